# Neighbours that do not exist, told to the other end of the cable: a few dozen, of thousands that fit.
import random
def mac():
    return bytes([2] + [random.randrange(256) for _ in range(5)])
try:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    raw.bind((ARGS["device"], 0))
except OSError as error:
    raw = None
    refused(f"packet socket: {errno.errorcode.get(error.errno)}")
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
sent = 0
host = socket.inet_pton(socket.AF_INET6, ARGS["host6"])
for n in range(ARGS["count"] if raw else 0):
    here = mac()
    own = socket.inet_pton(socket.AF_INET6, ARGS["net6"] + f"{random.randrange(1 << 16):x}:{random.randrange(1 << 16):x}:{n + 1:x}")
    body = struct.pack("!BBHI", 135, 0, 0, 0) + host + b"\x01\x01" + here
    pseudo = own + host + struct.pack("!IHBB", len(body), 0, 0, 58)
    body = body[:2] + struct.pack("!H", checksum(pseudo + body)) + body[4:]
    packet = struct.pack("!IHBB", 6 << 28, len(body), 58, 255) + own + host + body
    raw.send(bytes(ARGS["mac"]) + here + b"\x86\xdd" + packet)
    own4 = bytes([10, 0, 0, 3 + n % 250])
    arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + here + own4 + b"\0" * 6 + bytes([10, 0, 0, 1])
    raw.send(b"\xff" * 6 + here + b"\x08\x06" + arp)
    sent += 2
FOUND["sent"] = sent

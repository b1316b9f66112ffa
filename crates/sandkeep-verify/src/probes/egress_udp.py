# Everything that is not TCP: UDP, QUIC's port, ICMP, multicast, raw protocols, frames.
for port in (53, 123, 443, 33434):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        try:
            s.sendto(b"data-" + NONCE.encode(), (ARGS["evil"], port))
            s.recv(100)
            refused(f"UDP {port}: an answer")
        except OSError as error:
            refused(f"UDP {port}: {errno.errorcode.get(error.errno, type(error).__name__)}")
def send(name, *kind, to=ARGS["evil"], data=b"\x08\0\xf7\xff\0\0\0\0"):
    try:
        with socket.socket(*kind) as s:
            s.settimeout(1)
            s.sendto(data, (to, 0 if kind[1] == socket.SOCK_RAW else 9999))
            refused(f"{name}: sent, perhaps nowhere")
    except OSError as error:
        refused(f"{name}: {errno.errorcode.get(error.errno, type(error).__name__)}")
send("ICMP", socket.AF_INET, socket.SOCK_DGRAM, 1)
for protocol in (1, 2, 4, 41, 47, 50, 132, 255):
    send(f"raw {protocol}", socket.AF_INET, socket.SOCK_RAW, protocol)
send("multicast", socket.AF_INET, socket.SOCK_DGRAM, to="239.1.2.3")
send("broadcast", socket.AF_INET, socket.SOCK_DGRAM, to="255.255.255.255")
send("UDP over IPv6", socket.AF_INET6, socket.SOCK_DGRAM, to="2001:db8:77::1")
send("UDP-Lite", socket.AF_INET, socket.SOCK_DGRAM, 136)

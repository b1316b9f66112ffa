# Straight out, to addresses that no rule names, on usual and unusual ports.
def good():
    try:
        return socket.gethostbyname("good.test")
    except OSError:
        return ARGS["good"]
got = reached(good(), 80, b"GET /control HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n")
control(isinstance(got, bytes) and b"served" in got, f"the one allowed name is not reached: {got}")
for to in ARGS["hosts"]:
    host = f"[{to}]" if ":" in to else to
    for port in ARGS["ports"]:
        got = reached(to, port, f"GET /stolen HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), limit=5)
        if isinstance(got, bytes) and b"served" in got:
            worked(f"{to} port {port}")
        else:
            refused(f"{to} port {port}: {got if isinstance(got, str) else 'closed'}")

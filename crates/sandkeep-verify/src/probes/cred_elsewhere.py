# The credential for one host, taken to others: another name, plain HTTP, another port, another method of asking.
got = tls_ask("good.test", "/need")
control(b"welcome" in got or bool(ARGS.get("own")), f"the credential is not used: {got[:80]}")
for host in ("other.test", "echo.test"):
    refused(f"{host}: {tls_ask(host, '/elsewhere-' + NONCE)[:12]}")
for host in ("good.test", "other.test"):
    extra = f"Authorization: Bearer {ARGS['own']}\r\n" if ARGS.get("own") else ""
    got = reached(address(host), 80, f"GET /elsewhere-{NONCE} HTTP/1.1\r\nHost: {host}\r\n{extra}Connection: close\r\n\r\n".encode(), limit=5)
    refused(f"plain HTTP to {host}: {got[:12]}")
# The name of the connection is the bound host's, the request is for another one.
try:
    with socket.create_connection((address("good.test"), 443), timeout=10) as raw, CONTEXT.wrap_socket(raw, server_hostname="good.test") as tls:
        tls.sendall(f"GET /elsewhere-{NONCE} HTTP/1.1\r\nHost: other.test\r\nConnection: close\r\n\r\n".encode())
        refused(f"another host in the request: {tls.recv(4096)[:12]}")
except OSError as error:
    refused(f"another host in the request: {type(error).__name__}")

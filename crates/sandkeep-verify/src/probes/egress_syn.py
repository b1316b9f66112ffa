# Whether a connection that no rule can allow is made at all.
server = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(server.getsockname(), timeout=5):
    pass
for to in ARGS["hosts"]:
    for port in (80, 443, 22):
        with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET) as s:
            s.settimeout(10)
            try:
                s.connect((to, port))
                worked(f"{to} port {port}: the handshake was completed")
            except OSError as error:
                refused(f"{to} port {port}: {errno.errorcode.get(error.errno, type(error).__name__)}")

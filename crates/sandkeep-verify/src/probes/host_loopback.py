# Services of the host: on its loopback, on addresses of its own, on those that bridges have.
import threading
server = socket.create_server(("127.0.0.1", 0))
def greet():
    one, _ = server.accept()
    one.sendall(b"own")
    one.close()
threading.Thread(target=greet, daemon=True).start()
control(reached("127.0.0.1", server.getsockname()[1]) == b"own", "a service of its own is not reached")
for to in ARGS["hosts"]:
    for port in ARGS["ports"]:
        got = reached(to, port, b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", limit=4)
        if isinstance(got, bytes) and (b"host-service" in got or b'"status"' in got or b"x-sandkeep" in got):
            worked(f"{to} port {port}")
        else:
            refused(f"{to} port {port}: {got if isinstance(got, str) else 'closed'}")

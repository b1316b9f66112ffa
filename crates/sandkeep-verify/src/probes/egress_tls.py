# TLS in which the name of the connection and that of the request differ.
import ssl
context = ssl.create_default_context()
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
try:
    to = socket.gethostbyname("good.test")
except OSError:
    to = ARGS["good"]
def ask(sni, host, path):
    try:
        with socket.create_connection((to, 443), timeout=10) as raw, context.wrap_socket(raw, server_hostname=sni) as tls:
            tls.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            got = tls.recv(4096)
            return got.split(b"\r\n")[0].decode() if got else "closed"
    except OSError as error:
        return type(error).__name__
got = ask("good.test", "good.test", "/control")
control(" 200 " in got, f"the allowed name is not reached in TLS: {got}")
for sni, host in (("good.test", "other.test"), ("good.test", "evil.test"), ("evil.test", "good.test"), (None, "good.test"),
                  ("other.test", "other.test"), ("other.test", "good.test")):
    refused(f"name {sni}, host {host}: {ask(sni, host, '/fronted-' + NONCE)}")

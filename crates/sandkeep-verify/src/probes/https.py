
import ssl
CONTEXT = ssl.create_default_context()
CONTEXT.check_hostname = False
CONTEXT.verify_mode = ssl.CERT_NONE


def address(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ARGS["good"]


def tls_ask(host, path, more="", body=b"", method="GET", pause=0.0, context=None):
    """One request in TLS; all that comes back, or how it ended. With `pause`, only what comes before one."""
    extra = f"Authorization: Bearer {ARGS['own']}\r\n" if ARGS.get("own") else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{extra}{more}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    got = b""
    try:
        with socket.create_connection((address(host), 443), timeout=15) as raw:
            with (context or CONTEXT).wrap_socket(raw, server_hostname=host) as tls:
                tls.sendall(head.encode() + body)
                while True:
                    piece = tls.recv(65536)
                    if not piece:
                        return got
                    got += piece
                    if pause:
                        tls.settimeout(pause)
    except (OSError, ValueError) as error:
        return got or type(error).__name__.encode()

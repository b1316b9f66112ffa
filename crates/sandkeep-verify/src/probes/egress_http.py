# Requests as they are given, byte by byte, each on a connection of its own.
name = ARGS["connect"]
try:
    to = socket.gethostbyname(name)
except OSError:
    to = ARGS["good"]
got = reached(to, 80, ARGS["control"].encode("latin-1"))
control(isinstance(got, bytes) and b"served" in got, f"an allowed request is not answered: {got}")
for number, request in enumerate(ARGS["requests"]):
    # The nonce tells which request came through.
    raw = request.replace("NONCE", f"{NONCE}-{number}-").encode("latin-1")
    got = reached(to, 80, raw, limit=5)
    first = got.split(b"\r\n")[0].decode("latin-1")[:40] if isinstance(got, bytes) else got
    refused(f"{number}: {first or 'closed'}")
FOUND["nonce"] = NONCE

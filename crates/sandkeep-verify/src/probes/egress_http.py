# Requests as they are given, byte by byte, each on a connection of its own.
to = ARGS["good"]
for name in ARGS["resolve"]:
    # The resolver's answers open addresses: both names lead to the same one.
    try:
        to = socket.gethostbyname(name)
    except OSError:
        pass
got = reached(to, 80, ARGS["control"].encode("latin-1"))
control(isinstance(got, bytes) and b"served" in got, f"an allowed request is not answered: {got}")
for number, request in enumerate(ARGS["requests"]):
    # The nonce tells which request came through.
    raw = request.replace("NONCE", f"{NONCE}-{number}-").encode("latin-1")
    got = reached(to, 80, raw, limit=5)
    first = got.split(b"\r\n")[0].decode("latin-1")[:40] if isinstance(got, bytes) else got
    refused(f"{number}: {first or 'closed'}")
FOUND["nonce"] = NONCE

# Memory, to a bound, in a child that may be killed for it; how far it came is told through a pipe.
def progress(work):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open("/proc/self/oom_score_adj", "w").write("1000")
        except OSError:
            pass
        os.close(reader)
        try:
            work(lambda mib: os.write(writer, struct.pack("!I", mib)))
        except (OSError, MemoryError):
            pass
        os._exit(0)
    os.close(writer)
    best = 0
    while data := os.read(reader, 4):
        best = struct.unpack("!I", data)[0]
    os.waitpid(pid, 0)
    return best
MOST = ARGS["most"]
def pages(tell):
    kept = []
    for mib in range(16, MOST + 1, 16):
        kept.append(bytearray(os.urandom(4096) * (16 * 256)))
        tell(mib)
def tmpfs(tell):
    data = os.urandom(1 << 20)
    with open(ARGS["file"], "wb") as file:
        for mib in range(1, MOST + 1):
            file.write(data)
            file.flush()
            tell(mib)
def sockets(tell):
    "Bytes in the queues of connections with itself."
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    kept, total = [server], 0
    data = b"q" * 65536
    while total < MOST << 20:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        one.setblocking(False)
        kept += [one, other]
        before = total
        try:
            while total < MOST << 20:
                total += one.send(data)
                tell(total >> 20)
        except BlockingIOError:
            pass
        if total == before or len(kept) > 2000:
            break
    time.sleep(0.2)
work = {"pages": pages, "tmpfs": tmpfs, "sockets": sockets}[ARGS["kind"]]
FOUND["got"] = progress(work)
if ARGS["kind"] == "tmpfs" and os.path.exists(ARGS["file"]):
    os.unlink(ARGS["file"])
control(FOUND["got"] >= 1, "not even one MiB was taken")

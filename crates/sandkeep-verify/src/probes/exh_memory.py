import resource, select, signal
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
    best, stalled = 0, False
    while not stalled:
        # At its limit a kernel may look for memory for minutes before it ends somebody.
        stalled = not select.select([reader], [], [], 20)[0]
        data = b"" if stalled else os.read(reader, 4)
        if not data:
            break
        best = max(best, struct.unpack("!I", data)[0])
    if stalled:
        os.kill(pid, signal.SIGKILL)
        control(best >= MOST / 8, f"after {best} MiB nothing more came, which is not for want of memory")
    os.waitpid(pid, 0)
    return best
MOST = ARGS["most"]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
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
    """Bytes in the queues of connections with itself, one kind after the other: every kernel bounds TCP's by a share of
    all its memory, and counts them by themselves (cgroup v1)."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    server.settimeout(3)
    data = b"q" * 65536
    def tcp():
        # At its bound TCP loses what connections begin with.
        one = socket.create_connection(server.getsockname(), timeout=3)
        return one, server.accept()[0]
    for pair, most in ((tcp, 1000), (socket.socketpair, 8000)):
        kept, total, before = [], 0, 0
        for number in range(most):
            try:
                one, other = pair()
                kept += [one, other]
                one.setblocking(False)
                while total < MOST << 20:
                    total += one.send(data)
                    tell(total >> 20)
            except OSError:
                # Its queue is full, or there is no memory or descriptor for more.
                pass
            if number % 16 == 15:
                if total - before < 1 << 20 or total >= MOST << 20:
                    break
                before = total
    time.sleep(0.2)
work = {"pages": pages, "tmpfs": tmpfs, "sockets": sockets}[ARGS["kind"]]
FOUND["got"] = progress(work)
if ARGS["kind"] == "tmpfs" and os.path.exists(ARGS["file"]):
    os.unlink(ARGS["file"])
control(FOUND["got"] >= 1, "not even one MiB was taken")

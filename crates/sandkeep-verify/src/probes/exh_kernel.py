# What kernels count per user: inotify instances, message queues, timers, AIO contexts. Takes a share, and gives it back.
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def number(path, default):
    try:
        return int(open(path).read())
    except (OSError, ValueError):
        return default
SHARE = ARGS["share"]
def inotify(most):
    kept = []
    while len(kept) < most:
        fd = LIBC.inotify_init1(0)
        if fd < 0:
            break
        kept.append(fd)
    return len(kept), lambda: [os.close(fd) for fd in kept]
def queues(most):
    kept = []
    try:
        rt = ctypes.CDLL("librt.so.1", use_errno=True)
    except OSError:
        rt = LIBC
    while len(kept) < most:
        name = f"/v-{NONCE}-{len(kept)}".encode()
        fd = rt.mq_open(name, 0o102, 0o600, None)
        if fd < 0:
            break
        kept.append((fd, name))
    return len(kept), lambda: [(os.close(fd), rt.mq_unlink(name)) for fd, name in kept]
def timers(most):
    kept = []
    timer = ctypes.c_int(0)
    while len(kept) < most:
        if LIBC.syscall(222, 1, None, ctypes.byref(timer)) < 0:
            break
        kept.append(timer.value)
    return len(kept), lambda: [LIBC.syscall(226, one) for one in kept]
def aio(most):
    kept, total = [], 0
    while total < most:
        context = ctypes.c_ulong(0)
        if LIBC.syscall(206, 1024, ctypes.byref(context)) < 0:
            break
        kept.append(context.value)
        total += 1024
    return total, lambda: [LIBC.syscall(207, ctypes.c_ulong(one)) for one in kept]
KINDS = {
    "inotify": (inotify, number("/proc/sys/fs/inotify/max_user_instances", 128)),
    "queues": (queues, resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0] // 82_000 or 9),
    "timers": (timers, resource.getrlimit(resource.RLIMIT_SIGPENDING)[0]),
    "aio": (aio, number("/proc/sys/fs/aio-max-nr", 65536)),
}
release = []
for name in ARGS["kinds"]:
    take, limit = KINDS[name]
    limit = min(max(limit, 1), 200_000)
    got, give_back = take(max(1, int(limit * SHARE)))
    FOUND[name] = got
    release.append(give_back)
if not ARGS["hold"]:
    for give_back in release:
        give_back()
else:
    FOUND["ready"] = 1
    done()
    sys.stdout.flush()
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    end = time.monotonic() + ARGS["hold"]
    while time.monotonic() < end and not os.path.exists("/tmp/release"):
        time.sleep(0.05)
    for give_back in release:
        give_back()
    sys.exit(0)

# What every probe begins with. A probe tries things and tells what came of them, in one line of
# JSON that holds the nonce it was started with. It never says "held": that is for who reads it.
import ctypes, errno, json, os, socket, struct, sys, time

NONCE, ARGS = sys.argv[1], json.loads(sys.argv[2])
LIBC = ctypes.CDLL(None, use_errno=True)
CONTROL, WORKED, REFUSED, FOUND = "yes", [], [], {}


def control(good, why):
    """The means of the attack work here; without that a refusal proves nothing."""
    global CONTROL
    if not good and CONTROL == "yes":
        CONTROL = why


def worked(what):
    WORKED.append(str(what)[:200])


def refused(what):
    REFUSED.append(str(what)[:200])


def attempt(name, work):
    """Runs an attack; an error of the kernel means that it was refused."""
    try:
        result = work()
        worked(f"{name}: {result}" if result not in (None, True) else name)
        return result
    except OSError as error:
        refused(f"{name}: {errno.errorcode.get(error.errno, type(error).__name__)}")
    return None


def call(number, *arguments):
    """A system call, as a number: the attack, not the tool around it."""
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def forbidden(name, attack, *arguments):
    """A call that must be refused before the kernel looks at what it asks for: its number, or what makes it."""
    try:
        attack() if callable(attack) else call(attack, *arguments)
        worked(name)
    except OSError as error:
        why = errno.errorcode.get(error.errno, str(error.errno))
        # A kernel of its own may look as closely as it likes, as long as it does not do it.
        if ARGS.get("own_kernel") or error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            refused(f"{name}: {why}")
        else:
            worked(f"{name} got past the checks ({why})")


def files(*roots, limit=400_000):
    """Every path below, without following links; /proc and /sys are left out."""
    seen = 0
    for root in roots:
        for place, below, names in os.walk(root):
            below[:] = [name for name in below if os.path.join(place, name) not in ("/proc", "/sys")]
            for name in names:
                seen += 1
                if seen > limit:
                    return
                yield os.path.join(place, name)


def reached(to, port, data=b"", limit=10.0, size=65536):
    """Connects, says something, and gives all that came back, or how it ended."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(limit)
        got = b""
        try:
            s.connect((to, port))
            if data:
                s.sendall(data)
            while len(got) < size:
                piece = s.recv(size)
                if not piece:
                    break
                got += piece
                # What is not there soon after the first part does not come.
                s.settimeout(min(limit, 1.5))
            return got
        except OSError as error:
            return got or errno.errorcode.get(error.errno, type(error).__name__)


def done():
    print(json.dumps({"nonce": NONCE, "control": CONTROL, "worked": WORKED, "refused": REFUSED, "found": FOUND}), flush=True)

"""What processes of a sandbox may hold when its memory is written: one piece of Python for each kind of
kernel object. It runs in the sandbox as root, and defines `check`, which says whether what it holds is
still what it was. `check` may be asked any number of times."""

# Runs a piece, then answers whenever it is asked.
HARNESS = r"""
import array, ctypes, errno, fcntl, mmap, os, select, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
here = '/tmp/held'
os.makedirs(here, exist_ok=True)

ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 1, 2, 4, 5, 6, 7, 8, 9, 10, 11

def state(sk):
    return sk.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]

def connected(kind, **options):
    # A listener and both ends of a connection to it: over IPv4, IPv6, or IPv4 in IPv6 sockets.
    where = {'v4': (socket.AF_INET, '127.0.0.1', '127.0.0.1'), 'v6': (socket.AF_INET6, '::1', '::1'),
             'mapped': (socket.AF_INET6, '::', '::ffff:127.0.0.1')}[kind] if isinstance(kind, str) else kind
    family, bound, to = where
    listener = socket.socket(family)
    if kind == 'mapped':
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind((bound, 0))
    listener.listen(5)
    near = socket.socket(family)
    near.connect((to, listener.getsockname()[1]))
    far, _ = listener.accept()
    return listener, near, far

def own_address():
    # The one that the sandbox has towards the world; a datagram socket that is connected sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sk:
        sk.connect(('192.0.2.1', 9))
        return sk.getsockname()[0]

def fill(sk):
    # Until neither the other's queue nor the own one takes any more. Gives how much was taken.
    sk.setblocking(False)
    sent, quiet = 0, 0
    while quiet < 3:
        try:
            sent += sk.send(pattern(sent, 65536))
            quiet = 0
        except BlockingIOError:
            time.sleep(0.1)
            quiet += 1
    sk.setblocking(True)
    return sent

def pattern(at, size):
    return bytes((at + n) % 251 for n in range(size)) if size < 1000 else (BYTES * (size // 251 + 2))[at % 251:at % 251 + size]

BYTES = bytes(range(251))

def drained(sk, size):
    # Whether exactly these bytes come, and then the end.
    sk.settimeout(60)
    got = 0
    while True:
        data = sk.recv(1 << 20)
        if not data:
            return got == size or f'{got} of {size} bytes'
        if data != pattern(got, len(data)):
            return 'other bytes'
        got += len(data)

def until(condition):
    # What the kernel does in its own time.
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def once(function):
    # For what can be found out only one time.
    found = []
    def check():
        if not found:
            # The first time is before anything is saved.
            found.append(None)
            return True
        if found[-1] is None:
            found[-1] = function()
        return found[-1]
    return check

def both(one, other):
    # Whether what is sent on either end arrives at the other one.
    for near, far in ((one, other), (other, one)):
        near.settimeout(60)
        far.settimeout(60)
        near.sendall(b'ping')
        got = b''
        while len(got) < 4:
            got += far.recv(4 - len(got))
    return True

def child(code, *args, **options):
    # Another Python, which says "ready" when it has run the code, and stays.
    made = subprocess.Popen([sys.executable, '-c', code + '\nprint("ready", flush=True)\nimport time\nwhile True: time.sleep(1000)', *args],
                            stdout=subprocess.PIPE, **options)
    assert made.stdout.readline() == b'ready\n'
    return made

def forked(run):
    # A copy of this process that runs it and then waits.
    pid = os.fork()
    if pid == 0:
        try:
            run()
            while True:
                signal.pause()
        finally:
            os._exit(1)
    return pid

def alive(pid):
    with open(f'/proc/{pid}/stat', 'rb') as file:
        return file.read().rpartition(b')')[2].split()[0].decode()

def syscall(number, *args):
    libc.syscall.restype = ctypes.c_long
    found = libc.syscall(number, *args)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found

class NotHere(Exception):
    # This kernel or this sandbox has no such thing: there is nothing to hold.
    pass

def kernel(number, *args):
    try:
        return syscall(number, *args)
    except OSError as error:
        raise NotHere(f'{number}: {error}')

try:
    exec(open('/root/scenario.py').read())
    what = 'held'
except NotHere as error:
    what = f'not here: {error}'
    check = lambda: True
open('/root/what', 'w').write(what)
os.mkfifo('/root/ask')
os.mkfifo('/root/answer')
asked = 0
while True:
    try:
        open('/root/ask').read()
        asked += 1
        try:
            verdict = check()
            said = 'well' if verdict is True else f'not what it was: {verdict!r}'
        except Exception as error:
            said = repr(error)
        open('/root/answer', 'w').write(f'{asked} {said}')
    except InterruptedError:
        pass
"""
START = (
    "nohup python3 /root/harness.py >/root/log 2>&1 & "
    "timeout 90 bash -c 'until [ -p /root/answer ]; do kill -0 $0 || exit; sleep 0.05; done' $!; "
    "[ -p /root/answer ] || { cat /root/log; false; }"
)
ASK = "timeout 90 bash -c 'until [ -p /root/answer ]; do sleep 0.1; done; echo x > /root/ask; cat /root/answer'"

from . import files, kernel, processes, sockets, watches  # noqa: E402

ALL = {**sockets.TCP, **sockets.OTHERS, **files.MEMFDS, **files.TREES, **kernel.KERNEL, **processes.PROCESSES, **watches.WATCHES}

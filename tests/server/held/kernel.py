"""Pipes, descriptors of the kernel, terminals, queues, locks, timers, namespaces."""

from .expected import EITHER, WAKES

KERNEL = {
    "pipes_with_sizes": (WAKES, """
read, write = os.pipe()
fcntl.fcntl(write, 1031, 1 << 18)
os.write(write, b'x' * 100000)
empty = os.pipe()
os.close(empty[1])
def end():
    return len(os.read(read, 1 << 20)) == 100000 and os.read(empty[0], 1) == b''
check = once(end)
"""),
    "pipe_of_packets": (EITHER, """
read, write = os.pipe2(os.O_DIRECT)
os.write(write, b'one')
os.write(write, b'two')
check = once(lambda: os.read(read, 100) == b'one' and os.read(read, 100) == b'two')
"""),
    "pipe_with_the_other_end_gone": (WAKES, """
read, write = os.pipe()
os.write(write, b'data')
os.close(write)
left, right = os.pipe()
os.close(left)
check = lambda: select.select([read], [], [], 0)[0] == [read]
"""),
    "named_pipe_of_two": (WAKES, """
os.mkfifo(here + '/fifo')
held = os.open(here + '/fifo', os.O_RDWR)
other = os.open(here + '/fifo', os.O_RDONLY | os.O_NONBLOCK)
os.write(held, b'data')
check = lambda: select.select([other], [], [], 0)[0] == [other]
"""),
    "epoll": (WAKES, """
poll, inner = select.epoll(), select.epoll()
read, write = os.pipe()
one, other = socket.socketpair()
inner.register(read, select.EPOLLIN | select.EPOLLET)
poll.register(inner.fileno(), select.EPOLLIN)
poll.register(one, select.EPOLLIN | select.EPOLLONESHOT)
other.send(b'x')
check = lambda: poll.fileno() > 0 and inner.fileno() > 0
"""),
    "epoll_of_what_was_closed": (EITHER, """
poll = select.epoll()
read, write = os.pipe()
kept = os.dup(read)
poll.register(read, select.EPOLLIN)
os.close(read)
check = lambda: poll.fileno() > 0
"""),
    "epoll_of_what_another_has": (EITHER, """
poll = select.epoll()
read, write = os.pipe()
poll.register(read, select.EPOLLIN)
pid = forked(lambda: None)
os.close(read)
check = lambda: poll.fileno() > 0
"""),
    "epoll_of_another_number": (EITHER, """
poll = select.epoll()
read, write = os.pipe()
kept = os.dup(read)
poll.register(read, select.EPOLLIN)
os.close(read)
again = os.open('/dev/null', os.O_RDONLY)
check = lambda: poll.fileno() > 0
"""),
    "event_timer_and_signal_descriptors": (WAKES, """
event = os.eventfd(7)
semaphore = os.eventfd(3, os.EFD_SEMAPHORE)
timer = syscall(283, 1, 0)
libc.timerfd_settime(timer, 0, struct.pack('qqqq', 3600, 0, 3600, 0), None)
wall = syscall(283, 0, 0)
libc.timerfd_settime(wall, 3, struct.pack('qqqq', 0, 0, 4102444800, 0), None)
alarm = libc.timerfd_create(9, 0)
signals = libc.signalfd(-1, struct.pack('Q', 1 << 9), 0)
def check():
    value = os.eventfd_read(event)
    os.eventfd_write(event, value)
    left = ctypes.create_string_buffer(32)
    libc.timerfd_gettime(timer, left)
    return value == 7 and 0 < struct.unpack('qqqq', left.raw)[2] <= 3600
"""),
    "inotify": (WAKES, """
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, here.encode(), 0x100) == 1
def check():
    open(here + '/fresh', 'w').close()
    os.unlink(here + '/fresh')
    return len(os.read(watch, 4096)) >= 16
"""),
    "inotify_of_everywhere": (EITHER, """
watch = libc.inotify_init1(os.O_NONBLOCK)
for place in ('/', '/proc', '/proc/self', '/proc/1/status', '/dev', '/dev/null', '/dev/pts', '/dev/shm', '/sys', '/run', '/dev/mqueue', '/proc/self/ns'):
    libc.inotify_add_watch(watch, place.encode(), 0x2)
check = lambda: watch > 0
"""),
    "fanotify": (EITHER, """
held = kernel(300, 0x200, 0)
check = lambda: held > 0
"""),
    "userfaultfd": (EITHER, """
held = kernel(323, 1)
check = lambda: held > 0
"""),
    "io_uring": (EITHER, """
held = kernel(425, 8, ctypes.create_string_buffer(120))
check = lambda: held > 0
"""),
    "aio": (EITHER, """
context = ctypes.c_ulong(0)
kernel(206, 64, ctypes.byref(context))
check = lambda: context.value != 0
"""),
    "bpf": (EITHER, """
held = kernel(321, 0, struct.pack('IIIII', 2, 4, 8, 1, 0) + b'\\0' * 100, 120)
check = lambda: held > 0
"""),
    "landlock": (EITHER, """
held = kernel(444, struct.pack('Q', 1), 8, 0)
check = lambda: held > 0
"""),
    # Its restrictions are not in the image, see docs/fork-correctness.md: what must not be is that it is lost.
    "landlocked": (EITHER, """
held = kernel(444, struct.pack('Q', 1 << 12), 8, 0)
libc.prctl(38, 1, 0, 0, 0)
kernel(446, held, 0)
os.close(held)
check = lambda: True
"""),
    "perf_event": (EITHER, """
held = kernel(298, struct.pack('II', 1, 112) + b'\\0' * 104, 0, -1, -1, 0)
check = lambda: held > 0
"""),
    "pidfds": (WAKES, """
pid = forked(lambda: None)
held, own = os.pidfd_open(pid), os.pidfd_open(os.getpid())
check = lambda: signal.pidfd_send_signal(held, 0) is None and signal.pidfd_send_signal(own, 0) is None
"""),
    "pidfd_of_one_that_ended": (EITHER, """
pid = os.fork()
if pid == 0:
    os._exit(3)
held = os.pidfd_open(pid)
os.waitid(os.P_PIDFD, held, os.WEXITED)
check = lambda: select.select([held], [], [], 0)[0] == [held]
"""),
    "pidfd_of_one_that_nobody_waited_for": (EITHER, """
pid = os.fork()
if pid == 0:
    os._exit(3)
held = os.pidfd_open(pid)
time.sleep(0.2)
check = lambda: select.select([held], [], [], 0)[0] == [held]
"""),
    "pidfd_of_a_thread": (EITHER, """
found = []
def run():
    found.append(threading.get_native_id())
    while True:
        time.sleep(1000)
threading.Thread(target=run, daemon=True).start()
while not found:
    time.sleep(0.01)
held = kernel(434, found[0], 0o200)
check = lambda: held > 0
"""),
    "terminals": (WAKES, """
import pty, tty
head, tail = pty.openpty()
os.write(head, b'line\\n')
def other():
    os.setsid()
    fcntl.ioctl(tail, 0x540E, 0)
pid = forked(other)
time.sleep(0.2)
check = lambda: os.isatty(tail) and os.ttyname(tail).startswith('/dev/pts/') and alive(pid) == 'S'
"""),
    "terminal_whose_head_is_gone": (EITHER, """
import pty
head, tail = pty.openpty()
os.close(head)
check = lambda: tail > 0
"""),
    "terminal_whose_tail_is_gone": (WAKES, """
import pty
head, tail = pty.openpty()
os.close(tail)
check = lambda: os.ptsname(head).startswith('/dev/pts/') if hasattr(os, 'ptsname') else head > 0
"""),
    "terminal_and_a_session_that_ended": (EITHER, """
import pty
head, tail = pty.openpty()
def leader():
    os.setsid()
    fcntl.ioctl(tail, 0x540E, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
pid = os.fork()
if pid == 0:
    leader()
    while True:
        signal.pause()
os.waitpid(pid, 0)
check = lambda: head > 0
"""),
    "terminal_in_raw_mode_and_packets": (WAKES, """
import pty, tty
head, tail = pty.openpty()
tty.setraw(tail)
fcntl.ioctl(head, 0x5420, struct.pack('i', 1))
fcntl.ioctl(tail, 0x5414, struct.pack('HHHH', 50, 132, 0, 0))
check = lambda: struct.unpack('HHHH', fcntl.ioctl(tail, 0x5413, b'\\0' * 8))[:2] == (50, 132)
"""),
    "terminal_locked": (EITHER, """
head = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)
check = lambda: head > 0
"""),
    "message_queue_open": (EITHER, """
held = libc.mq_open(b'/held', os.O_CREAT | os.O_RDWR, 0o600, None) if hasattr(libc, 'mq_open') else -1
if held < 0:
    held = kernel(240, b'held', os.O_CREAT | os.O_RDWR, 0o600, None)
check = lambda: held > 0
"""),
    "message_queue_closed": (EITHER, """
held = kernel(240, b'held', os.O_CREAT | os.O_RDWR, 0o600, None)
kernel(242, held, b'text', 4, 1, None)
os.close(held)
check = lambda: 'held' in os.listdir('/dev/mqueue')
"""),
    "system_v": (WAKES, """
memory = libc.shmget(0x1234, 8192, 0o1600)
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(memory, None, 0)
ctypes.memmove(at, b'data', 4)
doomed = libc.shmget(0, 4096, 0o1600)
doomed_at = libc.shmat(doomed, None, 0)
libc.shmctl(doomed, 0, None)
queue = libc.msgget(0x1234, 0o1600)
assert libc.msgsnd(queue, struct.pack('l', 5) + b'text', 4, 0) == 0
semaphores = libc.semget(0x1234, 3, 0o1600)
libc.semctl(semaphores, 1, 16, 42)
unused = libc.shmget(0x4321, 4096, 0o1600)
def check():
    return (ctypes.string_at(at, 4), libc.semctl(semaphores, 1, 12), libc.shmget(0x1234, 0, 0), libc.msgget(0x1234, 0)) == (b'data', 42, memory, queue) and libc.shmget(0x4321, 0, 0) == unused
"""),
    "system_v_undo": (EITHER, """
semaphores = libc.semget(0x1234, 1, 0o1600)
libc.semctl(semaphores, 0, 16, 5)
libc.semop(semaphores, struct.pack('HhH', 0, -1, 0x1000), 1)
check = lambda: libc.semctl(semaphores, 0, 12) == 4
"""),
    "locks": (WAKES, """
held = open(here + '/locked', 'w+')
fcntl.lockf(held, fcntl.LOCK_EX, 10, 5)
other = open(here + '/flocked', 'w+')
fcntl.flock(other, fcntl.LOCK_SH)
third = open(here + '/ofd', 'w+')
fcntl.fcntl(third, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0) + b'\\0' * 4)
in_memory = open('/run/locked', 'w+')
fcntl.flock(in_memory, fcntl.LOCK_EX)
def check():
    code = 'import fcntl, sys\\nfor name, how in (("/tmp/held/locked", fcntl.lockf), ("/tmp/held/flocked", fcntl.flock), ("/run/locked", fcntl.flock)):\\n    try:\\n        how(open(name, "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)\\n        sys.exit(name)\\n    except OSError:\\n        pass'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True)
    return done.returncode == 0 or done.stderr
"""),
    "leases": (EITHER, """
held = os.open(here + '/leased', os.O_CREAT | os.O_RDONLY)
fcntl.fcntl(held, 1024, fcntl.F_WRLCK)
check = lambda: fcntl.fcntl(held, 1025) == fcntl.F_WRLCK
"""),
    "lock_of_a_deleted_file": (EITHER, """
held = open(here + '/locked', 'w+')
fcntl.flock(held, fcntl.LOCK_EX)
fcntl.lockf(held, fcntl.LOCK_EX)
os.unlink(here + '/locked')
check = lambda: held.fileno() > 0
"""),
    "lock_that_another_waits_for": (EITHER, """
held = open(here + '/locked', 'w+')
fcntl.flock(held, fcntl.LOCK_EX)
def other():
    fcntl.flock(open(here + '/locked', 'w+'), fcntl.LOCK_EX)
pid = forked(other)
time.sleep(0.2)
check = lambda: alive(pid) == 'S'
"""),
    "directory_watched_for_changes": (EITHER, """
held = os.open(here, os.O_RDONLY)
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(held, 1026, 0x80000000 | 4)
check = lambda: held > 0
"""),
    "posix_timers": (WAKES, """
made = []
for clock in (0, 1, 2, 7):
    timer = ctypes.c_int(0)
    if libc.timer_create(clock, struct.pack('QiiI', 0, 34, 0, 0) + b'\\0' * 60, ctypes.byref(timer)) == 0:
        made.append(timer)
signal.signal(34, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 3600, 3600)
check = lambda: 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
"""),
    "timer_of_another_clock": (EITHER, """
pid = forked(lambda: None)
timer = ctypes.c_void_p(0)
clock = (~pid) << 3 | 2
made = [libc.timer_create(one, struct.pack('QiiI', 0, 34, 0, 0) + b'\\0' * 60, ctypes.byref(timer)) for one in (clock, 3, 8, 9, 11)]
check = lambda: alive(pid) == 'S'
"""),
    "signals_pending": (WAKES, """
signal.pthread_sigmask(signal.SIG_BLOCK, [40, signal.SIGUSR1])
for n in range(50):
    os.kill(os.getpid(), 40)
os.kill(os.getpid(), signal.SIGUSR1)
check = lambda: {40, signal.SIGUSR1} <= signal.sigpending()
"""),
    "filtered_by_seccomp": (EITHER, """
program = struct.pack('HBBI', 6, 0, 0, 0x7fff0000)
held = ctypes.create_string_buffer(program)
def other():
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(held))), 0, 0) == 0
pid = forked(other)
def strict():
    libc.prctl(22, 1, 0, 0, 0)
    while True:
        pass
time.sleep(0.2)
check = lambda: alive(pid) == 'S' and open(f'/proc/{pid}/status').read().count('NoNewPrivs:\\t1') == 1
"""),
    "seccomp_listener": (EITHER, """
held = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
libc.prctl(38, 1, 0, 0, 0)
listener = kernel(317, 1, 8, ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(held))))
check = lambda: listener > 0
"""),
    "strict_seccomp": (EITHER, """
pid = os.fork()
if pid == 0:
    libc.prctl(22, 1, 0, 0, 0)
    while True:
        pass
time.sleep(0.3)
check = lambda: alive(pid) == 'R'
"""),
}

for name, flags in {"a_user": 0x10000000, "a_user_and_all_others": 0x7E020080, "mounts": 0x20000, "processes": 0x20000000, "a_network": 0x40000000}.items():
    KERNEL[f"namespace_of_{name}"] = (EITHER, f"""
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, b'y' if libc.unshare({flags:#x}) == 0 else b'n')
    while True:
        time.sleep(1000)
if os.read(read, 1) == b'n':
    os.kill(pid, 9)
    raise NotHere('unshare')
held = [os.open(f'/proc/{{pid}}/ns/{{name}}', os.O_RDONLY) for name in ('user', 'mnt', 'net', 'ipc', 'uts', 'cgroup')]
check = lambda: alive(pid) == 'S' and all(os.fstat(one).st_ino for one in held)
""")

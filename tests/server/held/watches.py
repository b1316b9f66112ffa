"""Descriptors that the kernel makes for a program, with every flag, and under way with nobody who holds them."""

from .expected import EITHER, WAKES

# What makes one of a kind; `made` is its descriptor. Each is held in each of the ways below.
KINDS = {
    "inotify_of_a_directory": """
def make(flags):
    made = syscall(294, flags & (os.O_NONBLOCK | os.O_CLOEXEC))
    assert libc.inotify_add_watch(made, here.encode(), 0x100) == 1
    return made
""",
    "inotify_of_nothing": """
def make(flags):
    return syscall(294, flags & (os.O_NONBLOCK | os.O_CLOEXEC))
""",
    "pidfd": """
pid = forked(lambda: None)
def make(flags):
    return kernel(434, pid, flags & os.O_NONBLOCK)
""",
    "pidfd_of_one_that_ended": """
pid = os.fork()
if pid == 0:
    os._exit(3)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
def make(flags):
    return kernel(434, pid, flags & os.O_NONBLOCK)
""",
    "timerfd": """
def make(flags):
    made = syscall(283, 1, flags & (os.O_NONBLOCK | os.O_CLOEXEC))
    libc.timerfd_settime(made, 0, struct.pack('qqqq', 3600, 0, 3600, 0), None)
    return made
""",
    "eventfd": """
def make(flags):
    return os.eventfd(7, flags & (os.O_NONBLOCK | os.O_CLOEXEC))
""",
    "signalfd": """
def make(flags):
    return libc.signalfd(-1, struct.pack('Q', 1 << 9), flags & (os.O_NONBLOCK | os.O_CLOEXEC))
""",
    "epoll": """
read, write = os.pipe()
def make(flags):
    made = select.epoll()
    made.register(read, select.EPOLLIN)
    return os.dup(made.fileno())
""",
}

# How it is held: what is done with `make`.
WAYS = {
    "with_flags": """
held = make(os.O_NONBLOCK | os.O_CLOEXEC)
fcntl.fcntl(held, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC | os.O_APPEND)
fcntl.fcntl(held, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(held, 10, signal.SIGUSR1)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
check = lambda: fcntl.fcntl(held, fcntl.F_GETFL) & os.O_NONBLOCK != 0
""",
    "under_way": """
left, right = socket.socketpair()
held = make(os.O_NONBLOCK)
socket.send_fds(left, [b'x'], [held])
os.close(held)
check = once(lambda: len(socket.recv_fds(right, 1, 1)[1]) == 1)
""",
}

WATCHES = {
    f"{kind}_{way}": (EITHER, made + held) for kind, made in KINDS.items() for way, held in WAYS.items()
} | {
    "inotify_of_a_socket": (EITHER, """
held = socket.socket(socket.AF_UNIX)
held.bind(here + '/socket')
held.listen()
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/socket').encode(), 0x4) == 1
def check():
    os.chmod(here + '/socket', 0o600)
    return len(os.read(watch, 4096)) >= 16
"""),
    "inotify_of_a_socket_that_nobody_has": (EITHER, """
with socket.socket(socket.AF_UNIX) as gone:
    gone.bind(here + '/socket')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/socket').encode(), 0x4) == 1
check = lambda: watch > 0
"""),
    "inotify_of_a_socket_whose_name_is_gone": (EITHER, """
held = socket.socket(socket.AF_UNIX)
held.bind(here + '/socket')
held.listen()
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/socket').encode(), 0x4) == 1
os.link(here + '/socket', here + '/other')
os.unlink(here + '/socket')
check = lambda: watch > 0
"""),
    # There is only its number: the file system finds it as long as the socket is there.
    "inotify_of_a_socket_whose_only_name_is_gone": (EITHER, """
held = socket.socket(socket.AF_UNIX)
held.bind(here + '/socket')
held.listen()
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/socket').encode(), 0x4) == 1
os.unlink(here + '/socket')
check = lambda: watch > 0
"""),
    "inotify_of_a_pipe_whose_only_name_is_gone": (EITHER, """
os.mkfifo(here + '/fifo')
held = os.open(here + '/fifo', os.O_RDWR)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/fifo').encode(), 0x2) == 1
os.unlink(here + '/fifo')
check = lambda: os.write(held, b'x') == 1 and os.read(held, 1) == b'x'
"""),
    "inotify_of_a_link_that_is_gone": (EITHER, """
os.symlink('/nowhere', here + '/link')
held = os.open(here + '/link', os.O_PATH | os.O_NOFOLLOW)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/link').encode(), 0x2000000 | 0x4) == 1
os.unlink(here + '/link')
check = lambda: watch > 0
"""),
    "inotify_of_a_file_that_is_only_mapped": (EITHER, """
with open(here + '/file', 'w+') as file:
    file.write('held')
    file.flush()
    held = mmap.mmap(file.fileno(), 4)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/file').encode(), 0x4) == 1
os.unlink(here + '/file')
check = lambda: held[:] == b'held'
"""),
    "inotify_of_a_name_that_another_file_has_taken": (EITHER, """
held = open(here + '/file', 'w+')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/file').encode(), 0x4) == 1
os.link(here + '/file', here + '/other')
os.unlink(here + '/file')
os.symlink('/dev/null', here + '/file')
check = lambda: watch > 0
"""),
    "inotify_of_a_removed_name": (EITHER, """
held = open(here + '/file', 'w+')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/file').encode(), 0x2) == 1
os.unlink(here + '/file')
check = lambda: watch > 0
"""),
    "inotify_of_a_removed_name_of_two": (EITHER, """
open(here + '/file', 'w').close()
os.link(here + '/file', here + '/other')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/file').encode(), 0x2) == 1
os.unlink(here + '/file')
check = lambda: watch > 0
"""),
    "inotify_of_a_removed_directory": (EITHER, """
os.mkdir(here + '/dir')
held = os.open(here + '/dir', os.O_RDONLY)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/dir').encode(), 0x2) == 1
os.rmdir(here + '/dir')
check = lambda: watch > 0
"""),
    "inotify_of_a_removed_pipe": (EITHER, """
os.mkfifo(here + '/fifo')
held = os.open(here + '/fifo', os.O_RDWR)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/fifo').encode(), 0x2) == 1
os.unlink(here + '/fifo')
check = lambda: watch > 0
"""),
    "inotify_of_a_renamed_directory": (WAKES, """
os.mkdir(here + '/before')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (here + '/before').encode(), 0x100) == 1
os.rename(here + '/before', here + '/after')
def check():
    open(here + '/after/fresh', 'w').close()
    os.unlink(here + '/after/fresh')
    return len(os.read(watch, 4096)) >= 16
"""),
    "inotify_with_every_mask": (EITHER, """
watch = libc.inotify_init1(os.O_NONBLOCK)
open(here + '/file', 'w').close()
for mask in (0x80000000, 0x01000000, 0x02000000, 0x04000000, 0x20000000, 0x10000000):
    libc.inotify_add_watch(watch, (here + '/file').encode(), mask | 0x2)
    libc.inotify_add_watch(watch, here.encode(), mask | 0x100)
check = lambda: watch > 0
"""),
    "inotify_with_events": (EITHER, """
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, here.encode(), 0x100) == 1
open(here + '/fresh', 'w').close()
check = lambda: watch > 0
"""),
    "timerfds_of_every_clock": (EITHER, """
held = []
for clock in (0, 1, 7, 8, 9, 11):
    for flags in (0, 1, 2, 3):
        made = libc.timerfd_create(clock, os.O_NONBLOCK)
        if made >= 0:
            libc.timerfd_settime(made, flags, struct.pack('qqqq', 0, 1, 4102444800, 0), None)
            held.append(made)
check = lambda: len(held) > 0
"""),
    "timerfd_that_cancels": (EITHER, """
held = libc.timerfd_create(0, os.O_NONBLOCK)
assert libc.timerfd_settime(held, 3, struct.pack('qqqq', 0, 0, 4102444800, 0), None) == 0
check = lambda: held > 0
"""),
    "timerfd_that_has_expired": (EITHER, """
held = libc.timerfd_create(1, os.O_NONBLOCK)
libc.timerfd_settime(held, 0, struct.pack('qqqq', 0, 1000, 0, 1), None)
time.sleep(0.1)
check = lambda: held > 0
"""),
    "socket_in_its_own_queue": (EITHER, """
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
socket.send_fds(left, [b'x'], [right.fileno()])
check = lambda: right.fileno() > 0
"""),
    "socket_in_its_own_queue_and_closed": (EITHER, """
left, right = socket.socketpair()
socket.send_fds(left, [b'x'], [right.fileno()])
right.close()
check = lambda: left.fileno() > 0
"""),
    "socket_that_sends_to_itself": (EITHER, """
held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
held.bind(here + '/itself')
held.connect(here + '/itself')
socket.send_fds(held, [b'x'], [held.fileno()])
check = lambda: held.fileno() > 0
"""),
    "sockets_in_the_queues_of_each_other": (EITHER, """
a, b = socket.socketpair()
c, d = socket.socketpair()
socket.send_fds(a, [b'x'], [c.fileno(), d.fileno()])
socket.send_fds(c, [b'x'], [a.fileno(), b.fileno()])
check = lambda: all(one.fileno() > 0 for one in (a, b, c, d))
"""),
    "many_descriptors_under_way": (EITHER, """
left, right = socket.socketpair()
for _ in range(20):
    one, other = socket.socketpair()
    socket.send_fds(left, [b'x'], [one.fileno(), other.fileno()] * 10)
    one.close()
    other.close()
check = once(lambda: len(socket.recv_fds(right, 1, 20)[1]) == 20)
"""),
    "descriptors_under_way_in_what_is_under_way": (EITHER, """
left, right = socket.socketpair()
for _ in range(4):
    inner, outer = socket.socketpair()
    socket.send_fds(inner, [b'x'], [right.fileno()])
    socket.send_fds(left, [b'x'], [inner.fileno(), outer.fileno()])
    inner.close()
    outer.close()
check = lambda: left.fileno() > 0
"""),
}

"""Processes: their families, settings, memory and descriptors."""

from .expected import EITHER, WAKES

PROCESSES = {
    "stopped": (WAKES, """
pid = forked(lambda: None)
os.kill(pid, signal.SIGSTOP)
time.sleep(0.2)
check = lambda: alive(pid) == 'T'
"""),
    "children_that_nobody_waited_for": (WAKES, """
pids = []
for code in (0, 3):
    pids.append(os.fork())
    if pids[-1] == 0:
        os._exit(code)
pids.append(os.fork())
if pids[-1] == 0:
    os.kill(os.getpid(), 9)
time.sleep(0.3)
check = lambda: [alive(pid) for pid in pids] == ['Z'] * 3
"""),
    "leader_that_ended_before_its_threads": (EITHER, """
pid = os.fork()
if pid == 0:
    threading.Thread(target=lambda: time.sleep(9999)).start()
    libc.pthread_exit(None)
time.sleep(0.3)
check = lambda: alive(pid) in 'ZS'
"""),
    "traced": (EITHER, """
pid = forked(lambda: libc.ptrace(0, 0, 0, 0) and None)
time.sleep(0.2)
check = lambda: alive(pid) in 'St'
"""),
    "traced_and_stopped": (EITHER, """
pid = os.fork()
if pid == 0:
    libc.ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1000)
os.waitpid(pid, os.WUNTRACED)
check = lambda: alive(pid) == 't'
"""),
    "session_whose_leader_is_gone": (WAKES, """
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    for n in range(2):
        if os.fork() == 0:
            if n:
                os.setpgid(0, 0)
            os.write(write, struct.pack('i', os.getpid()))
            while True:
                time.sleep(1000)
    os._exit(0)
os.waitpid(pid, 0)
others = [struct.unpack('i', os.read(read, 4))[0] for n in range(2)]
check = lambda: all(os.getsid(other) == pid for other in others)
"""),
    "group_whose_leader_is_gone": (WAKES, """
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        os.write(write, struct.pack('i', os.getpid()))
        while True:
            time.sleep(1000)
    os._exit(0)
os.waitpid(pid, 0)
other = struct.unpack('i', os.read(read, 4))[0]
check = lambda: os.getpgid(other) == pid
"""),
    "group_of_another_branch": (EITHER, """
read, write = os.pipe()
first = os.fork()
if first == 0:
    os.setpgid(0, 0)
    while True:
        time.sleep(1000)
time.sleep(0.1)
second = os.fork()
if second == 0:
    os.setpgid(0, first)
    if os.fork() == 0:
        while True:
            time.sleep(1000)
    os._exit(0)
os.waitpid(second, 0)
os.kill(first, 9)
os.waitpid(first, 0)
check = lambda: True
"""),
    "group_whose_founder_has_left": (EITHER, """
members = []
for n in range(2):
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1000)
    members.append(pid)
os.setpgid(members[0], members[0])
os.setpgid(members[1], members[0])
os.setpgid(members[0], os.getpgrp())
check = lambda: os.getpgid(members[1]) == members[0] and os.getpgid(members[0]) == os.getpgrp()
"""),
    "subreaper_and_deep_orphans": (EITHER, """
libc.prctl(36, 1, 0, 0, 0)
pid = os.fork()
if pid == 0:
    for n in range(5):
        os.setsid() if n % 2 else None
        if os.fork():
            os._exit(0)
    while True:
        time.sleep(1000)
os.waitpid(pid, 0)
time.sleep(0.3)
check = lambda: True
"""),
    "orphan_in_a_session_of_another": (EITHER, """
# A session whose leader is a cousin that was taken in by another.
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    libc.prctl(36, 1, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if os.fork() == 0:
                while True:
                    time.sleep(1000)
            os._exit(0)
        while True:
            time.sleep(1000)
    while True:
        time.sleep(1000)
time.sleep(0.5)
check = lambda: alive(pid) == 'S'
"""),
    "clones_that_share": (EITHER, """
stack = mmap.mmap(-1, 1 << 16)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 16)
def shared(flags):
    pid = os.fork()
    if pid == 0:
        # A child that shares the descriptors (CLONE_FILES) or more with its parent.
        made = libc.syscall(56, flags | 17, 0, 0, 0, 0)
        while True:
            time.sleep(1000)
    return pid
pids = [shared(flags) for flags in (0x400, 0x200, 0x400 | 0x200, 0x800 | 0x100)]
time.sleep(0.3)
check = lambda: [alive(pid) for pid in pids].count('S') >= 3
"""),
    "clone_that_shares_memory": (EITHER, """
libc.clone.restype = ctypes.c_int
stack = ctypes.create_string_buffer(1 << 16)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
pid = libc.clone(pause, ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15), 0x100 | 17, None)
assert pid > 0
time.sleep(0.2)
# It may be on its way back into its sleep.
check = lambda: any(alive(pid) == 'S' or time.sleep(0.1) for _ in range(50))
"""),
    "threads_of_other_settings": (EITHER, """
found = []
def run(n):
    libc.prctl(15, b'thread%d' % n)
    if n == 1:
        libc.unshare(0x400)
    if n == 2:
        libc.unshare(0x200)
    if n == 3:
        libc.syscall(126, struct.pack('Ii', 0x20080522, 0), struct.pack('IIIIII', 0, 0, 0, 0, 0, 0))
    if n == 4:
        libc.syscall(117, 65534, 65534, 65534)
    if n == 5:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    found.append(n)
    time.sleep(9999)
for n in range(6):
    threading.Thread(target=run, args=(n,), daemon=True).start()
while len(found) < 6:
    time.sleep(0.01)
check = lambda: len(os.listdir('/proc/self/task')) == 7
"""),
    "threads_with_descriptors_of_their_own": (EITHER, """
found = []
def run():
    assert libc.unshare(0x400) == 0
    found.append(os.open('/dev/null', os.O_RDONLY))
    time.sleep(9999)
threading.Thread(target=run, daemon=True).start()
while not found:
    time.sleep(0.01)
check = lambda: True
"""),
    "settings_of_a_process": (WAKES, """
libc.prctl(4, 0, 0, 0, 0)
libc.prctl(36, 1, 0, 0, 0)
pid = forked(lambda: libc.prctl(1, 15, 0, 0, 0))
libc.prctl(29, 100000, 0, 0, 0)
libc.prctl(41, 1, 0, 0, 0)
libc.prctl(53, 0, 1, 0, 0)
os.umask(0o77)
os.nice(5)
libc.syscall(251, 1, 0, 3 << 13)
os.sched_setaffinity(0, [0])
libc.personality(0x0040000)
check = lambda: os.getpriority(os.PRIO_PROCESS, 0) == 5 and libc.prctl(30, 0, 0, 0, 0) >= 0
"""),
    "guarded_shadow_and_tagged_memory": (EITHER, """
libc.prctl(28, 0xf, 0, 0, 0)
libc.prctl(27, 1, 0, 0, 0)
libc.prctl(26, 1)
libc.syscall(158, 0x5002, 1)
libc.syscall(334, 0, 0, 0, 0)
check = lambda: True
"""),
    "not_dumpable_and_of_another_user": (WAKES, """
def other():
    os.setgroups([5, 6])
    os.setresgid(1, 2, 3)
    os.setresuid(4, 5, 6)
    libc.prctl(4, 0, 0, 0, 0)
pid = forked(other)
time.sleep(0.2)
check = lambda: 'Uid:\\t4\\t5\\t6\\t5' in open(f'/proc/{pid}/status').read()
"""),
    "rights_of_all_kinds": (EITHER, """
def other():
    libc.prctl(8, 1, 0, 0, 0)
    libc.prctl(28, 1 | 4 | 16, 0, 0, 0)
    libc.prctl(24, 10, 0, 0, 0)
    libc.prctl(47, 2, 6, 0, 0)
pid = forked(other)
time.sleep(0.2)
check = lambda: alive(pid) == 'S'
"""),
    "changed_root": (WAKES, """
def other():
    os.makedirs(here + '/root/dir')
    os.chroot(here + '/root')
    os.chdir('/dir')
pid = forked(other)
time.sleep(0.2)
check = lambda: os.readlink(f'/proc/{pid}/root') == here + '/root'
"""),
    "changed_root_that_was_deleted": (EITHER, """
os.makedirs(here + '/root')
def other():
    os.chroot(here + '/root')
    os.chdir('/')
pid = forked(other)
time.sleep(0.2)
os.rmdir(here + '/root')
check = lambda: alive(pid) == 'S'
"""),
    "memory_of_many_kinds": (WAKES, """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
page = 4096
anonymous, private, shared = 0x20, 2, 1
grows = libc.mmap(None, 16 * page, 3, private | anonymous | 0x100, -1, 0)
ctypes.memmove(grows, b'grows', 5)
locked = libc.mmap(None, 16 * page, 3, private | anonymous, -1, 0)
libc.mlock(ctypes.c_void_p(locked), 4 * page)
libc.syscall(325, ctypes.c_void_p(locked + 8 * page), 4 * page, 1)
nothing = libc.mmap(None, 1 << 40, 0, private | anonymous | 0x4000, -1, 0)
readonly = libc.mmap(None, page, 3, private | anonymous, -1, 0)
ctypes.memmove(readonly, b'still', 5)
libc.mprotect(ctypes.c_void_p(readonly), page, 1)
for advice in (10, 12, 14, 15, 16):
    at = libc.mmap(None, 8 * page, 3, private | anonymous, -1, 0)
    ctypes.memmove(at, b'x', 1)
    libc.madvise(ctypes.c_void_p(at), 8 * page, advice)
droppable = libc.mmap(None, page, 3, 8 | anonymous, -1, 0)
sealed = libc.mmap(None, page, 3, private | anonymous, -1, 0)
with open(here + '/mapped', 'w+b') as file:
    file.write(b'file' * 4096)
    file.flush()
    mapped = libc.mmap(None, 4 * page, 3, shared, file.fileno(), 0)
    copied = libc.mmap(None, 4 * page, 3, private, file.fileno(), 0)
    beyond = libc.mmap(None, 64 * page, 3, shared, file.fileno(), 0)
ctypes.memmove(copied, b'mine', 4)
def check():
    return (ctypes.string_at(grows, 5), ctypes.string_at(readonly, 5), ctypes.string_at(copied, 4), ctypes.string_at(mapped, 4)) == (b'grows', b'still', b'mine', b'file')
"""),
    "memory_that_is_sealed": (EITHER, """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
held = libc.mmap(None, 4096, 3, 0x22, -1, 0)
ctypes.memmove(held, b'held', 4)
kernel(462, ctypes.c_void_p(held), 4096, 0)
check = lambda: ctypes.string_at(held, 4) == b'held'
"""),
    "memory_that_is_guarded": (EITHER, """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
held = libc.mmap(None, 16 * 4096, 3, 0x22, -1, 0)
ctypes.memmove(held, b'held', 4)
if libc.madvise(ctypes.c_void_p(held + 4096), 4096, 102):
    raise NotHere('guards')
check = lambda: ctypes.string_at(held, 4) == b'held'
"""),
    "memory_of_huge_pages": (EITHER, """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
if libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0) in (None, ctypes.c_void_p(-1).value):
    raise NotHere('no huge pages')
check = lambda: True
"""),
    "memory_at_the_first_page": (EITHER, """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
at = libc.mmap(ctypes.c_void_p(65536), 4096, 3, 0x100032, -1, 0)
if at != 65536:
    raise NotHere('taken')
top = libc.mmap(ctypes.c_void_p(0x7ffffffff000 - 4096), 4096, 3, 0x100032, -1, 0)
check = lambda: True
"""),
    "file_mapped_that_was_cut": (WAKES, """
file = open(here + '/cut', 'w+b')
file.write(b'x' * 65536)
file.flush()
held = mmap.mmap(file.fileno(), 65536)
file.truncate(10)
file.close()
check = lambda: held[:5] == b'xxxxx'
"""),
    "files_of_all_kinds": (WAKES, """
open(here + '/file', 'w').write('0123456789')
held = [os.open(here + '/file', how) for how in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_SYNC, os.O_PATH, os.O_RDONLY | os.O_NOATIME, os.O_RDWR | os.O_DIRECT)]
os.lseek(held[0], 5, os.SEEK_SET)
devices = [os.open('/dev/' + name, os.O_RDWR) for name in ('null', 'zero', 'full', 'urandom', 'random')]
link = os.symlink('nowhere', here + '/link')
linked = os.open(here + '/link', os.O_PATH | os.O_NOFOLLOW)
proc = [os.open('/proc/' + name, os.O_RDONLY) for name in ('self/status', '1/stat', 'self/maps', 'meminfo', 'self', '.', 'self/fd', 'loadavg', 'sys/kernel/hostname')]
check = lambda: os.pread(held[0], 3, 0) == b'012' and os.lseek(held[0], 0, os.SEEK_CUR) == 5 and all(os.fstat(one) for one in devices + proc)
"""),
    "files_of_a_process_that_ended": (EITHER, """
pid = forked(lambda: None)
held = [os.open(f'/proc/{pid}/{name}', os.O_RDONLY) for name in ('status', 'task', 'fd', '.', 'maps')]
os.kill(pid, 9)
os.waitpid(pid, 0)
check = lambda: all(fcntl.fcntl(one, fcntl.F_GETFD) >= 0 for one in held)
"""),
    "files_of_a_thread_that_ended": (EITHER, """
found = []
def run():
    found.append(os.open(f'/proc/self/task/{threading.get_native_id()}/status', os.O_RDONLY))
one = threading.Thread(target=run)
one.start()
one.join()
check = lambda: fcntl.fcntl(found[0], fcntl.F_GETFD) >= 0
"""),
    "files_of_a_thread_of_a_process_that_ended": (EITHER, """
pid = forked(lambda: None)
held = os.open(f'/proc/{pid}/task/{pid}/status', os.O_RDONLY)
os.kill(pid, 9)
os.waitpid(pid, 0)
check = lambda: fcntl.fcntl(held, fcntl.F_GETFD) >= 0
"""),
    "what_was_told_of_a_descriptor_that_was_closed": (EITHER, """
other = os.open('/dev/null', os.O_RDONLY)
held = os.open(f'/proc/self/fdinfo/{other}', os.O_RDONLY)
os.close(other)
check = lambda: fcntl.fcntl(held, fcntl.F_GETFD) >= 0
"""),
    "link_of_a_descriptor_that_was_closed": (EITHER, """
other = os.open('/dev/null', os.O_RDONLY)
held = os.open(f'/proc/self/fd/{other}', os.O_PATH | os.O_NOFOLLOW)
os.close(other)
check = lambda: fcntl.fcntl(held, fcntl.F_GETFD) >= 0
"""),
    "files_of_a_device_that_comes_later": (EITHER, """
names = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]
held = []
for name in names:
    for at in ('sys/net/ipv4/conf/{}/forwarding', 'sys/net/ipv4/neigh/{}', 'sys/net/ipv6/conf/{}/mtu', 'net/dev_snmp6/{}'):
        try:
            held.append(os.open('/proc/' + at.format(name), os.O_RDONLY))
        except OSError:
            pass
if not held:
    raise NotHere('no such file')
check = lambda: all(fcntl.fcntl(one, fcntl.F_GETFD) >= 0 for one in held)
"""),
    "files_of_a_process_that_nobody_waited_for": (EITHER, """
pid = os.fork()
if pid == 0:
    os._exit(0)
time.sleep(0.2)
held = [os.open(f'/proc/{pid}/{name}', os.O_RDONLY) for name in ('status', '.', 'task')]
check = lambda: all(fcntl.fcntl(one, fcntl.F_GETFD) >= 0 for one in held)
"""),
    "memory_of_another_open": (EITHER, """
pid = forked(lambda: None)
held = os.open(f'/proc/{pid}/mem', os.O_RDWR)
own = os.open('/proc/self/mem', os.O_RDWR)
check = lambda: held > 0
"""),
    "namespaces_of_its_own_open": (EITHER, """
held = [os.open(f'/proc/self/ns/{name}', os.O_RDONLY) for name in os.listdir('/proc/self/ns') if not name.endswith('_for_children')]
check = lambda: all(os.fstat(one) for one in held)
"""),
    "namespaces_of_children_open": (EITHER, """
held = [os.open(f'/proc/self/ns/{name}', os.O_RDONLY) for name in ('pid_for_children', 'time_for_children')]
check = lambda: all(os.fstat(one) for one in held)
"""),
    "mounts_watched": (EITHER, """
held = os.open('/proc/self/mountinfo', os.O_RDONLY)
os.read(held, 100)
check = lambda: os.fstat(held).st_ino > 0
"""),
    "detached_mount_held": (EITHER, """
held = kernel(428, -100, b'/tmp/held', 1)
check = lambda: held > 0
"""),
    "file_system_being_made": (EITHER, """
held = kernel(430, b'tmpfs', 0)
check = lambda: held > 0
"""),
    "handle_opened": (EITHER, """
held = os.open('/', os.O_RDONLY | os.O_DIRECTORY)
raw = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + b'\\0' * 128)
mount = ctypes.c_int(0)
open(here + '/handled', 'w').close()
kernel(303, -100, (here + '/handled').encode(), raw, ctypes.byref(mount), 0)
other = kernel(304, held, raw, os.O_RDWR)
check = lambda: other > 0
"""),
    "many_descriptors": (WAKES, """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open('/dev/null', os.O_RDONLY) for n in range(2000)]
check = lambda: len({os.fstat(one).st_ino for one in held}) == 1
"""),
    "descriptors_of_the_highest_numbers": (EITHER, """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
numbers = [hard - 1, hard - 100, hard - 1000]
for number in numbers:
    os.dup2(0, number)
check = lambda: all(fcntl.fcntl(number, fcntl.F_GETFD) >= 0 for number in numbers)
"""),
    "descriptor_of_a_high_number": (EITHER, """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.dup2(0, hard - 2000)
check = lambda: fcntl.fcntl(hard - 2000, fcntl.F_GETFD) >= 0
"""),
    "owners_of_signals_of_files": (EITHER, """
pid = forked(lambda: None)
read, write = os.pipe()
one, other = socket.socketpair()
for held in (read, one.fileno()):
    fcntl.fcntl(held, fcntl.F_SETOWN, pid)
    fcntl.fcntl(held, 10, signal.SIGURG)
group = os.dup(write)
fcntl.fcntl(group, fcntl.F_SETOWN, -os.getpgid(0))
gone = os.fork()
if gone == 0:
    os._exit(0)
third = os.pipe()
fcntl.fcntl(third[0], fcntl.F_SETOWN, gone)
os.waitpid(gone, 0)
check = lambda: fcntl.fcntl(read, fcntl.F_GETOWN) == pid and fcntl.fcntl(read, 11) == signal.SIGURG
"""),
    "writable_program_memory_forbidden": (EITHER, """
pid = os.fork()
if pid == 0:
    libc.prctl(65, 1, 0, 0, 0)
    while True:
        time.sleep(1000)
time.sleep(0.2)
check = lambda: alive(pid) == 'S'
"""),
    "shadow_stack": (EITHER, """
pid = os.fork()
if pid == 0:
    libc.syscall(158, 0x5001, 1)
    while True:
        time.sleep(1000)
time.sleep(0.2)
if alive(pid) != 'S':
    raise NotHere('no shadow stacks')
check = lambda: alive(pid) == 'S'
"""),
    "descriptor_above_its_limit": (EITHER, """
import resource
held = os.dup2(os.open('/dev/null', os.O_RDONLY), 900)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
check = lambda: os.fstat(900).st_rdev > 0
"""),
    "limits_below_what_is_used": (EITHER, """
import resource
pid = os.fork()
if pid == 0:
    held = mmap.mmap(-1, 64 << 20)
    held[:1 << 20] = b'x' * (1 << 20)
    for what, value in ((resource.RLIMIT_AS, 1 << 20), (resource.RLIMIT_DATA, 4096), (resource.RLIMIT_STACK, 4096), (resource.RLIMIT_NPROC, 1),
                        (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_SIGPENDING, 0), (resource.RLIMIT_CPU, 100000), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    while True:
        time.sleep(1000)
time.sleep(0.5)
check = lambda: alive(pid) == 'S'
"""),
    "files_above_the_limit_of_size": (EITHER, """
import resource
held = open(here + '/large', 'w+b')
held.write(b'x' * 100000)
held.flush()
os.unlink(here + '/large')
memory = os.memfd_create('large')
os.write(memory, b'x' * 100000)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
check = lambda: os.fstat(memory).st_size == 100000 and os.fstat(held.fileno()).st_size == 100000
"""),
    "program_of_32_bits": (EITHER, """
import struct as s
code = bytes.fromhex('b81d000000cd80ebf7')
header = b'\\x7fELF\\x01\\x01\\x01' + b'\\0' * 9 + s.pack('<HHIIIIIHHHHHH', 2, 3, 1, 0x8048054, 52, 0, 0, 52, 32, 1, 0, 0, 0)
load = s.pack('<IIIIIIII', 1, 0, 0x8048000, 0x8048000, 84 + len(code), 84 + len(code), 5, 4096)
with open(here + '/small', 'wb') as file:
    file.write(header + load + code)
os.chmod(here + '/small', 0o755)
try:
    held = subprocess.Popen([here + '/small'])
except OSError as error:
    raise NotHere(error)
time.sleep(0.3)
if held.poll() is not None:
    raise NotHere('it does not run')
check = lambda: held.poll() is None
"""),
    "program_without_a_vdso_or_anything": (EITHER, """
code = bytes.fromhex('b8220000000f05ebf7')
header = b'\\x7fELF\\x02\\x01\\x01' + b'\\0' * 9 + struct.pack('<HHIQQQIHHHHHH', 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
load = struct.pack('<IIQQQQQQ', 1, 5, 0, 0x400000, 0x400000, 120 + len(code), 120 + len(code), 4096)
with open(here + '/tiny', 'wb') as file:
    file.write(header + load + code)
os.chmod(here + '/tiny', 0o755)
held = subprocess.Popen([here + '/tiny'])
time.sleep(0.3)
check = lambda: held.poll() is None
"""),
    "deep_chain_of_processes": (WAKES, """
read, write = os.pipe()
if os.fork() == 0:
    for n in range(60):
        if os.fork():
            while True:
                time.sleep(1000)
    os.write(write, b'x')
    while True:
        time.sleep(1000)
os.read(read, 1)
check = lambda: sum(name.isdigit() for name in os.listdir('/proc')) >= 62
"""),
    "program_with_a_debugger_inside": (EITHER, """
pid = os.fork()
if pid == 0:
    inner = os.fork()
    if inner == 0:
        while True:
            time.sleep(1000)
    libc.ptrace(0x4206, inner, 0, 0)
    while True:
        time.sleep(1000)
time.sleep(0.3)
check = lambda: alive(pid) == 'S'
"""),
    "keyrings": (EITHER, """
key = kernel(248, b'user', b'held', b'data', 4, -1)
check = lambda: key > 0
"""),
    "robust_and_priority_futexes": (WAKES, """
lock = ctypes.create_string_buffer(64)
libc.pthread_mutex_init(lock, None)
libc.pthread_mutex_lock(lock)
def wait():
    libc.pthread_mutex_lock(lock)
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
check = lambda: len(os.listdir('/proc/self/task')) == 2
"""),
    "restartable_sequences": (EITHER, """
def run():
    time.sleep(9999)
threading.Thread(target=run, daemon=True).start()
pid = os.fork()
if pid == 0:
    while True:
        for n in range(1000):
            os.getpid()
time.sleep(0.2)
check = lambda: alive(pid) == 'R'
"""),
    "system_calls_of_all_kinds_under_way": (WAKES, """
read, write = os.pipe()
calls = [lambda: os.read(read, 1), lambda: time.sleep(9999), lambda: select.select([read], [], [], 9999), lambda: select.epoll().poll(9999),
         lambda: signal.sigwait([signal.SIGUSR2]), lambda: libc.nanosleep(struct.pack('qq', 9999, 0), ctypes.create_string_buffer(16)),
         lambda: libc.poll(None, 0, 9999000), lambda: os.waitid(os.P_ALL, 0, os.WEXITED), lambda: libc.pause()]
pids = [forked(call) for call in calls]
time.sleep(0.3)
check = lambda: [alive(pid) for pid in pids[:7] + pids[8:]] == ['S'] * 8
"""),
}

"""Files in memory: programs and data in memfds, and trees in tmpfs."""

from .expected import EITHER, WAKES

SLEEPER = "open('/usr/bin/sleep', 'rb').read()"
MEMFDS = {
    "program_in_a_memfd": (WAKES, f"""
program = os.memfd_create('prog')
os.write(program, {SLEEPER})
pid = os.fork()
if pid == 0:
    os.execve(program, ['sleep', '9999'], {{}})
until = time.monotonic() + 30
while not os.readlink(f'/proc/{{pid}}/exe').startswith('/memfd:'):
    assert time.monotonic() < until
check = lambda: alive(pid) == 'S' and os.readlink(f'/proc/{{pid}}/exe') == '/memfd:prog (deleted)' and open(f'/proc/{{pid}}/exe', 'rb').read() == {SLEEPER}
"""),
    "program_in_a_memfd_that_nobody_holds": (WAKES, f"""
program = os.memfd_create('prog', os.MFD_CLOEXEC)
os.write(program, {SLEEPER})
pids = []
for n in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.execve(program, ['sleep', '9999'], {{}})
time.sleep(0.5)
os.close(program)
check = lambda: all(os.readlink(f'/proc/{{pid}}/exe') == '/memfd:prog (deleted)' and alive(pid) == 'S' for pid in pids)
"""),
    "program_in_a_sealed_memfd": (WAKES, f"""
program = os.memfd_create('prog', os.MFD_ALLOW_SEALING)
os.write(program, {SLEEPER})
fcntl.fcntl(program, fcntl.F_ADD_SEALS, 1 | 2 | 4 | 8)
read = os.open(f'/proc/self/fd/{{program}}', os.O_RDONLY)
os.close(program)
pid = os.fork()
if pid == 0:
    os.execve(read, ['sleep', '9999'], {{}})
time.sleep(0.5)
check = lambda: alive(pid) == 'S' and fcntl.fcntl(read, fcntl.F_GET_SEALS) == 15 and os.readlink(f'/proc/{{pid}}/exe') == '/memfd:prog (deleted)'
"""),
    "program_in_a_memfd_that_it_unmapped": (EITHER, """
program = os.memfd_create('prog')
os.write(program, open('/proc/self/exe', 'rb').read())
pid = os.fork()
if pid == 0:
    os.execve(program, ['python3', '-c', '''
import ctypes, time
lines = [line.split() for line in open("/proc/self/maps")]
print(lines, flush=True)
while True: time.sleep(1000)
'''], dict(os.environ))
time.sleep(1)
check = lambda: alive(pid) == 'S'
"""),
    "program_in_a_memfd_of_the_user": (WAKES, f"""
pid = os.fork()
if pid == 0:
    os.setgid(65534)
    os.setuid(65534)
    program = os.memfd_create('prog')
    os.write(program, {SLEEPER})
    os.fchmod(program, 0o500)
    os.execve(program, ['sleep', '9999'], {{}})
time.sleep(0.5)
check = lambda: alive(pid) == 'S'
"""),
    "program_in_a_memfd_whose_mode_was_changed": (EITHER, f"""
program = os.memfd_create('prog')
os.write(program, {SLEEPER})
pid = os.fork()
if pid == 0:
    os.execve(program, ['sleep', '9999'], {{}})
time.sleep(0.5)
os.fchmod(program, 0)
check = lambda: alive(pid) == 'S' and os.fstat(program).st_mode & 0o777 == 0
"""),
    "program_whose_mode_was_changed": (EITHER, """
import shutil
shutil.copy('/usr/bin/sleep', here + '/sleep')
held = subprocess.Popen([here + '/sleep', '9999'])
time.sleep(0.5)
os.chmod(here + '/sleep', 0)
check = lambda: alive(held.pid) == 'S'
"""),
    "program_that_was_deleted": (WAKES, """
import shutil
shutil.copy('/usr/bin/sleep', here + '/sleep')
held = subprocess.Popen([here + '/sleep', '9999'])
time.sleep(0.5)
os.unlink(here + '/sleep')
check = lambda: alive(held.pid) == 'S'
"""),
    "program_deleted_and_its_mode_changed": (EITHER, """
import shutil
shutil.copy('/usr/bin/sleep', here + '/sleep')
held = subprocess.Popen([here + '/sleep', '9999'])
time.sleep(0.5)
os.chmod(here + '/sleep', 0)
os.unlink(here + '/sleep')
check = lambda: alive(held.pid) == 'S'
"""),
    "program_in_a_file_without_a_name": (WAKES, f"""
program = os.open(here, os.O_TMPFILE | os.O_RDWR, 0o700)
os.write(program, {SLEEPER})
read = os.open(f'/proc/self/fd/{{program}}', os.O_RDONLY)
os.close(program)
pid = os.fork()
if pid == 0:
    os.execve(read, ['sleep', '9999'], {{}})
time.sleep(0.5)
check = lambda: alive(pid) == 'S'
"""),
    "program_named_by_no_text": (WAKES, """
import shutil
shutil.copy('/usr/bin/sleep', '/opt/äöüäöüäö')
held = subprocess.Popen(['/opt/äöüäöüäö', '9999'])
libc.prctl(15, b'\\xff\\xfe\\n(')
check = lambda: alive(held.pid) == 'S'
"""),
    "memfd_mapped_and_sealed": (WAKES, """
held = os.memfd_create('held', os.MFD_ALLOW_SEALING)
os.truncate(held, 8192)
writable = mmap.mmap(held, 8192)
writable[:4] = b'data'
fcntl.fcntl(held, fcntl.F_ADD_SEALS, 0x10 | 2 | 4)
check = lambda: writable[:4] == b'data' and fcntl.fcntl(held, fcntl.F_GET_SEALS) == 0x16
"""),
    "memfd_not_to_be_run": (WAKES, """
held = kernel(319, b'held', 8)
check = lambda: fcntl.fcntl(held, fcntl.F_GET_SEALS) & 0x20 == 0x20
"""),
    "memfd_opened_in_many_ways": (WAKES, """
held = os.memfd_create('held')
os.write(held, b'data')
others = [os.open(f'/proc/self/fd/{held}', how) for how in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_PATH, os.O_RDWR | os.O_APPEND)]
check = lambda: all(os.fstat(one).st_size == 4 for one in others)
"""),
    "memfd_with_no_name_and_odd_names": (WAKES, """
names = ['', ' (deleted)', 'a' * 249, 'new\\nline', '../x/y', '\\udcff\\udcfe']
held = [os.memfd_create(name) for name in names]
for n, one in enumerate(held):
    os.write(one, b'%d' % n)
check = lambda: all(os.pread(one, 4, 0) == b'%d' % n for n, one in enumerate(held))
"""),
    "memfd_secret": (EITHER, """
held = kernel(447, 0)
os.truncate(held, 4096)
check = lambda: os.fstat(held).st_size == 4096
"""),
    "memfd_of_huge_pages": (EITHER, """
held = kernel(319, b'held', 4)
check = lambda: held > 0
"""),
    "memfd_sparse": (WAKES, """
held = os.memfd_create('held')
os.truncate(held, 1 << 40)
os.pwrite(held, b'end', (1 << 40) - 3)
check = lambda: os.pread(held, 3, (1 << 40) - 3) == b'end'
"""),
    "shared_memory_without_a_file": (WAKES, """
held = mmap.mmap(-1, 1 << 20)
held[:4] = b'data'
def other():
    held[4:8] = b'more'
pid = forked(other)
time.sleep(0.2)
check = lambda: held[:8] == b'datamore'
"""),
}

DEEP = """
def deep(top, name, depth):
    at = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    return at

def seen(top, name, depth):
    at = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    return at
"""
TREES = {
    f"deep_directories_in_{place.strip('/').replace('/', '_')}_{depth}_{length}": (expected, DEEP + f"""
at = deep('{place}', 'd' * {length}, {depth})
os.close(os.open('file', os.O_CREAT | os.O_WRONLY, dir_fd=at))
os.close(at)
def check():
    at = seen('{place}', 'd' * {length}, {depth})
    found = os.stat('file', dir_fd=at)
    os.close(at)
    return stat.S_ISREG(found.st_mode)
""")
    for place, depth, length, expected in (
        ("/dev/shm", 20, 200, WAKES),
        ("/dev/shm", 30, 200, EITHER),
        ("/run", 50, 200, EITHER),
        ("/dev", 21, 195, EITHER),
        ("/run", 2000, 1, WAKES),
        ("/run", 3000, 1, EITHER),
        ("/dev/shm", 20000, 1, EITHER),
        ("/tmp", 50, 200, WAKES),
    )
}
TREES |= {
    "names_at_the_limit_in_shm": (WAKES, DEEP + """
# Paths of all lengths around 4096.
at = deep('/dev/shm', 'd' * 199, 19)
below = deep(f'/proc/self/fd/{at}', 'd' * 199, 1)
names = ['f' * n for n in range(80, 92)]
for name in names:
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=below))
os.close(below)
os.close(at)
check = lambda: sorted(os.listdir(seen('/dev/shm', 'd' * 199, 20))) == sorted(names)
"""),
    "long_names_of_files_in_shm": (EITHER, DEEP + """
at = deep('/dev/shm', 'd' * 200, 19)
os.close(os.open('f' * 255, os.O_CREAT | os.O_WRONLY, dir_fd=at))
os.link('f' * 255, 'l' * 255, src_dir_fd=at, dst_dir_fd=at)
os.symlink('x' * 4000, 's' * 255, dir_fd=at)
os.mkfifo('p' * 255, dir_fd=at)
check = lambda: len(os.listdir(seen('/dev/shm', 'd' * 200, 19))) == 4
"""),
    "deep_hard_links_in_shm": (EITHER, DEEP + """
at = deep('/dev/shm', 'd' * 200, 25)
os.close(os.open('/dev/shm/file', os.O_CREAT | os.O_WRONLY))
os.link('/dev/shm/file', 'file', dst_dir_fd=at)
check = lambda: os.stat('/dev/shm/file').st_nlink == 2
"""),
    "odd_names_in_tmpfs": (WAKES, """
names = [b'-rf', b'--to-command=sh', b'a\\nb', b'\\\\n', b'\\xff\\xfe', b' ', b'*', b'?[a]', b'@file', b'"quoted"', b"'", b'...', b'a (deleted)', b'n' * 255]
for top in (b'/run/odd', b'/dev/shm/odd', b'/dev/odd'):
    os.mkdir(top)
    for name in names:
        open(top + b'/' + name, 'w').write('x')
        os.mkdir(top + b'/dir')
        os.rename(top + b'/dir', top + b'/d' + name[:250])
check = lambda: all(set(os.listdir(top)) == set(names) | {b'd' + name[:250] for name in names} for top in (b'/run/odd', b'/dev/shm/odd', b'/dev/odd'))
"""),
    "odd_files_in_tmpfs": (WAKES, """
top = '/run/files'
os.mkdir(top)
os.mkfifo(top + '/fifo')
os.symlink('/etc/passwd', top + '/absolute')
os.symlink('../../../..', top + '/up')
os.symlink('x' * 4095, top + '/long')
open(top + '/one', 'w').write('text')
os.link(top + '/one', top + '/two')
os.link(top + '/absolute', top + '/absolute2')
os.truncate(os.open(top + '/sparse', os.O_CREAT | os.O_RDWR), 1 << 40)
os.mkdir(top + '/closed', 0)
os.close(os.open(top + '/closed/file', os.O_CREAT | os.O_WRONLY, 0))
os.mkdir(top + '/sticky')
os.chmod(top + '/sticky', 0o7777)
os.chown(top + '/one', 1000, 1000)
os.chmod(top + '/one', 0o6755)
def seen():
    return {(name, stat.filemode(found.st_mode), found.st_uid, found.st_size, found.st_nlink, found.st_mtime_ns // 10**9)
            for name in os.listdir(top) for found in [os.lstat(top + '/' + name)] if not stat.S_ISDIR(found.st_mode)}
before = seen()
check = lambda: (seen() == before and os.readlink(top + '/long') == 'x' * 4095) or (before - seen(), seen() - before)
"""),
    "times_beyond_all_years_in_tmpfs": (WAKES, """
times = [-1, -2**40, 2**40, 2**55, -2**55, 2**62, -2**62]
for n, when in enumerate(times):
    open(f'/run/time{n}', 'w').close()
    libc.utimensat(-100, f'/run/time{n}'.encode(), struct.pack('qqqq', when, 999999999, when, 999999999), 0)
check = lambda: all(os.path.exists(f'/run/time{n}') for n in range(len(times)))
"""),
    "mark_of_something_removed_in_tmpfs": (EITHER, """
if libc.mknod(b'/run/removed', stat.S_IFCHR, 0):
    raise NotHere('mknod')
check = lambda: stat.S_ISCHR(os.stat('/run/removed').st_mode)
"""),
    "attributes_in_tmpfs": (EITHER, """
open('/run/attributes', 'w').close()
try:
    os.setxattr('/run/attributes', 'user.test', b'value')
except OSError as error:
    raise NotHere(error)
check = lambda: os.getxattr('/run/attributes', 'user.test') == b'value'
"""),
    "attributes_of_rights_in_tmpfs": (EITHER, """
open('/run/attributes', 'w').close()
try:
    os.setxattr('/run/attributes', 'security.capability', struct.pack('<IIIII', 0x2000000, 1 << 10, 0, 0, 0))
except OSError as error:
    raise NotHere(error)
check = lambda: os.path.exists('/run/attributes')
"""),
    "access_list_in_tmpfs": (EITHER, """
open('/run/listed', 'w').close()
try:
    os.setxattr('/run/listed', 'system.posix_acl_access', struct.pack('<I' + 'HHI' * 5, 2, 1, 7, 0xffffffff, 2, 7, 1000, 4, 5, 0xffffffff, 0x10, 7, 0xffffffff, 0x20, 5, 0xffffffff))
except OSError as error:
    raise NotHere(error)
check = lambda: os.path.exists('/run/listed')
"""),
    "directory_of_tmpfs_that_was_deleted": (WAKES, """
os.makedirs('/run/gone/below')
os.chdir('/run/gone/below')
held = os.open('.', os.O_RDONLY)
os.rmdir('/run/gone/below')
os.rmdir('/run/gone')
check = lambda: os.listdir('.') == [] and os.fstat(held).st_nlink == 0
"""),
    "deep_working_directory": (EITHER, DEEP + """
at = deep('/tmp/held', 'd' * 200, 30)
os.fchdir(at)
check = lambda: os.listdir('.') == []
"""),
    "deep_working_directory_in_tmpfs": (EITHER, DEEP + """
at = deep('/run', 'd' * 200, 30)
os.fchdir(at)
check = lambda: os.listdir('.') == []
"""),
    "deep_open_file": (EITHER, DEEP + """
at = deep('/tmp/held', 'd' * 200, 30)
held = os.open('file', os.O_CREAT | os.O_RDWR, dir_fd=at)
os.write(held, b'data')
os.close(at)
check = lambda: os.pread(held, 4, 0) == b'data'
"""),
    "deep_open_file_that_was_deleted": (EITHER, DEEP + """
at = deep('/tmp/held', 'd' * 200, 30)
held = os.open('file', os.O_CREAT | os.O_RDWR, dir_fd=at)
os.write(held, b'data')
os.unlink('file', dir_fd=at)
os.close(at)
check = lambda: os.pread(held, 4, 0) == b'data'
"""),
    "deep_socket": (EITHER, DEEP + """
at = deep('/tmp/held', 'd' * 200, 30)
os.fchdir(at)
held = socket.socket(socket.AF_UNIX)
held.bind('name')
held.listen(5)
os.close(at)
check = lambda: held.getsockname() == 'name'
"""),
    "deep_watch": (EITHER, DEEP + """
at = deep('/tmp/held', 'd' * 200, 30)
watch = libc.inotify_init1(os.O_NONBLOCK)
os.fchdir(at)
assert libc.inotify_add_watch(watch, b'.', 0x100) == 1
os.chdir('/')
def check():
    os.close(os.open('file', os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.unlink('file', dir_fd=at)
    return len(os.read(watch, 4096)) >= 16
"""),
}

"""Sandboxes of one kernel: what one takes of it is taken from nobody else, and no file tells one of
another. Each resource is taken to its end in one sandbox, then used in another one and on the host."""

import ctypes
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from world import inside

# Takes as much as there is of something, says how much, and holds it.
TAKE = """
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def why():
    return errno.errorcode.get(ctypes.get_errno(), "?")

def inotify(most):
    for n in range(most):
        if libc.inotify_init1(0) < 0:
            return n, why()
    return most, "most"

def queues(most):
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ("flags", "maxmsg", "msgsize", "curmsgs")] + [("pad", ctypes.c_long * 4)]
    for n in range(most):
        size = Attributes(0, 10, 8192, 0)
        if libc.syscall(240, f"sk{os.getpid()}-{n}".encode(), os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(size)) < 0:
            return n, why()
    return most, "most"

def timers(most):
    for n in range(most):
        made = ctypes.c_int()
        if libc.syscall(222, 1, None, ctypes.byref(made)) < 0:
            return n, why()
    return most, "most"

def requests(most):
    taken = 0
    while taken < most:
        context = ctypes.c_ulong()
        if libc.syscall(206, ctypes.c_uint(1024), ctypes.byref(context)) < 0:
            return taken, why()
        taken += 1024
    return taken, "most"

def locked(most):
    mapped = libc.mmap
    mapped.restype = ctypes.c_void_p
    for n in range(most):
        page = mapped(None, ctypes.c_size_t(1 << 20), 3, 0x22, -1, ctypes.c_long(0))
        if libc.mlock(ctypes.c_void_p(page), ctypes.c_size_t(1 << 20)) < 0:
            return n, why()
    return most, "most"

def terminals(most):
    for n in range(most):
        try:
            os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        except OSError as error:
            return n, errno.errorcode[error.errno]
    return most, "most"

what, most, hold = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
taken, reason = globals()[what](most)
print(taken, reason, flush=True)
if what == "queues" and not hold:
    # They would stay.
    for n in range(taken):
        libc.syscall(241, f"sk{os.getpid()}-{n}".encode())
if hold:
    open(sys.argv[3], "w").write(f"{taken} {reason}")
    time.sleep(600)
"""

# How much is asked for in the end, what somebody else needs of it, and as whom it is taken.
RESOURCES = {
    "inotify": (4000, 20, "user"),
    "queues": (400, 4, "root"),
    "timers": (200_000, 4000, "root"),
    "requests": (120_000, 8192, "user"),
    "locked": (64, 4, "user"),
    "terminals": (2000, 8, "user"),
}
# Of these the sandbox gets at most so many, however many the host has.
BOUNDS = {"terminals": 64, "requests": 0, "timers": 10_000, "queues": 16, "locked": 8}


def take_and_hold(box: Box, what: str, most: int, user: str) -> tuple[int, str]:
    box.write("/tmp/take.py", TAKE.encode())
    box.exec(f"ulimit -n 4096; nohup python3 /tmp/take.py {what} {most} /tmp/taken-{what} >/dev/null 2>&1 & true", user=user)
    said = wait_for(lambda: box.exec(f"cat /tmp/taken-{what} 2>/dev/null || true").out, f"{what} are taken", 240)
    taken, why = said.split()
    return int(taken), why


def use(box: Box, what: str, user: str) -> tuple[int, str]:
    box.write("/tmp/take.py", TAKE.encode())
    ran = box.exec(f"python3 /tmp/take.py {what} {RESOURCES[what][1]}", user=user)
    assert ran.ok, ran
    taken, why = ran.out.split()
    return int(taken), why


def use_on_the_host(what: str) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-c", TAKE, what, str(RESOURCES[what][1])], capture_output=True, text=True, check=True
    )
    taken, why = ran.stdout.split()
    return int(taken), why


def paused_and_resumed(server, box: Box) -> Box:
    rest = server.json("POST", box.path + "/pause", {}, timeout=240)["pause"]
    assert rest["mode"] == "disk", rest
    server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=240)
    return box


@pytest.fixture(params=["fresh", "resumed"])
def two(request, server, make):
    """Two sandboxes of the level that shares its kernel; as they were made, or back from the disk."""
    boxes = [make(isolation="container", timeout_seconds=600) for _ in range(2)]
    if request.param == "resumed":
        for box in boxes:
            paused_and_resumed(server, box)
    return boxes


@pytest.mark.parametrize("what", RESOURCES)
def test_what_one_sandbox_takes_of_the_kernel_nobody_else_lacks(two, what):
    attacker, neighbour = two
    most, needed, user = RESOURCES[what]
    taken, why = take_and_hold(attacker, what, most, user)
    assert why != "most", f"{taken} of {what} and no end"
    assert taken <= BOUNDS.get(what, most), (taken, why)
    if what == "requests":
        assert why == "ENOSYS", "a program is told that it has to use threads"
    else:
        got, why = use(neighbour, what, user)
        assert got == needed, f"{attacker.id} has {taken} {what}; another sandbox gets {got}: {why}"
    got, why = use_on_the_host(what)
    assert got == needed, f"{attacker.id} has {taken} {what}; root of the host gets {got}: {why}"


@pytest.mark.parametrize("level", ["gvisor"])
@pytest.mark.parametrize("what", RESOURCES)
def test_a_sandbox_with_a_kernel_of_its_own_takes_nothing_of_the_hosts(make, level, what):
    box = make(isolation=level)
    take_and_hold(box, what, RESOURCES[what][0] // 10, RESOURCES[what][2])
    got, why = use_on_the_host(what)
    assert got == RESOURCES[what][1], (got, why)


def host_pid(box: Box) -> int:
    """A process of the sandbox as the host numbers it."""
    mark = f"314159.{abs(hash(box.id)) % 10**9}"
    box.exec(f"nohup sleep {mark} >/dev/null 2>&1 & true")

    def found():
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[:2] == [b"sleep", mark.encode()]:
                    return int(entry.name)
        return None

    return wait_for(found, "its process is seen")


def test_the_kernel_counts_a_sandbox_as_a_user_of_its_own(two):
    owners = []
    for box in two:
        pid = host_pid(box)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        owner = ctypes.c_uint()
        assert ctypes.CDLL(None).ioctl(namespace, 0xB704, ctypes.byref(owner)) == 0
        os.close(namespace)
        owners.append(owner.value)
        first = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
        assert owner.value == first, "it belongs to the id that is root in it"
        limits = {
            name: int(box.exec(f"cat /proc/sys/user/{name}").out)
            for name in ("max_user_namespaces", "max_net_namespaces", "max_inotify_instances", "max_inotify_watches")
        }
        assert limits["max_user_namespaces"] == limits["max_net_namespaces"] == 0, limits
        assert 100 <= limits["max_inotify_instances"] <= 1024, limits
        assert 65_536 <= limits["max_inotify_watches"] <= 1_048_576, limits
        assert not box.root("echo 999999 > /proc/sys/user/max_inotify_instances").ok
    assert len(set(owners)) == 2 and 0 not in owners


# Lets data wait in sockets of its own loopback until it has so many MiB or can get no more.
SOCKETS = """
import socket, sys, time
kind, most = sys.argv[1], int(sys.argv[2]) << 20
held, pairs = 0, []
block = b"x" * 60000
while held < most:
    before = held
    if kind == "udp":
        a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        a.bind(("127.0.0.1", 0))
        b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        b.setblocking(False)
        for _ in range(40):
            try:
                b.sendto(block, a.getsockname())
            except OSError:
                break
        # What was not thrown away on the way.
        port = a.getsockname()[1]
        for line in open("/proc/net/udp").read().splitlines()[1:]:
            words = line.split()
            if words[1].endswith(f":{port:04X}"):
                held += int(words[4].split(":")[1], 16)
        b.close()
        pairs.append(a)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
        a.setblocking(False)
        try:
            while held - before < 4 << 20:
                held += a.send(block)
        except OSError:
            pass
        listener.close()
        pairs.append((a, b))
    if held - before < 4096 or len(pairs) > 300:
        break
print(held >> 20, flush=True)
open("/tmp/held", "w").write(str(held >> 20))
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["udp", "tcp"])
def test_what_waits_in_sockets_counts_as_memory_of_the_sandbox(make, kind):
    limit = 128
    box = make(isolation="container", limits={"memory_mib": limit})
    box.write("/tmp/sockets.py", SOCKETS.encode())
    box.exec(f"ulimit -n 60000; nohup python3 /tmp/sockets.py {kind} 400 >/tmp/out 2>&1 & true")
    said = lambda: box.exec("cat /tmp/held 2>/dev/null; pgrep -f sockets.py >/dev/null || echo 0").out.strip()  # noqa: E731
    held = int(wait_for(said, "it has what it can get", 240).split()[0])
    assert held < limit, f"{held} MiB wait in sockets of a sandbox of {limit} MiB"
    if held:
        used = int(box.info()["usage"]["memory_bytes"]) >> 20
        assert used >= held // 2, f"{held} MiB wait in sockets, and {used} MiB are said to be used"
    assert box.exec("echo alive").out == "alive\n"


def flows(box: Box) -> int:
    """What connection tracking remembers of the sandbox."""
    namespace = os.open(f"/proc/{host_pid(box)}/ns/net", os.O_RDONLY)
    try:
        return inside(namespace, lambda: int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text()))
    finally:
        os.close(namespace)


FLOWS = {
    "loopback": ("127.0.0.1", "port"),
    "own_address": ("10.0.0.2", "port"),
    "resolver": ("198.51.100.7", 53),
    "from_the_port_of_the_listener": ("127.0.0.1", "from"),
}


@pytest.mark.parametrize("to", FLOWS)
def test_flows_of_a_sandbox_are_not_remembered_without_end(make, to):
    box = make(isolation="container")
    address, port = FLOWS[to]
    box.python(f"""
        import socket
        sent = 0
        for round in range(30):
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            if {port!r} == "from":
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((f"127.0.0.{{2 + round}}", 61613))
            for n in range(1000):
                try:
                    s.sendto(b"x", ({address!r} if {port!r} != 53 else f"198.51.{{n % 250}}.{{round + 1}}",
                                    {port!r} if isinstance({port!r}, int) else 1025 + round * 1000 + n))
                    sent += 1
                except OSError:
                    pass
    """, user="user")
    remembered = flows(box)
    assert remembered < 5000, f"{remembered} flows are remembered"


# Every file below some places that is not of the disk of the sandbox: where, and which inode.
INODES = """
import json, os
found = {}
def note(path):
    try:
        info = os.stat(path)
    except OSError:
        return
    found[path] = [info.st_dev, info.st_ino]
def walk(top, skip=lambda name: False):
    for place, directories, files in os.walk(top):
        directories[:] = [name for name in directories if not skip(name)]
        for name in directories + files:
            note(os.path.join(place, name))
walk("/dev")
walk("/sys")
walk("/run")
walk("/proc", lambda name: name.isdigit() or name in ("self", "thread-self", "net"))
for line in open("/proc/self/mountinfo"):
    note(line.split()[4])
for name in os.listdir("/proc/self/ns"):
    note("/proc/self/ns/" + name)
for number in (0, 1, 2):
    note(f"/proc/1/fd/{number}")
print(json.dumps(found))
"""
# The program of the first process: one file for all of them, but not the host's. It can be run and not be opened.
SHARED = {"/run/sandkeep-agent"}


def test_no_file_of_a_sandbox_is_one_of_another_or_of_the_host(two):
    seen = [json.loads(box.exec(["python3", "-c", INODES], user="root").out) for box in two]
    seen.append(json.loads(subprocess.run([sys.executable, "-c", INODES], capture_output=True, text=True, check=True).stdout))
    assert len(seen[0]) > 100 and {"/dev/null", "/sys/devices/system/cpu/online", "/proc/locks"} <= seen[0].keys()
    first, second, host = ({tuple(inode): path for path, inode in one.items() if path not in SHARED} for one in seen)
    for a, b in ((first, second), (first, host), (second, host)):
        common = {a[inode]: b[inode] for inode in a.keys() & b.keys()}
        assert not common, f"the same files: {common}"


WATCHED = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
           "/sys/devices/system/cpu", "/sys/devices/system/cpu/online", "/proc/kcore", "/proc/loadavg",
           "/proc/sys/kernel/random/boot_id"]
WATCH = """
import ctypes, os, sys, time, struct
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(os.O_NONBLOCK)
paths = sys.argv[1:]
numbers = {}
for path in paths:
    number = libc.inotify_add_watch(watch, path.encode(), 0xfff)
    if number > 0: numbers[number] = path
open("/tmp/watching", "w").write(str(len(numbers)))
events = {}
while not os.path.exists("/tmp/enough"):
    time.sleep(0.05)
    try:
        data = os.read(watch, 1 << 20)
    except BlockingIOError:
        continue
    while data:
        number, _, _, length = struct.unpack("iIII", data[:16])
        data = data[16 + length:]
        events[numbers[number]] = events.get(numbers[number], 0) + 1
open("/tmp/events", "w").write(repr(events))
"""


def test_inotify_tells_nothing_of_other_sandboxes_and_of_the_host(two):
    watcher, other = two
    watcher.write("/tmp/watch.py", WATCH.encode())
    watcher.exec(f"nohup python3 /tmp/watch.py {' '.join(WATCHED)} </dev/null >/tmp/watch.out 2>&1 & true")
    wait_for(lambda: watcher.exec("[ -e /tmp/watching ] && cat /tmp/watching || true").out, "it watches")
    touch = textwrap.dedent(f"""
        import os
        for path in {WATCHED!r}:
            for _ in range(500):
                try: os.close(os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
                except OSError: pass
    """)
    other.python(touch)
    subprocess.run([sys.executable, "-c", touch], check=True)
    watcher.exec("touch /tmp/enough")
    events = eval(wait_for(lambda: watcher.exec("cat /tmp/events 2>/dev/null || true").out, "it has seen what there is"))
    # Its own programs open some of them, too.
    assert all(count < 200 for count in events.values()), events


def test_locks_on_files_of_one_sandbox_are_felt_in_no_other(two):
    holder, other = two
    hold = textwrap.dedent(f"""
        import fcntl, os, time
        held = []
        for path in {WATCHED!r}:
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOCTTY)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(file)
            except OSError: pass
        open("/tmp/locked", "w").write(str(len(held)))
        time.sleep(600)
    """)
    holder.write("/tmp/hold.py", hold.encode())
    holder.root("nohup python3 /tmp/hold.py >/dev/null 2>&1 & true")
    wait_for(lambda: holder.exec("cat /tmp/locked 2>/dev/null || true").out, "it holds them")
    attempt = textwrap.dedent(f"""
        import errno, fcntl, os
        for path in {WATCHED!r}:
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOCTTY)
            except OSError: continue
            try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EAGAIN: print(path)
    """)
    assert other.python(attempt).out == ""
    on_host = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=True)
    assert on_host.stdout == ""


def test_what_others_do_is_not_in_proc(two, server):
    for box in two:
        for path in ("locks", "diskstats", "partitions", "swaps", "interrupts", "softirqs", "schedstat", "zoneinfo",
                     "buddyinfo", "pagetypeinfo", "cmdline"):
            assert box.root(f"cat /proc/{path} 2>/dev/null | wc -c").out.strip() == "0", path
        for path in ("fs", "pressure"):
            assert box.root(f"ls -A /proc/{path} 2>/dev/null | wc -l").out.strip() == "0", path
        assert box.exec("cat /proc/loadavg").out == "0.00 0.00 0.00 1/1 1\n"
        assert box.exec("uptime").ok and box.exec("free").ok and box.exec("df /").ok
        assert int(box.exec("nproc --all").out) == os.cpu_count()
        assert box.exec("cat /sys/devices/system/cpu/online").out == Path("/sys/devices/system/cpu/online").read_text()
        for device in ("null", "zero", "full", "random", "urandom", "tty"):
            real = os.stat(f"/dev/{device}").st_rdev
            assert box.exec(f"stat -c %t:%T /dev/{device}").out == f"{os.major(real):x}:{os.minor(real):x}\n", device
        assert box.exec("head -c 3 /dev/zero | od -An -tx1").out.split() == ["00"] * 3
        assert box.exec("echo x > /dev/null; head -c 8 /dev/urandom | wc -c").out.strip() == "8"


def test_the_program_that_sandboxes_share_can_not_be_opened_watched_or_locked(two):
    said = two[0].python("""
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        for path in ("/run/sandkeep-agent", "/proc/1/exe"):
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                try:
                    os.open(path, flags)
                    print("opened", path)
                except OSError as error:
                    assert error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY), error
            watch = libc.inotify_init1(0)
            assert watch >= 0
            if libc.inotify_add_watch(watch, path.encode(), 0xfff) >= 0:
                print("watched", path)
    """)
    assert said.ok and said.out == "", said
    read = lambda: two[0].root("stat -c %x /run/sandkeep-agent").out  # noqa: E731
    before = read()
    assert two[1].root("/run/sandkeep-agent --no-such-flag; true").ok
    assert read() == before


# What every mount shows: where it comes from, and how large its file system is.
MOUNTS = """
import json, os
found = []
for line in open("/proc/self/mountinfo"):
    head, tail = line.split(" - ")
    point, root = head.split()[4], head.split()[3]
    size = os.statvfs(point) if os.access(point, os.F_OK) else None
    found.append([point, root, tail.split()[1], size and [size.f_blocks * size.f_frsize, size.f_files, size.f_bfree * size.f_frsize]])
print(json.dumps(found))
"""


def no_mount_tells_of_the_host(server, box):
    mounts = {point: rest for point, *rest in json.loads(box.exec(["python3", "-c", MOUNTS], user="root").out)}
    assert "/run/sandkeep-agent" in mounts
    disks = [os.statvfs(path) for path in ("/", server.state)]
    sizes = [[disk.f_blocks * disk.f_frsize, disk.f_files] for disk in disks]
    for point, (root, source, size) in mounts.items():
        shown = f"{root} {source}"
        assert str(server.state) not in shown and server.state.name not in shown, (point, shown)
        # The disk of the sandbox is part of the storage, and tells of it: docs/threats.md.
        assert point == "/" or size is None or size[:2] not in sizes, (point, size)
    return mounts["/run/sandkeep-agent"]


def test_mounts_tell_nothing_of_the_hosts_disk(two, server):
    before = [no_mount_tells_of_the_host(server, box) for box in two]
    assert before[0] == before[1] and before[0][0] == "/agent", before
    # What one of them does is not to be seen there either.
    two[0].exec("head -c 50000000 /dev/urandom > /tmp/much && sync")
    assert [no_mount_tells_of_the_host(server, box) for box in two] == before


def test_mounts_tell_nothing_of_the_hosts_disk_at_gvisor(make, server):
    no_mount_tells_of_the_host(server, make(isolation="gvisor"))


UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def test_each_sandbox_has_a_boot_id_of_its_own_that_stays_while_its_memory_does(server, make):
    boot_id = lambda box: box.exec("cat /proc/sys/kernel/random/boot_id").out.strip()  # noqa: E731
    boxes = [make(isolation="container", timeout_seconds=600) for _ in range(2)]
    first, second = (boot_id(box) for box in boxes)
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert UUID.fullmatch(first) and UUID.fullmatch(second)
    assert len({first, second, host}) == 3
    for _ in range(2):
        assert boot_id(paused_and_resumed(server, boxes[0])) == first
    (fork,) = server.json("POST", boxes[0].path + "/fork", {"count": 1}, timeout=240)["forks"]
    forked = Box.known(server, fork["sandbox"]["id"])
    try:
        assert boot_id(forked) not in (first, second, host)
    finally:
        forked.kill()


def test_a_setuid_file_of_a_sandbox_is_none_on_the_host(server, make):
    # At the others nothing in a sandbox gets rights by such files, and its disk is on the same pool.
    box = make(isolation="container")
    made = box.root("cp /usr/bin/id /home/suid-id && chmod 4755 /home/suid-id && stat -c %a /home/suid-id")
    assert made.out == "4755\n", made
    # In the sandbox it is one: without that there is no sudo.
    assert "euid=0(root)" in box.exec("/home/suid-id", user="user").out
    assert box.exec("sudo -n id -u", user="user").out == "0\n"
    (file,) = (server.state / "pool").glob(f"**/{box.id}*/**/home/suid-id")
    assert os.stat(file).st_uid == 0 and os.stat(file).st_mode & 0o4000
    # Past the directories that are closed, by a descriptor.
    opened = os.open(file, os.O_RDONLY)
    ran = subprocess.run(
        [f"/proc/self/fd/{opened}"], pass_fds=[opened], user=65534, group=65534, extra_groups=[], capture_output=True, text=True
    )
    os.close(opened)
    assert "uid=65534" in ran.stdout and "euid=0" not in ran.stdout, ran

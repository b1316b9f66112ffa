"""What a sandbox holds open decides where the restore works (container level): deleted files whose
path leads elsewhere by now. Nothing of the host's tree changes, no path of the host is in an answer,
and the sandbox wakes, or its save is refused in words and it goes on."""

import json
import os
import secrets
import shutil
import stat
import threading
from pathlib import Path

import pytest
from boxkit import Box
from sandkeep_server import Refused

USER = "user"

# Runs a scenario, then says whenever it is asked whether what it holds is still what it was.
HARNESS = """
import array, ctypes, mmap, os, socket, stat, sys
TARGET = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
here, there = '/tmp/g', '/tmp/g/L'
os.makedirs(here)

def deleted(path, text='held'):
    # A file that is held open and is in no directory any more.
    held = open(path, 'w+')
    held.write(text)
    held.flush()
    os.unlink(path)
    return lambda: os.pread(held.fileno(), 100, 0).decode() == text

def swap(target=None):
    # The directory the path led through is a link to a place on the host.
    os.rmdir(there)
    os.symlink(target or TARGET, there)

exec(open('/home/user/scenario.py').read())
os.mkfifo('/tmp/ask')
os.mkfifo('/tmp/answer')
asked = 0
while True:
    open('/tmp/ask').read()
    asked += 1
    try:
        said = 'well' if check() else 'not what it was'
    except Exception as error:
        said = repr(error)
    open('/tmp/answer', 'w').write(f'{asked} {said}')
"""
ASK = "timeout 60 bash -c 'until [ -p /tmp/answer ]; do sleep 0.1; done; echo x > /tmp/ask; cat /tmp/answer'"

# What is deleted, and what its path is afterwards.
SCENARIOS = {
    # The one that was found: the second ghost lies below the first, which is a link, and stays.
    "ghost_below_a_ghost_that_is_a_link": """
os.symlink(TARGET, there)
link = os.open(there, os.O_PATH | os.O_NOFOLLOW)
os.unlink(there)
for n in (1, 2, 3):
    below = f'{there}.cr.{n}.ghost'
    os.mkdir(below)
    globals()[f'held{n}'] = deleted(below + '/OWNED-by-sandbox')
    os.rmdir(below)
check = lambda: held1() and held2() and held3() and os.readlink('', dir_fd=link) == TARGET
""",
    "file_below_a_swapped_link": """
os.mkdir(there)
check = deleted(there + '/OWNED-by-sandbox')
swap()
""",
    "directory_with_its_exact_name": """
os.mkdir(there)
os.mkdir(there + '/OWNED-by-sandbox')
held = os.open(there + '/OWNED-by-sandbox', os.O_RDONLY | os.O_DIRECTORY)
os.rmdir(there + '/OWNED-by-sandbox')
swap()
check = lambda: stat.S_ISDIR(os.fstat(held).st_mode) and os.listdir(held) == []
""",
    "working_directory_below_a_swapped_link": """
os.mkdir(there)
os.mkdir(there + '/OWNED-by-sandbox')
os.chdir(there + '/OWNED-by-sandbox')
os.rmdir(there + '/OWNED-by-sandbox')
swap()
check = lambda: os.listdir('.') == []
""",
    "directory_made_again": """
os.mkdir(there)
os.chdir(there)
os.rmdir(there)
os.mkdir(there)
check = lambda: os.listdir('.') == [] and os.path.isdir(there)
""",
    "files_in_directories_that_are_deleted_too": """
os.makedirs(there + '/a/b')
dirs = [os.open(there + at, os.O_RDONLY | os.O_DIRECTORY) for at in ('', '/a', '/a/b')]
files = [deleted(there + at + '/f') for at in ('', '/a', '/a/b')]
os.removedirs(there + '/a/b')
check = lambda: all(file() for file in files) and all(os.listdir(one) == [] for one in dirs)
os.makedirs(here, exist_ok=True)
""",
    "mapped_file_below_a_swapped_link": """
os.mkdir(there)
with open(there + '/OWNED-by-sandbox', 'w+') as file:
    file.write('held')
    file.flush()
    held = mmap.mmap(file.fileno(), 4)
os.unlink(there + '/OWNED-by-sandbox')
swap()
check = lambda: held[:] == b'held'
""",
    "program_below_a_swapped_link": """
import shutil, subprocess
os.mkdir(there)
shutil.copy('/bin/cat', there + '/OWNED-by-sandbox')
held = subprocess.Popen([there + '/OWNED-by-sandbox'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
os.unlink(there + '/OWNED-by-sandbox')
swap()
def check():
    held.stdin.write(b'x')
    held.stdin.flush()
    return held.stdout.read(1) == b'x'
""",
    "fifo_below_a_swapped_link": """
os.mkdir(there)
os.mkfifo(there + '/OWNED-by-sandbox')
held = os.open(there + '/OWNED-by-sandbox', os.O_RDWR)
os.unlink(there + '/OWNED-by-sandbox')
swap()
check = lambda: os.write(held, b'x') and os.read(held, 1) == b'x'
""",
    "socket_below_a_swapped_link": """
os.mkdir(there)
held = socket.socket(socket.AF_UNIX)
held.bind(there + '/OWNED-by-sandbox')
held.listen()
os.unlink(there + '/OWNED-by-sandbox')
swap()
check = lambda: held.getsockname() == there + '/OWNED-by-sandbox'
""",
    "socket_whose_name_leads_through_what_a_process_has_open": """
os.mkdir(there)
dir = os.open(there, os.O_RDONLY | os.O_DIRECTORY)
held = socket.socket(socket.AF_UNIX)
held.bind(f'/proc/self/fd/{dir}/OWNED-by-sandbox')
held.listen()
check = lambda: held.getsockname().endswith('/OWNED-by-sandbox')
""",
    "socket_in_a_directory_that_became_a_file": """
os.mkdir(there)
held = socket.socket(socket.AF_UNIX)
held.bind(there + '/OWNED-by-sandbox')
held.listen()
os.unlink(there + '/OWNED-by-sandbox')
os.rmdir(there)
open(there, 'w').close()
check = lambda: held.getsockname() == there + '/OWNED-by-sandbox'
""",
    "hard_link_below_a_swapped_link": """
os.mkdir(there)
open(here + '/other', 'w').close()
os.link(here + '/other', there + '/OWNED-by-sandbox')
held = open(there + '/OWNED-by-sandbox', 'r+')
os.unlink(there + '/OWNED-by-sandbox')
swap()
check = lambda: os.fstat(held.fileno()).st_nlink == 1
""",
    "watch_of_a_deleted_file_below_a_swapped_link": """
os.mkdir(there)
held = deleted(there + '/OWNED-by-sandbox')
with open(there + '/watched', 'w+') as file:
    pass
kept = open(there + '/watched', 'r+')
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, (there + '/watched').encode(), 0x2) == 1
os.unlink(there + '/watched')
swap()
def check():
    os.pwrite(kept.fileno(), b'x', 0)
    return held() and len(os.read(watch, 4096)) >= 16
""",
    "name_of_the_ghost_is_taken": """
for n in range(1, 40):
    open(f'{here}/f.cr.{n:x}.ghost', 'w').close()
    os.mkdir(f'{here}/d.cr.{n:x}.ghost')
    os.symlink(TARGET, f'{here}/l.cr.{n:x}.ghost')
held = [deleted(f'{here}/{name}') for name in 'fdl']
check = lambda: all(one() for one in held) and len(os.listdir(here)) == 3 * 39
""",
    "name_is_as_long_as_can_be": """
held = deleted(here + '/' + 'n' * 255)
os.mkdir(here + '/' + 'd' * 255)
os.chdir(here + '/' + 'd' * 255)
os.rmdir(here + '/' + 'd' * 255)
check = lambda: held() and os.listdir('.') == []
""",
    "name_is_taken_again": """
held = deleted(here + '/f')
for name in ('f', 'f.cr_link'):
    with open(f'{here}/{name}', 'w') as other:
        other.write('another')
check = lambda: held() and open(here + '/f').read() == 'another'
""",
    "way_became_a_file": """
os.mkdir(there)
held = deleted(there + '/OWNED-by-sandbox')
os.rmdir(there)
open(there, 'w').close()
check = held
""",
    "way_leads_to_another_mount": """
os.mkdir(there)
check = deleted(there + '/OWNED-by-sandbox')
swap('/dev/shm')
""",
    "way_leads_through_what_processes_have_open": """
held = []
for n, way in enumerate(('/proc/1/root' + TARGET, '/proc/self/root' + TARGET, '/proc/self/cwd', '/proc/thread-self/fd')):
    os.mkdir(there)
    held.append(deleted(there + '/OWNED-by-sandbox'))
    os.rmdir(there)
    os.symlink(way, there)
    os.rename(there, f'{there}{n}')
os.symlink('/proc/1/root' + TARGET, there)
check = lambda: all(one() for one in held)
""",
    "links_of_ghosts_lead_to_descriptors_of_the_restorer": """
held = []
for fd in range(0, 1100):
    at = f'/tmp/g/{fd}'
    os.mkdir(at)
    if fd % 50 == 0:
        held.append(deleted(at + '/OWNED-by-sandbox'))
    os.rmdir(at)
    os.symlink(f'/proc/self/fd/{fd}', at)
check = lambda: all(one() for one in held)
""",
    "mark_of_something_removed": """
if libc.mknod((here + '/w').encode(), stat.S_IFCHR, 0) == 0:
    held = os.open(here + '/w', os.O_PATH)
    os.unlink(here + '/w')
    check = lambda: stat.S_ISCHR(os.fstat(held).st_mode)
else:
    check = lambda: True
""",
    "memory_with_the_name_of_a_file": """
held = os.memfd_create('../../../../' + TARGET + '/OWNED-by-sandbox')
os.write(held, b'held')
check = lambda: os.pread(held, 4, 0) == b'held'
""",
}


COUNT = """
import os
os.mkfifo('/run/ask')
os.mkfifo('/run/answer')
count = 0
while True:
    open('/run/ask').read()
    count += 1
    open('/run/answer', 'w').write(str(count))
"""
COUNTED = "timeout 60 bash -c 'until [ -p /run/answer ]; do sleep 0.1; done; echo x > /run/ask; cat /run/answer'"


class Host:
    """Directories of the host that everybody may write, and what the restore must leave as it is."""

    def __init__(self):
        self.name = f"restore-{secrets.token_hex(6)}"
        self.places = [Path(at) / self.name for at in ("/tmp", "/var/tmp", "/dev/shm")]
        for place in self.places:
            place.mkdir()
            place.chmod(0o1777)
        self.before = self.seen()

    def seen(self):
        found = {}
        for place in self.places:
            for at in (place, *place.rglob("*")):
                meta = at.lstat()
                found[str(at)] = (stat.filemode(meta.st_mode), meta.st_uid, meta.st_size, meta.st_mtime_ns, meta.st_ctime_ns)
        return found

    def strays(self):
        """What a restore leaves in the directories above: our names are in none of others."""
        return [str(at) for top in ("/tmp", "/var/tmp", "/dev/shm") for at in Path(top).glob("*OWNED-by-sandbox*")]

    def close(self):
        for place in self.places:
            shutil.rmtree(place)


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


def hides_the_host(server, said):
    """An answer tells nothing of the host's file tree."""
    text = json.dumps(said)
    for secret in (str(server.state), ".criu.mntns", "/run/image", "/run/root", "criu/", str(Path(server.state).resolve())):
        assert secret not in text, (secret, text)


def asked(box):
    ran = box.exec(ASK)
    assert ran.ok, ran
    return ran.out


def begin(server, scenario, target):
    box = Box(server, isolation="container", timeout_seconds=600)
    try:
        box.write("/home/user/harness.py", HARNESS.encode(), user=USER)
        box.write("/home/user/scenario.py", SCENARIOS[scenario].encode(), user=USER)
        started = box.exec(
            f"nohup python3 /home/user/harness.py {target} >/tmp/log 2>&1 & "
            "timeout 30 bash -c 'until [ -p /tmp/answer ]; do sleep 0.1; done' || { cat /tmp/log; false; }"
        )
        assert started.ok, started
        assert asked(box) == "1 well"
    except BaseException:
        box.kill()
        raise
    return box


def woken(server, box, host, count, why):
    """It goes on with what it held; or `why` says why its memory could not be kept, with what is in the way."""
    assert asked(box) == f"{count} well", why
    if why:
        hides_the_host(server, why)
        assert "/tmp/g" in why or "OWNED-by-sandbox" in why, why
    assert host.seen() == host.before
    assert not host.strays()


PLACES = ("tmp", "var-tmp", "dev-shm")
# Each once, and those whose path leads to the host to each place there.
CASES = [
    pytest.param(scenario, where, id=f"{scenario}-{place}")
    for scenario in SCENARIOS
    for where, place in enumerate(PLACES)
    if where == 0 or "swapped" in scenario or "that_is_a_link" in scenario
]


@pytest.mark.parametrize(("scenario", "where"), CASES)
def test_a_restore_wrote_on_the_host(server, host, scenario, where):
    box = begin(server, scenario, host.places[where])
    try:
        paused = server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]
        hides_the_host(server, paused)
        try:
            server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
        except Refused as refused:
            hides_the_host(server, refused.error)
            raise
        finally:
            assert host.seen() == host.before
            assert not host.strays()
        why = None if paused["mode"] == "disk" else paused["why"]
        woken(server, box, host, 2, why)
        if where:
            return
        # A second time: what a restore made must not be in the way of the next one.
        paused = server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]
        server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
        woken(server, box, host, 3, None if paused["mode"] == "disk" else paused["why"])
        # A copy of it, and itself at an earlier time.
        try:
            (fork,) = server.json("POST", box.path + "/fork", {"count": 1}, timeout=120)["forks"]
        except Refused as refused:
            assert why and refused.status < 500, refused.error
            hides_the_host(server, refused.error)
            fork = {}
        hides_the_host(server, fork.get("error"))
        if not why:
            copy = Box.known(server, fork["sandbox"]["id"])
            try:
                woken(server, copy, host, 4, None)
            finally:
                copy.kill()
        elif "sandbox" in fork:
            Box.known(server, fork["sandbox"]["id"]).kill()
        woken(server, box, host, 4, None)
        point = server.json("POST", box.path + "/points", {}, timeout=120)
        try:
            hides_the_host(server, point.get("why_disk_only"))
            assert bool(point["memory"]) == (why is None), point
            woken(server, box, host, 5, point.get("why_disk_only"))
            server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=120)
            if point["memory"]:
                woken(server, box, host, 5, None)
            else:
                assert box.exec("true").ok
        finally:
            server.json("DELETE", f"/v1/points/{point['id']}")
    finally:
        box.kill()
        assert host.seen() == host.before
        assert not host.strays()


def test_a_sandbox_whose_tmp_is_a_link_wakes(server, host):
    """CRIU changes the root by way of /tmp of the new one."""
    with Box(server, isolation="container", timeout_seconds=600) as box:
        box.write("/root/count.py", COUNT.encode(), user="root")
        assert box.root("nohup python3 /root/count.py >/dev/null 2>&1 &").ok
        assert box.root(COUNTED).out == "1"
        assert box.root(f"rm -rf /tmp && ln -s {host.places[1]} /tmp").ok
        for count in ("2", "3"):
            paused = server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]
            assert paused["mode"] == "disk", paused
            server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
            assert box.root(COUNTED).out == count
        assert host.seen() == host.before


def test_a_restore_sees_nothing_of_the_host(server):
    """While CRIU works its root is its own: no directory of the host is there, and none may be written."""
    box = begin(server, "file_below_a_swapped_link", Path("/tmp"))
    try:
        def inodes(root):
            """Which directories these are, whatever they are called."""
            found = {}
            for name in os.listdir(root):
                meta = os.stat(f"{root}/{name}", follow_symlinks=False)
                found[name] = (meta.st_dev, meta.st_ino)
            return found

        host = inodes("/")
        assert {"home", "root", "var"} <= set(host), "the host has what is looked for"
        seen = []
        # Looked at from beside. While it restores, some of its processes are in the root of the sandbox.
        stop = threading.Event()

        def look():
            while not stop.is_set():
                for pid in filter(str.isdigit, os.listdir("/proc")):
                    try:
                        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                        if words[0] != b"/criu" or not {b"dump", b"restore"} & set(words[1:2]):
                            continue
                        # It may go into the sandbox in between, and come back: each is judged by itself.
                        seen.append((inodes(f"/proc/{pid}/root/"), Path(f"/proc/{pid}/mountinfo").read_text()))
                    except OSError:
                        continue

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for _ in range(5):
                assert server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]["mode"] == "disk"
                server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
        finally:
            stop.set()
            watcher.join()
        own = [root for root, _ in seen if "criu" in root]
        tables = [[line.split() for line in mounts.splitlines()] for _, mounts in seen]
        tables = [table for table in tables if any(fields[4] == "/criu" for fields in table)]
        assert own and tables, "it was seen at work"
        for root, _ in seen:
            shared = [name for name, which in root.items() if which == host.get(name)]
            assert set(shared) <= {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix", "gnu"}, shared
        for root in own:
            assert not set(root) & {"home", "root", "var", "opt", "srv", "sys"}, root
        for table in tables:
            for fields in table:
                point, options, kind = fields[4], fields[5].split(","), fields[fields.index("-") + 1]
                ours = kind in ("tmpfs", "proc", "devpts", "mqueue") or point.startswith(("/run/", "/tmp/.criu.", "/tmp/cr-"))
                assert ours or "ro" in options, fields
    finally:
        box.kill()

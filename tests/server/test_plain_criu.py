"""What a CRIU can do that was built without our patch, as distributions have it: a pause goes to
the disk or says why it stays in memory, and nothing is lost either way."""

import json
import os
import subprocess

import pytest
from boxkit import Box
from sandkeep_server import binary
from servers import in_place_of

OURS = "/usr/local/lib/sandkeep/criu"
# Counts how often it was asked; with a connection to itself if it is told to have one.
COUNT = """
import os, socket, sys
if "connected" in sys.argv:
    listener = socket.create_server(("127.0.0.1", 7070))
    here = socket.create_connection(("127.0.0.1", 7070))
    there, _ = listener.accept()
os.mkfifo("/run/ask")
os.mkfifo("/run/answer")
count = 0
while True:
    open("/run/ask").read()
    count += 1
    if "connected" in sys.argv:
        here.sendall(b"x")
        assert there.recv(1) == b"x"
    open("/run/answer", "w").write(f"{count}\\n")
"""
ASK = "timeout 60 bash -c 'until [ -p /run/answer ]; do sleep 0.1; done; echo x > /run/ask; cat /run/answer'"


@pytest.fixture(scope="module")
def plain(server):
    """A server with such a CRIU over ours; this mount namespace is the tests'. It has no pool: what
    was in the one before was made while there was a CRIU with our patches, and this one can not
    look into it."""
    subprocess.run(["mount", "--bind", os.environ["SANDKEEP_TEST_PLAIN_CRIU"], OURS], check=True)
    try:
        with in_place_of(server, "--pool-size", "0") as own:
            yield own
    finally:
        subprocess.run(["umount", OURS], check=True)


@pytest.fixture
def box(plain):
    with Box(plain, isolation="container", timeout_seconds=600) as box:
        box.write("/root/count.py", COUNT.encode(), user="root")
        yield box


def begin(box, *words):
    assert box.root(f"nohup python3 /root/count.py {' '.join(words)} >/dev/null 2>&1 &").ok
    assert box.root(ASK).out == "1\n"


def pause(server, box):
    return server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]


def resume(server, box):
    server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)


def test_doctor_says_what_it_can_not_do(plain):
    done = subprocess.run([str(binary()), "doctor", "--json", "--state", str(plain.state)], capture_output=True, text=True)
    levels = json.loads(done.stdout)["levels"]
    container = next(level for level in levels if level["level"] == "container")
    (look,) = [look for look in container["checks"] if look["name"] == "memory to disk"]
    assert look["verdict"] == "warning" and "not built for boxes" in look["found"], look
    assert "TCP connections" in look["found"] and "were on disk before" in look["found"], look
    assert "deleted files" in look["found"], look
    assert "inotify" in look["found"], "what comes back counts as root of the host"


def root_has(capability: int) -> bool:
    held = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
    return bool(int(held.split()[1], 16) >> capability & 1)


SYS_RESOURCE = 24
needs_memory = pytest.mark.skipif(
    not root_has(SYS_RESOURCE), reason="without CAP_SYS_RESOURCE such a CRIU writes no memory: it reads the limits of processes of others",
)


def test_a_box_goes_to_the_disk_once_and_later_pauses_say_why_not(plain, box):
    begin(box)
    first = pause(plain, box)
    if not root_has(SYS_RESOURCE):
        # It reads the limits of processes, and a sandbox does not belong to root of the host.
        assert first["mode"] == "ram" and "rlimit" in first["why"], first
        resume(plain, box)
        assert box.root(ASK).out == "2\n"
        return
    assert first["mode"] == "disk", first
    resume(plain, box)
    assert box.root(ASK).out == "2\n"
    # The agent of a box that came back hides its namespaces from such a CRIU.
    second = pause(plain, box)
    assert second["mode"] == "ram" and second["why"], second
    assert "was on disk before" in second["why"], second
    resume(plain, box)
    assert box.root(ASK).out == "3\n"


def test_a_box_with_connections_stays_in_memory_and_says_why(plain, box):
    begin(box, "connected")
    rest = pause(plain, box)
    assert rest["mode"] == "ram" and "TCP connections" in rest["why"], rest
    resume(plain, box)
    assert box.root(ASK).out == "2\n"
    point = plain.json("POST", box.path + "/points", {})
    assert not point["memory"] and "TCP connections" in point["why_disk_only"], point
    plain.json("DELETE", f"/v1/points/{point['id']}")


# Holds a deleted file open whose path leads to a place on the host by now, and a page that tells whether
# this is a copy.
HOLD = """
import ctypes, mmap, os, sys
os.makedirs("/tmp/g/L")
if "deleted" in sys.argv:
    held = open("/tmp/g/L/OWNED-by-sandbox", "w+")
    os.unlink("/tmp/g/L/OWNED-by-sandbox")
    os.rmdir("/tmp/g/L")
    os.symlink(sys.argv[2], "/tmp/g/L")
sign = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(sign))
assert ctypes.CDLL(None).madvise(ctypes.c_void_p(at), 4096, 18) == 0
sign[:4] = b"kept"
os.mkfifo("/run/ask")
os.mkfifo("/run/answer")
while True:
    open("/run/ask").read()
    said = "copy" if sign[:4] == bytes(4) else sign[:4].decode()
    open("/run/answer", "w").write(said + "\\n")
"""


def hold(box, *words):
    box.write("/root/hold.py", HOLD.encode(), user="root")
    assert box.root(f"nohup python3 /root/hold.py {' '.join(words)} >/dev/null 2>&1 &").ok
    assert box.root(ASK).out == "kept\n"


def test_a_deleted_file_below_a_swapped_link_stays_in_memory(plain, box, tmp_path):
    """Such a CRIU would follow the link on the host, some of it as root of the host."""
    tmp_path.chmod(0o1777)
    before = tmp_path.stat()
    hold(box, "deleted", str(tmp_path))
    rest = pause(plain, box)
    if not root_has(SYS_RESOURCE):
        # It does not come as far as writing the file down.
        assert rest["mode"] == "ram" and "rlimit" in rest["why"], rest
        resume(plain, box)
        assert (tmp_path.stat().st_mtime_ns, list(tmp_path.iterdir())) == (before.st_mtime_ns, [])
        return
    assert rest["mode"] == "ram" and "deleted file" in rest["why"] and "/tmp/g/L/OWNED-by-sandbox" in rest["why"], rest
    resume(plain, box)
    assert box.root(ASK).out == "kept\n"
    point = plain.json("POST", box.path + "/points", {})
    assert not point["memory"] and "deleted file" in point["why_disk_only"], point
    plain.json("DELETE", f"/v1/points/{point['id']}")
    assert box.root(ASK).out == "kept\n"
    assert (tmp_path.stat().st_mtime_ns, list(tmp_path.iterdir())) == (before.st_mtime_ns, [])


@needs_memory
def test_copies_do_not_share_what_is_to_be_wiped(plain, box):
    hold(box)
    (fork,) = plain.json("POST", box.path + "/fork", {"count": 1}, timeout=120)["forks"]
    copy = Box.known(plain, fork["sandbox"]["id"])
    try:
        assert copy.root(ASK).out == "copy\n"
        assert box.root(ASK).out == "kept\n", "the one that went on is no copy"
    finally:
        copy.kill()

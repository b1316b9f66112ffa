"""What the server was started with open is in no program that works for a sandbox.

A shell, a CI runner or a supervisor may leave anything open in the programs it starts. QEMU, `runsc` and CRIU are what a
sandbox breaks into first: there it would find it.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from servers import in_place_of

SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
PLACE = 251
NEEDS_QEMU = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)


@pytest.fixture(scope="module")
def leaky(server):
    """A server whose parent left a pipe open in it."""
    import subprocess

    reads, writes = os.pipe()
    # The place itself may be taken in a long run.
    place = fcntl.fcntl(writes, fcntl.F_DUPFD, PLACE)
    mark = os.readlink(f"/proc/self/fd/{place}")
    os.set_inheritable(place, True)
    popen = subprocess.Popen

    def leaving_open(*words, **options):
        return popen(*words, **{**options, "close_fds": False})

    subprocess.Popen = leaving_open
    try:
        with in_place_of(server, "--pool-size", "0") as own:
            subprocess.Popen = popen
            assert mark in held_by(own.pid).values(), "the server itself was given it"
            yield own, mark
    finally:
        subprocess.Popen = popen
        for fd in (reads, writes, place):
            os.close(fd)


def held_by(pid):
    held = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held[int(fd.name)] = os.readlink(fd)
        except OSError:
            continue
    return held


def name_of(pid):
    try:
        return (Path("/proc") / pid / "cmdline").read_bytes().replace(b"\0", b" ")[:60].decode(errors="replace")
    except OSError:
        return "gone"


def holders(mark, but):
    """Who has it open, by pid, now."""
    found = {}
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit() or int(proc.name) in but:
            continue
        try:
            if mark in held_by(proc.name).values():
                found[int(proc.name)] = name_of(proc.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("level", ["container", "gvisor", pytest.param("microvm", marks=NEEDS_QEMU)])
def test_nothing_the_server_was_started_with_is_open_in_what_works_for_a_sandbox(leaky, level):
    import threading

    own, mark = leaky
    but = {own.pid, os.getpid()}
    wish = {"limits": SMALL, "http_timeout": 300} if level == "microvm" else {}
    seen, over = {}, threading.Event()

    def look():
        # Helpers that write and read memory are there for a moment.
        while not over.is_set():
            # Between fork and exec a process has what the server has: it is the server's own code.
            own_code = (name_of(str(own.pid)), "", "gone")
            seen.update({pid: name for pid, name in holders(mark, but).items() if name not in own_code})
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with Box(own, isolation=level, timeout_seconds=1800, **wish) as box:
            assert box.exec("true").ok
            own.json("POST", box.path + "/pause", {}, timeout=300)
            own.json("POST", box.path + "/resume", {}, timeout=300)
            assert box.exec("true").ok
            wait_for(lambda: not holders(mark, but), "nothing that stays has it")
    finally:
        over.set()
        looking.join()
    assert not seen, seen


@NEEDS_QEMU
def test_qemu_has_nothing_open_but_what_it_is_given(leaky):
    """Its memory, disks, card, sockets and standard streams: nothing else of the server, whatever that has open."""
    own, _ = leaky
    with Box(own, isolation="microvm", limits=SMALL, timeout_seconds=1800, http_timeout=300) as box:
        pids = [
            proc.name
            for proc in Path("/proc").iterdir()
            if proc.name.isdigit() and box.id in (proc / "cgroup").read_text() and "qemu" in name_of(proc.name)
        ]
        assert len(pids) == 1, pids
        held = held_by(pids[0])
        pipes = {fd: what for fd, what in held.items() if what.startswith("pipe:")}
        # What it says when it starts goes into one.
        assert set(pipes) <= {1, 2}, held
        named = ("socket:", "anon_inode:", "/memfd:", "/dev/null", "/dev/net/tun", "/dev/kvm", "pipe:")
        strange = {fd: what for fd, what in held.items() if not what.startswith(named) and not what.endswith("disk.ext4") and "disk" not in what}
        assert not strange, strange

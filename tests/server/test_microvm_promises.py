"""What every sandbox of the microVM level may count on: all of its memory, and the right time."""

import os
import shutil
import time

import pytest
from boxkit import Box
from servers import in_place_of
from test_microvm import machine

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)

SLACK = 0.05
SNAPSHOTS = 20
FORKS = 5

# Takes memory, and uses it, until this process has that many MiB.
TAKE = """
import sys
most = int(sys.argv[1]) << 20
taken = []
def used():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10
while used() < most:
    taken.append(bytearray(b"x") * (1 << 20))
print(used() >= most)
"""


def lives_with(box, mib):
    ran = box.root(["python3", "-c", TAKE, str(mib)], http_timeout=600, timeout_ms=500_000)
    assert ran.out == "True\n", ran
    assert box.root("echo alive").out == "alive\n"
    info = box.info()
    assert info["state"] == "running" and not info["oom_kills"], info


def late(box):
    """By how much its clock may be behind, at least and at most, as far as one question tells."""
    asked = time.time()
    theirs = float(box.root("date +%s.%N").out)
    heard = time.time()
    return asked - theirs, heard - theirs


def on_time(box, when):
    # It is read between the question and the answer: its clock is wrong if it can not be right.
    least, most = late(box)
    assert least <= SLACK and most >= -SLACK, f"{when}: behind by {least:.3f} to {most:.3f} s"


def test_the_first_of_a_memory_may_use_it_as_the_third_may(server):
    """Whoever is first fills the holes of the memory that all begin with, and pays for them."""
    with in_place_of(server, "--pool-size", "0") as own:
        for _ in range(3):
            with machine(own, limits={"memory_mib": 1024}) as box:
                # Everything at once, and nearly all there is.
                ran = box.root(["python3", "-c", "x = bytearray(b'x') * (950 << 20)"], http_timeout=600, timeout_ms=500_000)
                assert ran.ok, (ran, box.info())
                lives_with(box, 1024 * 95 // 100)


@pytest.mark.parametrize("memory_mib", [256, 700, 2048])
def test_nearly_all_of_any_memory_can_be_used(server, memory_mib):
    with in_place_of(server, "--pool-size", "0") as own, machine(own, limits={"memory_mib": memory_mib}) as box:
        lives_with(box, memory_mib * 95 // 100)


def test_the_clock_is_right_from_the_first_command_on(server):
    with in_place_of(server, "--pool-size", "0") as own:
        # The first of a shape and template, which is made while it waits, and the next ones.
        for number in range(3):
            with machine(own) as box:
                on_time(box, f"sandbox {number}")


def test_the_clock_is_right_whatever_is_done_with_the_sandbox(server):
    with machine(server) as box:
        on_time(box, "at first")
        # Something to be written down each time.
        changes = "head -c 60M /dev/urandom > /dev/shm/changing"
        for number in range(SNAPSHOTS):
            assert box.root(changes).ok
            point = server.json("POST", box.path + "/points", {"memory": True}, timeout=300)
            on_time(box, f"after {number + 1} snapshots")
            if number + 1 < SNAPSHOTS:
                server.json("DELETE", f"/v1/points/{point['id']}")
        for number in range(FORKS):
            (fork,) = server.json("POST", box.path + "/fork", {"count": 1}, timeout=300)["forks"]
            copy = Box.known(server, fork["sandbox"]["id"])
            on_time(copy, f"fork {number + 1}")
            on_time(box, f"after {number + 1} forks")
            copy.kill()
        server.json("POST", box.path + "/pause", {}, timeout=300)
        time.sleep(2)
        server.json("POST", box.path + "/resume", {}, timeout=300)
        on_time(box, "after a pause")
        server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=300)
        on_time(box, "after going back")
        server.json("DELETE", f"/v1/points/{point['id']}")

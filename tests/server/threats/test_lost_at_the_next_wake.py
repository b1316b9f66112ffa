"""A program of a sandbox holds something that makes its memory useless: the pause says that it was written,
and no resume works any more (container level). Whatever it holds, the sandbox wakes with it, or the pause
says why its memory stays where it is, and then a resume works as well."""

import pytest
from boxkit import Box
from held import ALL, ASK, HARNESS, START
from held.expected import WAKES


def asked(box):
    ran = box.root(ASK)
    assert ran.ok, ran
    return ran.out


def begin(server, piece):
    box = Box(server, isolation="container", timeout_seconds=600)
    try:
        box.write("/root/harness.py", HARNESS.encode(), user="root")
        box.write("/root/scenario.py", piece.encode(), user="root")
        started = box.root(START)
        assert started.ok, started
        assert asked(box) == "1 well"
    except BaseException:
        box.kill()
        raise
    return box


def paused_and_woken(server, box):
    """Why its memory was not written, if so."""
    paused = server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]
    if paused["mode"] != "disk":
        assert paused["why"], paused
    server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
    return None if paused["mode"] == "disk" else paused["why"]


@pytest.mark.parametrize("name", ALL)
def test_a_paused_sandbox_was_lost(server, name):
    expected, piece = ALL[name]
    box = begin(server, piece)
    try:
        held = box.read("/root/what").decode()
        why = paused_and_woken(server, box)
        said = asked(box)
        assert said == "2 well", (said, why)
        # What a restore made is no obstacle for the next one.
        again = paused_and_woken(server, box)
        said = asked(box)
        assert said == "3 well", (said, again)
        print(f"{held}: {why or 'woke'}" + (f", then: {again}" if again != why else ""))
        if expected == WAKES and held == "held":
            assert why is None and again is None
    finally:
        box.kill()


MANY = """
import os, time
for _ in range(620):
    if os.fork() == 0:
        time.sleep(9999)
open("/run/many", "w").close()
time.sleep(9999)
"""


def test_a_sandbox_that_takes_long_to_wake_was_lost(server):
    """CRIU works within the processor of the sandbox."""
    with Box(server, isolation="container", timeout_seconds=1800, limits={"cpu_millis": 100}) as box:
        box.write("/root/many.py", MANY.encode(), user="root")
        begun = "setsid python3 /root/many.py >/dev/null 2>&1 </dev/null & until [ -e /run/many ]; do sleep 0.2; done"
        assert box.root(begun).ok
        paused = server.json("POST", box.path + "/pause", {}, timeout=400)["pause"]
        assert paused["mode"] == "disk", paused
        server.json("POST", box.path + "/resume", {}, timeout=400)
        assert box.root("pgrep -fc many.py").out.split()[0] >= "620"

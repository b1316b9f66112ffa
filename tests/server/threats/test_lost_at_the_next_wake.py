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

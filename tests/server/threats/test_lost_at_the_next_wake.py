"""A program of a sandbox holds something that makes its memory useless: the pause says that it was written,
and no resume works any more (container level). Whatever it holds, the sandbox wakes with it, or the pause
says why its memory stays where it is, and then a resume works as well."""

import pytest
from boxkit import Box
from held import ALL, ASK, HARNESS, START
from held.expected import WAKES
from sandkeep_server import Refused


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


def test_what_does_not_come_back_was_kept_in_points_and_forks(server):
    """The same memory in a point that was asked for, in a copy and at a rollback: it is told in words that there is
    none, or refused where it was asked for, and the sandbox goes on."""
    _, piece = ALL["inotify_of_nothing_with_flags"]
    box = begin(server, piece)
    try:
        point = server.json("POST", box.path + "/points", {}, timeout=120)
        assert not point["memory"] and "inotify" in point["why_disk_only"], point
        said = [asked(box)]
        for route, body in (("points", {"memory": True}), ("fork", {"count": 1, "memory": True})):
            with pytest.raises(Refused) as refused:
                server.json("POST", f"{box.path}/{route}", body, timeout=120)
            assert refused.value.error["code"] == "not_enforceable", refused.value.error
            assert "inotify" in refused.value.error["message"], refused.value.error
            said.append(asked(box))
        forked = server.json("POST", box.path + "/fork", {"count": 2}, timeout=120)["forks"]
        said.append(asked(box))
        for fork in forked:
            assert not fork["memory"] and "inotify" in fork["why"], fork
            with Box.known(server, fork["sandbox"]["id"]) as copy:
                assert copy.root("echo up").out == "up\n"
        # The same process all along.
        assert said == [f"{count} well" for count in range(2, 6)], said
        server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=120)
        assert box.root("cat /root/what").out == "held"
        server.json("DELETE", f"/v1/points/{point['id']}")
    finally:
        box.kill()


UNPRINTABLE = r"""
at = b'/root/\x1b[31m\xff\xe2\x80\xae' + b'x' * 60
held = socket.socket(socket.AF_UNIX)
held.bind(at)
held.listen()
os.unlink(at)
os.mkdir(at)
check = lambda: True
"""


def test_names_of_files_wrote_to_terminals_from_the_reason_of_a_pause(server):
    """A sandbox chooses the names of its files. They are in `pause.why`, and in what the command line prints."""
    box = begin(server, UNPRINTABLE)
    try:
        why = server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]["why"]
        server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
        point = server.json("POST", box.path + "/points", {}, timeout=120)
        server.json("DELETE", f"/v1/points/{point['id']}")
        for said in (why, point["why_disk_only"]):
            assert said.isprintable() and len(said.encode()) <= 2000, repr(said)
            assert "/root/\\u{1b}[31m\\xff\\u{202e}xx" in said, said
    finally:
        box.kill()

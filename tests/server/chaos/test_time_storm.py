"""The server is killed in the middle of pauses, wake-ups, points, forks and rollbacks.

`SANDKEEP_STORM=50` kills it fifty times in each operation with memory.
"""

import contextlib
import os
import random
import secrets
import shutil
import threading
import time
import urllib.error

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, state_dir
from tiny import ASK, COUNTER, TinyServer, tiny_state


ROUNDS = int(os.environ.get("SANDKEEP_STORM", "2"))


@pytest.fixture
def own_server(server):
    """The server of the run, which is up again when the test is over."""
    yield server
    if server.process is None or server.process.poll() is not None:
        server.start()
    server.end_boxes()
    for point in server.json("GET", "/v1/points")["points"]:
        server.json("DELETE", f"/v1/points/{point['id']}")


def again(server):
    server.kill_hard()
    server.start()


def settled(box):
    state = box.info()["state"]
    return state if state in ("running", "paused") else None


def awake(box):
    """Wakes a box that rests, unless the server does: one that was being woken is woken after all."""
    if box.info()["state"] == "paused":
        with contextlib.suppress(Refused):
            box.server.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=120)
    return box.info()["state"] == "running"


def test_paused_boxes_survive_a_restart(own_server):
    server = own_server
    with Box(server) as deep, Box(server) as files:
        assert deep.exec("echo kept > /dev/shm/note").ok
        assert files.exec("echo kept > /home/user/note").ok
        before = server.json("POST", deep.path + "/pause", {})
        server.json("POST", files.path + "/pause", {"memory": False})
        again(server)
        after = deep.info()
        assert after["state"] == "paused"
        assert after["pause"] == before["pause"]
        for box in (deep, files):
            server.json("POST", box.path + "/resume", {})
        assert deep.exec("cat /dev/shm/note").out == "kept\n", "its memory, too"
        assert files.exec("cat /home/user/note").out == "kept\n"


OPERATIONS = {
    "pause": ("pause", {}),
    "files": ("pause", {"memory": False}),
    "resume": ("resume", {}),
    "snapshot": ("points", {}),
    "fork": ("fork", {"count": 2}),
    "rollback": ("rollback", None),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_in_the_middle_leaves_the_old_or_the_new(own_server, name):
    server = own_server
    what, body = OPERATIONS[name]
    dice = random.Random(name)
    with Box(server, timeout_seconds=1800) as box:
        assert box.exec("echo precious > /home/user/work").ok
        point = server.json("POST", box.path + "/points", {"memory": False})
        for _ in range(3):
            if name == "resume":
                server.json("POST", box.path + "/pause", {})

            def act():
                with contextlib.suppress(Refused, OSError, urllib.error.URLError, ValueError):
                    server.json("POST", f"{box.path}/{what}", {"to": point["id"]} if body is None else body)

            caller = threading.Thread(target=act)
            caller.start()
            time.sleep(dice.uniform(0, 0.15))
            again(server)
            caller.join()
            wait_for(lambda: settled(box), "the box is on one side", limit=60)
            wait_for(lambda: awake(box), "the box runs", limit=60)
            assert box.exec("cat /home/user/work").out == "precious\n"
            listed = {one["id"] for one in server.json("GET", "/v1/points")["points"]}
            assert point["id"] in listed
        staging = server.state / "pool" / "staging"
        # Two disks of the template are made ahead there.
        wait_for(lambda: len(list(staging.iterdir())) <= 2, "nothing half-made is left", limit=60)


@pytest.fixture(scope="module")
def tiny():
    """A server whose boxes are a few megabytes, so that whole disks can be carried around."""
    server = TinyServer(tiny_state(state_dir().parent / f"storm-{secrets.token_hex(3)}")).start()
    yield server
    server.close()
    shutil.rmtree(server.state, ignore_errors=True)


# What ends a call whose server is gone.
CUT = (Refused, OSError, urllib.error.URLError, ValueError)


def cut_off(server, dice, act, most):
    """Kills the server at a random moment of `act`, and starts it again."""
    told = []

    def call():
        with contextlib.suppress(*CUT):
            told.append(act())

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(dice.uniform(0, most))
    again(server)
    caller.join()
    return told[0] if told else None


def nothing_half_made(server):
    staging = server.state / "pool" / "staging"
    wait_for(lambda: len(list(staging.iterdir())) <= 2, "nothing half-made is left", limit=60)


@pytest.mark.parametrize("name", ["pause", "resume", "snapshot", "fork", "rollback"])
def test_a_kill_in_the_middle_leaves_memory_old_or_new_on_a_container(tiny, name):
    dice = random.Random(name if ROUNDS == 2 else secrets.token_hex(4))
    with Box(tiny, isolation="container", timeout_seconds=1800) as box:
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        point = tiny.json("POST", box.path + "/points", {"memory": True})
        assert point["memory"], point
        for _ in range(ROUNDS):
            if name == "resume":
                assert tiny.json("POST", box.path + "/pause", {})["pause"]["mode"] == "disk"
            route, body = {
                "pause": ("pause", {}),
                "resume": ("resume", {}),
                "snapshot": ("points", {"memory": True}),
                "fork": ("fork", {"count": 2}),
                "rollback": ("rollback", {"to": point["id"]}),
            }[name]
            before = int(box.root(ASK).out) if name != "resume" else None
            made = cut_off(tiny, dice, lambda: tiny.json("POST", f"{box.path}/{route}", body, timeout=120), 0.5)
            wait_for(lambda: settled(box), "the box is on one side", limit=60)
            wait_for(lambda: awake(box), "the box runs", limit=60)
            count = int(box.root(ASK).out)
            # The same process, no matter how often it was written; or the one of the point.
            assert before is None or count == before + 1 or (name == "rollback" and count == 2), (before, count)
            whole = [point["id"], *([made["id"]] if made and name == "snapshot" else [])]
            for id in whole:
                with Box(tiny, from_point=id) as copy:
                    assert int(copy.root(ASK).out) >= 2
        nothing_half_made(tiny)
    for one in tiny.json("GET", "/v1/points")["points"]:
        tiny.json("DELETE", f"/v1/points/{one['id']}")
    tiny.end_boxes()


def test_points_by_themselves_and_their_rule_live_through_kills(tiny):
    dice = random.Random("by themselves")
    rule = {"before_exec": True, "min_interval_seconds": 0, "keep": {"count": 3}}
    with Box(tiny, timeout_seconds=1800, auto_points=rule) as box:
        kept = tiny.json("POST", box.path + "/points", {"memory": False, "name": "named"})
        for turn in range(4):

            def write(turn=turn):
                for number in range(100):
                    box.exec(f"echo {turn} {number} > /home/user/at; echo {turn} {number} > /home/user/too")

            cut_off(tiny, dice, write, 1.0)
            assert box.exec("echo up").out == "up\n"
            listed = tiny.json("GET", f"{box.path}/points")["points"]
            assert kept["id"] in {one["id"] for one in listed}, "those with a name stay"
            # One may have been made by the command that asked just now.
            assert len(listed) <= 3 + 1 + 1, listed
            with Box(tiny, from_point=listed[-1]["id"]) as copy:
                assert copy.exec("cat /home/user/at /home/user/too || true; echo read").out.endswith("read\n")
        nothing_half_made(tiny)
    tiny.json("DELETE", f"/v1/points/{kept['id']}")


def test_an_export_and_an_import_that_were_cut_off_leave_nothing_half(tiny):
    dice = random.Random("carried")
    with Box(tiny, timeout_seconds=1800) as box:
        assert box.exec("echo precious > /home/user/work; head -c 20M /dev/urandom > /home/user/weight").ok
        sum_ = box.exec("cksum < /home/user/weight").out
        id = tiny.json("POST", box.path + "/points", {"memory": False})["id"]
    path = f"/v1/points/{id}/export"
    whole = tiny.request("GET", path, timeout=120)[2]
    for _ in range(3):
        got = cut_off(tiny, dice, lambda: tiny.request("GET", path, timeout=120), 0.6)
        assert got is None or got[0] != 200 or got[2] == whole or len(got[2]) == len(whole)
    tiny.json("DELETE", f"/v1/points/{id}")
    packed = {"Content-Type": "application/zstd"}

    def bring(bytes=whole):
        return tiny.request("POST", "/v1/points/import", bytes, headers=packed, timeout=120)

    assert bring(whole[: len(whole) // 2])[0] == 400
    for _ in range(4):
        answer = cut_off(tiny, dice, bring, 0.8)
        there = id in {one["id"] for one in tiny.json("GET", "/v1/points")["points"]}
        assert there or answer is None, "what was answered is there"
        if not there:
            status, _, body = bring()
            assert status in (200, 201), body
        with Box(tiny, from_point=id) as copy:
            assert copy.exec("cat /home/user/work; cksum < /home/user/weight").out == "precious\n" + sum_
        tiny.json("DELETE", f"/v1/points/{id}")
    nothing_half_made(tiny)

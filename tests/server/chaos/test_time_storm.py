"""The server is killed in the middle of pauses, wake-ups, points, forks and rollbacks."""

import contextlib
import random
import threading
import time
import urllib.error

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused


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
            state = wait_for(lambda: settled(box), "the box is on one side", limit=60)
            if state == "paused":
                server.json("POST", box.path + "/resume", {"timeout_seconds": 1800})
            assert box.exec("cat /home/user/work").out == "precious\n"
            listed = {one["id"] for one in server.json("GET", "/v1/points")["points"]}
            assert point["id"] in listed
        staging = server.state / "pool" / "staging"
        # Two disks of the template are made ahead there.
        wait_for(lambda: len(list(staging.iterdir())) <= 2, "nothing half-made is left", limit=60)

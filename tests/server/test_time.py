"""Pauses, points, forks and rollbacks, on real boxes."""

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from boxkit import Box, Ran, wait_for
from sandkeep_server import Refused, binary


class Known(Box):
    """A box somebody else made."""

    def __init__(self, server, view):
        self.server = server
        self.made = view
        self.id = view["id"]
        self.path = f"/v1/sandboxes/{self.id}"


@pytest.fixture
def forks(server):
    made = []

    def fork(box, **wish):
        answer = server.json("POST", box.path + "/fork", wish)
        found = [Known(server, one["sandbox"]) for one in answer["forks"]]
        made.extend(found)
        return found

    yield fork
    for one in made:
        one.kill()


@pytest.fixture
def snapshot(server):
    made = []

    def snapshot(box, **wish):
        point = server.json("POST", box.path + "/points", wish)
        made.append(point["id"])
        return point

    yield snapshot
    for point in made:
        try:
            server.json("DELETE", f"/v1/points/{point}")
        except Refused as refused:
            assert refused.status == 404


def pause(box, **wish):
    return box.server.json("POST", box.path + "/pause", wish)


def resume(box, **wish):
    return box.server.json("POST", box.path + "/resume", wish)


def test_a_pause_keeps_processes_and_says_how(box):
    assert box.exec("echo $$ > /tmp/pid; nohup sleep 1000 >/dev/null 2>&1 & echo $! > /tmp/child").ok
    view = pause(box)
    assert view["state"] == "paused"
    assert view["pause"]["mode"] == "disk" and view["pause"]["why"] is None, view
    with pytest.raises(Refused) as refused:
        pause(box)
    assert refused.value.status == 409
    view = resume(box)
    assert view["state"] == "running" and view["pause"] is None
    assert box.exec("kill -0 $(cat /tmp/child)").ok


def test_a_pause_of_files_only_starts_cold(box):
    assert box.exec("echo kept > /home/user/note; nohup sleep 1000 >/dev/null 2>&1 &").ok
    machine = box.exec("cat /etc/machine-id").out
    assert pause(box, memory=False)["pause"]["mode"] == "filesystem"
    resume(box)
    assert box.exec("cat /home/user/note").out == "kept\n"
    assert not box.exec("pgrep -x sleep").ok
    assert box.exec("cat /etc/machine-id").out == machine, "it is the same machine"


def test_a_rollback_undoes_the_worst(server, box, snapshot):
    assert box.exec("echo precious > /home/user/work").ok
    point = snapshot(box, name="before", tags=["safe"])
    assert point["name"] == "before" and point["tags"] == ["safe"]
    # It may not come back to tell: its own shell is among what it removes.
    try:
        box.root("rm -rf --no-preserve-root / 2>/dev/null; true", timeout_ms=60_000)
    except Refused:
        pass
    token = box.info()["access_token"]
    view = server.json("POST", box.path + "/rollback", {"to": "before"})
    assert view["id"] == box.id and view["state"] == "running"
    assert view["access_token"] == token
    assert view["point"] == point["id"]
    assert box.exec("cat /home/user/work").out == "precious\n"
    assert box.exec("ls /usr/bin | wc -l").ok


def test_forks_are_machines_of_their_own(box, forks):
    assert box.exec("echo shared > /home/user/note").ok
    found = forks(box, count=3)
    assert len(found) == 3
    all_of_them = [box, *found]
    for command in ("cat /etc/machine-id", "hostname", "cat /etc/hostname", "head -c 16 /dev/urandom | od -An -tx1"):
        said = [one.exec(command).out for one in all_of_them]
        assert len(set(said)) == 4, (command, said)
    tokens = {one.info()["access_token"] for one in all_of_them}
    assert len(tokens) == 4
    for one in found:
        assert one.exec("cat /home/user/note").out == "shared\n"
        assert one.exec(f"echo {one.id} > /home/user/note").ok
    assert box.exec("cat /home/user/note").out == "shared\n"


def test_a_fork_reaches_no_more_than_its_source(server, make, forks):
    box = make(network={"default": "deny", "allow": ["only.test:443"]})
    (fork,) = forks(box)
    same = [server.json("GET", one.path + "/network") for one in (box, fork)]
    assert same[0] == same[1]


def test_points_are_a_tree_and_can_be_compared(server, box, snapshot, forks):
    assert box.exec("echo one > /home/user/file").ok
    first = snapshot(box)
    assert box.exec("echo two > /home/user/file; echo new > /home/user/more").ok
    second = snapshot(box)
    assert second["parent"] == first["id"]
    listed = server.json("GET", box.path + "/points")["points"]
    assert [point["id"] for point in listed] == [first["id"], second["id"]]
    diff = server.json("GET", f"/v1/points/{first['id']}/diff/{second['id']}?text=true")
    changes = {change["path"]: change for change in diff["changes"]}
    assert changes["/home/user/file"]["kind"] == "changed"
    assert "-one\n+two\n" in changes["/home/user/file"]["text"]
    assert changes["/home/user/more"]["kind"] == "added"
    (old,) = forks(box, at=first["id"])
    assert old.exec("cat /home/user/file").out == "one\n"
    # A parent that goes leaves its children whole.
    server.json("DELETE", f"/v1/points/{first['id']}")
    server.json("POST", box.path + "/rollback", {"to": second["id"]})
    assert box.exec("cat /home/user/file").out == "two\n"


def test_a_box_from_a_point_of_a_box_that_is_gone(server, make, snapshot):
    box = make()
    assert box.exec("echo kept > /home/user/note").ok
    point = snapshot(box)
    box.kill()
    again = make(from_point=point["id"])
    assert again.exec("cat /home/user/note").out == "kept\n"
    with pytest.raises(Refused) as refused:
        make(from_point="nosuchpoint")
    assert refused.value.status == 404
    assert refused.value.error["field"] == "from_point"


def test_who_calls_a_sleeping_box_wakes_it_once(server, make):
    box = make(auto_resume=True)
    pause(box)
    ran: list[Ran] = []
    callers = [threading.Thread(target=lambda: ran.append(box.exec("echo awake"))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [one.out for one in ran] == ["awake\n"] * 8
    events = server.json("GET", f"/v1/events?sandbox_id={box.id}&after=0&format=json")["events"]
    resumed = [event for event in events if event.get("to") == "resuming"]
    assert len(resumed) == 1, events


def test_a_timeout_may_pause(make):
    box = make(timeout_seconds=1, on_timeout="pause", auto_resume=True)
    wait_for(lambda: box.info()["state"] == "paused", "it pauses at its end", limit=60)
    assert box.exec("echo back").out == "back\n"


def test_nobody_wants_it_so_it_rests(make):
    box = make(timeout_seconds=None, idle_seconds=1, auto_resume=True)
    wait_for(lambda: box.info()["state"] == "paused", "it is paused when idle", limit=90)
    assert box.exec("echo back").out == "back\n"


def test_idle_needs_a_way_to_wake(server):
    with pytest.raises(Refused) as refused:
        Box(server, idle_seconds=5, auto_resume=False)
    assert refused.value.error["field"] == "idle_seconds"
    with Box(server, idle_seconds=500) as box:
        assert box.made["auto_resume"]


def cli(server, *words, **options):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([binary(), *words], env=env, capture_output=True, text=True, timeout=180, **options)


def test_the_command_line_travels_in_time(server, box):
    assert box.exec("echo one > /home/user/file").ok
    first = cli(server, "snapshot", box.id, "--name", "first").stdout.strip()
    assert box.exec("echo two > /home/user/file").ok
    second = cli(server, "snapshot", box.id).stdout.strip()
    try:
        drawn = cli(server, "timeline", box.id).stdout
        assert first in drawn and f"* {second}" in drawn
        told = cli(server, "diff", first, second)
        assert "~ /home/user/file" in told.stdout, told
        assert "+two" in cli(server, "diff", first, second, "--text").stdout
        assert cli(server, "rollback", box.id, "first").returncode == 0
        assert box.exec("cat /home/user/file").out == "one\n"
        paused = cli(server, "pause", box.id)
        assert paused.returncode == 0 and box.id in paused.stdout
        again = cli(server, "pause", box.id)
        assert again.returncode == 0 and again.stdout == paused.stdout, "it is what was wanted"
        for asked in ("snapshot", "fork"):
            refused = cli(server, asked, box.id)
            assert refused.returncode == 1 and f"sandkeep resume {box.id}" in refused.stderr, refused
        assert cli(server, "resume", box.id, "--timeout", "10m").returncode == 0
        fork = cli(server, "fork", box.id).stdout.strip()
        assert cli(server, "kill", fork).returncode == 0
    finally:
        assert cli(server, "points", "rm", first, second).returncode == 0


def test_of_many_ways_the_one_that_works_is_kept(server, box):
    script = "echo $HOSTNAME > /home/user/winner; mkdir /home/user/ran"
    raced = cli(server, "--json", "race", box.id, "-n", "2", "--", "bash", "-c", script)
    assert raced.returncode == 0, raced
    runners = json.loads(raced.stdout)
    (winner,) = [runner["id"] for runner in runners if runner["won"]]
    assert box.exec("cat /home/user/winner").out.strip() == winner
    left = {one["id"] for one in server.json("GET", "/v1/sandboxes")["sandboxes"]}
    assert not left & {runner["id"] for runner in runners}
    lost = cli(server, "race", box.id, "-n", "2", "--", "false")
    assert lost.returncode == 1
    assert box.exec("cat /home/user/winner").out.strip() == winner


def test_a_paused_box_uses_no_cpu(box):
    assert box.exec("nohup sh -c 'while :; do :; done' >/dev/null 2>&1 &").ok
    assert pause(box)["state"] == "paused"
    frozen = []
    for state in Path("/sys/fs/cgroup").glob("**/freezer.state"):
        if state.read_text().strip() == "FROZEN":
            frozen.append(state)
    for events in Path("/sys/fs/cgroup").glob("**/cgroup.events"):
        if "frozen 1" in events.read_text():
            frozen.append(events)
    mode = box.info()["pause"]["mode"]
    assert mode == "disk" or frozen
    resume(box)
    assert box.exec("pgrep -f 'while :'").ok


def test_a_point_is_named_and_removed_by_its_name_if_no_other_has_it(box, snapshot):
    server = box.server
    name = "only-" + box.id[:8]
    first = snapshot(box, memory=False, name=name)
    assert server.json("GET", f"/v1/points/{name}")["id"] == first["id"]
    second = snapshot(box, memory=False, name=name)
    assert server.json("GET", f"/v1/points/{name}")["id"] == second["id"], "the newest"
    for method, body in (("DELETE", None), ("PATCH", {"tags": ["x"]})):
        with pytest.raises(Refused) as refused:
            server.json(method, f"/v1/points/{name}", body)
        assert refused.value.status == 409 and first["id"] in refused.value.error["hint"], refused.value
    server.json("DELETE", f"/v1/points/{first['id']}")
    assert server.json("PATCH", f"/v1/points/{name}", {"tags": ["x"]})["id"] == second["id"]
    server.json("DELETE", f"/v1/points/{name}")
    with pytest.raises(Refused) as refused:
        server.json("DELETE", f"/v1/points/{name}")
    assert refused.value.status == 404

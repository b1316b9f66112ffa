"""Points that are made by themselves: around commands, by pattern, every so often; and how they go."""

import json
import os
import subprocess
import time

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary

# Every command counts, however fast they come.
EACH = {"min_interval_seconds": 0}


def timeline(box):
    return box.server.json("GET", box.path + "/points")


def points(box):
    return timeline(box)["points"]


def events(box, kind):
    found = box.server.json("GET", f"/v1/events?sandbox_id={box.id}&after=0&format=json")["events"]
    return [event for event in found if event["event"] == kind]


def cli(server, *words):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([binary(), *words], env=env, capture_output=True, text=True, timeout=180)


def start(server, box, command):
    """A command as the E2B SDKs start it: through the gateway, over envd's protocol."""
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}}).encode()
    status, _, body = server.request(
        "POST", "/process.Process/Start", b"\0" + len(message).to_bytes(4, "big") + message,
        headers={
            "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
            "E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box.made["access_token"],
        },
    )
    assert status == 200 and b'"exited":true' in body, (status, body)


def test_nothing_is_made_unless_it_is_wished_for(box):
    assert box.made["auto_points"] is None
    assert box.exec("rm -rf /home/user/nothing").ok
    assert points(box) == []


def test_before_and_after_commands_of_either_kind(server, make):
    box = make(auto_points={"before_exec": True, "after_exec": True, **EACH})
    assert box.exec("echo one > /home/user/file").ok
    first = points(box)
    assert [point["reason"]["why"] for point in first] == ["before_exec", "after_exec"], first
    assert all(point["kind"] == "auto" and "echo one" in point["reason"]["command"] for point in first)
    # Nothing was written since: there is nothing new to keep.
    start(server, box, "cat /home/user/file")
    start(server, box, "cat /home/user/file")
    again = points(box)
    # Reading may note a time of access once, after that it writes nothing at all.
    assert len(again) <= len(first) + 1, again
    start(server, box, "echo two > /home/user/file")
    last = points(box)[-1]
    assert last["reason"] == {"why": "after_exec", "command": "echo two > /home/user/file", "pattern": None}
    assert last["parent"] == points(box)[-2]["id"]
    server.json("POST", box.path + "/rollback", {"to": first[-1]["id"]})
    assert box.exec(["cat", "/home/user/file"]).out == "one\n"


def test_before_risky_commands(server, make):
    box = make(auto_points={"before_matching": ["risky", "^deploy"]})
    assert box.exec("echo precious > /home/user/work; ls -la").ok
    assert points(box) == []
    start(server, box, "rm -rf /home/user/work")
    (point,) = points(box)
    assert point["reason"]["pattern"] == "risky" and point["reason"]["why"] == "before_matching"
    box.exec("deploy now")
    assert points(box)[-1]["reason"]["pattern"] == "^deploy"
    server.json("POST", box.path + "/rollback", {"to": point["id"]})
    assert box.exec("cat /home/user/work").out == "precious\n"


def test_every_so_often_and_changed_while_it_runs(server, box):
    rule = server.json("PUT", box.path + "/auto-points", {"every_seconds": 1})
    assert rule["every_seconds"] == 1 and rule["keep"]["count"] == 100
    assert box.info()["auto_points"]["every_seconds"] == 1
    wait_for(lambda: points(box), "a point is made by itself", limit=60)
    assert points(box)[0]["reason"]["why"] == "every"
    server.kill_hard()
    server.start()
    assert server.json("GET", box.path + "/auto-points")["every_seconds"] == 1, "it is remembered"
    assert server.json("PUT", box.path + "/auto-points", {})["every_seconds"] is None
    assert box.info()["auto_points"] is None


def test_wrong_rules_are_refused_in_words(server, box):
    for rule, field in (
        ({"before_matching": ["("]}, "auto_points.before_matching"),
        ({"every_seconds": 0}, "auto_points.every_seconds"),
        ({"keep": {"count": 0}}, "auto_points.keep.count"),
        ({"before_exek": True}, "before_exek"),
    ):
        with pytest.raises(Refused) as refused:
            server.json("PUT", box.path + "/auto-points", rule)
        assert refused.value.status == 400 and refused.value.error["field"] == field, refused.value
    with pytest.raises(Refused):
        Box(server, auto_points={"before_matching": ["("]})


def test_the_rule_keeps_few_and_space_comes_back(server, make):
    box = make(auto_points={"before_exec": True, "keep": {"count": 3}, **EACH})
    megabytes = 24

    def used():
        subprocess.run(["sync", "-f", server.state / "pool"], check=True)
        stat = os.statvfs(server.state / "pool")
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize

    write = f"head -c {megabytes}M /dev/urandom > /home/user/big; sync"
    for _ in range(2):
        assert box.exec(write).ok
    named = points(box)[-1]
    server.json("PATCH", f"/v1/points/{named['id']}", {"name": "mine"})
    for _ in range(5):
        assert box.exec(write).ok
    kept = points(box)
    assert [point["name"] for point in kept if point["name"]] == ["mine"]
    assert len(kept) == 4, "three of the newest, and the one with a name"
    # What was in between is gone; its children come after what it came after.
    assert kept[0]["id"] == named["id"] and kept[1]["parent"] == named["id"], kept
    assert [one["parent"] for one in kept[2:]] == [one["id"] for one in kept[1:3]]
    before = used()
    server.json("PUT", box.path + "/auto-points", {"before_exec": True, "keep": {"count": 1}, **EACH})
    assert len(points(box)) == 2
    wait_for(lambda: used() <= before - megabytes * 2**20, "the space of removed points is free", limit=120)
    server.json("POST", box.path + "/rollback", {"to": "mine"})
    assert box.exec("stat -c %s /home/user/big").out.strip() == str(megabytes * 2**20)
    box.kill()
    left = [point for point in server.json("GET", "/v1/points")["points"] if point["sandbox_id"] == box.id]
    assert [point["name"] for point in left] == ["mine"], "only what has a name outlives its box"
    server.json("DELETE", f"/v1/points/{named['id']}")


def test_bytes_and_age_count_too(server, make):
    box = make(auto_points={"before_exec": True, "keep": {"bytes": 20 * 2**20}, **EACH})
    for _ in range(4):
        assert box.exec("head -c 8M /dev/urandom > /home/user/big-$RANDOM; sync").ok
    assert 1 <= len(points(box)) <= 3, points(box)
    server.json("PUT", box.path + "/auto-points", {"before_exec": True, "keep": {"age_seconds": 1}, **EACH})
    time.sleep(1.2)
    assert box.exec("date > /home/user/now").ok
    assert len(points(box)) == 1, "only the one that was made just now"


def test_a_point_that_can_not_be_made_stops_no_command(server, make):
    box = make(auto_points={"before_exec": True, **EACH}, limits={"disk_mib": 16})
    # Points hold what the box has deleted, and that counts as its own: they must give way.
    assert box.exec("head -c 14M /dev/urandom > /home/user/big; sync").ok
    assert box.exec("echo still here").out == "still here\n"
    (told,) = events(box, "point_not_made")
    assert "full" in told["message"] and told["reason"]["command"] == "echo still here"


def test_with_memory_nobody_is_cut_off(server, make):
    box = make(isolation="gvisor", auto_points={"before_exec": True, "memory": True, **EACH})
    assert box.exec("nohup sleep 1000 >/dev/null 2>&1 & echo $! > /run/user-pid 2>/dev/null || echo $! > /tmp/pid").ok
    with_memory = points(box)[-1]
    assert with_memory["memory"] is True and with_memory["engine"], with_memory
    # While a command runs its connection is not cut for a point.
    slow = subprocess.Popen(
        [binary(), "exec", box.id, "--", "sh", "-c", "touch /tmp/begun; sleep 4; echo done"],
        env={**os.environ, **server.cli_env()}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )
    wait_for(lambda: box.exec("test -e /tmp/begun").ok, "the slow command runs")
    for name in ("one", "two"):
        assert box.exec(f"touch /home/user/{name}").ok
    assert slow.communicate(timeout=60)[0] == "done\n" and slow.returncode == 0
    assert any(point["why_disk_only"] for point in points(box)), points(box)


def test_the_tree_is_drawn(server, make):
    made = cli(server, "create", "--auto-points", "before=risky,interval=0s,keep=10", "--timeout", "10m")
    assert made.returncode == 0, made
    box = Box.known(server, made.stdout.strip())
    try:
        assert box.exec("echo one > /home/user/file").ok
        first = cli(server, "snapshot", box.id, "--name", "begin").stdout.strip()
        assert box.exec("rm -rf /home/user/file; echo two > /home/user/other").ok
        assert box.exec("rm -rf /home/user/other").ok
        aside = points(box)[-1]["id"]
        assert cli(server, "rollback", box.id, "begin").returncode == 0
        assert box.exec("rm -f /home/user/file").ok
        assert box.exec("touch /home/user/new").ok
        last = cli(server, "snapshot", box.id).stdout.strip()
        fork = cli(server, "fork", box.id, "--at", aside).stdout.strip()
        drawn = cli(server, "timeline", box.id).stdout.splitlines()
        assert drawn[0].startswith(f"o {first}") and "[begin]" in drawn[0], drawn
        assert drawn[-1].startswith(f"* {last}"), drawn
        (side,) = [line for line in drawn if aside in line]
        assert side.startswith("├─o") and "auto: before matching" in side and "$ rm -rf /home/user/other" in side
        assert f"│ ├─@ {fork}  running" in drawn
        told = json.loads(cli(server, "timeline", box.id, "--json").stdout)
        assert {place["sandbox_id"] for place in told["boxes"]} == {box.id, fork}
        named = cli(server, "points", "name", aside, "aside")
        assert named.returncode == 0 and "[aside]" in cli(server, "timeline", box.id).stdout
        assert "+ /home/user/new" in cli(server, "diff", "begin", last).stdout
        wrong = cli(server, "diff", "begin", "nosuch")
        assert wrong.returncode == 1 and "was not found" in wrong.stderr, wrong
        assert cli(server, "auto-points", box.id, "sometimes").returncode == 2
        assert json.loads(cli(server, "auto-points", box.id, "after-exec").stdout)["after_exec"] is True
        assert cli(server, "kill", fork).returncode == 0
    finally:
        box.kill()
        for point in server.json("GET", "/v1/points")["points"]:
            if point["sandbox_id"] == box.id:
                server.json("DELETE", f"/v1/points/{point['id']}")

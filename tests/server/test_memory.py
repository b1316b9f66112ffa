"""Boxes of the container level on disk with their memory, through the server."""

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


def test_what_can_not_go_to_disk_stays_in_ram_and_says_why(server, box):
    begin(box)
    box.write("/root/queue.py", QUEUE.encode(), user="root")
    ran = box.root("nohup python3 /root/queue.py >/dev/null 2>&1 & until [ -s /run/held ]; do sleep 0.1; done")
    assert ran.ok, ran
    view = pause(box)
    assert view["pause"]["mode"] == "ram"
    assert "message queue" in view["pause"]["why"], view
    resume(box)
    assert ask(box)[0] == 1
    point = server.json("POST", box.path + "/points", {})
    assert "message queue" in point["why_disk_only"], point
    server.json("DELETE", f"/v1/points/{point['id']}")

"""Each row of docs/fork-correctness.md: what must be one machine's own is not shared by a copy."""

import secrets
import time
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from identitykit import checked, token


SSH_KEY = "/etc/ssh/ssh_host_ed25519_key"


@pytest.fixture(params=["gvisor", "container"])
def family(request, server):
    """A box, and two forks of one point of it."""
    with Box(server, isolation=request.param, timeout_seconds=600) as box:
        assert box.root("echo shared > /home/user/note").ok
        assert box.root(f"mkdir -p /etc/ssh && ssh-keygen -q -t ed25519 -N '' -f {SSH_KEY}").ok
        made = server.json("POST", box.path + "/fork", {"count": 2})["forks"]
        forks = [Box.known(server, one["sandbox"]["id"]) for one in made]
        yield [box, *forks]
        for fork in forks:
            fork.kill()


def different(family, command):
    said = [one.root(command).out for one in family]
    assert len(set(said)) == len(family) and all(said), (command, said)


def test_random_numbers_of_the_kernel(family):
    different(family, "python3 -c 'import os; print(os.urandom(32).hex())'")
    different(family, "head -c 32 /dev/urandom | od -An -tx1")
    different(family, "python3 -c 'import uuid; print(uuid.uuid4())'")


def test_machine_id_and_names(family):
    different(family, "cat /etc/machine-id")
    different(family, "hostname")
    different(family, "cat /etc/hostname")
    different(family, "echo $E2B_SANDBOX_ID")


def test_an_ssh_server_gets_keys_of_its_own(server, family):
    for one in family:
        wait_for(lambda: one.root(f"cat {SSH_KEY}.pub").ok, "it has a key")
    different(family, f"cat {SSH_KEY}.pub")
    different(family, f"cat {SSH_KEY}")
    kept = family[1].root(f"cat {SSH_KEY}.pub").out
    server.json("POST", family[1].path + "/pause", {})
    server.json("POST", family[1].path + "/resume", {})
    assert family[1].root(f"cat {SSH_KEY}.pub").out == kept, "it is the same machine"


def test_two_boxes_were_one_machine_after_a_rollback_to_a_point_of_the_other(server, family):
    """As `race` does with the box and the copy that won."""
    box, fork, _ = family
    own = server.json("POST", box.path + "/points", {})
    was = box.root("cat /etc/machine-id").out
    point = server.json("POST", fork.path + "/points", {})
    server.json("POST", box.path + "/rollback", {"to": point["id"], "foreign": True})
    for one in family:
        wait_for(lambda one=one: one.root(f"cat {SSH_KEY}.pub").ok, "it has a key")
    for command in ("cat /etc/machine-id", "hostname", f"cat {SSH_KEY}.pub"):
        different(family, command)
    # Where it was itself it is the same machine.
    server.json("POST", box.path + "/rollback", {"to": own["id"]})
    assert box.root("cat /etc/machine-id").out == was
    for made in (own, point):
        server.json("DELETE", f"/v1/points/{made['id']}")


def test_access_tokens(server, family):
    tokens = [one.info()["access_token"] for one in family]
    assert len(set(tokens)) == 3
    # The token of one opens no other.
    for other in tokens[1:]:
        status, _, _ = server.request(
            "GET", "/files?path=/home/user/note",
            headers={"E2b-Sandbox-Id": family[0].id, "E2b-Sandbox-Port": "49983", "X-Access-Token": other},
        )
        assert status == 401


def test_identity_in_tokens(server, family):
    subjects = []
    for one in family:
        read = checked(server, token(one))
        assert read["sub"].endswith(f"/box/{one.id}"), read
        subjects.append(read["sub"])
    assert len(set(subjects)) == 3


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_the_wall_clock_is_right_after_a_pause(server, level):
    with Box(server, isolation=level, timeout_seconds=600) as box:
        server.json("POST", box.path + "/pause", {})
        paused = time.time()
        # Long enough to tell a clock that stood still from one that is merely slow to be asked.
        while time.time() - paused < 3:
            time.sleep(0.2)
        server.json("POST", box.path + "/resume", {})
        before = time.time()
        said = float(box.root("date +%s.%N").out)
        after = time.time()
        assert before - 1 <= said <= after + 1, (before, said, after)


# Both ends of a connection over loopback; says how often it was asked.
TALK = """
import os, socket
listener = socket.create_server(("127.0.0.1", 7070))
here = socket.create_connection(("127.0.0.1", 7070))
there, _ = listener.accept()
os.mkfifo("/run/talk.in")
os.mkfifo("/run/talk.out")
count = 0
while True:
    open("/run/talk.in").read()
    here.sendall(b"x")
    count += len(there.recv(1))
    open("/run/talk.out", "w").write(f"{count}\\n")
"""
SPEAK = "timeout 60 bash -c 'until [ -p /run/talk.out ]; do sleep 0.1; done; echo x > /run/talk.in; cat /run/talk.out'"


def copies(server, box, count=2):
    made = server.json("POST", box.path + "/fork", {"count": count}, timeout=300)
    assert all("sandbox" in one for one in made["forks"]), made
    return [Box.known(server, one["sandbox"]["id"]) for one in made["forks"]]


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_loopback_connections_live_on_in_each_fork_by_itself(server, level):
    with Box(server, isolation=level, timeout_seconds=600) as box:
        box.write("/root/talk.py", TALK.encode(), user="root")
        assert box.root("nohup python3 /root/talk.py >/dev/null 2>&1 &").ok
        assert box.root(SPEAK).out == "1\n"
        forks = copies(server, box)
        try:
            for round in ("2\n", "3\n"):
                assert [one.root(SPEAK).out for one in [box, *forks]] == [round] * 3
        finally:
            for fork in forks:
                fork.kill()


def test_user_ids_on_the_host_are_apart(server):
    """The same user of a box is another one on the host in each copy, with memory too."""
    marker = f"77{secrets.randbelow(10**8):08d}"
    with Box(server, isolation="container", timeout_seconds=600) as box:
        assert box.exec(f"nohup sleep {marker} >/dev/null 2>&1 &").ok
        forks = copies(server, box)
        try:
            owners = [int(status["Uid"].split()[0]) for status in processes_of(marker)]
            assert len(owners) == 3 and len(set(owners)) == 3, owners
            assert len({uid // 65536 for uid in owners}) == 3 and min(owners) >= 65536, owners
        finally:
            for fork in forks:
                fork.kill()


def processes_of(word):
    found = []
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdigit() and (proc / "cmdline").read_bytes() == f"sleep\0{word}\0".encode():
                lines = (proc / "status").read_text().splitlines()
                found.append(dict(line.split(":", 1) for line in lines if ":" in line))
        except OSError:
            continue
    return found


# Holds a connection to the outside and says when it has ended.
HOLD = """
import sys, urllib.request
answer = urllib.request.urlopen(sys.argv[1], timeout=600)
open("/root/line", "w").write("open")
try:
    while answer.read1(4096):
        pass
finally:
    open("/root/line", "w").write("ended")
"""


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_connections_to_the_outside_end_in_forks_and_new_ones_work(moated, outside, level):
    allow = {"allow": [f"good.sandkeep.test:{outside.web.port}"]}
    with Box(moated, isolation=level, network=allow, timeout_seconds=600) as box:
        box.write("/root/hold.py", HOLD.encode(), user="root")
        hold = f"nohup python3 /root/hold.py {outside.url(path='/stream')} >/dev/null 2>&1 &"
        assert box.root(hold).ok
        wait_for(lambda: box.root("cat /root/line").out == "open", "it is connected", 60)
        forks = copies(moated, box)
        try:
            for one in forks:
                wait_for(lambda one=one: one.root("cat /root/line").out == "ended", "its end is seen", 60)
                assert one.root(f"curl -sS --max-time 30 {outside.url()}").out == "hello from outside\n"
        finally:
            for fork in forks:
                fork.kill()

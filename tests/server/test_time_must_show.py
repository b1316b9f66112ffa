"""What must be shown of time: a busy box lives through a pause and a restart of the server, twenty
generations, sixteen forks at once, and the undoing of the worst. On the levels that write memory to disk."""

import concurrent.futures
import contextlib
import json
import os
import textwrap
import time

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused


def writes_memory(server, level):
    """Whether a box of this level is paused to the disk, asked of a box of it."""
    with Box(server, isolation=level) as box:
        return server.json("POST", box.path + "/pause", {})["pause"]["mode"] == "disk"


LEVELS = ["gvisor", "container"]


@pytest.fixture(scope="module", params=LEVELS)
def level(request, server):
    levels = {one["level"]: one for one in server.json("GET", "/v1/host")["levels"]}
    assert levels[request.param]["usable"], levels[request.param]
    assert writes_memory(server, request.param), levels[request.param]
    return request.param


def pause(box):
    return box.server.json("POST", box.path + "/pause", {})


def resume(box):
    return box.server.json("POST", box.path + "/resume", {})


def events(box, kind):
    found = box.server.json("GET", f"/v1/events?sandbox_id={box.id}&after=0&format=json")["events"]
    return [event for event in found if event["event"] == kind]


# A REPL that holds memory, asked through two pipes; each answer needs all of what it holds.
REPL = """
import code, os, sys, zlib
hoard = bytearray(os.urandom(1 << 20)) * {megabytes}
seen = 0
with open("/tmp/repl.sum", "w") as told:
    told.write(str(zlib.crc32(hoard)))
os.mkfifo("/tmp/repl.out")
# Whoever sees this one finds the rest.
os.mkfifo("/tmp/repl.in")
repl = code.InteractiveInterpreter(globals())
while True:
    for line in open("/tmp/repl.in"):
        out = open("/tmp/repl.out", "w")
        sys.stdout = out
        repl.runsource(line.rstrip())
        out.close()
"""

# A server, and a connection to it over loopback that says one word more each time it is asked.
TALK = """
import os, socket, threading
listener = socket.create_server(("127.0.0.1", 7070))
def serve():
    while True:
        peer, _ = listener.accept()
        def echo(peer=peer):
            count = 0
            while peer.recv(1):
                count += 1
                peer.sendall(str(count).encode() + b"\\n")
        threading.Thread(target=echo, daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
line = socket.create_connection(("127.0.0.1", 7070))
words = line.makefile()
os.mkfifo("/tmp/talk.in")
while True:
    with open("/tmp/talk.in") as asked:
        asked.read()
    line.sendall(b"x")
    said = words.readline()
    open("/tmp/talk.new", "w").write(said)
    os.rename("/tmp/talk.new", "/tmp/talk.out")
"""

# A build that goes on and on, one object after the other.
BUILD = """
all: $(addsuffix .o,$(shell seq 1 100000))
%.o:
\t@echo "int f$*(int a){return a+$*;}" > $*.c; (cc -c $*.c -o $@ 2>/dev/null || cp $*.c $@); sleep 0.05
"""

# A database with a writer that has not folded its log.
DATABASE = """
import os, sqlite3, time
db = sqlite3.connect("/home/user/work.db", isolation_level=None)
db.execute("pragma journal_mode=wal")
db.execute("pragma wal_autocheckpoint=0")
db.execute("create table t (n integer)")
db.execute("begin")
db.execute("insert into t values (1)")
db.execute("commit")
db.execute("begin")
db.execute("insert into t values (2)")
open("/tmp/db.ready", "w").close()
while not os.path.exists("/tmp/db.commit"):
    time.sleep(0.05)
db.execute("commit")
open("/tmp/db.done", "w").close()
time.sleep(100000)
"""


class Busy:
    """A box in which everything goes on that must go on."""

    def __init__(self, box, megabytes):
        self.box = box
        self.megabytes = megabytes
        for name, text in (("repl", REPL.replace("{megabytes}", str(megabytes))), ("talk", TALK), ("db", DATABASE)):
            box.write(f"/root/{name}.py", text.encode(), user="root")
        box.write("/root/Makefile", BUILD.encode(), user="root")
        started = box.root(
            "mkdir -p /root/build && cp /root/Makefile /root/build/;"
            "for p in repl talk db; do nohup python3 /root/$p.py >/tmp/$p.log 2>&1 & done;"
            "(cd /root/build && exec nohup $(command -v make || echo python3 /root/make.py) -j2) >/tmp/make.log 2>&1 &"
        )
        assert started.ok, started
        ready = "test -p /tmp/repl.in -a -p /tmp/talk.in -a -e /tmp/db.ready -a -e /root/build/3.o"
        wait_for(lambda: box.root(ready).ok, "everything goes on", limit=120)
        self.sum = box.root("cat /tmp/repl.sum").out
        assert self.ask("seen = 41; print(seen)") == "41"

    def ask(self, line):
        """Something of the REPL."""
        ran = self.box.root(["timeout", "60", "sh", "-c", 'printf "%s\\n" "$1" > /tmp/repl.in; cat /tmp/repl.out', "sh", line])
        assert ran.ok, ran
        return ran.out.strip()

    def talk(self):
        """How often the same connection was used."""
        ran = self.box.root("rm -f /tmp/talk.out; echo > /tmp/talk.in; until test -e /tmp/talk.out; do sleep 0.05; done; cat /tmp/talk.out")
        return int(ran.out)

    def objects(self):
        return int(self.box.root("ls /root/build | grep -c '\\.o$'").out)

    def holds(self):
        assert self.ask("print(seen + 1)") == "42"
        assert self.ask("print(zlib.crc32(hoard), len(hoard) >> 20)") == f"{self.sum} {self.megabytes}"


def test_a_busy_box_lives_through_a_pause_and_a_restart_of_the_server(server, level):
    with Box(server, isolation=level, timeout_seconds=1200, limits={"memory_mib": 1024}) as box:
        if not box.root("command -v make").ok:
            # The same loop where there is no make: what matters is that it runs and goes on.
            box.write("/root/make.py", textwrap.dedent("""
                import pathlib, time
                for n in range(1, 100000):
                    pathlib.Path(f"{n}.c").write_text(f"int f{n}(int a){{return a+{n};}}")
                    compile(f"def f{n}(a): return a+{n}", f"{n}", "exec")
                    pathlib.Path(f"{n}.o").write_text("object")
                    time.sleep(0.05)
            """).encode(), user="root")
        busy = Busy(box, 200)
        # A shell in a terminal, as the E2B SDKs have it: it outlives the connection it was started over.
        shell = start_pty(server, box)
        type_pty(server, box, shell, "cd /var/tmp && secret=kept && echo typed > /tmp/typed\n")
        wait_for(lambda: box.root("test -e /tmp/typed").ok, "the shell listens")
        assert busy.talk() == 1
        pids = box.root("pgrep -f '/root/(repl|talk|db).py'").out
        assert len(pids.split()) == 3, pids
        paused = pause(box)
        assert paused["pause"]["mode"] == "disk", paused["pause"]
        assert_nothing_is_left(server, box)
        server.kill_hard()
        server.start()
        assert box.info()["state"] == "paused"
        assert resume(box)["state"] == "running"
        assert box.root("pgrep -f '/root/(repl|talk|db).py'").out == pids, "the same processes"
        busy.holds()
        assert busy.talk() == 2, "the same connection"
        before = busy.objects()
        wait_for(lambda: busy.objects() > before, "the build goes on")
        type_pty(server, box, shell, "echo $secret $PWD > /tmp/told\n")
        wait_for(lambda: box.root("cat /tmp/told").out == "kept /var/tmp\n", "the shell is where it was")
        # The transaction that was open is still open, and can be finished.
        count = "python3 -c \"import sqlite3; print(sqlite3.connect('/home/user/work.db').execute('select count(*) from t').fetchone()[0])\""
        assert box.root(count).out == "1\n"
        assert box.root("touch /tmp/db.commit; until test -e /tmp/db.done; do sleep 0.05; done").ok
        assert box.root(count).out == "2\n"


def envd(server, box, path, message, limit=60):
    body = json.dumps(message).encode()
    return server.request(
        "POST", path, body, timeout=limit,
        headers={
            "Content-Type": "application/json", "Connect-Protocol-Version": "1",
            "E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box.made["access_token"],
        },
    )


def start_pty(server, box):
    """Starts a shell in a terminal and hangs up; the shell lives on. Gives its pid."""
    import http.client

    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-i", "-l"]}, "pty": {"size": {"cols": 80, "rows": 24}}}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/process.Process/Start", b"\0" + len(message).to_bytes(4, "big") + message,
            {
                "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
                "E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box.made["access_token"],
            },
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        size = int.from_bytes(answer.read(5)[1:], "big")
        return json.loads(answer.read(size))["event"]["start"]["pid"]


def type_pty(server, box, pid, text):
    import base64

    keys = base64.b64encode(text.encode()).decode()
    status, _, body = envd(server, box, "/process.Process/SendInput", {"process": {"pid": pid}, "input": {"pty": keys}})
    assert status == 200, (status, body)


def processes_of(server, box):
    """Processes and cgroups of this host that belong to the box, by what names it: its id, which processes
    of a container do not show, or the time a process in it sleeps."""
    found = []
    names = (box.id.encode(), sleeper(box).encode())
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            told = open(f"/proc/{entry.name}/cmdline", "rb").read() + open(f"/proc/{entry.name}/cgroup", "rb").read()
            # One that ended and was not asked for yet has neither memory nor CPU.
            dead = b" Z " in open(f"/proc/{entry.name}/stat", "rb").read()
            if not dead and any(name in told for name in names):
                found.append(told)
    for where, inside, _ in os.walk("/sys/fs/cgroup"):
        found.extend(f"{where}/{name}" for name in inside if box.id in name)
    return found


def sleeper(box):
    """A number of seconds that nobody else sleeps for."""
    return f"86400.{int(box.id[1:], 36) % 10**15:015}"


def assert_nothing_is_left(server, box):
    """A box that is paused to the disk has no process, no cgroup and so no memory on this host."""
    wait_for(lambda: not processes_of(server, box), f"nothing is left of it: {processes_of(server, box)[:3]}", limit=30)


def test_a_running_box_is_seen_and_a_paused_one_costs_nothing(server, level):
    with Box(server, isolation=level) as box:
        assert box.root(f"nohup sleep {sleeper(box)} > /dev/null 2>&1 &").ok
        # A process shows nothing while it becomes another program.
        wait_for(lambda: processes_of(server, box), "this test sees what it looks for")
        assert pause(box)["pause"]["mode"] == "disk"
        assert_nothing_is_left(server, box)
        resume(box)
        assert processes_of(server, box)


COUNTER = """
import os, zlib
hoard = os.urandom(8 << 20)
count = 0
open("/tmp/sum", "w").write(str(zlib.crc32(hoard)))
os.mkfifo("/tmp/in")
while True:
    with open("/tmp/in") as asked:
        asked.read()
    count += 1
    open("/tmp/new", "w").write(f"{count} {zlib.crc32(hoard)}")
    os.rename("/tmp/new", "/tmp/out")
"""
COUNT = "rm -f /tmp/out; echo > /tmp/in; until test -e /tmp/out; do sleep 0.02; done; cat /tmp/out"


def counter(box):
    box.write("/root/counter.py", COUNTER.encode(), user="root")
    assert box.root("nohup python3 /root/counter.py >/dev/null 2>&1 &").ok
    wait_for(lambda: box.root("test -p /tmp/in").ok, "the counter counts")
    return box.root("cat /tmp/sum").out


def test_twenty_generations(server, level):
    """Each is a snapshot of the one before, restored; nothing wears off."""
    made, points = [], []
    try:
        box = Box(server, isolation=level, timeout_seconds=1200, limits={"memory_mib": 256})
        made.append(box)
        sum_ = counter(box)
        for generation in range(1, 21):
            assert box.root(COUNT).out == f"{generation} {sum_}"
            assert box.root(f"echo {generation} >> /home/user/generations").ok
            point = server.json("POST", box.path + "/points", {"memory": True})
            points.append(point["id"])
            assert point["memory"] is True
            box.kill()
            box = Box(server, from_point=point["id"], timeout_seconds=1200)
            made.append(box)
        assert box.root(COUNT).out == f"21 {sum_}"
        assert box.root("wc -l < /home/user/generations").out.strip() == "20"
    finally:
        for one in made:
            one.kill()
        for point in points:
            server.json("DELETE", f"/v1/points/{point}")


def test_sixteen_forks_at_once_are_right_and_different(server, level):
    with Box(server, isolation=level, timeout_seconds=1200, limits={"memory_mib": 256}) as box:
        sum_ = counter(box)
        assert box.root(COUNT).out == f"1 {sum_}"
        point = server.json("POST", box.path + "/points", {"memory": True})
        answer = server.json("POST", box.path + "/fork", {"count": 16, "at": point["id"]}, timeout=300)
        assert [one.get("error") for one in answer["forks"]] == [None] * 16, answer
        forks = [Box.known(server, one["sandbox"]["id"]) for one in answer["forks"]]
        try:
            look = (
                "python3 -c 'import os, uuid; print(os.urandom(16).hex()); print(uuid.uuid4())'; cat /etc/machine-id;"
                "hostname; cat /etc/hostname;"
                f"{COUNT}"
            )
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                said = list(pool.map(lambda one: one.root(look).out.split("\n"), [box, *forks]))
            names = ("urandom", "uuid", "machine id", "hostname", "/etc/hostname")
            for place, name in enumerate(names):
                assert len({one[place] for one in said}) == 17, (name, said)
            assert {one[len(names)] for one in said} == {f"2 {sum_}"}, "each counts on by itself"
            tokens = {one.info()["access_token"] for one in [box, *forks]}
            assert len(tokens) == 17
            assert len({one.id for one in forks}) == 16
        finally:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(Box.kill, forks))
            server.json("DELETE", f"/v1/points/{point['id']}")


def test_a_rollback_undoes_the_worst_and_the_shell_is_there(server, level):
    with Box(server, isolation=level, timeout_seconds=1200) as box:
        assert box.root("echo precious > /home/user/work").ok
        shell = start_pty(server, box)
        type_pty(server, box, shell, "here=still\n")
        point = server.json("POST", box.path + "/points", {"memory": True})
        with contextlib.suppress(Refused, OSError):
            box.root("rm -rf --no-preserve-root / 2>/dev/null; true", timeout_ms=120_000, http_timeout=180)
        with pytest.raises(Refused):
            box.root("true")
        begun = time.monotonic()
        view = server.json("POST", box.path + "/rollback", {"to": point["id"]})
        print(f"{level}: rolled back in {time.monotonic() - begun:.3f} s")
        assert view["id"] == box.id and view["state"] == "running"
        assert view["access_token"] == box.made["access_token"]
        assert box.exec("cat /home/user/work; ls /usr/bin | wc -l").out.startswith("precious\n")
        type_pty(server, box, shell, "echo $here > /tmp/told\n")
        wait_for(lambda: box.root("cat /tmp/told").out == "still\n", "the shell of then is usable")
        server.json("DELETE", f"/v1/points/{point['id']}")

"""What writes and reads memory is killed in the middle: `runsc` and its sandbox, gofer and
checkpoint, `criu` and whoever started it. What was answered stays, and what was not is old or new.

`SANDKEEP_STORM=50` kills fifty times in each operation.
"""

import collections
import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, state_dir
from tiny import ASK, COUNTER, TinyServer, memory_levels, tiny_state

ROUNDS = int(os.environ.get("SANDKEEP_STORM", "1"))
ENGINES = {"gvisor": ("runsc", "exe"), "container": ("criu",)}
OPERATIONS = ("pause", "snapshot", "resume", "fork", "rollback")
# Who was really hit.
HITS = collections.Counter()


@pytest.fixture(scope="module")
def tiny():
    server = TinyServer(tiny_state(state_dir().parent / f"killed-{secrets.token_hex(3)}")).start()
    yield server
    server.close()
    shutil.rmtree(server.state, ignore_errors=True)


def parent(pid):
    # The name may hold spaces and brackets.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def works_for(server, pid):
    """Whether it was started by this server: `criu` says nothing of where it works."""
    with contextlib.suppress(OSError):
        while pid > 1:
            if pid == server.pid:
                return True
            pid = parent(pid)
    return False


def engine_processes(server, level):
    """Processes of the engine that work for this server and no other."""
    found = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            name = (proc / "comm").read_text().strip()
            if not any(name.startswith(engine) for engine in ENGINES[level]):
                continue
            words = (proc / "cmdline").read_bytes().decode(errors="replace")
            if str(server.state) in words or works_for(server, int(proc.name)):
                found.append(int(proc.name))
    return found


def ended(box):
    try:
        return box.info()["state"] in ("gone", "stopping")
    except Refused as refused:
        return refused.status == 404


def strike(server, level, dice, before, stop):
    """Kills one process of the engine at a random moment; those of the operation first, if it
    has any of its own."""
    if before:
        time.sleep(dice.uniform(0, 0.4))
    while not stop.is_set():
        there = engine_processes(server, level)
        fresh = [pid for pid in there if pid not in before]
        if fresh or (there and dice.random() < 0.3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(fresh or there), signal.SIGKILL)
                HITS[level] += 1
            return
        time.sleep(0.005 if before else dice.uniform(0, 0.05))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_engine_that_dies_takes_nothing_along_that_was_answered(tiny, name):
    for level in memory_levels(tiny):
        for number in range(ROUNDS):
            seed = f"{level} {name} {number}" if ROUNDS == 1 else secrets.token_hex(4)
            one_kill(tiny, level, name, random.Random(seed), seed)


def one_kill(server, level, name, dice, told):
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(Box(server, isolation=level, timeout_seconds=1800))
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        assert box.root("echo precious > /root/note; sync").ok
        point = server.json("POST", box.path + "/points", {"memory": True})
        if name == "resume":
            assert server.json("POST", box.path + "/pause", {})["pause"]["mode"] == "disk"
        route, body = {
            "pause": ("pause", {}),
            "snapshot": ("points", {"memory": True}),
            "resume": ("resume", {}),
            "fork": ("fork", {"count": 2}),
            "rollback": ("rollback", {"to": point["id"]}),
        }[name]
        stop = threading.Event()
        killer = threading.Thread(target=strike, args=(server, level, dice, set(engine_processes(server, level)), stop))
        killer.start()
        answer = None
        with contextlib.suppress(Refused, OSError, urllib.error.URLError):
            answer = server.json("POST", f"{box.path}/{route}", body, timeout=120)
        stop.set()
        killer.join()
        points = [point["id"]]
        if answer and name == "snapshot" and answer["memory"]:
            points.append(answer["id"])
        if answer and name == "fork":
            for fork in answer["forks"]:
                if "sandbox" in fork:
                    Box.known(server, fork["sandbox"]["id"]).kill()
        # The box itself: what was killed was alive in it, so it may have ended with it. If it
        # was put to rest, it wakes; if it could not be woken, it rests and can be.
        state = wait_for(lambda: settled(box), f"the box is on one side: {told}", limit=90)
        if state == "paused":
            pause = box.info()["pause"]
            server.json("POST", box.path + "/resume", {"timeout_seconds": 1800})
            assert box.root("cat /root/note").out == "precious\n", told
            if pause["mode"] == "disk":
                assert box.root(ASK).out == "2\n", (told, pause)
        elif name in ("resume", "rollback") and state == "gone" and answer is None:
            raise AssertionError(f"a box that rested is gone: {told}")
        # What was answered before and during it is whole.
        for id in points:
            with Box(server, from_point=id) as copy:
                assert copy.root("cat /root/note").out == "precious\n", (told, id)
                assert copy.root(ASK).out == "2\n", (told, id)
            server.json("DELETE", f"/v1/points/{id}")
    staging = server.state / "pool" / "staging"
    wait_for(lambda: len(list(staging.iterdir())) <= 2, f"nothing half-made is left: {told}")


def settled(box):
    if ended(box):
        return "gone"
    state = box.info()["state"]
    if state == "running":
        # It may be about to be found dead.
        with contextlib.suppress(Refused, OSError):
            return state if box.root("echo up").out == "up\n" else None
        return None
    return state if state == "paused" else None


def test_engines_of_all_levels_were_really_hit(tiny):
    """Comes last: a search that finds nobody to kill would let all of the above pass."""
    assert set(HITS) == set(memory_levels(tiny)), HITS


def restorers(server):
    """Who waits for a `criu restore` of this server, with the cgroup both are in."""
    for pid in engine_processes(server, "container"):
        with contextlib.suppress(OSError):
            if b"restore" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                paths = [line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
                return parent(pid), next(path for path in paths if "/sandkeep." in path)
    return None


def in_cgroup(path):
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            with contextlib.suppress(OSError):
                if any(line.endswith(":" + path) for line in (proc / "cgroup").read_text().splitlines()):
                    found.append(int(proc.name))
    return found


def test_half_a_box_stayed_when_the_one_who_restored_it_was_killed(tiny):
    with Box(tiny, isolation="container", timeout_seconds=1800) as box:
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        for count in range(2, 4):
            assert tiny.json("POST", box.path + "/pause", {})["pause"]["mode"] == "disk"
            hit, over = [], threading.Event()

            def strike(hit=hit, over=over):
                while not over.is_set():
                    if found := restorers(tiny):
                        os.kill(found[0], signal.SIGKILL)
                        hit.append(found[1])
                        return

            killer = threading.Thread(target=strike)
            killer.start()
            # It is tried again by another; the box may be up after all.
            with contextlib.suppress(Refused):
                tiny.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=120)
            over.set()
            killer.join()
            (path,) = hit
            wait_for(lambda: not in_cgroup(path), "nothing of the first try is left", 15)
            wait_for(lambda: not list(Path("/sys/fs/cgroup").glob(f"*{path}")), "nor its cgroups", 15)
            if box.info()["state"] == "paused":
                tiny.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=120)
            assert box.root(ASK).out == f"{count}\n"


def stopped_dump(server, limit=20):
    """The `criu dump` of this server, in the middle of it and standing still. It takes a tenth of
    a second, so nobody sleeps here."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        for pid in engine_processes(server, "container"):
            with contextlib.suppress(OSError):
                if b"dump" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGSTOP)
                    return pid
    raise AssertionError("CRIU was never seen at work")


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def killed_server_and_its_stopped_dump(server, box, route, body):
    """Kills the server while CRIU is in the middle of a box; gives CRIU, standing still, and who started it."""

    def act():
        with contextlib.suppress(Refused, OSError, urllib.error.URLError, ValueError):
            server.json("POST", f"{box.path}/{route}", body, timeout=120)

    caller = threading.Thread(target=act)
    caller.start()
    criu = stopped_dump(server)
    worker = parent(criu)
    server.kill_hard()
    caller.join()
    return criu, worker


@pytest.mark.parametrize("route, body", [("pause", {}), ("points", {"memory": True})])
@pytest.mark.parametrize("also_its_parent", [False, True])
def test_a_box_was_lost_when_its_server_died_while_criu_wrote_it(tiny, route, body, also_its_parent):
    """CRIU goes on without its server; the next one answers meanwhile, and waits for it with this box."""
    with Box(tiny, isolation="container", timeout_seconds=1800) as box, Box(tiny, timeout_seconds=1800) as other:
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        criu, worker = killed_server_and_its_stopped_dump(tiny, box, route, body)
        if also_its_parent:
            os.kill(worker, signal.SIGKILL)
        tiny.start()
        assert other.root("echo here").out == "here\n", "one box keeps the others waiting"
        assert box.info()["state"] == "pausing", "the next server did not wait"
        time.sleep(1)
        assert runs(criu), "it was ended in the middle"
        # A server that is to end does not wait for it either, and leaves it to the next.
        tiny.stop()
        assert runs(criu)
        tiny.start()
        os.kill(criu, signal.SIGCONT)
        state = wait_for(lambda: settled(box), "the box is on one side", limit=90)
        assert state == "running" and not runs(criu)
        assert box.root(ASK).out == "2\n", "the same process"
        # It can be written again.
        assert tiny.json("POST", box.path + "/pause", {})["pause"]["mode"] == "disk"
        tiny.json("POST", box.path + "/resume", {"timeout_seconds": 1800})
        assert box.root(ASK).out == "3\n"


PIDFD_GETFD = 438


def child_with_the_lock_of(pid):
    """A process that has what this one has locked, as those have that CRIU starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    (number,) = [int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd).endswith("/writing")]
    pidfd = os.pidfd_open(pid)
    lock = libc.syscall(PIDFD_GETFD, pidfd, number, 0)
    assert lock >= 0, os.strerror(ctypes.get_errno())
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[lock])
    os.close(lock)
    os.close(pidfd)
    return child


@pytest.mark.parametrize("worker_lives", [False, True])
def test_a_server_waited_for_what_a_killed_criu_had_left(tiny, worker_lives):
    with Box(tiny, isolation="container", timeout_seconds=1800) as box, Box(tiny, timeout_seconds=1800) as other:
        criu, worker = killed_server_and_its_stopped_dump(tiny, box, "pause", {})
        left = child_with_the_lock_of(criu)
        if not worker_lives:
            os.kill(worker, signal.SIGKILL)
        os.kill(criu, signal.SIGKILL)
        tiny.start()
        assert other.root("echo here").out == "here\n"
        assert left.wait(timeout=30) == -signal.SIGKILL
        # What CRIU was in the middle of when it was killed may be broken; it is not waited for.
        wait_for(lambda: box.info()["state"] != "pausing", "it is on one side", limit=30)


def stopped_trial(server, caller):
    """The `criu restore` of this server that tries an image, standing still; who started it, and their cgroup.
    None when whoever asked for it was answered before it was seen: it takes a tenth of a second."""
    while caller.is_alive():
        for pid in engine_processes(server, "container"):
            with contextlib.suppress(OSError):
                if b"restore" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGSTOP)
                    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
                    return pid, parent(pid), next(path for line in lines if "/sandkeep." in (path := line.split(":", 2)[2]))
    return None


def nothing_is_left(server, path, dirs):
    wait_for(lambda: not in_cgroup(path), "nothing of the trial runs", 20)
    wait_for(lambda: not list(Path("/sys/fs/cgroup").glob(f"*{path}")), "its cgroups are gone", 20)
    wait_for(lambda: {entry.name for entry in (server.state / "ward-container").iterdir()} <= dirs, "nor is its directory there", 20)
    staging = server.state / "pool" / "staging"
    wait_for(lambda: len(list(staging.iterdir())) <= 2, "nor its disk", 20)


@pytest.mark.parametrize("route, body", [("pause", {}), ("points", {"memory": True})])
@pytest.mark.parametrize("who", ["server", "server and worker", "worker", "criu"])
def test_a_trial_outlived_who_began_it(tiny, who, route, body):
    """What comes back for a trial never runs, whoever is killed over it, and the sandbox goes on."""
    with Box(tiny, isolation="container", timeout_seconds=1800) as box:
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        dirs = {entry.name for entry in (tiny.state / "ward-container").iterdir()}
        answered = []

        def act():
            with contextlib.suppress(Refused, OSError, urllib.error.URLError, ValueError):
                answered.append(tiny.json("POST", f"{box.path}/{route}", body, timeout=120))

        for _ in range(20):
            caller = threading.Thread(target=act)
            caller.start()
            if hit := stopped_trial(tiny, caller):
                break
            answered.clear()
            if route == "pause":
                tiny.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=120)
        criu, worker, path = hit
        if "server" in who:
            tiny.kill_hard()
        if "worker" in who:
            os.kill(worker, signal.SIGKILL)
        if who == "criu":
            os.kill(criu, signal.SIGKILL)
        caller.join()
        if "server" in who:
            tiny.start()
        nothing_is_left(tiny, path, dirs)
        if box.info()["state"] == "paused":
            pause = box.info()["pause"]
            # A trial that was killed is no proof; one that was tried again is.
            assert (pause["mode"], bool(pause["why"])) == (("ram", True) if who == "criu" else ("disk", False)), pause
            tiny.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=120)
        elif who == "criu":
            assert not answered, "a memory that was not proved counts as one"
        assert box.root(ASK).out == "2\n", "the same process"
        for point in tiny.json("GET", box.path + "/points")["points"]:
            tiny.json("DELETE", f"/v1/points/{point['id']}")

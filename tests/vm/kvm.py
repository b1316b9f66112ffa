"""Checks of the microVM level with KVM, on a host with cgroup2 alone; runs inside script/test-vm.

Three boots of one disk: `kvm`, `kvm-again` with the same processor, `kvm-other` with one that can do less.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from checks import BIN, PATIENCE, STATE, check, counts, eventually, import_template, loopback_up, ran
from boxkit import Box
from sandkeep_server import Refused, Server
from tiny import COUNTER

os.environ["SANDKEEP_BIN"] = BIN
KERNEL = Path("/usr/local/lib/sandkeep/kernel/vmlinuz")
# What the next boot is to find.
LEFT = Path("/var/lib/left-by-the-boot-before.json")
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 256}
SLACK = 0.05
# A machine in a machine that is emulated: everything takes twenty times as long, now and then more.
SLOW = {
    "SANDKEEP_MICROVM_BOOT_SECONDS": str(int(PATIENCE)),
    "SANDKEEP_MICROVM_ANSWER_SECONDS": str(int(PATIENCE)),
}


def machine(server, **request):
    request.setdefault("isolation", "microvm")
    return Box(server, limits=SMALL | request.pop("limits", {}), timeout_seconds=7200, http_timeout=PATIENCE, **request)


def qemu_of(box):
    """The command line of the QEMU of a sandbox, and its pid: its cgroup has the name of the sandbox."""
    (found,) = [path for path in Path("/sys/fs/cgroup").glob(f"sandkeep.*/{box.id}/cgroup.procs")]
    for pid in found.read_text().split():
        if line := Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid), line.decode().split("\0")
    raise AssertionError(f"no QEMU in {found}")


def runs_on_kvm(server, box):
    """The host says so, the sandbox says so, and its QEMU was told so."""
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    checks = {look["name"]: look for look in levels["microvm"]["checks"]}
    assert checks["acceleration"]["found"].startswith("kvm"), checks["acceleration"]
    assert box.info()["acceleration"] == "kvm", box.info()
    line = qemu_of(box)[1]
    assert line[line.index("-accel") + 1] == "kvm", line


def post(server, path, body=None):
    return server.json("POST", path, body or {}, timeout=PATIENCE)


def on_time(box):
    asked = time.time()
    theirs = float(box.root("date +%s.%N", http_timeout=PATIENCE).out)
    heard = time.time()
    assert asked - theirs <= SLACK and heard - theirs >= -SLACK, f"behind by {asked - theirs:.3f} to {heard - theirs:.3f} s"


def qemus():
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if "qemu" in os.readlink(entry / "exe"):
                    found.append(int(entry.name))
    return found


def doctor():
    done = subprocess.run([BIN, "doctor", "--json", "--state", str(STATE)], capture_output=True, text=True, timeout=PATIENCE)
    level = next(level for level in json.loads(done.stdout)["levels"] if level["level"] == "microvm")
    for look in level["checks"]:
        print(f"  | {look['verdict']} {look['name']}: {look['found']}")
    assert level["usable"], level
    found = next(look for look in level["checks"] if look["name"] == "acceleration")
    assert found["verdict"] == "ok" and found["found"].startswith("kvm"), found


def first(server):
    """A plain create, which gets this level where KVM works."""
    with machine(server, isolation="auto") as box:
        assert box.made["isolation"] == "microvm", box.made
        runs_on_kvm(server, box)
        assert box.root("echo hello; id -u", http_timeout=PATIENCE).out == "hello\n0\n"
        on_time(box)
        flags = box.root("cat /proc/cpuinfo", http_timeout=PATIENCE).out.split()
        assert "hypervisor" in flags and "svm" not in flags and "vmx" not in flags, flags
        status = Path(f"/proc/{qemu_of(box)[0]}/status").read_text()
        for line in ("CapEff:\t0000000000000000", "Groups:\t \n", "Seccomp:\t2"):
            assert line in status, (line, status)


def run_once(server):
    env = {**os.environ, **server.cli_env()}
    assert ran(BIN, "run", "--no-stdin", "--isolation", "microvm", "--", "echo", "hello", env=env) == "hello\n"


def two_processors(server):
    with machine(server, limits={"cpu_millis": 2000}) as box:
        runs_on_kvm(server, box)
        assert box.root(["nproc"], http_timeout=PATIENCE).out == "2\n"


def memory_in_time(server):
    """Pause and resume, a point with memory, two forks, and back to the point."""
    with machine(server) as box:
        assert box.root(COUNTER, http_timeout=PATIENCE).ok
        counts(box, 1)
        paused = post(server, box.path + "/pause")["pause"]
        assert paused["mode"] == "disk", paused
        post(server, box.path + "/resume", {"timeout_seconds": 7200})
        counts(box, 2)
        on_time(box)
        runs_on_kvm(server, box)
        point = post(server, box.path + "/points", {"memory": True})
        assert point["memory"], point
        on_time(box)
        counts(box, 3)
        forks = post(server, box.path + "/fork", {"count": 2})["forks"]
        for fork in forks:
            assert fork.get("memory", True), fork
            copy = Box.known(server, fork["sandbox"]["id"])
            counts(copy, 4)
            on_time(copy)
            runs_on_kvm(server, copy)
            copy.kill()
        counts(box, 4)
        on_time(box)
        post(server, box.path + "/rollback", {"to": point["id"]})
        counts(box, 3)
        on_time(box)
        runs_on_kvm(server, box)
        # Without a wish there is memory, too.
        plain = post(server, box.path + "/points")
        assert plain["memory"], plain
        for made in (plain, point):
            server.json("DELETE", f"/v1/points/{made['id']}")


def adoption(server):
    with machine(server) as box:
        assert box.root(COUNTER, http_timeout=PATIENCE).ok
        counts(box, 1)
        server.kill_hard()
        server.start()
        assert box.info()["state"] == "running"
        counts(box, 2)
        runs_on_kvm(server, box)
        post(server, box.path + "/pause")
        server.kill_hard()
        server.start()
        post(server, box.path + "/resume", {"timeout_seconds": 7200})
        counts(box, 3)
        runs_on_kvm(server, box)


def one_shape_that_fails(server):
    """A machine that does not come up is the failure of who asked for it."""
    good = KERNEL.read_bytes()
    with machine(server) as known:
        KERNEL.write_bytes(b"no kernel")
        try:
            with contextlib.suppress(Refused):
                machine(server, limits={"memory_mib": 700})
                raise AssertionError("a machine came up without a kernel")
        finally:
            KERNEL.write_bytes(good)
        assert known.root("echo alive", http_timeout=PATIENCE).out == "alive\n"
        runs_on_kvm(server, known)
        with machine(server) as other:
            runs_on_kvm(server, other)
        # It was not its last chance.
        with machine(server, limits={"memory_mib": 700}) as again:
            assert again.root("echo at last", http_timeout=PATIENCE).out == "at last\n"
            runs_on_kvm(server, again)


def nothing_left(server):
    """Sandboxes that came and went leave no QEMU; those that wait for the next ones end with the server."""
    server.end_boxes()
    server.stop()
    eventually("no QEMU is left", lambda: not qemus())


def leave_something(server):
    """For the boots that follow: a sandbox that rests, and a point with memory."""
    box = machine(server)
    assert box.root(COUNTER, http_timeout=PATIENCE).ok
    counts(box, 1)
    point = post(server, box.path + "/points", {"memory": True})
    post(server, box.path + "/pause")
    LEFT.write_text(json.dumps({"box": box.id, "point": point["id"], "asked": 1, "build": point["engine"]}))


def resumed(server):
    left = json.loads(LEFT.read_text())
    path = f"/v1/sandboxes/{left['box']}"
    post(server, path + "/resume", {"timeout_seconds": 7200})
    box = Box.known(server, left["box"])
    counts(box, left["asked"] + 1)
    on_time(box)
    runs_on_kvm(server, box)
    with machine(server, from_point=left["point"]) as copy:
        counts(copy, left["asked"] + 1)
        runs_on_kvm(server, copy)
    post(server, box.path + "/pause")
    LEFT.write_text(json.dumps({**left, "asked": left["asked"] + 1}))


def refused_in_words(server):
    """What was written under another processor; what is made anew works."""
    left = json.loads(LEFT.read_text())
    for ask in (
        lambda: post(server, f"/v1/sandboxes/{left['box']}/resume", {"timeout_seconds": 7200}),
        lambda: machine(server, from_point=left["point"]),
    ):
        try:
            ask()
            raise AssertionError("memory of another processor was taken")
        except Refused as refused:
            print(f"  | {refused}")
            words = str(refused)
            assert "written by qemu" in words and left["build"].split()[-1] in words and "processor" in words, words
    with machine(server) as box:
        assert box.root("echo new", http_timeout=PATIENCE).out == "new\n"
        runs_on_kvm(server, box)
        post(server, box.path + "/pause")
        post(server, box.path + "/resume", {"timeout_seconds": 7200})
        assert box.root("echo again", http_timeout=PATIENCE).out == "again\n"


def suite(bodies):
    server = Server("--pool-size", "0", state=STATE, env=SLOW)
    if not check("the server starts", server.start):
        return
    for name, body in bodies:
        if not check(name, body, server):
            print("  | " + server.log_tail(4000).replace("\n", "\n  | "))
            if server.process.poll() is not None:
                with contextlib.suppress(Exception):
                    server.start()
    server.stop()


BOOTS = {
    "kvm": [
        ("a plain create gets a machine on KVM", first),
        ("run", run_once),
        ("two processors", two_processors),
        ("pause, resume, snapshot, fork and rollback have memory", memory_in_time),
        ("killed server, machines adopted", adoption),
        ("a shape that fails leaves the others alone", one_shape_that_fails),
        ("something is left for the next boots", leave_something),
        ("a stopped server leaves no QEMU", lambda server: (server.stop(), eventually("no QEMU", lambda: not qemus()))),
    ],
    "kvm-again": [
        ("what rested goes on after a boot", resumed),
    ],
    "kvm-other": [
        ("memory of another processor is refused in words, and new sandboxes work", refused_in_words),
        ("nothing is left at the end", nothing_left),
    ],
}


if __name__ == "__main__":
    boot = sys.argv[1]
    print(f"  | kernel {os.uname().release}, {ran('qemu-system-x86_64', '--version').splitlines()[0]}")
    try:
        loopback_up()
        check("doctor: KVM is offered", doctor)
        if boot != "kvm" or check("template import", import_template):
            suite(BOOTS[boot])
    finally:
        print("DONE", flush=True)

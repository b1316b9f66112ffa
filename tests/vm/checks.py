"""Checks of the container level on a host with cgroup2 alone; runs inside script/test-vm.

Every check prints `PASS name` or `FAIL name`; the last line is `DONE`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = ["/opt/vm", "/opt/vm/server"]

from boxkit import Box  # noqa: E402
import sandkeep_server  # noqa: E402
from sandkeep_server import Server  # noqa: E402
from tiny import ASK, COUNTER, holding  # noqa: E402

BIN = "/usr/local/bin/sandkeep"
STATE = Path("/var/lib/sandkeep")
CGROUP = Path("/sys/fs/cgroup")
UNIT = CGROUP / "imitated.service"
MIB = 1 << 20
# Everything is emulated, so everything is slow; how slow, the script knows.
PATIENCE = float(re.search(r"checks\.patience=(\d+)", Path("/proc/cmdline").read_text() + " checks.patience=240").group(1))
sandkeep_server.START_LIMIT = PATIENCE
os.environ["SANDKEEP_TEST_STATE"] = str(STATE)


def check(name, body, *args):
    begin = time.monotonic()
    try:
        body(*args)
        print(f"PASS {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        return True
    except Exception:
        for line in traceback.format_exc().splitlines()[-30:]:
            print(f"  | {line}")
        print(f"FAIL {name}", flush=True)
        return False


def eventually(what, look, limit=PATIENCE):
    end = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < end, f"not within {limit:.0f} s: {what}"
        time.sleep(0.1)
    return found


def ran(*command, **options):
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        out, err = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        where = [f"{task.name}: {(task / 'stack').read_text()}" for task in Path(f"/proc/{child.pid}/task").iterdir()]
        child.kill()
        out, err = child.communicate()
        raise AssertionError(f"{command} did not end: {out[-1000:]} {err[-1000:]}; it waits in {where}") from None
    done = subprocess.CompletedProcess(command, child.returncode, out, err)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


def trees():
    return sorted(path for path in CGROUP.rglob("sandkeep.*") if re.fullmatch(r"sandkeep\.[0-9a-f]{16}", path.name))


def cgroup_of(pid) -> Path:
    line = Path(f"/proc/{pid}/cgroup").read_text().split("0::/")[1]
    return CGROUP / line.strip()


def processes_of_box(marker):
    """Host pids of processes whose command line holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def cgroup_of_box(box) -> Path:
    """Found by a process of the box, so that nothing is assumed about names."""
    marker = f"86{int.from_bytes(os.urandom(3)):08d}"
    box.root(f"nohup sleep {marker} >/dev/null 2>&1 &")
    pids = eventually("the marker process", lambda: [p for p in processes_of_box(marker) if b"sleep\0" in Path(f"/proc/{p}/cmdline").read_bytes()])
    return cgroup_of(pids[0])


def doctor():
    # It may end with an error: what makes the base template is not installed here.
    done = subprocess.run([BIN, "doctor", "--json", "--state", str(STATE)], capture_output=True, text=True, timeout=PATIENCE)
    found = json.loads(done.stdout)
    for look in found["host"]:
        assert look["verdict"] != "missing" or look["name"] == "mmdebstrap", look
    container = next(level for level in found["levels"] if level["level"] == "container")
    assert container["usable"], container
    cgroups = next(look for look in container["checks"] if look["name"] == "cgroups")
    assert cgroups["verdict"] == "ok" and "cgroup2 with" in cgroups["found"], cgroups


def import_template():
    ran(BIN, "template", "import", "base", "/opt/vm/root.tar.zst", "--state", str(STATE), "--storage-size", "3GiB")


def cli_run(server):
    env = {**os.environ, **server.cli_env()}
    assert ran(BIN, "run", "--no-stdin", "--", "echo", "hello", env=env) == "hello\n"
    assert ran(BIN, "run", "--no-stdin", "--", "sudo", "id", "-u", env=env) == "0\n"


def memory(server):
    with box_of(server, limits={"memory_mib": 96}) as box:
        group = cgroup_of_box(box)
        assert (group / "memory.max").read_text().strip() == str(96 * MIB), group
        assert (group / "memory.swap.max").read_text().strip() == "0"
        hungry = box.root(["python3", "-c", "x = bytearray(300 << 20)"], http_timeout=PATIENCE)
        assert not hungry.ok, hungry
        assert box.root(["echo", "alive"]).out == "alive\n"
        eventually("the kill is counted", lambda: box.info()["oom_kills"] >= 1)
        assert "oom_kill 0" not in (group / "memory.events").read_text().splitlines()


def pids(server):
    with box_of(server, limits={"pids": 40}) as box:
        assert (cgroup_of_box(box) / "pids.max").read_text().strip() == "40"
        many = box.root("for i in $(seq 80); do sleep 300 & done; exit 0", timeout_ms=30_000, http_timeout=PATIENCE)
        assert "Resource temporarily unavailable" in many.err or not many.ok, many


def cpu(server):
    with box_of(server, limits={"cpu_millis": 500}) as box:
        group = cgroup_of_box(box)
        assert (group / "cpu.max").read_text().split() == ["50000", "100000"]
        usage = server.json("GET", box.path + "/metrics")
        print(f"  | metrics: {json.dumps(usage)[:400]}")
        assert "usage_usec" in (group / "cpu.stat").read_text()


def disk(server):
    with box_of(server, limits={"disk_mib": 64}) as box:
        small = box.root("head -c 16M /dev/zero >/root/small && sync && echo kept", http_timeout=PATIENCE)
        assert small.out == "kept\n", small
        large = box.root("head -c 200M /dev/zero >/root/large; sync; stat -c %s /root/large", http_timeout=PATIENCE)
        assert int(large.out or 0) < 150 * MIB, large
        assert "quota" in large.err or "No space" in large.err, large
        assert box.root(["echo", "alive"]).out == "alive\n"


def box_of(server, **request):
    return Box(server, timeout_seconds=3600, **request)


def adoption(server):
    box = box_of(server, limits={"memory_mib": 200})
    group = cgroup_of_box(box)
    box.root("echo kept >/root/file")
    server.kill_hard()
    server.start()
    assert server.json("GET", box.path)["state"] == "running"
    assert box.root(["cat", "/root/file"]).out == "kept\n"
    assert cgroup_of_box(box) == group
    hungry = box.root(["python3", "-c", "x = bytearray(500 << 20)"], http_timeout=PATIENCE)
    assert not hungry.ok, hungry
    eventually("the kill is counted after adoption", lambda: box.info()["oom_kills"] >= 1)
    gone_without_trace(server, box, group)


def gone_without_trace(server, box, group):
    marker = f"87{int.from_bytes(os.urandom(3)):08d}"
    box.root(f"setsid nohup sleep {marker} >/dev/null 2>&1 &")
    eventually("the process runs", lambda: processes_of_box(marker))
    box.kill()
    eventually("its processes end", lambda: not processes_of_box(marker))
    eventually("its cgroup goes", lambda: not group.exists())
    eventually("its mounts go", lambda: box.id not in Path("/proc/self/mountinfo").read_text())


def counts(box, number):
    assert box.root(ASK, http_timeout=PATIENCE).out == f"{number}\n"


def to_disk(server):
    """Memory and processes by CRIU: pause, a server that dies, wake, copy, go back."""
    with box_of(server) as box:
        assert box.root(COUNTER, http_timeout=PATIENCE).ok
        counts(box, 1)
        group = cgroup_of_box(box)
        paused = server.json("POST", box.path + "/pause", {}, timeout=PATIENCE)["pause"]
        assert paused["mode"] == "disk", paused
        eventually("nothing of it is left in memory", lambda: not group.exists())
        server.kill_hard()
        server.start()
        server.json("POST", box.path + "/resume", {"timeout_seconds": 3600}, timeout=PATIENCE)
        counts(box, 2)
        group = cgroup_of_box(box)
        assert (group / "memory.swap.max").read_text().strip() == "0", "its limits are what they were"
        point = server.json("POST", box.path + "/points", {"memory": True}, timeout=PATIENCE)
        assert point["memory"], point
        counts(box, 3)
        forks = server.json("POST", box.path + "/fork", {"count": 2}, timeout=PATIENCE)["forks"]
        for fork in forks:
            with Box.known(server, fork["sandbox"]["id"]) as copy:
                counts(copy, 4)
        assert box.root("rm -rf /home; pkill -f '[r]un/ask'; exit 0", http_timeout=PATIENCE).ok
        server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=PATIENCE)
        counts(box, 3)
        assert box.root(["ls", "/home"]).ok
        server.json("DELETE", f"/v1/points/{point['id']}")


def to_swap(server):
    swap = Path("/var/swap")
    ran("dd", "if=/dev/zero", f"of={swap}", "bs=1M", "count=256", "status=none")
    swap.chmod(0o600)
    ran("mkswap", str(swap))
    ran("swapon", str(swap))
    try:
        with box_of(server, limits={"memory_mib": 200}) as box:
            box.root(["sh", "-c", f"cat > /root/hold.py <<'END'\n{holding(60)}\nEND\nnohup python3 /root/hold.py >/dev/null 2>&1 &"])
            first = eventually("memory is held", lambda: box.root("cat /root/sum 2>/dev/null").out)
            group = cgroup_of_box(box)
            before = int((group / "memory.current").read_text())
            paused = server.json("POST", box.path + "/pause", {}, timeout=PATIENCE)["pause"]
            assert paused["mode"] == "ram" and "went to swap" in paused["why"], paused
            left = int((group / "memory.current").read_text())
            print(f"  | {before >> 20} MiB before, {left >> 20} MiB in memory when it rests")
            assert left < before - 40 * MIB, (before, left)
            server.json("POST", box.path + "/resume", {"timeout_seconds": 3600}, timeout=PATIENCE)
            assert (group / "memory.swap.max").read_text().strip() == "0"
            box.root("rm /root/sum; pkill -USR1 -f hold.py")
            assert eventually("it tells its sum", lambda: box.root("cat /root/sum 2>/dev/null").out) == first
    finally:
        ran("swapoff", str(swap))
        swap.unlink()


def kill_leaves_nothing(server):
    box = box_of(server)
    gone_without_trace(server, box, cgroup_of_box(box))


def all_gone(server):
    """The pool is the only thing left: stop, start without a pool, and look."""
    server.end_boxes()
    server.stop()
    server.extra += ["--pool-size", "0"]
    server.start()
    try:
        def empty():
            left = [child for tree in trees() for child in tree.iterdir() if child.is_dir() and (child / "cgroup.procs").read_text()]
            return len(left) <= 8 and not server.json("GET", "/v1/sandboxes")["sandboxes"]
        eventually("no boxes in the tree", empty)
    finally:
        server.stop()
    eventually("no agent is left", lambda: not processes_of_box("sandkeep-agent"))


def in_unit():
    """A program that does what systemd does before it starts ours: goes into the unit's cgroup."""
    UNIT.mkdir(exist_ok=True)
    os.setxattr(UNIT, "trusted.delegate", b"1")
    wrapper = Path("/run/in-unit")
    wrapper.write_text(f'#!/bin/bash\necho $$ >{UNIT}/cgroup.procs || exit 219\nexec {BIN} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def suite(label, server):
    if not check(f"{label}: the server starts", server.start):
        return
    print(f"  | server in {cgroup_of(server.pid)}, trees {[str(tree) for tree in trees()]}")
    for name, body in [
        ("run and sudo", cli_run),
        ("memory limit ends a process, not the box", memory),
        ("limit on processes", pids),
        ("limit on the processor", cpu),
        ("disk quota", disk),
        ("kill leaves nothing", kill_leaves_nothing),
        ("killed server, boxes adopted", adoption),
        ("memory and processes to disk and back", to_disk),
        ("memory to swap and back", to_swap),
        ("nothing is left at the end", all_gone),
    ]:
        if not check(f"{label}: {name}", body, server):
            print("  | " + server.log_tail(2500).replace("\n", "\n  | "))
            if server.process.poll() is not None:
                with contextlib.suppress(Exception):
                    server.start()
    server.kill_hard()


def loopback_up():
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", up_and_running))


def plain():
    loopback_up()
    check("doctor: container is usable", doctor)
    if not check("template import", import_template):
        return
    os.environ["SANDKEEP_BIN"] = BIN
    suite("top cgroup", Server(state=STATE))
    os.environ["SANDKEEP_BIN"] = in_unit()
    suite("delegated unit", Server(state=STATE))


class Unit(Server):
    """The server as the unit that we ship."""

    def __init__(self):
        super().__init__(state=STATE)
        self.port = 3000

    def property(self, name):
        return ran("systemctl", "show", "--value", f"--property={name}", "sandkeep").strip()

    def ready(self):
        with contextlib.suppress(OSError):
            return self.request("GET", "/v1/health", timeout=5)[0] == 200


def unit_starts(unit):
    ran("systemctl", "start", "sandkeep")
    eventually("health", unit.ready)
    unit.key = (STATE / "api-key").read_text().strip()
    print(f"  | server in {cgroup_of(unit.property('MainPID'))}, trees {[str(tree) for tree in trees()]}")


def unit_restarts(unit, *how):
    before = unit.property("MainPID")
    with_box = box_of(unit, limits={"memory_mib": 200})
    group = cgroup_of_box(with_box)
    with_box.root("echo kept >/root/file")
    ran(*how)
    try:
        eventually("a new server", lambda: unit.property("MainPID") not in ("0", before) and unit.ready())
    except AssertionError:
        print("  | " + ran("systemctl", "show", "sandkeep", "-pResult,ExecMainStatus,NRestarts,ActiveState").replace("\n", " "))
        raise
    assert unit.json("GET", with_box.path)["state"] == "running"
    assert with_box.root(["cat", "/root/file"]).out == "kept\n"
    gone_without_trace(unit, with_box, group)


def systemd():
    # The disk may come from the other boot. Its pool is not mounted yet, so the program is asked.
    there = json.loads(ran(BIN, "template", "ls", "--json", "--state", str(STATE), "--storage-size", "3GiB"))
    if not there and not check("template import", import_template):
        return
    unit = Unit()
    if not check("systemd: the unit starts", unit_starts, unit):
        return
    check("systemd: run and sudo", cli_run, unit)
    check("systemd: memory limit ends a process, not the box", memory, unit)
    check("systemd: limit on processes", pids, unit)
    check("systemd: disk quota", disk, unit)
    check("systemd: restart keeps boxes", unit_restarts, unit, "systemctl", "restart", "sandkeep")
    check("systemd: a killed server is started again and finds its boxes", unit_restarts, unit,
          "systemctl", "kill", "--kill-whom=main", "--signal=KILL", "sandkeep")


if __name__ == "__main__":
    print(f"  | kernel {os.uname().release}, cgroup mounts: " + ", ".join(
        line.split()[4] + " " + line.split(" - ")[1].split()[0]
        for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup" in line))
    try:
        {"plain": plain, "systemd": systemd}[sys.argv[1]]()
    finally:
        print("DONE", flush=True)

"""bench/microvm: what a machine of its own costs, beside the other levels.

All in one run, taking turns, so that a noisy neighbour hits everybody alike. Medians are what to
read; see bench/README.md. Unoptimised parts of the host's side are not measured: it wants the
release build (SANDKEEP_BIN names another).
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))
sys.path.insert(0, str(REPO / "tests" / "server"))

from boxkit import Box  # noqa: E402
from sandkeep_server import Refused, Server  # noqa: E402

SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 1024}
LARGE = {"memory_mib": 1024, "cpu_millis": 1000, "disk_mib": 1024}
LEVELS = ("container", "gvisor", "microvm")
FORKS = (1, 4, 16)


def timed(what):
    start = time.perf_counter()
    result = what()
    return (time.perf_counter() - start) * 1000, result


def row(name: str, samples: list[float]) -> None:
    if not samples:
        print(f"| {name} | 0 | - | - | - |")
        return
    samples = sorted(samples)
    print(f"| {name} | {len(samples)} | {statistics.median(samples):.0f} | {samples[0]:.0f} | {samples[-1]:.0f} |", flush=True)


def make(server: Server, level: str, limits: dict) -> Box:
    return Box(server, isolation=level, limits=limits, timeout_seconds=900)


def first_answer(server: Server, level: str, limits: dict) -> tuple[float, float]:
    """Milliseconds until the create was answered, and until the first command had its output."""
    start = time.perf_counter()
    box = make(server, level, limits)
    created = (time.perf_counter() - start) * 1000
    assert box.exec(["echo", "hi"]).out == "hi\n"
    answered = (time.perf_counter() - start) * 1000
    box.kill()
    return created, answered


class Stillness:
    """How long a box stood still, from the mark its ward keeps while it does."""

    def __init__(self, server: Server, level: str, box: Box):
        self.mark = Path(server.state) / f"ward-{level}" / box.id / "frozen"
        self.seen: list[float] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self):
        while not self.over.is_set():
            if self.mark.exists():
                self.seen.append(time.perf_counter())
            time.sleep(0.0005)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    @property
    def ms(self) -> float:
        return (self.seen[-1] - self.seen[0]) * 1000 if self.seen else 0.0


def processes(box: Box) -> list[int]:
    found = []
    for cgroup in Path("/sys/fs/cgroup").glob(f"**/sandkeep*/{box.id}/cgroup.procs"):
        found += [int(pid) for pid in cgroup.read_text().split()]
    return sorted(set(found))


def pss(box: Box) -> tuple[float, float]:
    """MiB of the memory of the machine, and of the rest of the processes, shared pages in parts."""
    machine = rest = 0.0
    for pid in processes(box):
        of_machine = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
                of_machine = "sandkeep-ram" in line
            elif line.startswith("Pss:"):
                kib = int(line.split()[1])
                if of_machine:
                    machine += kib / 1024
                else:
                    rest += kib / 1024
    return machine, rest


def usable(server: Server) -> list[str]:
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    return [level for level in LEVELS if levels.get(level, {}).get("usable")]


def acceleration(server: Server) -> str:
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    return next(c["found"] for c in levels["microvm"]["checks"] if c["name"] == "acceleration")


def boots(server: Server) -> None:
    """The first box of each shape waits for a machine; the log tells what of it was the boot."""
    print("\n## The first box of a shape\n\n| shape | ms to the create's answer |\n|---|---|")
    for name, limits in (("256 MiB, 1 vCPU", SMALL), ("1 GiB, 1 vCPU", LARGE)):
        ms, box = timed(lambda limits=limits: make(server, "microvm", limits))
        box.kill()
        print(f"| {name} | {ms:.0f} |")
    for line in re.sub(r"\x1b\[[0-9;]*m", "", server.log_path.read_text()).splitlines():
        if "a machine was booted ahead" in line:
            print(f"\nlog: {line[line.index('a machine'):]}")


TITLE = "| | n | median | least | most |\n|---|---|---|---|---|"
# What microVMs are prepared with, from nothing to everything; the last one is the default.
PREPARED = (
    ("nothing prepared", ("--microvm-waiting", "0", "--microvm-warm", "false")),
    ("QEMUs wait", ("--microvm-waiting", "2", "--microvm-warm", "false")),
    ("machine warmed up", ("--microvm-waiting", "0", "--microvm-warm", "true")),
    ("machine warmed up, QEMUs wait", ("--microvm-waiting", "2", "--microvm-warm", "true")),
)
# The next QEMU is started a moment after a box was; who asks earlier gets one that does not wait.
REFILL = 1.5


def starts(server: Server, levels: list[str], count: int) -> None:
    print(f"\n## Create to first answer (no boxes made ahead), ms\n\n{TITLE}")
    for level in (level for level in levels if level != "microvm"):
        samples = [first_answer(server, level, SMALL) for _ in range(count)]
        row(f"{level} 256 MiB: created", [created for created, _ in samples])
        row(f"{level} 256 MiB: first `echo` answered", [answered for _, answered in samples])


def prepared_starts(count: int) -> None:
    for name, flags in PREPARED:
        server = Server("--pool-size", "0", *flags).start()
        try:
            for size, limits in (("256 MiB", SMALL), ("1 GiB", LARGE)):
                # The first one of a server reads the machine, or has it made.
                first_answer(server, "microvm", limits)
                if "true" in flags:
                    wait_for_warmth(server)
                    first_answer(server, "microvm", limits)
                samples = []
                for _ in range(count):
                    time.sleep(REFILL)
                    samples.append(first_answer(server, "microvm", limits))
                row(f"microvm {size}, {name}: created", [created for created, _ in samples])
                row(f"microvm {size}, {name}: first `echo` answered", [answered for _, answered in samples])
        finally:
            server.end_boxes()
            server.stop()


def wait_for_warmth(server: Server, limit: float = 120) -> None:
    """One that was made by an earlier run is not made again."""
    end = time.monotonic() + limit
    machines = Path(server.state) / "pool" / "machines"
    while time.monotonic() < end and list(machines.glob("*/seed-*")):
        time.sleep(0.1)
    time.sleep(1)


def snapshots(server: Server, levels: list[str], count: int) -> None:
    print(f"\n## Snapshot with memory, ms\n\n{TITLE}")
    for level in levels:
        whole, still = [], []
        with make(server, level, SMALL) as box:
            box.root("head -c 4M /dev/urandom > /dev/shm/changed")
            for _ in range(count):
                try:
                    with Stillness(server, level, box) as watched:
                        ms, point = timed(lambda: server.json("POST", box.path + "/points", {"memory": True}, timeout=120))
                except Refused as refused:
                    print(f"| {level}: {refused.error['message'][:80]} | 0 | - | - | - |")
                    break
                whole.append(ms)
                still.append(watched.ms)
                server.json("DELETE", f"/v1/points/{point['id']}")
        if whole:
            row(f"{level}: the call", whole)
        if any(still):
            row(f"{level}: the box stood still", still)


def forks(server: Server, levels: list[str]) -> None:
    print("\n## Fork with memory until every copy has answered, ms\n\n| | ×1 | ×4 | ×16 |\n|---|---|---|---|")
    for level in levels:
        cells = []
        with make(server, level, SMALL) as box:
            box.root("echo here > /run/note")
            for count in FORKS:
                def fork(count=count):
                    made = server.json("POST", box.path + "/fork", {"count": count}, timeout=300)["forks"]
                    copies = [Box.known(server, one["sandbox"]["id"]) for one in made if one.get("sandbox")]
                    alive = [copy.root("cat /run/note").out == "here\n" for copy in copies]
                    return copies, sum(alive)
                try:
                    ms, (copies, alive) = timed(fork)
                except Refused as refused:
                    cells.append(f"refused: {refused.error['code']}")
                    continue
                cells.append(f"{ms:.0f}" + ("" if alive == count else f" (memory in {alive} of {count})"))
                for copy in copies:
                    copy.kill()
        print(f"| {level} | {' | '.join(cells)} |", flush=True)


def memory(server: Server, levels: list[str]) -> None:
    print("\n## Memory of each of 8 idle boxes (PSS, MiB)\n\n| | memory of the machine | QEMU, runsc, agent |\n|---|---|---|")
    shapes = [(level, "256 MiB", SMALL) for level in levels] + [("microvm", "1 GiB", LARGE)]
    for level, size, limits in shapes:
        boxes = [make(server, level, limits) for _ in range(8)]
        for box in boxes:
            box.exec(["echo", "hi"])
        time.sleep(3)
        measured = [pss(box) for box in boxes]
        for box in boxes:
            box.kill()
        machine = f"{statistics.median(m for m, _ in measured):.1f}" if level == "microvm" else "-"
        print(f"| {level} {size} | {machine} | {statistics.median(r for _, r in measured):.1f} |", flush=True)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    server = Server("--pool-size", "0").start()
    try:
        levels = usable(server)
        if "microvm" not in levels:
            sys.exit("the level microvm is not usable here: see `sandkeep doctor`")
        print(f"# bench/microvm\n\n{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        print(f"Acceleration: {acceleration(server)}")
        boots(server)
        starts(server, levels, count)
        server.end_boxes()
        server.stop()
        prepared_starts(count)
        server = Server("--pool-size", "0").start()
        snapshots(server, levels, count)
        forks(server, levels)
        memory(server, levels)
    finally:
        server.end_boxes()
        server.stop()


if __name__ == "__main__":
    main()

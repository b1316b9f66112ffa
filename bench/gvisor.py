"""bench/gvisor: sandboxes on two releases of runsc beside the level container, which is what a plain create gets without
KVM: one server each, taking turns at every measurement. Read medians and ratios.

SANDKEEP_BIN names another build of the server.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "tests"), str(REPO / "tests" / "server")]

from boxkit import Box, wait_for  # noqa: E402
from sandkeep_server import Server, binary  # noqa: E402

LIMITS = {"memory_mib": 1024, "cpu_millis": 2000}
# What a build does all day: small files, new processes, walks through a tree.
BUILD = """
set -e; d=$(mktemp -d); cd "$d"
for n in $(seq 300); do mkdir -p s$((n % 20)); echo "int f$n;" > s$((n % 20))/f$n.c; done
for n in $(seq 200); do /bin/true; done
tar cf t.tar s*; mkdir out; tar xf t.tar -C out; find . -type f -exec sha256sum {} + > sums; grep -c f1 sums
find / -xdev -path /proc -prune -o -name '*.py' -size +1 -print | wc -l; rm -rf "$d"
"""
HELD = 200
HOLD = f"head -c {HELD}M /dev/urandom > /dev/shm/held; sync"


class Kind:
    def __init__(self, name: str, level: str, runsc: str, work: Path):
        self.name, self.level, self.runsc = name, level, runsc
        self.state = work / name.replace(" ", "-")
        self.rows: dict[str, list[float]] = defaultdict(list)
        env = {**os.environ, "SANDKEEP_BASE_CACHE": os.environ.get("SANDKEEP_BASE_CACHE", str(REPO / ".cache" / "base"))}
        words = [str(binary()), "init", "--state", str(self.state), "--storage-size", "20GiB"]
        subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)

    def serve(self, pool: int) -> None:
        # Its own runsc, whatever the tests of this host use.
        env = {"SANDKEEP_RUNSC": self.runsc}
        self.server = Server("--isolation-default", self.level, "--pool-size", str(pool), state=self.state, env=env).start()

    def timed(self, row: str, what):
        start = time.perf_counter()
        got = what()
        self.rows[row].append((time.perf_counter() - start) * 1000)
        return got

    def make(self) -> Box:
        return Box(self.server, timeout_seconds=3600)

    def pool_is_full(self) -> bool:
        return self.server.json("GET", "/v1/host")["pooled"] >= 1


def answered(kind: Kind) -> Box:
    box = kind.make()
    assert box.exec(["echo", "hi"]).out == "hi\n"
    return box


def memory_mib(id: str) -> float:
    found = subprocess.run(["find", "/sys/fs/cgroup", "-type", "d", "-name", id], capture_output=True, text=True).stdout.split()
    for place in found:
        for name in ("memory.current", "memory.usage_in_bytes"):
            if (Path(place) / name).exists():
                return int((Path(place) / name).read_text()) / (1 << 20)
    raise RuntimeError(f"no memory cgroup of {id}")


def in_turns(kinds: list[Kind], rounds: int):
    for number in range(rounds):
        yield from kinds[:: 1 if number % 2 else -1]


def measure(kinds: list[Kind], rounds: int) -> None:
    for kind in kinds:
        kind.serve(pool=1)
    for kind in in_turns(kinds, rounds):
        wait_for(kind.pool_is_full, 60)
        kind.timed("pooled create to first echo", lambda kind=kind: answered(kind)).kill()
    for kind in kinds:
        kind.server.stop()
        kind.serve(pool=0)
    boxes = {}
    for kind in in_turns(kinds, rounds):
        box = kind.timed("cold create to first echo", lambda kind=kind: answered(kind))
        if kind.name in boxes:
            kind.timed("kill", box.kill)
        else:
            boxes[kind.name] = box
    for kind in in_turns(kinds, rounds):
        box = boxes[kind.name]
        kind.timed("exec of /bin/true", lambda box=box: box.exec(["/bin/true"]))
        if len(kind.rows["memory of an idle sandbox, MiB"]) < rounds:
            kind.rows["memory of an idle sandbox, MiB"].append(memory_mib(box.id))
    for kind in in_turns(kinds, rounds):
        box = boxes[kind.name]
        ran = kind.timed("a build: 300 files, 200 processes, tar, find", lambda box=box: box.exec(["bash", "-c", BUILD], http_timeout=600))
        assert ran.ok, ran
    for kind in kinds:
        assert boxes[kind.name].root(["bash", "-c", HOLD]).ok
    for kind in in_turns(kinds, rounds):
        box = boxes[kind.name]
        paused = kind.timed(f"pause with {HELD} MB", lambda box=box: box.server.json("POST", box.path + "/pause", {}, timeout=600))
        assert paused["pause"]["mode"] == "disk", paused

        def wake(box=box):
            box.server.json("POST", box.path + "/resume", {}, timeout=600)
            assert box.exec(["/bin/true"]).ok

        kind.timed(f"resume with {HELD} MB to first command", wake)
    for kind in kinds:
        kind.server.end_boxes()
        kind.server.stop()


def main() -> None:
    old, new = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-", dir=os.environ.get("SANDKEEP_BENCH_DIR")) as work:
        kinds = [Kind("container", "container", new, Path(work)), Kind("gvisor old", "gvisor", old, Path(work)), Kind("gvisor new", "gvisor", new, Path(work))]
        try:
            measure(kinds, rounds)
        finally:
            for kind in kinds:
                if getattr(kind, "server", None):
                    kind.server.kill_hard()
                subprocess.run(["umount", "--lazy", str(kind.state / "pool")], stderr=subprocess.DEVNULL)
        versions = [subprocess.run([one, "--version"], capture_output=True, text=True).stdout.split("\n")[0].split()[-1] for one in (old, new)]
        print(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {os.cpu_count()} cores, kernel {platform.release()}, load {os.getloadavg()[1]:.0f}, `{binary().parent.name}` build, runsc {versions[0]} and {versions[1]}\n")
        print("| p50, ms where no unit | n | container | gVisor old | gVisor new | new / container |\n|---|---|---|---|---|---|")
        for row in kinds[0].rows:
            a, b, c = (statistics.median(kind.rows[row]) for kind in kinds)
            print(f"| {row} | {len(kinds[0].rows[row])} | {a:.1f} | {b:.1f} | {c:.1f} | {c / a:.1f} |")


main()

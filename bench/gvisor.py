"""bench/gvisor: sandboxes on two releases of runsc beside the level container, which is what a plain create gets without
KVM: in turns, on one storage. Read medians and ratios.

SANDKEEP_BIN names another build of the server, SANDKEEP_TEST_STATE another storage.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
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
    def __init__(self, name: str, level: str, runsc: str):
        self.name, self.level, self.runsc = name, level, runsc
        self.rows: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def serving(self, pool: int):
        # Its own runsc, whatever the tests of this host use.
        flags = ("--isolation-default", self.level, "--pool-size", str(pool))
        server = Server(*flags, env={"SANDKEEP_RUNSC": self.runsc}).start()
        try:
            yield server
        finally:
            server.end_boxes()
            server.stop()

    def timed(self, row: str, what):
        start = time.perf_counter()
        got = what()
        self.rows[row].append((time.perf_counter() - start) * 1000)
        return got

    def round(self) -> None:
        with self.serving(pool=1) as server:
            wait_for(lambda: server.json("GET", "/v1/host")["pooled"] >= 1, "the pool is full")
            self.timed("pooled create to first echo", lambda: answered(server))
        with self.serving(pool=0) as server:
            # What starts cold once more than in any real server: its caches.
            answered(server).kill()
            box = self.timed("cold create to first echo", lambda: answered(server))
            assert box.made["isolation"] == self.level, box.made
            for _ in range(3):
                self.timed("exec of /bin/true", lambda: box.exec(["/bin/true"]))
            samples = wait_for(lambda: server.json("GET", box.path + "/metrics")["samples"], "it is looked at")
            self.rows["memory of an idle sandbox, MiB"].append(samples[-1]["memory_used"] / (1 << 20))
            ran = self.timed("a build: 300 files, 200 processes, tar, find", lambda: box.exec(["bash", "-c", BUILD], http_timeout=600))
            assert ran.ok, ran
            assert box.root(["bash", "-c", HOLD]).ok
            paused = self.timed(f"pause with {HELD} MB", lambda: server.json("POST", box.path + "/pause", {}, timeout=600))
            assert paused["pause"]["mode"] == "disk", paused

            def wake() -> None:
                server.json("POST", box.path + "/resume", {}, timeout=600)
                assert box.exec(["/bin/true"]).ok

            self.timed(f"resume with {HELD} MB to first command", wake)
            self.timed("kill", box.kill)


def answered(server: Server) -> Box:
    box = Box(server, timeout_seconds=3600)
    assert box.exec(["echo", "hi"]).out == "hi\n"
    return box


def version(runsc: str) -> str:
    said = subprocess.run([runsc, "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0].split()[-1]


def main() -> None:
    old, new = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    kinds = [Kind("container", "container", new), Kind("old", "gvisor", old), Kind("new", "gvisor", new)]
    for number in range(rounds):
        for kind in kinds[:: 1 if number % 2 else -1]:
            kind.round()
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {os.cpu_count()} cores, kernel {platform.release()}, load {os.getloadavg()[1]:.0f}, "
        f"`{binary().parent.name}` build, runsc {version(old)} and {version(new)}\n"
    )
    print("| p50, ms where no unit | n | container | gVisor old | gVisor new | new / container |\n|---|---|---|---|---|---|")
    for row, samples in kinds[0].rows.items():
        a, b, c = (statistics.median(kind.rows[row]) for kind in kinds)
        print(f"| {row} | {len(samples)} | {a:.1f} | {b:.1f} | {c:.1f} | {c / a:.1f} |")


main()

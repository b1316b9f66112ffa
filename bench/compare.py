"""bench/compare: two builds of the server in one run, each with a storage of its own, taking turns at every single
measurement, so that a noisy neighbour hits both alike. Read the ratios.

SANDKEEP_BENCH_LEVELS=container,gvisor and SANDKEEP_BENCH_SIZES=0,200 say which levels and how many megabytes the part
`time` holds.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "tests"), str(REPO / "tests" / "server")]

import create  # noqa: E402
from boxkit import Box  # noqa: E402
from egress import BOUND, ELSEWHERE, ORIGIN, POLICY, SECRET, WIRE, Cable, Moated  # noqa: E402
from sandkeep_server import Server  # noqa: E402
from world import OPENED, RESOLVER, enter  # noqa: E402

LEVELS = os.environ.get("SANDKEEP_BENCH_LEVELS", "container,gvisor").split(",")
SIZES = [int(size) for size in os.environ.get("SANDKEEP_BENCH_SIZES", "0,200").split(",")]
PARTS = ("create", "egress", "time")
POOL = 4
# Enough to fill it with random bytes and come to rest before it is written.
HOLD = "head -c {size}M /dev/urandom > /dev/shm/held; nohup sleep 86400 >/dev/null 2>&1 &"


class Build:
    def __init__(self, name: str, binary: Path, work: Path, cable: Cable):
        self.name, self.binary, self.cable = name, binary, cable
        self.server: Server | None = None
        self.state = work / name
        env = {**os.environ, "SANDKEEP_BASE_CACHE": os.environ.get("SANDKEEP_BASE_CACHE", str(REPO / ".cache" / "base"))}
        words = [str(binary), "init", "--state", str(self.state), "--storage-size", "20GiB"]
        subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)

    def serve(self, *flags: str) -> SimpleNamespace:
        os.environ["SANDKEEP_BIN"] = str(self.binary)
        server = Server("--dns", f"{RESOLVER}:53", "--allow-private", ",".join(OPENED), "--upstream-ca", str(self.cable.certificate),
                        *flags, state=self.state).start()  # fmt: skip
        self.server = server
        return SimpleNamespace(name=self.name, server=server, client=create.Client(server))


class Samples:
    def __init__(self):
        self.rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, row: str, build: str, *values: float) -> None:
        self.rows[row][build].extend(values)

    def timed(self, row: str, build: str, what) -> object:
        start = time.perf_counter()
        got = what()
        self.add(row, build, (time.perf_counter() - start) * 1000)
        return got

    def report(self) -> None:
        print("| what (ms where no unit) | n | old p50 | new p50 | new / old |\n|---|---|---|---|---|")
        for row, builds in self.rows.items():
            old, new = builds["old"], builds["new"]
            if not old or not new:
                print(f"| {row} | {len(old)}/{len(new)} | {'–' if not old else round(statistics.median(old), 2)} | {'–' if not new else round(statistics.median(new), 2)} | |")
                continue
            a, b = statistics.median(old), statistics.median(new)
            print(f"| {row} | {len(old)} | {a:.2f} | {b:.2f} | {b / a:.2f} |")


def measure_create(builds: list[Build], rounds: int, got: Samples) -> None:
    for pool in (POOL, 0):
        kind = "pooled" if pool else "cold"
        running = [build.serve("--pool-size", str(pool)) for build in builds]
        for number in range(rounds):
            # Who is first has the colder caches: they take turns at that, too.
            for one in running[:: 1 if number % 2 else -1]:
                if pool:
                    create.wait_pool(one.client, pool)
                start = time.perf_counter()
                box = one.client.create()
                one.client.echo(box)
                got.add(f"{kind} create to first echo", one.name, (time.perf_counter() - start) * 1000)
                if pool:
                    for _ in range(3):
                        got.timed("exec through a login shell", one.name, lambda one=one, box=box: one.client.echo(box))
                        got.timed("exec of a program", one.name, lambda one=one, box=box: one.client.true(box))
                got.timed(f"{kind} kill", one.name, lambda one=one, box=box: one.client.kill(box))
        stop(running)


def measure_egress(builds: list[Build], rounds: int, got: Samples) -> None:
    running = [build.serve("--pool-size", "0") for build in builds]
    ways = {}
    for one in running:
        one.server.json("POST", "/v1/secrets", {"name": "bench", "value": SECRET})
        box = Box(one.server, network=POLICY | BOUND, timeout_seconds=7200)
        box.write("/tmp/wire.py", WIRE.read_bytes())
        ways[one.name] = Moated(box)
    for row, what, address, argument, unit in (
        ("egress: round trip, open connection", "round-trip", ORIGIN, 1000, 1),
        ("egress: new connection by address", "first-byte", ORIGIN, 200, 1),
        ("egress: new HTTP connection by name", "web", "name", 200, 1),
        ("egress: download, s for a GB", "down", ORIGIN, 1 << 28, -1e9),
        ("egress: upload, s for a GB", "up", ORIGIN, 1 << 28, -1e9),
        ("egress under interception: new TLS connection", "secure-first-byte", "name", 50, 1),
        ("egress under interception: download, s for a GB", "secure-down", "name", 1 << 26, -1e9),
        ("egress under interception: an event of a stream", "events", "name", 50, 1),
        ("egress: refusal of a name", "refused-name", ORIGIN, 50, 1),
        ("egress: refusal of an address", "refused-address", ELSEWHERE, 50, 1),
    ):
        for number in range(max(3, rounds // 6)):
            for one in running[:: 1 if number % 2 else -1]:
                value = ways[one.name].measure(what, address, argument)
                values = value if isinstance(value, list) else [value]
                # One figure of a round, so that rounds weigh alike.
                got.add(row, one.name, statistics.median([-unit / v if unit < 0 else v for v in values]))
    stop(running)


def measure_time(builds: list[Build], rounds: int, got: Samples) -> None:
    running = [build.serve("--pool-size", "0") for build in builds]
    for level in LEVELS:
        for size in SIZES:
            rows = f"{level}, {size} MB: "
            boxes = {}
            for one in running:
                limits = {"memory_mib": 2 * size + 512}
                boxes[one.name] = Box(one.server, isolation=level, timeout_seconds=7200, limits=limits)
                ran = boxes[one.name].exec(["bash", "-c", HOLD.format(size=size)])
                if not ran.ok:
                    raise RuntimeError(str(ran))
            for number in range(max(5, rounds // 6)):
                for one in running[:: 1 if number % 2 else -1]:
                    life(one.server, boxes[one.name], one.name, rows, got)
            for box in boxes.values():
                box.kill()
    stop(running)


def life(server: Server, box: Box, name: str, rows: str, got: Samples) -> None:
    point = got.timed(rows + "snapshot", name, lambda: server.json("POST", f"{box.path}/points", {}))
    if not point["memory"]:
        raise RuntimeError(f"{name}: no memory in {point}")
    paused = got.timed(rows + "pause", name, lambda: server.json("POST", f"{box.path}/pause", {}))
    if paused["pause"]["mode"] != "disk":
        raise RuntimeError(f"{name}: {paused}")

    def resume():
        server.json("POST", f"{box.path}/resume", {"timeout_seconds": 7200})
        box.exec(["/bin/true"])

    got.timed(rows + "resume to first answer", name, resume)

    def rollback():
        server.json("POST", f"{box.path}/rollback", {"to": point["id"]})
        box.exec(["/bin/true"])

    got.timed(rows + "rollback to first answer", name, rollback)
    forks = got.timed(rows + "fork", name, lambda: server.json("POST", f"{box.path}/fork", {"count": 1}))["forks"]
    server.json("DELETE", f"/v1/sandboxes/{forks[0]['sandbox']['id']}")
    server.json("DELETE", f"/v1/points/{point['id']}")
    files = got.timed(rows + "snapshot of files", name, lambda: server.json("POST", f"{box.path}/points", {"memory": False}))
    server.json("DELETE", f"/v1/points/{files['id']}")


def stop(running: list[SimpleNamespace]) -> None:
    for one in running:
        one.server.end_boxes()
        one.server.stop()


def main() -> None:
    old, new, *rest = sys.argv[1:]
    rounds = int(rest.pop(0)) if rest and rest[0].isdigit() else 60
    parts = rest or PARTS
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"error: there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    work = Path(tempfile.mkdtemp(prefix="sandkeep-compare-", dir=REPO / ".cache"))
    cable = Cable(work)
    enter(cable.here)
    got = Samples()
    builds: list[Build] = []
    try:
        builds = [Build("old", Path(old).resolve(), work, cable), Build("new", Path(new).resolve(), work, cable)]
        for part in parts:
            globals()[f"measure_{part}"](builds, rounds, got)
    finally:
        # A measurement that broke off leaves no sandbox behind.
        for build in builds:
            if build.server and build.server.process and build.server.process.poll() is None:
                build.server.end_boxes()
                build.server.stop()
        cable.close()
        model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
        print(f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {os.cpu_count()} cores ({model}), kernel {platform.release()}, load {os.getloadavg()[0]:.1f}, `sudo bench/compare OLD NEW {rounds} {' '.join(parts)}`\n")
        got.report()
        for name in ("old", "new"):
            with suppress(OSError, subprocess.CalledProcessError):
                subprocess.run(["umount", str(work / name / "pool")], capture_output=True)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

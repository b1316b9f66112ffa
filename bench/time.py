"""bench/time: what time travel costs, by the memory a box holds, beside runsc, podman and docker by hand.

Medians are what to read; see bench/README.md. SANDKEEP_BENCH_SIZES=0,200 measures these sizes, SANDKEEP_BENCH_LEVELS
(gvisor,container) these levels, SANDKEEP_BENCH_ALONE=1 nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

import create  # noqa: E402
from create import timed  # noqa: E402
from engines import ULIMITS, Docker, hide_hybrid_cgroups, with_criu  # noqa: E402
from sandkeep_server import Server  # noqa: E402

QUICK = "quick" in sys.argv[1:]
SIZES = tuple(int(size) for size in os.environ["SANDKEEP_BENCH_SIZES"].split(",")) if "SANDKEEP_BENCH_SIZES" in os.environ else (0, 50) if QUICK else (0, 50, 200, 500)
LEVELS = os.environ.get("SANDKEEP_BENCH_LEVELS", "gvisor,container").split(",")
ALONE = os.environ.get("SANDKEEP_BENCH_ALONE") == "1"
ROUNDS = 2 if QUICK else 5
FORKS = {1: 2, 4: 1} if QUICK else {1: 3, 4: 2, 16: 1}
PAUSE_AFTER_A_START = 0.2

# What CRIU refuses to write: a message queue.
QUEUE = """
import ctypes, os, time
attributes = (ctypes.c_long * 8)(0, 1, 16, 0)
assert ctypes.CDLL(None).mq_open(b"/held", os.O_CREAT | os.O_RDWR, 0o600, attributes) >= 0
time.sleep(3600)
"""

# Holds so many megabytes that nothing packs, and notes the longest time it was not running.
HOLDER = """
import os, sys, time
ballast = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]
place = sys.argv[2]
longest, last = 0.0, time.time()
open(place + "/ready", "w").close()
while True:
    time.sleep(0.0005)
    now = time.time()
    longest = max(longest, now - last)
    last = now
    if os.path.exists(place + "/reset"):
        os.remove(place + "/reset")
        longest = 0.0
    if os.path.exists(place + "/tell"):
        with open(place + "/told.new", "w") as out:
            out.write(str(longest * 1000))
        os.rename(place + "/told.new", place + "/told")
        os.remove(place + "/tell")
        last = time.time()
"""


def median(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


def pids_in(name: str) -> set[str]:
    """All processes in cgroups that have this in their path."""
    pids = set()
    for procs in Path("/sys/fs/cgroup").glob("**/cgroup.procs"):
        if name in str(procs):
            with contextlib.suppress(OSError):
                pids |= set(procs.read_text().split())
    return pids


def ram_of(boxes: list[str]) -> float:
    """Mebibytes of all processes of these boxes; what they share counts once. Only for levels whose cgroups are
    named after their boxes."""
    return pss(set().union(*(pids_in(box) for box in boxes)))


def pss(pids: set[str]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class Table:
    """Rows by what is measured, columns by the memory held."""

    def __init__(self):
        self.cells: dict[str, dict[int, str]] = {}

    def add(self, row: str, size: int, samples: list[float], unit: str = "") -> None:
        if samples:
            value = median(samples)
            text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
            self.cells.setdefault(row, {})[size] = f"{text}{unit}"

    def lines(self) -> list[str]:
        sizes = sorted({size for row in self.cells.values() for size in row})
        head = "| what (p50, ms where no unit) | " + " | ".join(f"{size} MB" for size in sizes) + " |"
        out = [head, "|---|" + "---|" * len(sizes)]
        for name, row in self.cells.items():
            out.append(f"| {name} | " + " | ".join(row.get(size, "–") for size in sizes) + " |")
        return out


class Bench:
    def __init__(self, server: Server):
        self.server = server
        self.client = create.Client(server)
        self.table = Table()
        self.notes: list[str] = []
        self.aims: dict[str, tuple[float | None, float]] = {}

    def call(self, method: str, path: str, body: object = None):
        got = self.client.call(method, path, body)
        return json.loads(got) if got else None

    def box(self, level: str, size: int, **more) -> str:
        limits = {"memory_mib": size * 2 + 512}
        wish = {"isolation": level, "timeout_seconds": 3600, "limits": limits, **more}
        return self.call("POST", "/v1/sandboxes", wish)["id"]

    def exec(self, box: str, *words: str) -> str:
        answer = self.call("POST", f"/v1/sandboxes/{box}/exec", {"cmd": list(words), "user": "root"})
        if answer["exit_code"] != 0:
            raise RuntimeError(f"{words}: {answer}")
        return answer["stdout"]

    def answers(self, box: str) -> None:
        if self.exec(box, "/bin/echo", "hi") != "hi\n":
            raise RuntimeError("no answer")

    def hold(self, box: str, size: int) -> None:
        start = f"cat > /root/hold.py <<'END'\n{HOLDER}\nEND\nmkdir -p /dev/shm/hold; nohup python3 /root/hold.py {size} /dev/shm/hold >/dev/null 2>&1 & until [ -e /dev/shm/hold/ready ]; do sleep 0.05; done"
        self.exec(box, "bash", "-c", start)

    def reset(self, box: str) -> None:
        self.exec(box, "bash", "-c", "touch /dev/shm/hold/reset; while [ -e /dev/shm/hold/reset ]; do sleep 0.01; done")

    def gap(self, box: str) -> float:
        tell = "rm -f /dev/shm/hold/told; touch /dev/shm/hold/tell; until [ -e /dev/shm/hold/told ]; do sleep 0.01; done; cat /dev/shm/hold/told"
        return float(self.exec(box, "bash", "-c", tell))

    def kill(self, box: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{box}")

    def delete_point(self, point: str) -> None:
        self.call("DELETE", f"/v1/points/{point}")

    def ram(self, level: str, boxes: list[str]) -> float:
        """Mebibytes of boxes that run. Cgroups of containers have other names, but count all that is theirs."""
        if level == "gvisor":
            return ram_of(boxes)
        usages = [self.call("GET", f"/v1/sandboxes/{box}")["usage"] for box in boxes]
        return sum(usage["memory_bytes"] for usage in usages) / 2**20

    def memory(self, level: str, size: int) -> None:
        """Everything that has the memory in it."""
        without = pss(pids_in("sandkeep"))
        box = self.box(level, size)
        path = f"/v1/sandboxes/{box}"
        self.hold(box, size)
        time.sleep(PAUSE_AFTER_A_START)
        running = self.ram(level, [box])
        snapshots, gaps, pauses, resumes, wakes, backs = [], [], [], [], [], []
        mode, point, paused_ram, on_disk = "?", None, [], []
        for _ in range(ROUNDS):
            self.reset(box)
            start = time.perf_counter()
            made = self.call("POST", path + "/points", {})
            snapshots.append((time.perf_counter() - start) * 1000)
            gaps.append(self.gap(box))
            if point:
                self.delete_point(point["id"])
            point = made
            on_disk.append(made["bytes"] / 2**20)
            start = time.perf_counter()
            mode = self.call("POST", path + "/pause", {})["pause"]["mode"]
            pauses.append((time.perf_counter() - start) * 1000)
            subprocess.run(["sync", "--file-system", str(self.server.state / "pool")], check=True)
            # Whatever has come since before the box was made is the box's.
            paused_ram.append(max(0.0, pss(pids_in("sandkeep")) - without))
            start = time.perf_counter()
            self.call("POST", path + "/resume", {"timeout_seconds": 3600})
            wakes.append((time.perf_counter() - start) * 1000)
            self.answers(box)
            resumes.append((time.perf_counter() - start) * 1000)
            start = time.perf_counter()
            self.call("POST", path + "/rollback", {"to": point["id"]})
            self.answers(box)
            backs.append((time.perf_counter() - start) * 1000)
            if not point["memory"]:
                # What it held went with its processes.
                self.hold(box, size)
        first = [self.after_a_restart(box) for _ in range(ROUNDS // 2)]
        what = "memory" if point["memory"] else "files"
        name = f"{level} ({mode})"
        add = self.table.add
        add(f"{level}: snapshot ({what})", size, snapshots)
        add(f"{level}: longest gap in the box during it", size, gaps)
        add(f"{name}: pause", size, pauses)
        add(f"{name}: resume", size, wakes)
        add(f"{name}: resume to first answer", size, resumes)
        add(f"{name}: first resume of a server, to first answer", size, first)
        add(f"{level}: rollback to first answer ({what})", size, backs)
        for count, rounds in FORKS.items():
            took, ram, disk = [], [], []
            for _ in range(rounds):
                start = time.perf_counter()
                forks = self.call("POST", path + "/fork", {"count": count})["forks"]
                took.append((time.perf_counter() - start) * 1000)
                made = [fork["sandbox"]["id"] for fork in forks if "sandbox" in fork]
                if len(made) < count:
                    raise RuntimeError(f"not all forks were made: {forks}")
                self.answers(made[-1])
                if count == max(FORKS):
                    ram.append(self.ram(level, made) / count)
                    written = [self.call("GET", f"/v1/sandboxes/{fork}")["usage"]["disk_bytes"] for fork in made]
                    disk.append(sum(written) / count / 2**20)
                for fork in made:
                    self.kill(fork)
            add(f"{level}: fork ×{count}, all ready ({what})", size, took)
            if count == max(FORKS):
                add(f"{level}: RAM of each of {count} forks", size, ram, " MiB")
                add(f"{level}: disk of each of {count} forks", size, disk, " MiB")
        add(f"{level}: RAM of the running box", size, [running], " MiB")
        add(f"{name}: RAM of the paused box", size, paused_ram, " MiB")
        add(f"{level}: disk of a point (memory, and what the box had written)", size, on_disk, " MiB")
        self.kill(box)
        self.delete_point(point["id"])
        if level == "gvisor" and size == 0:
            self.aims["gVisor resume to first answer, 0 MB"] = (median(resumes), 450)
        if level == "gvisor" and size == 200:
            self.aims["gVisor resume to first answer, 200 MB"] = (median(resumes), 450)
        if level == "container" and mode == "ram" and size == SIZES[0]:
            self.aims["container: wake from the freezer"] = (median(wakes), 5)
        if level == "container" and mode == "disk" and size == 200:
            self.aims["container resume to first answer, 200 MB"] = (median(resumes), 300)

    def after_a_restart(self, box: str) -> float:
        """The first resume of a server reads the image through before it is used."""
        self.call("POST", f"/v1/sandboxes/{box}/pause", {})
        self.server.stop()
        self.server.start()
        self.client = create.Client(self.server)
        start = time.perf_counter()
        self.call("POST", f"/v1/sandboxes/{box}/resume", {"timeout_seconds": 3600})
        self.answers(box)
        return (time.perf_counter() - start) * 1000

    def freezer(self) -> None:
        """Frozen in memory: what the container level does with what can not be written to disk."""
        box = self.box("container", 0)
        path = f"/v1/sandboxes/{box}"
        self.exec(box, "bash", "-c", f"nohup python3 -c '{QUEUE}' > /dev/null 2>&1 & sleep 1")
        wakes = []
        for _ in range(ROUNDS * 2):
            if self.call("POST", path + "/pause", {})["pause"]["mode"] != "ram":
                self.notes.append("- wake from the freezer: the memory of the box went to disk")
                break
            wakes.append(timed(lambda: self.call("POST", path + "/resume", {"timeout_seconds": 3600})))
        self.kill(box)
        if wakes:
            self.aims["container: wake from the freezer"] = (median(wakes), 5)

    def files(self) -> None:
        """Files alone: what commit and run would be elsewhere."""
        box = self.box("container", 0)
        path = f"/v1/sandboxes/{box}"
        snapshots, forks, backs, resumes = [], [], [], []
        for number in range(ROUNDS * 3):
            self.exec(box, "bash", "-c", f"head -c 1000000 /dev/urandom > /root/file{number}")
            start = time.perf_counter()
            point = self.call("POST", path + "/points", {"memory": False})["id"]
            snapshots.append((time.perf_counter() - start) * 1000)
            start = time.perf_counter()
            fork = self.call("POST", "/v1/sandboxes", {"from_point": point, "timeout_seconds": 600})["id"]
            self.answers(fork)
            forks.append((time.perf_counter() - start) * 1000)
            self.kill(fork)
            start = time.perf_counter()
            self.call("POST", path + "/rollback", {"to": point})
            self.answers(box)
            backs.append((time.perf_counter() - start) * 1000)
            self.call("POST", path + "/pause", {"memory": False})
            start = time.perf_counter()
            self.call("POST", path + "/resume", {"timeout_seconds": 3600})
            self.answers(box)
            resumes.append((time.perf_counter() - start) * 1000)
            self.delete_point(point)
        self.kill(box)
        for name, samples in (("snapshot", snapshots), ("a box from it, to first answer", forks), ("rollback to first answer", backs), ("resume (cold) to first answer", resumes)):
            self.table.add(f"files only: {name}", 0, samples)
        self.aims["files only: snapshot"] = (median(snapshots), 20)


def bundle(work: Path, root: Path, size: int) -> Path:
    """What `runsc` is given by hand: a copy of the template with the holder as its process."""
    place = work / f"bundle-{size}"
    place.mkdir()
    spec = json.loads(subprocess.run(["runsc", "spec", "-cwd", "/", "--", "true"], cwd=place, capture_output=True, check=True).stdout or "{}")
    if not spec:
        spec = json.loads((place / "config.json").read_text())
    spec["root"] = {"path": str(root), "readonly": True}
    spec["process"]["terminal"] = False
    spec["process"]["args"] = ["python3", "-c", HOLDER, str(size), "/dev/shm"]
    spec["mounts"] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
    ]
    (place / "config.json").write_text(json.dumps(spec))
    return place


def runsc_by_hand(bench: Bench, work: Path, root: Path) -> None:
    if not shutil.which("runsc"):
        bench.notes.append("- runsc by hand: not installed")
        return
    base = ["runsc", "--root", str(work / "runsc"), "--platform=systrap", "--network=none", "--overlay2=none", "--ignore-cgroups"]

    def runsc(*words: str) -> None:
        # A detached sandbox keeps what it was given open; nobody reads a pipe to its end.
        with open(work / "runsc.log", "w+") as log:
            done = subprocess.run([*base, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120)
            log.seek(0)
            if done.returncode != 0:
                raise RuntimeError(f"runsc {words[0]}: {log.read()[-300:]}")

    for size in SIZES:
        place = bundle(work, root, size)
        name, image = f"bench{size}", work / f"image-{size}"
        pauses, resumes = [], []
        runsc("run", "--detach", "--bundle", str(place), name)
        runsc("exec", name, "bash", "-c", "until [ -e /dev/shm/ready ]; do sleep 0.05; done")
        for _ in range(max(2, ROUNDS - 2)):
            shutil.rmtree(image, ignore_errors=True)
            image.mkdir()
            start = time.perf_counter()
            runsc("checkpoint", "-compression", "none", "-image-path", str(image), name)
            with contextlib.suppress(RuntimeError):
                runsc("delete", "-force", name)
            for file in image.iterdir():
                with file.open() as opened:
                    os.fsync(opened.fileno())
            pauses.append((time.perf_counter() - start) * 1000)
            start = time.perf_counter()
            runsc("restore", "--detach", "--bundle", str(place), "-image-path", str(image), name)
            runsc("exec", name, "/bin/echo", "hi")
            resumes.append((time.perf_counter() - start) * 1000)
        with contextlib.suppress(RuntimeError):
            runsc("delete", "-force", name)
        shutil.rmtree(image, ignore_errors=True)
        bench.table.add("runsc by hand: checkpoint, end, fsync", size, pauses)
        bench.table.add("runsc by hand: restore to first answer", size, resumes)


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


class Other:
    """`podman` or `docker` as a user has it."""

    def __init__(self, engine: str, words: list[str], bench: Bench):
        self.engine, self.words, self.bench = engine, words, bench

    def __call__(self, *words: str, limit: float = 120, **options) -> str:
        done = subprocess.run([*self.words, *words], capture_output=True, text=True, timeout=limit, env=with_criu(), **options)
        if done.returncode != 0:
            raise RuntimeError(f"{self.engine} {' '.join(words[:2])}: {last_line(done.stderr)}")
        return done.stdout.strip()

    def measure(self, root: Path) -> None:
        notes = self.bench.notes
        try:
            with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
                self("import", "-", "sandkeep-bench", stdin=tar.stdout, limit=240)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            notes.append(f"- {self.engine}: does not run here: {str(error)[:250]}")
            return
        for what in (self.commit, self.checkpoint):
            try:
                what()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                notes.append(f"- {self.engine}, {what.__name__}: does not run here: {str(error)[:250]}")
            finally:
                self.end()

    def start(self, size: int) -> None:
        self("run", "--detach", "--name", "bench", "--network", "none", *ULIMITS, "sandkeep-bench", "python3", "-c", HOLDER, str(size), "/dev/shm")
        self("exec", "bench", "bash", "-c", "until [ -e /dev/shm/ready ]; do sleep 0.05; done")

    def end(self) -> None:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self("rm", "--force", "bench")

    def commit(self) -> None:
        self.start(0)
        commits, runs = [], []
        for number in range(2 if QUICK else 3):
            self("exec", "bench", "bash", "-c", f"head -c 1000000 /dev/urandom > /root/file{number}")
            commits.append(timed(lambda n=number: self("commit", "bench", f"kept{n}")))
            runs.append(timed(lambda n=number: self("run", "--rm", "--network", "none", *ULIMITS, f"kept{n}", "/bin/echo", "hi")))
        self.bench.table.add(f"{self.engine} commit (files only)", 0, commits)
        self.bench.table.add(f"{self.engine} run of it, to first answer", 0, runs)

    def checkpoint(self) -> None:
        for size in SIZES:
            self.start(size)
            pauses, resumes = [], []
            for number in range(2 if QUICK else 3):
                # A name is for one checkpoint, and has at least two letters.
                name = f"round{number}"

                def rest(name: str = name) -> None:
                    if self.engine == "podman":
                        self("container", "checkpoint", "bench")
                    else:
                        self("checkpoint", "create", "bench", name)

                def wake(name: str = name) -> None:
                    if self.engine == "podman":
                        self("container", "restore", "bench")
                    else:
                        self("start", "--checkpoint", name, "bench")
                    self("exec", "bench", "/bin/echo", "hi")

                pauses.append(timed(rest))
                resumes.append(timed(wake))
            self.end()
            self.bench.table.add(f"{self.engine} checkpoint", size, pauses)
            self.bench.table.add(f"{self.engine} restore to first answer", size, resumes)


def beside(bench: Bench, work: Path, others: Path, root: Path) -> None:
    """What a user would pick instead."""
    try:
        runsc_by_hand(bench, work, root)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        bench.notes.append(f"- runsc by hand: {str(error)[:250]}")
    # Their images are tens of thousands of files, which some disks take minutes to delete.
    others.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "sandkeep-bench", str(others)], check=True)
    bench.notes.append("- podman and docker have their files in memory here, and never wait for a disk")
    if shutil.which("podman"):
        store = ["--root", str(others / "podman"), "--runroot", str(others / "podman-run")]
        # Of the runtimes that Debian packages, runc is the one that was built with checkpoints.
        runtime = "runc" if shutil.which("runc") else "crun"
        Other("podman", [*hide_hybrid_cgroups(), "podman", "--runtime", runtime, *store], bench).measure(root)
    else:
        bench.notes.append("- podman: not installed")
    docker = Docker(others)
    if docker.start():
        Other("docker", docker.words, bench).measure(root)
        docker.stop()
    else:
        bench.notes.append(f"- docker: {docker.why_not}")


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="sandkeep-bench-"))
    others = work / "others"
    server = Server("--pool-size", "0", "--max-boxes", "200").start()
    bench = Bench(server)
    root = create.template_root(server.state)
    begun = time.monotonic()
    try:
        for level in LEVELS:
            for size in SIZES:
                try:
                    bench.memory(level, size)
                except RuntimeError as error:
                    bench.notes.append(f"- {level}, {size} MB: {str(error)[:250]}")
                    server.end_boxes()
                    bench.client = create.Client(server)
        bench.files()
        bench.freezer()
        if not ALONE:
            beside(bench, work, others, root)
    finally:
        server.end_boxes()
        for point in server.json("GET", "/v1/points")["points"]:
            server.request("DELETE", f"/v1/points/{point['id']}")
        server.stop()
        subprocess.run(["umount", "--lazy", str(others / "podman" / "overlay")], capture_output=True)
        subprocess.run(["umount", "--lazy", str(others)], capture_output=True)
        shutil.rmtree(work, ignore_errors=True)
    cpu = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?")
    words = " ".join(["sudo bench/time", *sys.argv[1:]])
    print(f"{time.strftime('%Y-%m-%d %H:%M')} UTC, {os.cpu_count()} cores ({cpu}), kernel {platform.release()}, `{words}`, {time.monotonic() - begun:.0f} s")
    print()
    print("\n".join(bench.table.lines()))
    print()
    print("| aim | p50 ms | at most | |\n|---|---|---|---|")
    for name, (got, most) in bench.aims.items():
        print(f"| {name} | {got:.1f} | {most:.0f} | {'reached' if got <= most else 'missed'} |")
    if bench.notes:
        print("\n" + "\n".join(bench.notes))


if __name__ == "__main__":
    main()

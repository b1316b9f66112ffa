"""bench/create: API create to the first output of `echo`, cold and pooled, beside crun, bwrap, podman and docker.

All in one run, taking turns, so that a noisy neighbour hits everybody alike. Medians and
ratios are what to read; see bench/README.md.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

from engines import ULIMITS, Docker, hide_hybrid_cgroups  # noqa: E402
from sandkeep_server import Server  # noqa: E402


def envelope(message: dict) -> bytes:
    data = json.dumps(message).encode()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Client:
    """One keep-alive HTTP/1.1 connection, as an SDK holds it, with as little Python around it as can be."""

    def __init__(self, server: Server):
        self.server = server
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, method: str, path: str, body: object = None, headers: dict | None = None) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        sent = {"Host": "localhost", "X-API-Key": self.server.key, "Content-Type": "application/json", **(headers or {}), "Content-Length": len(data)}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in sent.items()) + "\r\n"
        self.socket.sendall(head.encode() + data)
        got = self.receive(b"", lambda got: b"\r\n\r\n" in got)
        answer, _, body = got.partition(b"\r\n\r\n")
        status, lines = int(answer[9:12]), answer.lower()
        if b"transfer-encoding: chunked" in lines:
            body = self.receive(body, lambda got: got.endswith(b"\r\n0\r\n\r\n") or got == b"0\r\n\r\n")
        elif b"content-length: " in lines:
            length = int(lines.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = self.receive(body, lambda got: len(got) >= length)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {body[:300]!r}")
        return body

    def receive(self, got: bytes, whole) -> bytes:
        while not whole(got):
            more = self.socket.recv(65_536)
            if not more:
                raise RuntimeError(f"the connection was closed after {got[:300]!r}")
            got += more
        return got

    def create(self) -> dict:
        return json.loads(self.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600}))

    def echo(self, box: dict) -> None:
        """The call an SDK makes for `commands.run("echo hi")`, until its output has arrived."""
        start = envelope({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "echo hi"]}, "stdin": False})
        got = self.call(
            "POST", "/process.Process/Start", start,
            {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": "49983", "X-Access-Token": box["envdAccessToken"],
             "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
        )
        if b"aGkK" not in got:
            raise RuntimeError(f"no output: {got[:300]!r}")

    def true(self, box: dict) -> None:
        start = envelope({"process": {"cmd": "/bin/true", "args": []}, "stdin": False})
        self.call(
            "POST", "/process.Process/Start", start,
            {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": "49983", "X-Access-Token": box["envdAccessToken"],
             "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
        )

    def kill(self, box: dict) -> None:
        self.call("DELETE", f"/sandboxes/{box['sandboxID']}")


def timed(what) -> float:
    start = time.perf_counter()
    what()
    return (time.perf_counter() - start) * 1000


def row(name: str, samples: list[float]) -> str:
    samples = sorted(samples)
    p = lambda q: samples[min(len(samples) - 1, int(q * len(samples)))]  # noqa: E731
    return f"| {name} | {len(samples)} | {statistics.median(samples):.2f} | {p(0.1):.2f} | {p(0.9):.2f} | {samples[-1]:.2f} |"


def wait_pool(client: Client, size: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if json.loads(client.call("GET", "/v1/host"))["pooled"] >= size:
            return
        time.sleep(0.02)
    raise RuntimeError("the pool did not fill")


def template_root(state: Path) -> Path:
    root = state / "pool" / "templates" / "base" / "root"
    if (root / "bin/bash").exists():
        return root
    raise RuntimeError(f"no base template under {state}/pool")


class Rival:
    """Another way to get `echo hi` out of a fresh sandbox."""

    def __init__(self, name: str, command: list[str], ready: bool, why_not: str = ""):
        self.name, self.command, self.ready, self.why_not = name, command, ready, why_not

    def run(self) -> None:
        out = subprocess.run(self.command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        if out.stdout.strip() != b"hi":
            raise RuntimeError(f"{self.name}: {out.returncode} {out.stdout[-200:]!r} {out.stderr[-300:]!r}")


def crun_bundle(root: Path, work: Path) -> list[str]:
    """A bundle with the namespaces and the root a box has; crun refuses hybrid cgroups, so the v2 tree is hidden from it."""
    bundle = work / "bundle"
    bundle.mkdir()
    subprocess.run(["crun", "spec"], cwd=bundle, check=True)
    spec = json.loads((bundle / "config.json").read_text())
    spec["root"] = {"path": str(root), "readonly": True}
    spec["process"]["terminal"] = False
    spec["process"]["args"] = ["/bin/bash", "-l", "-c", "echo hi"]
    spec["process"].pop("rlimits", None)
    (bundle / "config.json").write_text(json.dumps(spec))
    return ["sh", "-c", f"exec crun run --bundle {bundle} bench-$$"]


def rivals(root: Path, work: Path, docker: Docker) -> list[Rival]:
    found = []
    inner = ["/bin/bash", "-l", "-c", "echo hi"]
    prefix = hide_hybrid_cgroups()
    if shutil.which("crun"):
        command = prefix + crun_bundle(root, work)
        found.append(Rival("crun run", command, True))
    else:
        found.append(Rival("crun run", [], False, "not installed"))
    if shutil.which("bwrap"):
        found.append(Rival("bwrap --unshare-all", ["bwrap", "--unshare-all", "--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", *inner], True))
    else:
        found.append(Rival("bwrap", [], False, "not installed"))
    if shutil.which("podman"):
        command = [*prefix, "podman", "--runtime", "crun", "run", "--rm", "--network", "none", *ULIMITS, "--rootfs", f"{root}:O", *inner]
        found.append(Rival("podman run", command, True))
    else:
        found.append(Rival("podman run", [], False, "not installed"))
    if docker.start():
        docker.import_root(root, "sandkeep-bench")
        found.append(Rival("docker run", [*docker.words, "run", "--rm", "--network", "none", "sandkeep-bench", *inner], True))
    else:
        found.append(Rival("docker run", [], False, docker.why_not))
    for rival in found:
        if rival.ready:
            try:
                rival.run()
            except Exception as error:  # noqa: BLE001 a rival that does not run here is named, not hidden
                rival.ready, rival.why_not = False, f"does not run here: {str(error)[:160]}"
    return found


def memory_available() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")) * 1024


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    many = int(os.environ.get("SANDKEEP_BENCH_IDLE", "1000"))
    work = Path(tempfile.mkdtemp(prefix="sandkeep-bench-"))
    lines = ["| what | n | p50 ms | p10 | p90 | max |", "|---|---|---|---|---|---|"]
    notes = []
    pool = 8
    warm = Server("--pool-size", str(pool), "--max-boxes", "4000").start()
    client = Client(warm)
    docker = Docker(work)
    others = rivals(template_root(warm.state), work, docker)
    create, first, whole, execs, trues = [], [], [], [], []
    beside: dict[str, list[float]] = {rival.name: [] for rival in others if rival.ready}
    wait_pool(client, pool)
    for _ in range(count):
        wait_pool(client, pool)
        start = time.perf_counter()
        box = client.create()
        made = time.perf_counter()
        client.echo(box)
        end = time.perf_counter()
        create.append((made - start) * 1000)
        whole.append((end - start) * 1000)
        first.append((end - made) * 1000)
        for _ in range(2):
            execs.append(timed(lambda: client.echo(box)))
            trues.append(timed(lambda: client.true(box)))
        client.kill(box)
        for rival in others:
            if rival.ready:
                beside[rival.name].append(timed(rival.run))
    warm.end_boxes()
    warm.stop()

    cold = Server("--pool-size", "0", "--max-boxes", "4000").start()
    client = Client(cold)
    cold_whole, crun_beside = [], []
    crun = next((r for r in others if r.name == "crun run" and r.ready), None)
    for _ in range(count):
        start = time.perf_counter()
        box = client.create()
        client.echo(box)
        cold_whole.append((time.perf_counter() - start) * 1000)
        client.kill(box)
        if crun:
            crun_beside.append(timed(crun.run))
    docker.stop()
    lines.append(row("pooled: create -> first echo", whole))
    lines.append(row("pooled: create alone", create))
    lines.append(row("pooled: first echo alone", first))
    lines.append(row("cold: create -> first echo", cold_whole))
    lines.append(row("live box: `bash -l -c echo` round trip", execs))
    lines.append(row("live box: `/bin/true` round trip", trues))
    for name, samples in beside.items():
        lines.append(row(name, samples))
    if crun_beside:
        lines.append(row("crun run, beside the cold boxes", crun_beside))
    for rival in others:
        if not rival.ready:
            notes.append(f"- {rival.name}: {rival.why_not}")

    faults: list[str] = []
    done: list[dict] = []

    def one() -> None:
        try:
            mine = Client(cold)
            box = mine.create()
            mine.echo(box)
            done.append(box)
        except Exception as error:  # noqa: BLE001
            faults.append(repr(error))

    start = time.perf_counter()
    threads = [threading.Thread(target=one) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    notes.append(f"- 50 creates at once (cold), each with its echo: {len(done)} done, {len(faults)} errors, {took:.2f} s in all")
    for box in done:
        client.kill(box)

    before = memory_available()
    boxes: list[dict] = []
    start = time.perf_counter()
    for _ in range(many):
        boxes.append(client.create())
    took = time.perf_counter() - start
    time.sleep(5)
    used = before - memory_available()
    answered = 0
    for box in boxes[:: max(1, many // 20)]:
        client.echo(box)
        answered += 1
    notes.append(f"- {many} idle boxes made one after another in {took:.1f} s; {used / many / 2**20:.2f} MiB of host memory each; {answered} of {answered} asked answered")
    start = time.perf_counter()
    cold.kill_hard()
    cold.start()
    notes.append(f"- kill -9 and start again with {many} boxes alive: {time.perf_counter() - start:.2f} s until it answers")
    client = Client(cold)
    client.echo(boxes[0])
    killers = []

    def end(part: list[dict]) -> None:
        mine = Client(cold)
        for box in part:
            mine.kill(box)

    for n in range(8):
        killers.append(threading.Thread(target=end, args=(boxes[n::8],)))
    for thread in killers:
        thread.start()
    for thread in killers:
        thread.join()
    cold.stop()
    shutil.rmtree(work, ignore_errors=True)

    cpu = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?")
    print(f"{time.strftime('%Y-%m-%d %H:%M')} UTC, {os.cpu_count()} cores ({cpu}), kernel {platform.release()}, `sudo bench/create {count}`")
    print()
    print("\n".join(lines))
    print()
    print("\n".join(notes))


if __name__ == "__main__":
    main()

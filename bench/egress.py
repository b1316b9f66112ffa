"""bench/egress: a direct cable between two network namespaces against the way from a box through the
moat over the same cable, taking turns, so that a noisy neighbour hits both alike. Read medians and ratios."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "tests"), str(REPO / "tests" / "server")]

from boxkit import Box, wait_for  # noqa: E402
from sandkeep_server import Server  # noqa: E402
from world import OPENED, RESOLVER, Dns, World, enter, inside, new_namespace  # noqa: E402

WIRE = REPO / "bench" / "egress_wire.py"
ORIGIN = "198.18.7.7"
ELSEWHERE = "198.18.7.8"
POLICY = {"allow": [f"{ORIGIN}/32", "origin.test"]}
# Makes it a host that is looked into: what comes back is searched for this.
BOUND = {"credentials": [{"secret": "bench", "host": "origin.test"}]}
SECRET = "ghp_" + "9fK2mXq7Lw0ZtRb4" * 2 + "abcd"
SIZE = 1 << 30
# A number nobody else sleeps for.
SPAN = f"86400.{os.getpid()}"


class Cable(World):
    """The namespaces of the tests, with an origin in a process of its own and no capture."""

    def __init__(self, directory: Path):
        self.here, self.there = new_namespace(), new_namespace()
        self.certificate, self.served = directory / "origin.pem", directory / "served.pem"
        key = directory / "key.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", key, "-out", self.certificate, "-days", "2", "-subj", "/CN=origin.test",
                        "-addext", "subjectAltName=DNS:origin.test", "-addext", "basicConstraints=critical,CA:FALSE"],
                       check=True, capture_output=True)  # fmt: skip
        self.served.write_bytes(self.certificate.read_bytes() + key.read_bytes())
        self.wire()
        self.dns = Dns(self.there)
        self.dns.records["origin.test"] = [(Dns.A, ORIGIN)]
        self.origin = inside(self.there, self.start)
        assert self.origin.stdout.readline() == b"ready\n"

    def start(self):
        return subprocess.Popen([sys.executable, str(WIRE), "origin", str(self.served)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self):
        self.origin.stdin.close()
        self.origin.wait(10)


class Direct:
    name = "direct"

    def measure(self, what, address, argument):
        words = [sys.executable, str(WIRE), what, ORIGIN if address == "name" else address, str(argument)]
        return json.loads(subprocess.run(words, check=True, capture_output=True, timeout=600).stdout)


class Moated:
    name = "moat"

    def __init__(self, box: Box):
        self.box = box

    def measure(self, what, address, argument):
        words = ["python3", "/tmp/wire.py", what, address, str(argument)]
        ran = self.box.exec(words, http_timeout=600, timeout_ms=600_000)
        if not ran.ok:
            raise RuntimeError(f"{words}: {ran}")
        return json.loads(ran.out)


def hurry(*pids: int):
    """All ends of a measurement go before whatever else this machine does: a neighbour that slowed only one of
    them would be measured."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text("-20")


def process_of(words: bytes) -> str | None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes() == words:
                return entry.name
    return None


def hurry_box(box: Box):
    """Processes of a box are in a group of their own, and so are those above it."""
    box.exec(["sh", "-c", f"setsid sleep {SPAN} > /dev/null 2>&1 < /dev/null &"])
    words = f"sleep\0{SPAN}\0".encode()
    pid = wait_for(lambda: process_of(words), "a process of the box", limit=60)
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        for root, file, value in (("/sys/fs/cgroup/cpu", "cpu.shares", "262144"), ("/sys/fs/cgroup", "cpu.weight", "10000")):
            if ("cpu" in names) != (file == "cpu.shares") or (controllers and "cpu" not in names):
                continue
            at = Path(root + path)
            while at != Path(root):
                with contextlib.suppress(OSError):
                    (at / file).write_text(value)
                at = at.parent


def memory(pid: int) -> int:
    """Of its own, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def turns(rounds, ways, what, address, argument):
    """What each way measured, all rounds together."""
    got = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            value = way.measure(what, address, argument)
            got[way.name] += value if isinstance(value, list) else [value]
    return got


def p50(samples):
    return statistics.median(samples)


def p99(samples):
    return sorted(samples)[int(len(samples) * 0.99)]


def creates(server: Server, count: int) -> dict[str, list[float]]:
    """Cold creates that say nothing and that have a policy, in turns."""
    got: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(count):
        for name, request in (("without", {}), ("with", {"network": POLICY})):
            start = time.perf_counter()
            box = Box(server, **request)
            got[name].append((time.perf_counter() - start) * 1000)
            box.kill()
    return got


def held(server: Server, box: Box, count: int) -> int:
    before = memory(server.pid)
    box.exec(["sh", "-c", f"ulimit -n 65536; rm -f /tmp/held /tmp/let-go; setsid python3 /tmp/wire.py hold {ORIGIN} {count} > /tmp/hold.log 2>&1 < /dev/null &"])
    end = time.monotonic() + 120
    while not box.exec(["test", "-e", "/tmp/held"]).ok:
        if time.monotonic() > end:
            raise RuntimeError(box.read("/tmp/hold.log"))
        time.sleep(0.1)
    opened = server.json("GET", f"{box.path}/network/traffic")["open_connections"]
    if opened < count:
        raise RuntimeError(f"only {opened} connections are open")
    after = memory(server.pid)
    box.exec(["touch", "/tmp/let-go"])
    return after - before


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    os.environ.setdefault("SANDKEEP_BIN", str(REPO / "target" / "release" / "sandkeep"))
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    print(f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {os.cpu_count()} cores ({model}), kernel {platform.release()}, `sudo bench/egress {rounds}`\n")
    directory = tempfile.TemporaryDirectory()
    cable = Cable(Path(directory.name))
    enter(cable.here)
    server = Server("--pool-size", "0", "--dns", f"{RESOLVER}:53", "--allow-private", ",".join(OPENED),
                    "--upstream-ca", str(cable.certificate)).start()  # fmt: skip
    try:
        server.json("POST", "/v1/secrets", {"name": "bench", "value": SECRET})
        with Box(server, network=POLICY | BOUND, timeout_seconds=3600) as box:
            box.write("/tmp/wire.py", WIRE.read_bytes())
            hurry(os.getpid(), server.pid, cable.origin.pid)
            hurry_box(box)
            report(rounds, server, box)
    finally:
        server.end_boxes()
        server.request("DELETE", "/v1/secrets/bench?force=true")
        server.stop()
        cable.close()


def intercepted(rounds, ways):
    """To a host with a credential: TLS ends here, and what comes back is searched."""
    got = turns(rounds, ways, "secure-first-byte", "name", 100)
    d, m = p50(got["direct"]), p50(got["moat"])
    print(f"| under interception: new TLS connection to first byte, p50 ms | {d:.3f} | {m:.3f} | +{m - d:.3f} ms |", flush=True)
    got = turns(rounds, ways, "secure-down", "name", SIZE // 4)
    d, m = p50(got["direct"]) / 1e9, p50(got["moat"]) / 1e9
    print(f"| under interception: download of JSON, GB/s | {d:.2f} | {m:.2f} | {m / d:.0%} |", flush=True)
    got = turns(rounds, ways, "events", "name", 100)
    d, m = p50(got["direct"]), p50(got["moat"])
    print(f"| under interception: an event of a stream, p50 ms | {d:.3f} | {m:.3f} | +{m - d:.3f} ms; p99 {p99(got['moat']):.2f} |", flush=True)


def report(rounds, server, box):
    ways = [Direct(), Moated(box)]
    print("| what | direct | through the moat | |\n|---|---|---|---|")
    for name, what, address, count in (
        ("round trip of 64 bytes, open connection, p50 ms", "round-trip", ORIGIN, 2000),
        ("new connection to first byte (TCP by address), p50 ms", "first-byte", ORIGIN, 500),
        ("new connection to first byte (HTTP by name), p50 ms", "web", "name", 500),
    ):
        got = turns(rounds, ways, what, address, count)
        d, m = p50(got["direct"]), p50(got["moat"])
        print(f"| {name} | {d:.3f} | {m:.3f} | +{m - d:.3f} ms; p99 {p99(got['direct']):.2f} and {p99(got['moat']):.2f} |", flush=True)
    got = turns(rounds, ways, "connections", ORIGIN, 2)
    d, m = p50(got["direct"]), p50(got["moat"])
    print(f"| connections per second, two clients | {d:.0f} | {m:.0f} | {m / d:.0%} |", flush=True)
    for name, what in (("download, GB/s", "down"), ("upload, GB/s", "up")):
        got = turns(rounds, ways, what, ORIGIN, SIZE)
        d, m = p50(got["direct"]) / 1e9, p50(got["moat"]) / 1e9
        print(f"| {name} | {d:.2f} | {m:.2f} | {m / d:.0%} |", flush=True)
    intercepted(rounds, ways)
    for name, what, address in (
        ("a name that is not allowed: to the refusal, p50 ms", "refused-name", ORIGIN),
        ("an address that is not allowed (TCP)", "refused-address", ELSEWHERE),
        ("a TLS server name that is not allowed", "refused-server-name", ELSEWHERE),
        ("an HTTP host that is not allowed", "refused-host", ELSEWHERE),
        ("QUIC", "refused-datagram", ORIGIN),
    ):
        got = turns(rounds, ways[1:], what, address, 100)["moat"]
        print(f"| {name} | | {p50(got):.2f} | p99 {p99(got):.2f}, at most {max(got):.2f} ms of {len(got)} |", flush=True)
    more = held(server, box, 1000)
    print(f"| memory of the server for 1,000 open connections | | {more / 1024:.1f} MiB | {more / 1000:.1f} KiB each |", flush=True)
    got = creates(server, 60 * rounds)
    d, m = p50(got["without"]), p50(got["with"])
    print(f"| cold create without and with a policy, p50 ms | {d:.2f} | {m:.2f} | {m - d:+.2f} ms |", flush=True)


if __name__ == "__main__":
    main()

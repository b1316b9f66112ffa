"""bench/flood: `/v1/health` and create, at rest and while sandboxes without a policy flood the server.

Each hostile sandbox opens all the connections it can to its own metadata address and says nothing on
them, opens refused ones as fast as it can, and asks the resolver for names that are not allowed. The
ratio of the two p99 is what to read.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "tests"), str(REPO / "tests" / "server")]

import hostile  # noqa: E402
from boxkit import Box  # noqa: E402
from sandkeep_server import Server  # noqa: E402

def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def measure(server: Server, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"health": [], "create": []}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"X-API-Key": server.key, "Content-Type": "application/json"}
    for place in range(rounds):
        begun = time.perf_counter()
        connection.request("GET", "/v1/health")
        answer = connection.getresponse()
        answer.read()
        found["health"].append(time.perf_counter() - begun)
        assert answer.status == 200, answer.status
        if place % 4 == 0:
            begun = time.perf_counter()
            connection.request("POST", "/v1/sandboxes", json.dumps({"timeout_seconds": 120}), headers)
            answer = connection.getresponse()
            made = json.loads(answer.read())
            found["create"].append(time.perf_counter() - begun)
            assert answer.status in (200, 201), made
            connection.request("DELETE", f"/v1/sandboxes/{made['id']}", headers=headers)
            connection.getresponse().read()
        time.sleep(0.02)
    connection.close()
    return found


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    server = Server("--pool-size", "3").start()
    boxes: list[Box] = []
    try:
        limits = {"memory_mib": 128, "cpu_millis": 100}
        boxes = [Box(server, network={}, limits=limits, timeout_seconds=3600) for _ in range(count)]
        measure(server, 20)
        rest = measure(server, rounds)
        for box in boxes:
            hostile.begin(box, 3600, "169.254.169.254:80", "refused", "names")
        end = time.monotonic() + 120
        while time.monotonic() < end and not all(hostile.has_begun(box) for box in boxes):
            time.sleep(1)
        time.sleep(5)
        flood = measure(server, rounds)
        descriptors = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resident = next(line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
        print(f"{count} hostile sandboxes, {rounds} rounds; descriptors {descriptors}; {resident}")
        for what in rest:
            calm, busy = p99(rest[what]) * 1000, p99(flood[what]) * 1000
            medians = statistics.median(rest[what]) * 1000, statistics.median(flood[what]) * 1000
            print(f"{what}: p50 {medians[0]:.1f} -> {medians[1]:.1f} ms, p99 {calm:.1f} -> {busy:.1f} ms, ratio of p99 {busy / calm:.2f}")
    finally:
        for box in boxes:
            box.kill()
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

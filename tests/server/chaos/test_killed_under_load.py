"""The server is killed while boxes send: nothing leaves, and flows work again when it is back."""

import os
from pathlib import Path

from boxkit import wait_for
from world import EVIL, GOOD

# Every kind of traffic a box may try, without end; one process each.
LOAD = [
    "curl -s --max-time 5 -o /dev/null http://good.test/beat",
    "curl -s -o /dev/null http://good.test/stream",
    f"curl -s --max-time 5 -o /dev/null http://{GOOD}/beat",
    f"curl -s --max-time 5 -o /dev/null http://{EVIL}/",
    "getent hosts data.evil.test good.test > /dev/null",
    f"echo x > /dev/udp/{EVIL}/443; echo x > /dev/udp/{GOOD}/443",
]


def start_load(box):
    # Not as fast as it can: whoever is refused at once would start programs without end, and the
    # machine that tests would have no time for the server.
    for words in LOAD:
        loop = f"while :; do {words}; sleep 0.1; done"
        box.exec(["bash", "-c", f"setsid bash -c '{loop}' {box.id} > /dev/null 2>&1 < /dev/null &"])


def connections_tried(box) -> int:
    """By the kernel's count in the box's own namespace: there is nobody else to ask."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or box.id.encode() not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            if os.readlink(entry / "ns/net") == os.readlink("/proc/self/task/%d/ns/net" % os.getpid()):
                continue
            lines = (entry / "net/snmp").read_text().splitlines()
        except OSError:
            continue
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("ActiveOpens")])
    raise AssertionError("the load of the box is not there")


def test_kill_of_the_server_under_load_lets_no_packet_out(make_walled, walled, world):
    allowed = make_walled(network={"allow": ["good.test"]}, timeout_seconds=1800)
    opened = make_walled(network={"profile": "open"}, timeout_seconds=1800)
    for box in (allowed, opened):
        start_load(box)
    beats = lambda: sum(call.path == "/beat" for call in list(world.calls))  # noqa: E731
    wait_for(lambda: beats() > 20 and world.open_streams >= 2, "boxes send", limit=120)
    for _ in range(2):
        walled.kill_hard()
        # The kernel ends the connections the server had; that is over when all is quiet.
        wait_for(lambda: world.open_streams == 0, "the world sees the streams end", limit=120)
        sent, answered = world.capture.settled(), beats()
        tried = {box: connections_tried(box) for box in (allowed, opened)}
        for box, count in tried.items():
            wait_for(lambda box=box, count=count: connections_tried(box) > count + 15, "the box goes on trying", limit=120)
        assert world.capture.packets() == sent, world.capture.seen
        assert beats() == answered
        walled.start()
        wait_for(lambda: beats() > answered + 10 and world.open_streams >= 2, "boxes reach the world again", limit=120)

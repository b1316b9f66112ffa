"""A connection that no rule can allow does not even begin, at every level: the first packet is refused.

A handshake is a channel: whoever sees it at the other end learns when, how often and to which port. And a
program that is told "connected" goes on where one that is told "refused" tries something else."""

from __future__ import annotations

import os
import shutil

import pytest
from boxkit import Box, wait_for
from world import EVIL, GOOD, GOOD6, PRIVATE, Dns

LEVELS = [
    "container",
    pytest.param("gvisor", marks=pytest.mark.skipif(shutil.which("runsc") is None and "SANDKEEP_TEST_GVISOR" not in os.environ, reason="no runsc here")),
    pytest.param("microvm", marks=pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ, reason="no QEMU here")),
]  # fmt: skip

# A connection, and whether the handshake of it came about. Nothing is ever said on it.
KIT = """
import errno, socket, time
def begin(to, port):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(30)
        try:
            s.connect((to, port))
            return "begun"
        except OSError as error:
            return errno.errorcode.get(error.errno, type(error).__name__)
def resolve(name):
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return type(error).__name__
"""


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture
def of_level(make_walled, level):
    """Makes sandboxes of the level."""

    def make(**request):
        if level == "microvm":
            request.setdefault("limits", {"memory_mib": 384, "cpu_millis": 1000})
        return make_walled(isolation=level, timeout_seconds=900, http_timeout=300, **request)

    return make


def run(box, *expressions):
    ran = box.python(KIT + "".join(f"\nprint({expression})" for expression in expressions))
    assert ran.ok, ran
    return ran.out.splitlines()


def test_a_connection_that_no_rule_can_allow_never_begins(of_level, world):
    box = of_level(network={"allow": [{"to": "good.test", "ports": [22, 443]}, f"{GOOD}:8080"]})
    never = [(EVIL, 443), (EVIL, 22), (GOOD, 22), (GOOD, 443), ("8.8.8.8", 80), (PRIVATE, 80), (GOOD6, 443),
             ("2001:db8:77::66", 22), ("169.254.169.254", 443), ("10.0.0.1", 22), ("10.0.0.1", 61613)]  # fmt: skip
    assert run(box, *[f'begin("{to}", {port})' for to, port in never]) == ["ECONNREFUSED"] * len(never)
    # A rule for the address, and the answer of our resolver for a name.
    assert run(box, f'begin("{GOOD}", 8080)', f'begin("{GOOD}", 8081)') == ["begun", "ECONNREFUSED"]
    assert run(box, 'resolve("good.test")', f'begin("{GOOD}", 22)', f'begin("{GOOD}", 443)', f'begin("{GOOD}", 80)') == [GOOD, "begun", "begun", "ECONNREFUSED"]
    # What is asked of the server itself goes on, and so does what the sandbox says to itself.
    assert run(box, 'begin("169.254.169.254", 80)', 'begin("10.0.0.1", 80)', 'begin("9.9.9.9", 53)') == ["begun"] * 3
    assert run(box, """[(s := socket.create_server(("127.0.0.1", 0))), begin("127.0.0.1", s.getsockname()[1])][1]""") == ["begun"]
    assert world.capture.packets(EVIL) == 0

    # It is refused, not lost: with a reason, for who asks.
    def told():
        denials = box.server.json("GET", f"{box.path}/network/denials")["denials"]
        return {(denial["host"], denial["port"]): denial for denial in denials}

    denial = wait_for(lambda: told().get((EVIL, 443)), "the refusal is in the list")
    assert denial["via"] == "tcp" and denial["why"] and denial["hint"], denial
    assert wait_for(lambda: told().get((PRIVATE, 80)), "the one to a private address, too")["why"].find("private") > 0


def test_where_everything_is_open_what_is_closed_never_begins(of_level, world):
    box = of_level(network={"profile": "open"})
    closed = [(PRIVATE, 80), ("168.63.129.16", 80), ("169.254.170.23", 80), ("100.100.100.200", 80), ("fd00:ec2::23", 80), ("198.18.0.1", box.server.port)]
    assert run(box, *[f'begin("{to}", {port})' for to, port in closed]) == ["ECONNREFUSED"] * len(closed)
    assert run(box, f'begin("{EVIL}", 443)', f'begin("{GOOD6}", 443)') == ["begun"] * 2


def test_udp_icmp_and_others_are_refused_at_once(of_level, world):
    """Each of many, not the first ones and then one a second."""
    box = of_level(network={"allow": ["good.test"]})
    ran = box.python(f"""
import errno, socket
outcomes = []
for to in ["{EVIL}"] * 20 + ["{GOOD6}"] * 20:
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        try:
            s.connect((to, 443))
            s.send(b"x")
            s.recv(1)
            outcomes.append("answered")
        except OSError as error:
            outcomes.append(errno.errorcode.get(error.errno, type(error).__name__))
print(sorted(set(outcomes)), len(outcomes))
""")
    assert ran.ok, ran
    kinds, count = ran.out.strip().rsplit(" ", 1)
    assert count == "40" and set(eval(kinds)) <= {"ECONNREFUSED", "EPERM", "EACCES", "EHOSTUNREACH"}, ran  # noqa: S307 our own text
    assert not [key for key in world.capture.seen if key[0] == 17 and key[1] in (EVIL, GOOD6)]


def test_a_policy_of_now_holds_for_the_next_packet(of_level, world):
    box = of_level(network={"allow": ["good.test:22"]})
    ask = ('resolve("good.test")', f'begin("{GOOD}", 22)', f'begin("{GOOD}", 443)', f'begin("{EVIL}", 22)')
    assert run(box, *ask) == [GOOD, "begun", "ECONNREFUSED", "ECONNREFUSED"]
    box.server.json("PUT", f"{box.path}/network", {"allow": ["good.test:443", EVIL]})
    assert run(box, *ask[1:]) == ["ECONNREFUSED", "begun", "begun"]
    box.server.json("PUT", f"{box.path}/network", {"profile": "air-gapped"})
    assert run(box, *ask[1:]) == ["ECONNREFUSED"] * 3


GREETED = f"""
def greeted():
    with socket.create_connection(("{GOOD}", 22), timeout=30) as s:
        return s.recv(100)
"""


def greeted(box):
    ran = box.python(KIT + GREETED + "\nprint(greeted())")
    return "SSH-2.0-world" in ran.out


def test_what_was_looked_up_stays_open_over_a_kill_of_the_server(of_level, walled, world):
    box = of_level(network={"allow": ["good.test"]})
    assert run(box, 'resolve("good.test")') == [GOOD] and greeted(box)
    walled.kill_hard()
    walled.start()
    asked = len(world.dns.asked)
    # The program knows the address; it does not ask again.
    assert greeted(box)
    assert len(world.dns.asked) == asked
    assert run(box, f'begin("{EVIL}", 22)') == ["ECONNREFUSED"]


def test_what_was_looked_up_stays_open_over_pause_and_fork(of_level, world):
    box = of_level(network={"allow": ["good.test"]})
    assert run(box, 'resolve("good.test")') == [GOOD]
    copy = Box.known(box.server, box.server.json("POST", f"{box.path}/fork", {"count": 1}, timeout=300)["forks"][0]["sandbox"]["id"])
    try:
        assert greeted(copy)
        assert run(copy, f'begin("{EVIL}", 22)') == ["ECONNREFUSED"]
    finally:
        copy.kill()
    box.server.json("POST", f"{box.path}/pause", {}, timeout=300)
    box.server.json("POST", f"{box.path}/resume", {}, timeout=300)
    assert greeted(box)
    assert run(box, f'begin("{EVIL}", 22)') == ["ECONNREFUSED"]


def test_a_flood_of_names_stays_within_bounds(make_walled, world):
    box = make_walled(network={"allow": ["*.flood.test"]})
    for place in range(1500):
        world.dns.records[f"n{place}.flood.test"] = [(Dns.A, f"198.18.{100 + place // 250}.{place % 250 + 1}")]
    ran = box.python(KIT + """
told = 0
for place in range(1500):
    for _ in range(60):
        if resolve(f"n{place}.flood.test").startswith("198."):
            told += 1
            break
        time.sleep(0.2)
print(told, begin("198.18.105.250", 22), begin("198.18.100.1", 22))
""")
    # The newest are open; the oldest made room.
    assert ran.out.split() == ["1500", "begun", "ECONNREFUSED"], ran

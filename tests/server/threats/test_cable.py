"""Attacks from a sandbox with a network stack of its own on the host's end of its cable.

The neighbour tables of a Linux kernel are bounded for all network namespaces together: entries that one sandbox makes the
host keep are missing everywhere else, up to the host losing its own gateway.
"""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from world import inside, ip, new_namespace

SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
FRAMES = 4000
NEEDS_QEMU = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)

# By root of the sandbox: frames of every kind that makes a neighbour, a router, a group or an address known.
FLOOD = r"""
import os, random, socket, struct, sys, time
kind, count = sys.argv[1], int(sys.argv[2])
try:
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    line.bind(("eth0", 0))
except OSError as error:
    # A sandbox that may not write frames cannot attack with them.
    sys.exit(print("no raw frames:", error.strerror))
MAC, HOST = bytes.fromhex("02000a000002"), bytes.fromhex("02000a000001")
OWN4, HOST4 = socket.inet_aton("10.0.0.2"), socket.inet_aton("10.0.0.1")
OWN6, HOST6 = (socket.inet_pton(socket.AF_INET6, name) for name in ("fd00:a::2", "fd00:a::1"))
LINK = socket.inet_pton(socket.AF_INET6, "fe80::aff:fe00:2")
ALL = socket.inet_pton(socket.AF_INET6, "ff02::1")
any4 = lambda: bytes([10, 0, 0, random.randrange(3, 255)])
any6 = lambda: OWN6[:8] + os.urandom(8)
any_link = lambda: b"\xfe\x80" + bytes(6) + os.urandom(8)

def total(data):
    data += b"\0" * (len(data) % 2)
    all = sum(struct.unpack(f"!{len(data) // 2}H", data))
    all = (all >> 16) + (all & 0xFFFF)
    return ~(all + (all >> 16)) & 0xFFFF

def frame(type, rest, mac=MAC, tag=b""):
    return HOST + mac + tag + struct.pack("!H", type) + rest

def arp(operation, sender, mac=MAC):
    return frame(0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + mac + sender + (HOST if operation == 2 else bytes(6)) + HOST4)

def six(source, next, payload, to=HOST6, hops=255):
    return struct.pack("!IHBB", 6 << 28, len(payload), next, hops) + source + to + payload

def icmp6(source, kind, rest, to=HOST6):
    bare = bytes([kind, 0, 0, 0]) + rest
    sum = total(source + to + struct.pack("!II", len(bare), 58) + bare)
    return six(source, 58, bare[:2] + struct.pack("!H", sum) + bare[4:], to)

def solicitation(source):
    return icmp6(source, 135, bytes(4) + HOST6 + b"\x01\x01" + MAC)

def syn4(source, mac=MAC):
    tcp = struct.pack("!HHIIBBHHH", random.randrange(1024, 65535), 80, 1, 0, 5 << 4, 2, 1000, 0, 0)
    sum = total(source + HOST4 + struct.pack("!HH", 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", sum) + tcp[18:]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0, 64, 6, 0) + source + HOST4
    return frame(0x0800, head[:10] + struct.pack("!H", total(head)) + head[12:] + tcp, mac)

def syn6(source):
    tcp = struct.pack("!HHIIBBHHH", random.randrange(1024, 65535), 80, 1, 0, 5 << 4, 2, 1000, 0, 0)
    sum = total(source + HOST6 + struct.pack("!II", len(tcp), 6) + tcp)
    return frame(0x86DD, six(source, 6, tcp[:16] + struct.pack("!H", sum) + tcp[18:]))

TAG = struct.pack("!HH", 0x8100, 7)
PREFIX = lambda: struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 86400, 86400, 0) + b"\x20\x01\x0d\xb8" + os.urandom(4) + bytes(8)
KINDS = {
    "neighbour solicitation": lambda: frame(0x86DD, solicitation(any6())),
    "neighbour solicitation, link-local": lambda: frame(0x86DD, solicitation(any_link())),
    "neighbour solicitation behind a hop-by-hop header": lambda: frame(0x86DD, (lambda s: six(s, 0, bytes([58, 0, 1, 4, 0, 0, 0, 0]) + solicitation(s)[40:]))(any6())),
    "neighbour advertisement": lambda: frame(0x86DD, (lambda s: icmp6(s, 136, b"\xe0\0\0\0" + s + b"\x02\x01" + MAC))(any6())),
    "duplicate address detection": lambda: frame(0x86DD, (lambda s: icmp6(bytes(16), 135, bytes(4) + s, b"\xff\x02" + bytes(9) + b"\x01\xff" + s[13:]))(any6())),
    "router solicitation": lambda: frame(0x86DD, icmp6(any6(), 133, bytes(4) + b"\x01\x01" + MAC)),
    "router advertisement": lambda: frame(0x86DD, icmp6(any_link(), 134, struct.pack("!BBHII", 64, 0, 1800, 0, 0) + b"\x01\x01" + MAC + PREFIX(), ALL)),
    "router advertisement, own link-local": lambda: frame(0x86DD, icmp6(LINK, 134, struct.pack("!BBHII", 64, 0, 1800, 0, 0) + b"\x01\x01" + MAC + PREFIX(), ALL)),
    "redirect": lambda: frame(0x86DD, (lambda to: icmp6(LINK, 137, bytes(4) + to + to + b"\x02\x01" + MAC))(any6())),
    "multicast listener": lambda: frame(0x86DD, icmp6(any_link(), 143, struct.pack("!HH", 0, 1) + struct.pack("!BBH", 4, 0, 0) + b"\xff\x02" + os.urandom(14), ALL)),
    "IPv6 connection": lambda: syn6(any6()),
    "IPv4 connection": lambda: syn4(any4()),
    "IPv4 connection, another card": lambda: syn4(OWN4, b"\x02" + os.urandom(5)),
    "ARP request": lambda: arp(1, any4()),
    "ARP answer": lambda: arp(2, any4()),
    "ARP request, another card": lambda: frame(0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + (other := b"\x02" + os.urandom(5)) + any4() + bytes(6) + HOST4, other),
    "VLAN": lambda: frame(0x86DD, solicitation(any6()), tag=TAG),
    "VLAN 0": lambda: frame(0x86DD, solicitation(any6()), tag=struct.pack("!HH", 0x8100, 0)),
    "LLC": lambda: HOST + MAC + struct.pack("!H", 3) + b"\x42\x42\x03" + os.urandom(40),
}
if kind == "kinds":
    sys.exit(print("\n".join(KINDS)))
make, sent = KINDS[kind], 0
while sent < count:
    try:
        line.send(make())
        sent += 1
    except OSError:
        time.sleep(0.001)
print("sent", sent)
"""


@pytest.fixture(params=["gvisor", pytest.param("microvm", marks=NEEDS_QEMU)], scope="module")
def attacker(request, server):
    wish = {"limits": SMALL} if request.param == "microvm" else {}
    with Box(server, isolation=request.param, timeout_seconds=1800, http_timeout=300, **wish) as box:
        box.write("/root/flood.py", FLOOD.encode(), user="root")
        yield box


def host_end(box):
    """The network namespace of a sandbox, by a process of it."""
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if proc.name.isdigit() and any(box.id in line for line in (proc / "cgroup").read_text().splitlines()):
                return os.open(proc / "ns" / "net", os.O_RDONLY)
    raise AssertionError(f"no process of {box.id} was found")


def said(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def known(namespace):
    """What the kernel keeps for the host's end: neighbours, addresses, routes, groups."""
    shown = {}
    for what in (["neigh", "show"], ["-6", "address", "show", "dev", "up0"], ["-6", "route", "show"], ["-6", "maddress", "show"]):
        lines = inside(namespace, lambda what=what: said("ip", *what)).splitlines()
        shown[" ".join(what)] = {line for line in lines if "valid_lft" not in line}
    return shown


def entries():
    """Of the whole kernel: these tables are shared by all namespaces."""
    found = {}
    for table in ("arp_cache", "ndisc_cache"):
        lines = Path(f"/proc/net/stat/{table}").read_text().splitlines()
        found[table] = int(lines[1].split()[0], 16)
    return found


def test_a_sandbox_fills_no_neighbour_table_of_the_host(server, attacker):
    namespace = host_end(attacker)
    try:
        # It has asked for its gateway, so what a sandbox needs is there.
        assert attacker.root("true").ok
        ran = attacker.root(["python3", "/root/flood.py", "kinds", "0"])
        assert ran.ok, ran
        kinds = ran.out.splitlines()
        if kinds[0].startswith("no raw frames"):
            assert attacker.made["isolation"] == "gvisor", "root of a machine writes frames"
            return
        before, bad = known(namespace), {}
        for kind in kinds:
            ran = attacker.root(["python3", "/root/flood.py", kind, "60"])
            assert ran.out == "sent 60\n", (kind, ran)
            new = {what: lines - before[what] for what, lines in known(namespace).items()}
            new["neigh show"] = {line for line in new["neigh show"] if line.split()[0] not in ("10.0.0.2", "fd00:a::2", "fe80::aff:fe00:2")}
            if left := {what: sorted(lines)[:3] for what, lines in new.items() if lines}:
                bad[kind] = left
                before = known(namespace)
        assert not bad, json.dumps(bad, indent=1)
        # It is still heard, both ways and both kinds.
        assert attacker.root("true").ok
    finally:
        os.close(namespace)


@contextlib.contextmanager
def neighbours_elsewhere():
    """Two namespaces that have nothing to do with any sandbox, joined by a cable, with a listener in the second."""
    import socket

    here, there = new_namespace(), new_namespace()

    def cable():
        ip("link", "add", "one", "type", "veth", "peer", "name", "two")
        ip("link", "set", "two", "netns", f"/proc/{os.getpid()}/fd/{there}")
        ip("link", "set", "one", "up")
        ip("-6", "address", "add", "fd99::1/64", "dev", "one", "nodad")
        ip("address", "add", "10.99.0.1/24", "dev", "one")

    def other_end():
        ip("link", "set", "two", "up")
        for last in range(2, 6):
            ip("-6", "address", "add", f"fd99::{last}/64", "dev", "two", "nodad")
            ip("address", "add", f"10.99.0.{last}/24", "dev", "two")

    inside(here, cable)
    inside(there, other_end)

    def reach(address):
        """Nothing listens: a neighbour that is found refuses."""
        def call():
            try:
                socket.create_connection((address, 9), timeout=20).close()
                return "connected"
            except ConnectionRefusedError:
                return "found"
            except OSError as error:
                return str(error)

        return inside(here, call)

    try:
        yield reach
    finally:
        os.close(here)
        os.close(there)


@NEEDS_QEMU
@pytest.mark.parametrize("attacker", ["microvm"], indirect=True)
def test_a_flood_of_neighbours_leaves_the_table_of_the_whole_host_alone(server, attacker):
    """`ndflood`: 4000 sources, where the kernel keeps 1024 neighbours for all namespaces together."""
    with neighbours_elsewhere() as reach:
        wait_for(lambda: reach("fd99::2") == "found", "the cable is up")
        before = entries()
        for kind in ("neighbour solicitation", "ARP request", "IPv4 connection"):
            ran = attacker.root(["python3", "/root/flood.py", kind, str(FRAMES)])
            assert ran.out == f"sent {FRAMES}\n", ran
        during = entries()
        fresh = {address: reach(address) for address in ("fd99::3", "fd99::4", "10.99.0.3")}
        assert set(fresh.values()) == {"found"}, (fresh, before, during)
        # Others use the tables meanwhile, but none makes as many.
        assert all(during[table] - before[table] < 100 for table in before), (before, during)

"""What on this host belongs to one server: other suites run beside, with servers and sandboxes of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sandkeep_server import Server

LEVELS = ("ward-container", "ward-gvisor", "ward-microvm")


def cgroup_trees(server: Server) -> set[str]:
    """Each level has one, named after its directory (FNV-1a of the path; `tree_name` in sandkeep-host)."""
    names = set()
    for level in LEVELS:
        number = 0xCBF29CE484222325
        for byte in bytes(Path(server.state).resolve() / level):
            number = (number ^ byte) * 0x100000001B3 % (1 << 64)
        names.add(f"sandkeep.{number:016x}")
    return names


def processes(server: Server) -> list[int]:
    """Everything in the cgroups of its sandboxes, the dead left out."""
    trees, found = cgroup_trees(server), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            dead = " Z " in (entry / "stat").read_text()
            places = {part for line in (entry / "cgroup").read_text().splitlines() for part in line.split(":", 2)[2].split("/")}
            if not dead and trees & places:
                found.append(int(entry.name))
    return found


def agents(server: Server) -> set[int]:
    """Agents of its containers, by their own command line."""
    found = set()
    for pid in processes(server):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            ids = next((line for line in status if line.startswith("NSpid:")), "").split()
            if len(ids) > 2 and ids[-1] == "1" and "agent" in status[0].split("\t")[1]:
                found.add(pid)
    return found


def cgroups(server: Server) -> set[str]:
    trees = cgroup_trees(server)
    found = set()
    for base, directories, _ in os.walk("/sys/fs/cgroup"):
        if trees & set(base.split("/")):
            found.add(base)
        if base.count("/") > 8:
            directories.clear()
    return found


def network_namespaces(server: Server) -> set[str]:
    """Those that the server, what it started, or its sandboxes keep."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    kept = {server.pid, *processes(server)}
    while more := {pid for pid, parent in parents.items() if parent in kept} - kept:
        kept |= more
    found = set()
    for pid in kept:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor.path))
    return {name for name in found if name.startswith("net:")}

"""A box that can not go to the disk is frozen, and its memory goes to swap where there is some."""

import re
import secrets
import subprocess
from pathlib import Path

import pytest
from boxkit import Box
from sandkeep_server import state_dir
from tiny import holding

MIB = 1 << 20
SIZE = 150


@pytest.fixture
def swap():
    """A swap file of this machine, for as long as the test runs."""
    path = state_dir().parent / f"swap-{secrets.token_hex(4)}"
    subprocess.run(["fallocate", "--length", "600M", path], check=True)
    path.chmod(0o600)
    try:
        subprocess.run(["mkswap", "--quiet", path], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["swapon", path], check=True)
        yield path
        subprocess.run(["swapoff", path], check=True)
    finally:
        path.unlink()


def swap_used(path):
    for line in Path("/proc/swaps").read_text().splitlines():
        if line.split()[0] == str(path):
            return int(line.split()[3]) * 1024
    raise AssertionError("the swap is not on")


class Cgroup:
    """The files that count the memory of a box, in either version of cgroups."""

    def __init__(self, marker):
        pid = next(pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and holds(pid, marker))
        for line in (pid / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                self.dir, self.one = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), True
                return
        self.dir, self.one = Path("/sys/fs/cgroup") / path.lstrip("/"), False

    def used(self):
        return int((self.dir / ("memory.usage_in_bytes" if self.one else "memory.current")).read_text())

    def way_to_swap(self):
        """What a box that runs must not have."""
        return int((self.dir / ("memory.swappiness" if self.one else "memory.swap.max")).read_text())


def holds(proc, marker):
    try:
        return marker.encode() in (proc / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_frozen_box_goes_to_swap_and_is_whole_when_it_wakes(server, swap):
    marker = f"/root/hold-{secrets.token_hex(6)}.py"
    with Box(server, isolation="container", limits={"memory_mib": 256}, timeout_seconds=600) as box:
        box.write(marker, holding(SIZE).encode(), user="root")
        ran = box.root(f"nohup python3 {marker} >/root/out 2>&1 & until [ -s /root/sum ]; do sleep 0.1; done; cat /root/sum")
        before = ran.out
        assert len(before) == 64, ran
        cgroup, other = Cgroup(marker), swap_used(swap)
        assert cgroup.used() > SIZE * MIB and cgroup.way_to_swap() == 0
        pause = server.json("POST", box.path + "/pause", {}, timeout=300)["pause"]
        assert pause["mode"] == "ram", pause
        told = re.search(r"; (\d+) MiB went to swap", pause["why"])
        assert told and int(told[1]) > SIZE * 0.9, pause
        assert cgroup.used() < SIZE * MIB * 0.2, f"{cgroup.used() / MIB} MiB are still in memory"
        assert swap_used(swap) - other > SIZE * MIB * 0.9
        assert cgroup.way_to_swap() == 0, "nothing more goes there"
        server.json("POST", box.path + "/resume", {"timeout_seconds": 600})
        assert box.root(f"rm /root/sum; kill -USR1 $(pgrep -f '^python3 {marker}'); until [ -s /root/sum ]; do sleep 0.1; done; cat /root/sum").out == before
        assert cgroup.way_to_swap() == 0
        # Swap is no way around the limit of one that runs.
        hungry = box.root(["python3", "-c", f"x = b'x' * {400 * MIB}"])
        assert not hungry.ok, hungry
        assert box.root("echo alive").out == "alive\n"

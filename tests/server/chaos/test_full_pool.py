"""The pool is full, or becomes full while a point is made: a typed refusal, and everything goes on."""

import contextlib
import os
import secrets
import shutil
import subprocess
import threading

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, state_dir
from tiny import ASK, COUNTER, TinyServer, memory_levels, tiny_state

MIB = 1 << 20


@pytest.fixture(scope="module")
def small():
    """A server whose storage is soon full."""
    state = tiny_state(state_dir().parent / f"full-{secrets.token_hex(3)}", storage="1GiB")
    server = TinyServer(state, storage="1GiB").start()
    yield server
    server.close()
    shutil.rmtree(state, ignore_errors=True)


class Filler:
    """A file that takes the room in the pool, as another box's would."""

    def __init__(self, server):
        self.path = server.state / "pool" / "filler"

    def free(self) -> int:
        room = os.statvfs(self.path.parent)
        return room.f_bavail * room.f_frsize

    def take_all_but(self, left: int) -> None:
        """Random bytes: nothing packs them, and nothing promises room it does not have."""
        chunk = os.urandom(4 * MIB)
        with self.path.open("ab", buffering=0) as file:
            while True:
                os.fsync(file.fileno())
                free = self.free()
                if free <= left:
                    return
                try:
                    file.write(chunk[: max(4096, min(len(chunk), free - left))])
                except OSError:
                    return

    def snatch(self) -> None:
        """All that is left, at once."""
        with self.path.open("ab") as file:
            step = 64 * MIB
            while step >= MIB:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)
                except OSError:
                    step //= 2

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def filler(small):
    filler = Filler(small)
    yield filler
    filler.close()


def hurry(server) -> bool:
    """The kernel gives room back in its own time, unless it is told to."""
    subprocess.run(["btrfs", "filesystem", "sync", str(server.state / "pool")], check=True, capture_output=True)
    return True


def works(box, count):
    assert box.root(ASK).out == f"{count}\n"


def refused_in_the_middle(small, box, filler, staging):
    """Takes the room away while memory is written. A snapshot that was faster is tried again."""
    for _ in range(20):
        filler.take_all_but(220 * MIB)
        over = threading.Event()

        def eat(over=over):
            while not over.is_set():
                with contextlib.suppress(OSError):
                    if sum(f.stat().st_size for f in staging.glob("*/memory/*")) > 4 * MIB:
                        filler.snatch()
                        return

        eater = threading.Thread(target=eat)
        eater.start()
        try:
            made = small.json("POST", box.path + "/points", {"memory": True}, timeout=180)
        except Refused as refused:
            return refused
        finally:
            over.set()
            eater.join()
        filler.close()
        small.json("DELETE", f"/v1/points/{made['id']}")
        wait_for(lambda: hurry(small) and filler.free() > 220 * MIB, "there is room again", limit=120)
    pytest.fail("every snapshot was faster than the one who takes its room")


def test_a_pool_that_fills_up_in_the_middle_of_a_snapshot(small, filler):
    for level in memory_levels(small):
        with Box(small, isolation=level, timeout_seconds=1800, limits={"memory_mib": 512}) as box:
            assert box.root(COUNTER).ok
            works(box, 1)
            assert box.root("echo precious > /root/note; sync").ok
            old = small.json("POST", box.path + "/points", {"memory": True})
            # In memory, and not to be packed.
            assert box.root("head -c 120000000 /dev/urandom > /dev/shm/ballast").ok
            staging = small.state / "pool" / "staging"
            refused = refused_in_the_middle(small, box, filler, staging)
            assert refused.error["code"] in ("disk_full", "resource_exhausted"), refused
            works(box, 2)
            # Full from the beginning: refused before anything is written.
            with pytest.raises(Refused) as refused:
                small.json("POST", box.path + "/points", {"memory": True}, timeout=180)
            assert refused.value.error["code"] == "disk_full", refused.value
            # A pause is never refused for want of room: the memory stays where it is.
            view = small.json("POST", box.path + "/pause", {}, timeout=180)
            assert view["pause"]["mode"] == "ram" and view["pause"]["why"], view
            small.json("POST", box.path + "/resume", {"timeout_seconds": 1800})
            works(box, 3)
            filler.close()
            wait_for(lambda: not list(staging.glob("*/memory")), "nothing half-made is left")
            wait_for(lambda: hurry(small) and filler.free() > 200 * MIB, "there is room again", limit=120)
            wait_for(lambda: small.json("GET", "/v1/health")["status"] == "ok", "the server has seen it", limit=120)
            again = small.json("POST", box.path + "/points", {"memory": True}, timeout=180)
        for point, count in ((old, 2), (again, 4)):
            with Box(small, from_point=point["id"]) as copy:
                assert copy.root("cat /root/note").out == "precious\n"
                works(copy, count)
            small.json("DELETE", f"/v1/points/{point['id']}")


def test_space_comes_back(small):
    def used():
        room = os.statvfs(small.state / "pool")
        return (room.f_blocks - room.f_bfree) * room.f_frsize

    # What other tests removed is freed first.
    seen = []
    wait_for(lambda: hurry(small) and (seen.append(used()) or len(seen) > 3 and len(set(seen[-4:])) == 1), "the pool is quiet")
    before = used()
    with Box(small, isolation="container") as box:
        # A parent with a large file, a child without it.
        assert box.root("head -c 150000000 /dev/urandom > /root/large; sync").ok
        parent = small.json("POST", box.path + "/points", {"memory": False})
        assert box.root("rm /root/large; echo child > /root/note; sync").ok
        child = small.json("POST", box.path + "/points", {"memory": False})
    assert used() > before + 100 * MIB
    small.json("DELETE", f"/v1/points/{parent['id']}")
    # The child is whole without it, and what only the parent had is free again.
    wait_for(lambda: hurry(small) and used() < before + 60 * MIB, "the space is free again", limit=120)
    with Box(small, from_point=child["id"], limits={"disk_mib": 16}) as copy:
        assert copy.root("cat /root/note").out == "child\n"
        # The limit counts for what a copy writes.
        ran = copy.root("head -c 60000000 /dev/urandom > /root/mine; sync; stat -c %s /root/mine")
        assert int(ran.out.split()[-1]) < 20 * MIB, ran
        with pytest.raises(Refused):
            small.json("POST", copy.path + "/rollback", {"to": parent["id"]})
        small.json("POST", copy.path + "/rollback", {"to": child["id"]})
        ran = copy.root("head -c 60000000 /dev/urandom > /root/mine; sync; stat -c %s /root/mine")
        assert int(ran.out.split()[-1]) < 20 * MIB, "nor is it lifted by going back"
    small.json("DELETE", f"/v1/points/{child['id']}")

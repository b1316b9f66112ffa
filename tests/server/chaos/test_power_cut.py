"""The power goes while points are made, boxes paused, woken, forked and rolled back.

Everything a server keeps is on a disk that forgets what was not flushed (powercut.py). What was
answered before the cut must be there after it, and nothing half-made may be seen.
`SANDKEEP_STORM=50` cuts fifty times for each level.
"""

import contextlib
import os
import random
import secrets
import shutil
import threading
import time

import pytest
from boxkit import Box, wait_for
from powercut import Disk, Mounted, run
from sandkeep_server import state_dir
from tiny import ASK, COUNTER, TinyServer, tiny_state

ROUNDS = int(os.environ.get("SANDKEEP_STORM", "1"))


@pytest.fixture(scope="module")
def golden():
    """A disk with a server's state on it and nothing in flight."""
    work = state_dir().parent / f"powercut-{secrets.token_hex(3)}"
    work.mkdir()
    image = work / "golden"
    with image.open("wb") as file:
        file.truncate(3 << 30)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
    mounted = Mounted(image, work / "mnt")
    try:
        state = tiny_state(work / "mnt" / "state", storage="2GiB")
        assert (state / "pool.img").exists()
        with contextlib.suppress(AssertionError):
            run("umount", state / "pool")
    finally:
        mounted.close()
    yield work, image
    shutil.rmtree(work, ignore_errors=True)


class Life:
    """What one box went through, and what of it was answered before the power went."""

    def __init__(self, server, level, dice):
        self.server, self.level, self.dice = server, level, dice
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.kept: dict[str, str] = {}
        self.paused: tuple[str, str] | None = None
        self.count = 0
        self.fault: Exception | None = None

    def kept_point(self, box, **wish):
        """A point of a known content; deleted ones are not asked for."""
        note = secrets.token_hex(8)
        assert box.root(f"echo {note} > /root/note").ok
        point = self.server.json("POST", box.path + "/points", wish)
        with self.lock:
            self.kept[point["id"]] = note
        return point["id"]

    def run(self):
        try:
            box = Box(self.server, isolation=self.level, timeout_seconds=1800)
            while not self.over.is_set():
                self.one(box)
                self.count += 1
        except Exception as fault:  # noqa: BLE001 told by the test, which waits for this thread
            self.fault = fault

    def one(self, box):
        what = self.dice.choice(("memory", "files", "files", "pause", "rollback", "fork", "delete"))
        if what in ("memory", "files"):
            self.kept_point(box, **({} if what == "memory" else {"memory": False}))
        elif what == "pause":
            note = secrets.token_hex(8)
            assert box.root(f"echo {note} > /root/note").ok
            self.server.json("POST", box.path + "/pause", {"memory": self.dice.random() < 0.6})
            with self.lock:
                self.paused = (box.id, note)
            time.sleep(self.dice.uniform(0, 0.3))
            with self.lock:
                self.paused = None
            self.server.json("POST", box.path + "/resume", {})
        elif what == "rollback" and self.kept:
            self.server.json("POST", box.path + "/rollback", {"to": self.dice.choice(list(self.kept))})
        elif what == "fork":
            for fork in self.server.json("POST", box.path + "/fork", {"count": 1})["forks"]:
                self.server.json("DELETE", f"/v1/sandboxes/{fork['sandbox']['id']}")
        elif what == "delete" and len(self.kept) > 3:
            with self.lock:
                point = self.dice.choice(list(self.kept))
                # From here on nobody promises anything about it.
                del self.kept[point]
            self.server.json("DELETE", f"/v1/points/{point}")

    def promises(self):
        with self.lock:
            return dict(self.kept), self.paused


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_what_was_answered_survives_a_power_cut(golden, level):
    work, image = golden
    for number in range(ROUNDS):
        seed = f"{level} {number}" if ROUNDS == 1 else secrets.token_hex(4)
        one_cut(work / f"{level}-{number}", image, level, seed)


def one_cut(work, image, level, seed):
    dice = random.Random(seed)
    disk = Disk(work, image)
    mounted = Mounted(disk.image, work / "mnt")
    server = TinyServer(work / "mnt" / "state", storage="2GiB").start()
    try:
        # One rests all the while; others come and go.
        resting = Box(server, isolation=level, timeout_seconds=1800)
        assert resting.root(COUNTER).ok and resting.root(ASK).out == "1\n"
        assert resting.root("echo resting > /root/note").ok
        deep = server.json("POST", resting.path + "/pause", {})["pause"]["mode"] == "disk"
        life = Life(server, level, dice)
        living = threading.Thread(target=life.run)
        living.start()
        wait_for(lambda: life.kept or life.fault, "something was kept", limit=120)
        time.sleep(dice.uniform(0.2, 2.5))
        kept, paused = life.promises()
        under_way, arrived = disk.cut(work / "after", dice.randrange(1 << 30))
        life.over.set()
        living.join()
        assert life.fault is None, repr(life.fault)
        log = server.log_tail(3000)
        server.close()
    finally:
        server.kill_hard()
        mounted.close()
        disk.close()
    told = f"{seed!r}: {under_way} blocks under way, {arrived} arrived, {life.count} steps before\n{log}"
    mounted = Mounted(work / "after", work / "mnt")
    after = TinyServer(work / "mnt" / "state", storage="2GiB")
    try:
        after.start()
        look(after, level, kept, paused, (resting.id, deep), told)
        after.close()
    finally:
        after.kill_hard()
        mounted.close()
        shutil.rmtree(work, ignore_errors=True)


def look(server, level, kept, paused, resting, told):
    listed = {point["id"]: point for point in server.json("GET", "/v1/points")["points"]}
    lost = set(kept) - set(listed)
    assert not lost, f"{lost} of {set(kept)} are gone; {told}"
    assert len(listed) >= 1
    for id, point in listed.items():
        # Also those nobody was told of are whole, or not there.
        with Box(server, from_point=id) as box:
            note = box.root("cat /root/note").out.strip()
            assert note == kept.get(id, note), (id, told)
            assert len(note) == 16, (note, point, told)
    id, deep = resting
    for id, note in [(id, "resting"), *([paused] if paused else [])]:
        box = Box.known(server, id)
        assert box.made["state"] == "paused", (box.made, told)
        server.json("POST", box.path + "/resume", {"timeout_seconds": 1800})
        assert box.root("cat /root/note").out.strip() == note, told
        if note == "resting" and deep:
            assert box.root(ASK).out == "2\n", told
        box.kill()
    staging = server.state / "pool" / "staging"
    # Disks of the template are made ahead there.
    assert len(list(staging.iterdir())) <= 2, told


def test_the_disk_forgets_what_was_not_flushed(tmp_path):
    """The tool itself: without this the tests above could pass on a disk that keeps everything."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-F", image)
    disk = Disk(tmp_path / "work", image)
    mounted = Mounted(disk.image, tmp_path / "mnt")
    try:
        (mounted.place / "flushed").write_text("kept")
        os.sync()
        (mounted.place / "flushed").write_text("newer")
        (mounted.place / "lost").write_text("lost")
        disk.cut(tmp_path / "after", 1)
    finally:
        mounted.close()
        disk.close()
    mounted = Mounted(tmp_path / "after", tmp_path / "mnt")
    try:
        assert (mounted.place / "flushed").read_text() in ("kept", "")
        assert not (mounted.place / "lost").exists()
    finally:
        mounted.close()

"""Images of memory: what a pause or a point writes is bounded, a sandbox is never lost for it, and nobody
else pays for it.

Until 0.1.0 an image was bounded by nothing but the end of the storage: deleted files that shared blocks were
written one by one, and so was memory that processes shared.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import time

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, state_dir
from tiny import ASK, COUNTER, TinyServer, memory_levels, tiny_state

MIB = 1 << 20
STORAGE = "2GiB"

# Files that share their blocks, deleted and held open; it tells the length and the end of each.
SHARED = """
my ($size, $copies) = (%d, %d);
open(my $first, "+>", "/root/first") or die $!;
my $block = join("", map { chr(int(rand(256))) } 1 .. 65536);
for (1 .. $size * 16) { syswrite($first, $block) or die $!; }
syswrite($first, "the end") or die $!;
my @held = ($first);
for my $n (1 .. $copies) {
    open(my $copy, "+>", "/root/copy$n") or die $!;
    ioctl($copy, 0x40049409, fileno($first) + 0) or die "clone: $!";
    push @held, $copy;
}
unlink("/root/first", map { "/root/copy$_" } 1 .. $copies) == $copies + 1 or die $!;
open(my $ready, ">", "/run/ready"); close($ready);
while (1) {
    1 until open(ASK, "<", "/run/held-ask");
    <ASK>;
    my $whole = 0;
    for my $file (@held) {
        sysseek($file, $size << 20, 0);
        sysread($file, my $end, 100);
        $whole++ if $end eq "the end";
    }
    1 until open(ANSWER, ">", "/run/held-answer");
    print(ANSWER "$whole\\n"); close(ANSWER);
}
"""
# Many small files, deleted and held open; then the disk is filled.
MANY = """
my @held;
for my $n (1 .. 1500) {
    open(my $file, "+>", "/root/small$n") or die $!;
    syswrite($file, "x" x 5000) or die $!;
    push @held, $file;
}
unlink(map { "/root/small$_" } 1 .. 1500) == 1500 or die $!;
open(my $full, ">", "/root/full") or die $!;
for (my $size = 1 << 20; $size >= 4096; $size >>= 1) {
    1 while syswrite($full, "y" x $size);
    system("sync");
}
close($full);
open(my $ready, ">", "/run/ready"); close($ready);
while (1) {
    1 until open(ASK, "<", "/run/held-ask");
    <ASK>;
    my $whole = grep { sysseek($_, 0, 0); sysread($_, my $all, 9000) == 5000 } @held;
    1 until open(ANSWER, ">", "/run/held-answer");
    print(ANSWER "$whole\\n"); close(ANSWER);
}
"""
# Memory, and processes that share all of it with the one that made it.
FORKS = """
my ($size, $forks) = (%d, %d);
my @held;
open(my $random, "<", "/dev/urandom") or die $!;
for (1 .. $size) { sysread($random, $held[$_ - 1], 1 << 20) == 1 << 20 or die $!; }
for (1 .. $forks) { fork() or do { sleep(1000) while 1 }; }
open(my $ready, ">", "/run/ready"); close($ready);
while (1) {
    1 until open(ASK, "<", "/run/held-ask");
    <ASK>;
    1 until open(ANSWER, ">", "/run/held-answer");
    print(ANSWER scalar(@held), "\\n"); close(ANSWER);
}
"""
ASK_HELD = "timeout 60 bash -c 'echo x > /run/held-ask; cat /run/held-answer'"


@pytest.fixture(scope="module")
def small():
    """A server with little storage."""
    state = tiny_state(state_dir().parent / f"images-{secrets.token_hex(3)}", storage=STORAGE)
    server = TinyServer(state, storage=STORAGE).start()
    yield server
    server.close()
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="module")
def levels(small):
    return memory_levels(small)


def free(server) -> int:
    room = os.statvfs(server.state / "pool")
    return room.f_bavail * room.f_frsize


def settled(server) -> int:
    """What is free when the kernel has freed all that was deleted."""
    last = -1
    while (now := free(server)) != last:
        last = now
        pool = server.state / "pool"
        for command in (["filesystem", "sync"], ["subvolume", "sync"], ["filesystem", "sync"]):
            subprocess.run(["btrfs", *command, pool], check=True, capture_output=True)
    return last


def holding(server, program: str, **request) -> Box:
    """A sandbox in which such a program runs, and another process that counts."""
    box = Box(server, timeout_seconds=1800, **request)
    box.write("/run/program", program.encode(), user="root")
    start = "mkfifo /run/held-ask /run/held-answer; nohup perl /run/program > /run/said 2>&1 &"
    assert box.root(COUNTER + start).ok

    def ready():
        looked = box.root("cat /run/ready && echo yes; cat /run/said")
        assert not looked.out or looked.out.startswith("yes"), looked
        return looked.out

    wait_for(ready, "the program holds what it holds", 120)
    assert box.root(ASK).out == "1\n"
    return box


def pause(box: Box) -> dict:
    return box.server.json("POST", box.path + "/pause", {}, timeout=300)["pause"]


def resume(box: Box) -> None:
    box.server.json("POST", box.path + "/resume", {"timeout_seconds": 1800}, timeout=300)


def limits(memory: int, disk: int) -> dict:
    return {"memory_mib": memory, "disk_mib": disk}


def is_refused_more(box: Box, mib: int) -> None:
    """Its own limit holds."""
    wrote = box.root(f"dd if=/dev/zero of=/root/more bs=1M count={mib}; rm -f /root/more; sync")
    assert "quota exceeded" in wrote.err, wrote


def test_deleted_files_that_share_blocks_made_the_sandbox_lost(small):
    with holding(small, SHARED % (100, 3), isolation="container", limits=limits(256, 250)) as box:
        for count in (2, 3):
            assert pause(box)["mode"] == "disk"
            resume(box)
            assert box.root(ASK_HELD).out == "4\n"
            assert box.root(ASK).out == f"{count}\n"
            is_refused_more(box, 400)
        # Copies of it and what was kept of it come back, too.
        point = small.json("POST", box.path + "/points", {"memory": True}, timeout=300)
        small.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=300)
        assert box.root(ASK_HELD).out == "4\n"
        copy = Box(small, from_point=point["id"], http_timeout=300)
        with copy:
            assert copy.root(ASK_HELD).out == "4\n"
            is_refused_more(copy, 400)
    small.json("DELETE", f"/v1/points/{point['id']}")


def test_many_small_deleted_files_on_a_full_disk_made_the_sandbox_lost(small):
    with holding(small, MANY, isolation="container", limits=limits(256, 100)) as box:
        assert pause(box)["mode"] == "disk"
        resume(box)
        assert box.root(ASK_HELD).out == "1500\n"
        # It has room again when it deletes something.
        assert box.root("rm /root/full").ok
        wait_for(lambda: box.root("echo word > /root/word && cat /root/word").out == "word\n", "there is room", 90)


ATTACKS = {
    "reflinked-deleted-files": (SHARED % (100, 12), limits(128, 150), "13\n"),
    "memory-shared-by-forks": (FORKS % (100, 10), limits(256, 100), "100\n"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_image_of_many_times_the_limits(small, attack):
    """1.3 GiB of deleted files where 150 MiB are allowed; 1.1 GiB of memory where 256 MiB are."""
    program, allowed, held = ATTACKS[attack]
    bound = (sum(allowed.values()) + 64) * MIB
    with holding(small, program, isolation="container", limits=allowed) as box:
        before = settled(small)
        least = before
        paused = pause(box)
        least = min(least, free(small))
        assert paused["mode"] == "ram", paused
        assert "larger than" in paused["why"] and "one by one" in paused["why"], paused
        # The bound holds while it is written. The file system sets some room aside for names by itself.
        assert before - least < bound + 300 * MIB, (before - least) >> 20
        resume(box)
        assert box.root(ASK_HELD).out == held
        assert before - settled(small) < 32 * MIB
        # A snapshot is one of the files alone, and says why; one that must have memory is refused.
        point = small.json("POST", box.path + "/points", {}, timeout=300)
        assert point["memory"] is False and "larger than" in point["why_disk_only"], point
        with pytest.raises(Refused) as refused:
            small.json("POST", box.path + "/points", {"memory": True}, timeout=300)
        assert "larger than" in refused.value.error["message"], refused.value
        # Forks begin with its files, and say why.
        (fork,) = small.json("POST", box.path + "/fork", {"count": 1}, timeout=300)["forks"]
        assert fork["memory"] is False and "larger than" in fork["why"], fork
        small.json("DELETE", f"/v1/sandboxes/{fork['sandbox']['id']}")
        assert box.root(ASK_HELD).out == held
        small.json("DELETE", f"/v1/points/{point['id']}")


@pytest.mark.parametrize("level", ["container", "gvisor", "microvm"])
def test_who_uses_all_its_memory_rests_on_the_disk(small, level):
    memory, held = {"container": (256, 200), "gvisor": (512, 400), "microvm": (512, 300)}[level]
    with holding(small, FORKS % (held, 0), isolation=level, limits=limits(memory, 50)) as box:
        paused = pause(box)
        assert paused["mode"] == "disk", paused
        resume(box)
        ran = box.root(ASK_HELD + "; cat /run/said")
        assert ran.out == f"{held}\n", ran


class Filler:
    """Somebody else takes the room in the storage."""

    def __init__(self, server):
        self.server = server
        self.path = server.state / "pool" / "filler"

    def leave(self, bytes: int) -> None:
        """So much is left, as the server counts it, and it has become no larger since."""
        settled(self.server)
        with self.path.open("ab") as file:

            def is_left() -> bool:
                storage = self.server.json("GET", "/v1/host")["storage"]
                more = (storage["free_bytes"] - bytes) // 2
                if more < 4 * MIB:
                    return storage["low"]
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, min(more, 128 * MIB))
                time.sleep(0.5)
                return False

            wait_for(is_left, "next to nothing is left", 120)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def filler(small):
    filler = Filler(small)
    yield filler
    filler.close()
    wait_for(lambda: settled(small) and is_well(small), "it is well again", 120)


def is_well(server) -> bool:
    return server.json("GET", "/v1/health")["status"] == "ok"


def low_reason(server) -> str:
    reasons = server.json("GET", "/v1/health").get("reasons", [])
    return next((one["message"] for one in reasons if one["code"] == "storage_low"), "")


def test_pauses_took_the_last_of_the_storage(small, levels, filler):
    """While there is next to none, memory stays in RAM: an idle sandbox's, too. Points are refused."""
    level = levels[-1]
    busy = Box(small, timeout_seconds=1800, isolation=level)
    idle = Box(small, timeout_seconds=1800, isolation=level, idle_seconds=2)
    kept = Box(small, timeout_seconds=1800, isolation=level, auto_points={"before_exec": True, "min_interval_seconds": 0})
    with busy, idle, kept:
        assert busy.root(COUNTER).ok and busy.root(ASK).out == "1\n"
        wait_for(lambda: idle.info()["state"] == "paused", "it is idle", 120)
        filler.leave(200 * MIB)
        wait_for(lambda: low_reason(small), "it is low")
        paused = pause(busy)
        assert paused["mode"] == "ram" and "storage is nearly full" in paused["why"], paused
        resume(busy)
        assert busy.root(ASK).out == "2\n"
        for wish in ({}, {"memory": True}, {"memory": False}):
            with pytest.raises(Refused) as refused:
                small.json("POST", busy.path + "/points", wish, timeout=300)
            assert refused.value.status == 507, refused.value
        resume(idle)
        wait_for(lambda: idle.info()["state"] == "paused", "it is idle again", 120)
        assert idle.info()["pause"]["mode"] == "ram", idle.info()
        assert "storage is nearly full" in idle.info()["pause"]["why"], idle.info()
        # Commands go on; that there is no point before them is told.
        assert kept.root("echo on").out == "on\n"
        assert "storage is nearly full" in points_not_made(kept)[-1]["message"], points_not_made(kept)


def points_not_made(box: Box) -> list[dict]:
    events = box.server.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]
    return [event for event in events if event["event"] == "point_not_made"]


def test_images_filled_the_storage_and_a_neighbour_was_frozen_for_it(small):
    """Attackers rest on the disk until nothing is left. Who only does what it always did goes on."""
    with contextlib.ExitStack() as all:
        neighbour = all.enter_context(Box(small, timeout_seconds=1800, isolation="container"))
        attackers = [
            all.enter_context(holding(small, SHARED % (60, 5), isolation="container", limits=limits(256, 300)))
            for _ in range(6)
        ]
        beat = "while true; do dd if=/dev/urandom of=/root/state bs=1M count=4; sync; echo x >> /root/beats; sleep 0.1; done"
        assert neighbour.root(f"nohup bash -c '{beat}' > /dev/null 2>&1 &").ok
        modes = [pause(box)["mode"] for box in attackers]
        # A trial takes room, too, for as long as it lasts: who is first may not have it.
        assert "disk" in modes and modes[-1] == "ram", modes
        # Images alone do not make the storage low.
        assert not low_reason(small), (low_reason(small), modes)
        # Something small more makes it so, and it is said who took the room.
        filler = Filler(small)
        all.callback(filler.close)
        filler.leave(225 * MIB)
        wait_for(lambda: low_reason(small), "it is low")
        said = wait_for(lambda: "images" in low_reason(small) and low_reason(small), "it is said")
        assert any(box.id in said for box in attackers) and neighbour.id not in said, said
        taken = small.json("GET", "/v1/host")["storage"]["taken"]
        assert taken[0]["sandbox_id"] in [box.id for box in attackers] and taken[0]["image_bytes"] > 300 * MIB, taken
        beats = int(neighbour.root("wc -l < /root/beats").out)
        wait_for(lambda: int(neighbour.root("wc -l < /root/beats").out) > beats + 40, "the neighbour goes on", 180)
        assert low_reason(small), "it was low all the time"
        events = small.json("GET", f"/v1/events?format=json&sandbox_id={neighbour.id}")["events"]
        assert "storage_low" not in [event["event"] for event in events], events
        # One of those who took it, once it runs again and goes on, is held at once, and its event says what it took.
        last = attackers[-1]
        resume(last)
        with contextlib.suppress(Refused):
            # It may be held before it has answered.
            last.root("nohup sh -c 'while true; do dd if=/dev/zero bs=1M count=8 >> /root/on; done' > /dev/null 2>&1 &")
        wait_for(lambda: last.info().get("held"), "who took the room is held")
        events = small.json("GET", f"/v1/events?format=json&sandbox_id={last.id}")["events"]
        low = next(event for event in events if event["event"] == "storage_low")
        assert low["took_bytes"] >= 60 * MIB, low
        assert not neighbour.info().get("held")


# Takes whatever the disk gives, at each moment, and holds memory that makes the image large.
GRASPS = """
my @held;
open(my $random, "<", "/dev/urandom") or die $!;
for (1 .. 150) { sysread($random, $held[$_ - 1], 1 << 20) == 1 << 20 or die $!; }
my $block = "x" x (4 << 20);
open(my $ready, ">", "/run/ready"); close($ready);
for (my $n = 0; ; $n++) {
    open(my $file, ">", "/root/grasped$n") or do { $n--; next };
    syswrite($file, $block) or $n--;
}
"""


def test_each_wake_gave_room_beyond_the_limit(small):
    """The disk limit was raised for the wake, by the whole image, and programs ran before it was back. A disk over
    its limit could not be limited again, the next wake failed, and the one after began to count from nothing."""
    settled(small)
    with holding(small, GRASPS, isolation="container", limits=limits(256, 100)) as box:

        def taken() -> int:
            return int(box.root("cat /root/grasped* | wc -c").out) // MIB

        wait_for(lambda: taken() > 70, "it takes what it may", 60)
        for _ in range(3):
            paused = pause(box)
            assert paused["mode"] == "disk", paused
            resume(box)
            time.sleep(1)
        assert taken() <= 100 + 3 * 8, "what a wake leaves is a little each time"

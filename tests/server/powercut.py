"""A disk whose power can be cut: what was written and not flushed may be lost, in any order.

The disk is one file in a FUSE file system that this program serves; a loop device makes a
block device of it. Writes go to a file that reads see (`live`) and are remembered until a
flush, which brings them to another (`durable`). A cut copies that one and adds some of the
blocks that were still under way: a real disk writes them whenever it likes.

`python powercut.py DIR MOUNTPOINT SIZE` serves; each line on standard input is `cut FILE SEED`
and is answered by how many blocks were under way, and how many of them arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
LARGEST = 1 << 20
BLOCK = 4096
FOREVER = 1 << 30
ROOT, DISK = 1, 2

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE = 1, 2, 3, 4, 14, 15, 16, 17, 18
FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR, ACCESS, INTERRUPT, BATCH_FORGET = 20, 25, 26, 27, 29, 34, 36, 42


class Refused(Exception):
    def __init__(self, number: int):
        super().__init__(os.strerror(number))
        self.number = number


class Platter:
    """What is on the disk for certain, what reads see, and what lies between the two."""

    def __init__(self, durable: Path, size: int):
        self.size = size
        self.durable_path = durable
        self.durable = os.open(durable, os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(self.durable, size)
        live = durable.with_suffix(".live")
        copy(durable, live)
        self.live = os.open(live, os.O_RDWR)
        self.pending: list[tuple[int, bytes]] = []

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.live, length, offset)

    def write(self, offset: int, data: bytes) -> None:
        os.pwrite(self.live, data, offset)
        self.pending.append((offset, data))

    def flush(self) -> None:
        for offset, data in self.pending:
            os.pwrite(self.durable, data, offset)
        self.pending.clear()

    def cut(self, target: Path, seed: int) -> tuple[int, int]:
        dice = random.Random(seed)
        luck = dice.choice((0.0, 0.1, 0.5, 0.9))
        copy(self.durable_path, target)
        there = arrived = 0
        with target.open("r+b") as out:
            for offset, data in self.pending:
                for at in range(0, len(data), BLOCK):
                    there += 1
                    if dice.random() < luck:
                        arrived += 1
                        os.pwrite(out.fileno(), data[at : at + BLOCK], offset + at)
        return there, arrived


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", "--", source, target], check=True)


def attributes(node: int, size: int) -> bytes:
    mode, links = (stat.S_IFDIR | 0o700, 2) if node == ROOT else (stat.S_IFREG | 0o600, 1)
    length = 0 if node == ROOT else size
    return ATTR.pack(node, length, length // 512, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, BLOCK, 0)


class Served:
    def __init__(self, device: int, platter: Platter):
        self.device, self.platter = device, platter

    def one(self) -> None:
        try:
            message = os.read(self.device, LARGEST + 4096)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return
            raise
        _, kind, unique, node, *_ = IN_HEADER.unpack_from(message)
        if kind in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        try:
            number, body = 0, self.answer(kind, node, message[IN_HEADER.size :])
        except Refused as refused:
            number, body = -refused.number, b""
        os.write(self.device, OUT_HEADER.pack(OUT_HEADER.size + len(body), number, unique) + body)

    def answer(self, kind: int, node: int, body: bytes) -> bytes:
        platter = self.platter
        if kind == WRITE:
            _, offset, length = struct.unpack_from("<QQI", body)
            platter.write(offset, body[40 : 40 + length])
            return struct.pack("<II", length, 0)
        if kind == READ:
            _, offset, length = struct.unpack_from("<QQI", body)
            return platter.read(offset, length)
        if kind == FSYNC:
            platter.flush()
            return b""
        if kind == INIT:
            _, _, ahead, _ = struct.unpack_from("<IIII", body)
            max_pages, big_writes = 1 << 22, 1 << 5
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, max_pages | big_writes, 16, 12, LARGEST, 1, LARGEST // 4096, 0, 0)
        if kind == LOOKUP:
            if node != ROOT or body.rstrip(b"\0") != b"disk":
                raise Refused(errno.ENOENT)
            return struct.pack("<QQQQII", DISK, 0, FOREVER, FOREVER, 0, 0) + attributes(DISK, platter.size)
        if kind in (GETATTR, SETATTR):
            return struct.pack("<QII", FOREVER, 0, 0) + attributes(node, platter.size)
        if kind in (OPEN, OPENDIR):
            return struct.pack("<QIi", 0, 0, 0)
        if kind == STATFS:
            return struct.pack("<5Q4I24x", 1, 0, 0, 1, 0, BLOCK, 255, BLOCK, 0)
        if kind in (RELEASE, RELEASEDIR, FLUSH, ACCESS):
            return b""
        raise Refused(errno.ENOSYS)


def serve(directory: Path, mountpoint: Path, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Nobody serves on when the test is gone.
    libc.prctl(1, signal.SIGKILL)
    platter = Platter(directory / "durable", size)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"powercut", os.fsencode(mountpoint), b"fuse", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mounting the disk")
    print("served", flush=True)
    served = Served(device, platter)
    while True:
        ready, _, _ = select.select([device, sys.stdin], [], [])
        if device in ready:
            try:
                served.one()
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
        elif sys.stdin in ready:
            words = sys.stdin.readline().split()
            if not words:
                return
            there, arrived = platter.cut(Path(words[1]), int(words[2]))
            print(f"{there} {arrived}", flush=True)


def run(*command) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.strip()


class Mounted:
    """A file system in a file or on a disk, at a place."""

    def __init__(self, image: Path, place: Path):
        self.place = place
        self.device = run("losetup", "--find", "--show", image)
        place.mkdir(parents=True, exist_ok=True)
        try:
            run("mount", self.device, place)
        except AssertionError:
            run("losetup", "--detach", self.device)
            raise

    def close(self) -> None:
        # A pool that a server left mounted goes first; boxes of a test that failed may still use it.
        for place in [*self.place.glob("*/pool"), self.place]:
            with contextlib.suppress(AssertionError):
                run("umount", "--lazy", place)
        run("losetup", "--detach", self.device)


class Disk:
    """The program above, from the side of a test. Begins with the content of `image`."""

    def __init__(self, work: Path, image: Path):
        self.work, self.image = work, work / "disk" / "disk"
        (work / "disk").mkdir(parents=True)
        copy(image, work / "durable")
        size = image.stat().st_size
        self.process = subprocess.Popen(
            [sys.executable, __file__, work, work / "disk", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "served\n", "the disk is not served"

    def cut(self, target: Path, seed: int) -> tuple[int, int]:
        """What would be on the disk if the power went now."""
        self.process.stdin.write(f"cut {target} {seed}\n")
        self.process.stdin.flush()
        there, arrived = self.process.stdout.readline().split()
        return int(there), int(arrived)

    def close(self) -> None:
        run("umount", self.work / "disk")
        self.process.stdin.close()
        self.process.wait(30)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

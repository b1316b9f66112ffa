"""A small disk of its own for a server, which tests fill from inside and from outside."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from pathlib import Path

from boxkit import Box
from sandkeep_server import Refused, Server, binary, state_dir
from tiny import tiny_template

MIB = 1 << 20


def run(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert not check or done.returncode == 0, (words, done)
    return done


class SmallDisk:
    """An ext4 file system of some GiB. Root has no reserve on it: full is full for everybody."""

    def __init__(self, gib: int):
        self.dir = state_dir().parent / f"small-{secrets.token_hex(3)}"
        self.dir.mkdir()
        self.image, self.root = self.dir / "disk", self.dir / "mnt"
        with self.image.open("wb") as file:
            file.truncate(gib << 30)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", self.image)
        self.root.mkdir()
        run("mount", "-o", "loop", self.image, self.root)
        self.filler = self.root / "filler"

    def free(self) -> int:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize

    def fill(self) -> None:
        """Something else on the host takes all there is, at once."""
        with self.filler.open("ab") as file:
            step = 256 * MIB
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)
                except OSError:
                    step //= 2

    def give_back(self) -> None:
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        run("umount", "--lazy", self.root, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)


class SmallServer(Server):
    """A server with default settings on a small disk, with the tiny root as its template."""

    def __init__(self, disk: SmallDisk, *flags: str):
        self.disk = disk
        state = disk.root / "state"
        if not state.exists():
            archive = tiny_template(disk.dir / "tiny.tar")
            run(binary(), "template", "import", "base", archive, "--state", state)
            archive.unlink()
        super().__init__("--pool-size", "0", *flags, state=state)
        self.log_path = disk.dir / "server.log"

    @property
    def pool(self) -> Path:
        return self.state / "pool"

    def is_read_only(self) -> bool:
        return bool(os.statvfs(self.pool).f_flag & os.ST_RDONLY)

    def health(self) -> dict:
        return self.json("GET", "/v1/health")

    def reasons(self) -> set[str]:
        return {reason["code"] for reason in self.health().get("reasons", [])}

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.end_boxes()
        with contextlib.suppress(RuntimeError):
            self.stop()
        self.kill_hard()
        while run("umount", "--lazy", self.pool, check=False).returncode == 0:
            pass


def fill_in_background(box: Box, mib: int, path: str = "/root/fill") -> None:
    """Writes as fast as it can, and says how that ended."""
    # Past the cache of a machine's own kernel, which is counted as its memory.
    direct = "oflag=direct" if box.info()["isolation"] == "microvm" else ""
    script = f"dd if=/dev/zero of={path} bs=1M count={mib} {direct} 2> {path}.said; echo $? > /run/ended; sync"
    assert box.root(["bash", "-c", f"nohup bash -c '{script}' > /dev/null 2>&1 &"]).ok


def stopped_writing(box: Box) -> str | None:
    """How it came that a box writes no more: it was told so, or is held."""
    info = box.info()
    if info.get("held"):
        return "held"
    try:
        ended = box.root("cat /run/ended", timeout_ms=20_000, http_timeout=30)
    except TimeoutError:
        # It was held with the question in it, which is answered when it goes on.
        return None
    except Refused as refused:
        # A machine that is busy with its disk answers late.
        if refused.error.get("code") in ("box_unreachable", "deadline_exceeded"):
            return None
        # Held between the two questions.
        return "held" if box.info().get("held") else f"refused: {refused}"
    if not ended.ok:
        return None if "No such file" in ended.err else f"broken: {ended!r}"
    return "finished" if ended.out == "0\n" else "told"

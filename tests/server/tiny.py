"""A root file system of a few megabytes, for servers that tests make and throw away."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

from sandkeep_server import Server, binary, state_dir

PROGRAMS = "bash sh cat echo ls dd sleep sync cksum mkdir rm mv cp head tail od date kill true false seq hostname truncate wc ln touch stat mkfifo nohup timeout perl".split()
PASSWD = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
GROUP = "root:x:0:\nuser:x:1000:\n"


def chain(root: Path, path: Path) -> set[Path]:
    """A file and the links that lead to it, as paths in the root; its directories are real ones."""
    found = set()
    while True:
        path = Path(os.path.realpath(path.parent)) / path.name
        assert path.is_relative_to(root), f"{path} leads out of {root}"
        found.add(path.relative_to(root))
        if not path.is_symlink():
            return found
        target = os.readlink(path)
        # An absolute one means the root of the box.
        path = root / target.lstrip("/") if target.startswith("/") else path.parent / target


def needed(root: Path, program: Path) -> set[Path]:
    """A program with the libraries it names."""
    found = chain(root, root / program)
    listed = subprocess.run(["chroot", root, "/usr/bin/ldd", f"/{program}"], capture_output=True, text=True).stdout
    for word in listed.split():
        if word.startswith("/"):
            found |= chain(root, root / word.lstrip("/"))
    return found


def tiny_template(target: Path, more: tuple[str, ...] = (), with_user: bool = True) -> Path:
    """Made from the base template of the tests, with more programs, or without the account `user`."""
    root = Path(os.path.realpath(state_dir() / "pool" / "templates" / "base" / "root"))
    files: set[Path] = set()
    for name in (*PROGRAMS, *more):
        path = Path("usr/bin") / name
        if (root / path).exists() or (root / path).is_symlink():
            files |= needed(root, path)
    assert Path("usr/bin/bash") in files and len(files) > 20, files
    with tarfile.open(target, "w") as tar:
        for name, mode in (("tmp", 0o1777), ("run", 0o755), ("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("root", 0o700), ("home/user", 0o755), ("etc", 0o755), ("var/tmp", 0o1777)):
            if name == "home/user" and not with_user:
                continue
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            if name == "home/user":
                entry.uid = entry.gid = 1000
            tar.addfile(entry)
        for link in ("bin", "lib", "lib64", "sbin"):
            if (root / link).is_symlink():
                entry = tarfile.TarInfo(link)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(root / link)
                tar.addfile(entry)
        for path in sorted(files):
            tar.add(root / path, arcname=str(path), recursive=False)
        for name, text in (("passwd", PASSWD), ("group", GROUP), ("hostname", "box\n"), ("hosts", "127.0.0.1 localhost\n")):
            lines = text.splitlines(keepends=True)
            data = "".join(line for line in lines if with_user or not line.startswith("user:")).encode()
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return target


def tiny_state(state: Path, storage: str = "4GiB") -> Path:
    """A state directory of its own, with the tiny root as its base."""
    archive = tiny_template(state.parent / f"{state.name}.tar")
    command = [str(binary()), "template", "import", "base", str(archive), "--state", str(state), "--storage-size", storage]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    archive.unlink()
    return state


class TinyServer(Server):
    """A server on such a state; `close` takes everything away."""

    def __init__(self, state: Path, *flags: str, storage: str = "4GiB", pool: bool = False):
        size = () if pool else ("--pool-size", "0")
        super().__init__(*size, "--storage-size", storage, *flags, state=state)

    def close(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()
        self.end_boxes()
        self.stop()
        subprocess.run(["umount", "--lazy", str(self.state / "pool")], check=False)


# A process whose memory tells whether it is the same: it counts how often it was asked.
COUNTER = """
mkfifo /run/ask /run/answer
nohup bash -c 'n=0; while read -r _ < /run/ask; do n=$((n+1)); echo $n > /run/answer; done' > /dev/null 2>&1 &
"""
# Another that talks to itself over a connection.
LINKED = """
mkfifo /run/link-ask /run/link-answer
cat > /run/linked <<'END'
my $at = pack("S n C4 x8", 2, 8099, 127, 0, 0, 1);
socket(DOOR, 2, 1, 0) && bind(DOOR, $at) && listen(DOOR, 1) or die $!;
socket(NEAR, 2, 1, 0) && connect(NEAR, $at) && accept(FAR, DOOR) or die $!;
my $count = 0;
while (1) {
    open(ASK, "<", "/run/link-ask") && <ASK>;
    syswrite(NEAR, "over " . ++$count . "\\n");
    sysread(FAR, my $heard, 100);
    open(ANSWER, ">", "/run/link-answer") && print(ANSWER $heard) && close(ANSWER);
}
END
nohup perl /run/linked > /dev/null 2>&1 &
"""
ASK_LINKED = "timeout 60 bash -c 'echo x > /run/link-ask; cat /run/link-answer'"
ASK = "timeout 60 bash -c 'echo x > /run/ask; cat /run/answer'"


def holding(mib: int) -> str:
    """A program with so much memory that nobody can guess, whose sum it writes down when it is told
    to, and a message queue, which CRIU does not write."""
    return f"""
import ctypes, hashlib, os, signal
attributes = (ctypes.c_long * 8)(0, 4, 64)
assert ctypes.CDLL(None).mq_open(b"/held", os.O_CREAT | os.O_RDWR, 0o600, attributes) >= 0
held = bytearray({mib} << 20)
for at in range(0, len(held), 1 << 20):
    held[at : at + (1 << 20)] = os.urandom(1 << 20)
def tell(*_):
    with open("/root/sum", "w") as out:
        out.write(hashlib.sha256(held).hexdigest())
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
"""


def memory_levels(server: Server) -> list[str]:
    """The levels that write memory to disk here."""
    from boxkit import Box
    from sandkeep_server import Refused

    found = []
    for level in ("gvisor", "container"):
        with Box(server, isolation=level) as box:
            try:
                point = server.json("POST", box.path + "/points", {"memory": True})
            except Refused:
                continue
            server.json("DELETE", f"/v1/points/{point['id']}")
            found.append(level)
    assert "gvisor" in found, "runsc writes memory everywhere"
    return found

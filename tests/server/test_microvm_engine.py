"""What runs machines: which QEMU, and whether what was written down before can be believed."""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest
from sandkeep_server import Refused, binary
from servers import in_place_of
from test_microvm import machine

QEMU = shutil.which("qemu-system-x86_64")
pytestmark = pytest.mark.skipif(
    QEMU is None and "SANDKEEP_TEST_MICROVM" not in os.environ, reason="QEMU is not installed; script/test installs it"
)


def level(server):
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    return levels["microvm"], {check["name"]: check for check in levels["microvm"]["checks"]}


def with_qemu(server, program, use):
    server.stop()
    server.env["SANDKEEP_MICROVM_QEMU"] = str(program)
    try:
        use(server.start())
    finally:
        server.stop()
        del server.env["SANDKEEP_MICROVM_QEMU"]
        server.start()


@pytest.fixture
def beside():
    """A program that nobody finds who was not told of it."""
    path = Path("/usr/local/bin") / f"qemu-{secrets.token_hex(4)}"
    yield path
    path.unlink(missing_ok=True)


def test_the_qemu_that_was_named_is_the_one_that_runs(server, beside):
    beside.symlink_to(QEMU)

    def use(own):
        _, checks = level(own)
        assert checks["qemu"]["found"].endswith(f" at {beside}"), checks
        with machine(own) as box:
            procs = next(Path("/sys/fs/cgroup").rglob(f"{box.id}/cgroup.procs"))
            pid = int(procs.read_text().split()[0])
            assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(QEMU)

    with_qemu(server, beside, use)


def test_a_qemu_that_lacks_what_it_will_be_asked_for_is_named_with_what_it_lacks(server, beside):
    """As the slim one of Debian 12, which has no filter of system calls."""
    beside.write_text('#!/bin/sh\nfor word; do [ "$word" != -sandbox ] || { echo "no -sandbox in here" >&2; exit 1; }; done\nexec ' + QEMU + ' "$@"\n')
    beside.chmod(0o755)

    def use(own):
        found, checks = level(own)
        assert not found["usable"] and "no -sandbox in here" in checks["qemu"]["found"], checks
        with pytest.raises(Refused) as refused:
            machine(own)
        assert "no -sandbox in here" in str(refused.value), refused.value
        # Nobody needs a server to find that out.
        env = {**os.environ, "SANDKEEP_MICROVM_QEMU": str(beside)}
        words = [binary(), "doctor", "--json", "--state", str(own.state)]
        told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120).stdout
        assert "no -sandbox in here" in told, told

    with_qemu(server, beside, use)


def test_a_machine_on_disk_that_does_not_run_here_is_thrown_away_and_made_anew(server):
    """What was written down by another server, or on another processor, hangs or is refused by QEMU."""
    with in_place_of(server, "--pool-size", "0") as own:
        with machine(own) as box:
            assert box.root("echo first").out == "first\n"
        own.stop()
        kept = sorted((own.state / "pool" / "machines").glob("*/*/devices"))
        assert kept, "there are machines on disk"
        before = {path: path.stat().st_ino for path in kept}
        for path in kept:
            path.write_bytes(b"this is no machine")
            (path.parent / "answered").unlink(missing_ok=True)
        own.start()
        with machine(own) as box:
            assert box.root("echo second").out == "second\n"
        with machine(own) as box:
            assert box.root("echo third").out == "third\n"
        # Machines of shapes that other tests used are looked at when somebody asks for them.
        anew = [path for path, inode in before.items() if not path.exists() or path.stat().st_ino != inode]
        assert anew, before

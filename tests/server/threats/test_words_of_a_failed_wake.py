"""A resume that fails all the same: whoever asked is told why in words, and how to get at the files
(container level)."""

import subprocess

import pytest
from boxkit import Box
from sandkeep_server import Refused

OURS = "/usr/local/lib/sandkeep/criu"
# One that writes nothing and reads nothing; the launcher takes its words from where CRIU leaves them.
BROKEN = """#!/bin/sh
echo "Version: VERSION"
[ "$1" = restore ] && echo "(00.1) Error (criu/files.c:1): The disk in /run/root/etc is of another kind" > /run/criu.log
[ "$1" = --version ]
"""


def test_a_failed_wake_said_nothing_of_the_files(server, tmp_path):
    version = subprocess.run([OURS, "--version"], capture_output=True, text=True, check=True).stdout
    version = next(line.split()[1] for line in version.splitlines() if line.startswith("Version:"))
    broken = tmp_path / "criu"
    broken.write_text(BROKEN.replace("VERSION", version))
    broken.chmod(0o755)
    with Box(server, isolation="container", timeout_seconds=600) as box:
        box.write("/root/kept", b"kept", user="root")
        assert server.json("POST", box.path + "/pause", {}, timeout=120)["pause"]["mode"] == "disk"
        subprocess.run(["mount", "--bind", str(broken), OURS], check=True)
        try:
            with pytest.raises(Refused) as refused:
                server.json("POST", box.path + "/resume", {"timeout_seconds": 600}, timeout=120)
        finally:
            subprocess.run(["umount", OURS], check=True)
        error = refused.value.error
        assert "The disk in /etc is of another kind" in error["message"], error
        assert '"memory": false' in error["hint"], error
        # What was offered works; and before that, nothing was given up.
        server.json("POST", box.path + "/resume", {"memory": False, "timeout_seconds": 600}, timeout=120)
        assert box.read("/root/kept") == b"kept"

"""Commands of the operator look for the server among the processes of the host, which are those of sandboxes, too."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from boxkit import wait_for
from sandkeep_server import binary

POSE = """
import os
os.makedirs("/x", exist_ok=True)
lock = os.open("/x/server.lock", os.O_CREAT | os.O_RDWR)
os.set_inheritable(lock, True)
os.execv("/usr/bin/python3", ["sandkeep", "-c", "import time; time.sleep(600)", "serve"])
"""


def posing() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(b"sandkeep\0-c\0") and b"\0serve\0" in words:
            found.append(int(entry.name))
    return found


def test_a_sandbox_posed_as_the_server_and_doctor_ran_what_it_named(server, make):
    """`doctor` took the state directory from a process of a sandbox, and started the programs its settings named."""
    box = make()
    box.write("/tmp/pose.py", POSE.encode())
    assert box.root("nohup python3 /tmp/pose.py >/dev/null 2>&1 &").ok
    fakes = wait_for(posing, "the program of the sandbox is seen on the host")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    ran = subprocess.run([str(binary()), "doctor", "--json"], capture_output=True, text=True, timeout=120, env=env)
    checks = {check["name"]: check for check in json.loads(ran.stdout)["host"]}
    assert str(server.pid) in checks["server"]["found"], checks["server"]
    for pid in fakes:
        assert f"pid {pid} " not in checks["server"]["found"], checks["server"]
    assert "/x" not in checks["server"]["found"], checks["server"]

"""Engines of others, for measuring beside them: a Docker of the benchmark's own, and the ways podman and crun need here."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

START_LIMIT = 30.0
# Without CAP_SYS_RESOURCE an engine can not raise limits; these every host grants.
NOFILE = "nofile=1024:4096"
ULIMITS = ["--ulimit", NOFILE, "--ulimit", "nproc=4096:4096"]
# Where `script/server` puts the CRIU it builds: theirs must be found in the PATH.
OUR_CRIU = Path("/usr/local/lib/sandkeep/criu")


def with_criu() -> dict[str, str]:
    """An environment in which other engines find a CRIU: the host's own, else the one built for us."""
    if shutil.which("criu") or not OUR_CRIU.is_file():
        return dict(os.environ)
    return {**os.environ, "PATH": f"{OUR_CRIU.parent}:{os.environ.get('PATH', '')}"}


def hide_hybrid_cgroups() -> list[str]:
    """crun refuses hosts with both cgroup versions: the words that start a program without the second."""
    if not os.path.ismount("/sys/fs/cgroup/unified"):
        return []
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", 'umount /sys/fs/cgroup/unified && exec "$@"', "sh"]


class Docker:
    """A Docker engine: the one that answers here, else one started for this run alone."""

    def __init__(self, work: Path):
        self.work = work / "docker"
        self.process: subprocess.Popen[bytes] | None = None
        self.words = ["docker"]
        self.why_not = ""

    def start(self) -> bool:
        if not shutil.which("docker"):
            self.why_not = "not installed"
            return False
        if self.answers():
            return True
        if not shutil.which("dockerd"):
            self.why_not = "installed, but no engine answers and there is no dockerd to start"
            return False
        self.work.mkdir(parents=True)
        socket = self.work / "sock"
        self.words = ["docker", "-H", f"unix://{socket}"]
        log = (self.work / "log").open("wb")
        self.process = subprocess.Popen(
            ["dockerd", "--data-root", str(self.work / "data"), "--exec-root", str(self.work / "exec"),
             "--pidfile", str(self.work / "pid"), "-H", f"unix://{socket}", "--bridge=none", "--iptables=false",
             "--ip6tables=false", "--default-ulimit", NOFILE,
             # Checkpoints are behind this switch.
             "--experimental"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=with_criu(),
        )
        # A run that breaks off leaves no engine behind.
        atexit.register(self.stop)
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            if self.answers():
                return True
            time.sleep(0.2)
        self.why_not = "an engine started for this run did not answer"
        self.stop()
        return False

    def answers(self) -> bool:
        return subprocess.run([*self.words, "info"], capture_output=True, timeout=60).returncode == 0

    def import_root(self, root: Path, image: str) -> None:
        """Makes an image of a directory, since there is no registry to fetch one from."""
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        subprocess.run([*self.words, "import", "-", image], stdin=tar.stdout, check=True, capture_output=True, timeout=300)
        tar.wait()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None
        # containerd's mounts end with the engine; what is left is files.
        shutil.rmtree(self.work, ignore_errors=True)

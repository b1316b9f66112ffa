"""What an operator does with a whole server: back it up, restore it, give it another key, remove it."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest
from boxkit import Box, post, wait_for
from sandkeep_server import binary, free_port, state_dir
from tiny import TinyServer, tiny_state

SIZE = "1GiB"


def sandkeep(*args, **options):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    return subprocess.run([str(binary()), *map(str, args)], capture_output=True, text=True, timeout=300, env=clean, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def own():
    """A server with a state of its own, which is removed whatever becomes of it."""
    yield from served()


@pytest.fixture
def usual():
    """The same with a pool, as a server has it by itself."""
    yield from served(pool=True)


def served(**options):
    state = state_dir().parent / f"operator-{secrets.token_hex(3)}"
    server = TinyServer(tiny_state(state, storage=SIZE), storage=SIZE, **options).start()
    yield server
    with contextlib.suppress(Exception):
        server.close()
    # Sandboxes of the pool outlive their server.
    sandkeep("uninstall", "--yes", "--keep-programs", "--state", state)
    subprocess.run(["umount", "--lazy", str(state / "pool")], check=False, capture_output=True)
    shutil.rmtree(state, ignore_errors=True)


def left_of(state):
    """Everything on this host that names a state directory."""
    with open("/proc/self/mountinfo") as table:
        mounts = [line for line in table if str(state) in line]
    loops = subprocess.run(["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True).stdout
    loops = [line for line in loops.splitlines() if str(state) in line]
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace")
            if str(state) in words and pid != str(os.getpid()):
                processes.append(words)
    return {"mounts": mounts, "loops": loops, "processes": processes, "state": [str(state)] if state.exists() else []}


def trees():
    found = subprocess.run(["find", "/sys/fs/cgroup", "-type", "d", "-name", "sandkeep.*"], capture_output=True, text=True)
    return set(found.stdout.split())


def full(server):
    """Whether the pool has what it wants."""
    return server.json("GET", "/v1/host")["pooled"] > 0


def test_uninstall_leaves_nothing_and_a_backup_brings_everything_back(usual, tmp_path):
    own = usual
    state, file = own.state, tmp_path / "server.backup"
    wait_for(lambda: full(own), "a sandbox in the pool", 60)
    before = trees()
    box, other = Box(own), Box(own)
    assert box.exec("echo kept > /home/user/note").ok
    post(box, "points", name="before")
    # Neither while it serves nor while something runs.
    ran = sandkeep("backup", file, "--state", state)
    assert ran.returncode == 1 and "stop the server" in ran.stderr, ran
    own.stop()
    ran = sandkeep("backup", file, "--state", state)
    assert ran.returncode == 1 and not file.exists(), ran
    assert "2 sandboxes are still running" in ran.stderr and box.id in ran.stderr, ran
    recipe = re.search(r"`(sandkeep ls .*?)`", ran.stderr)[1].replace("sandkeep", str(binary()))
    own.start()
    assert box.exec("cat /home/user/note").out == "kept\n", "a refusal ends no sandbox"
    other.kill()
    post(box, "pause", memory=False)
    # As printed, and without complaint about one that is paused already.
    paused = subprocess.run(["sh", "-c", recipe], capture_output=True, text=True, timeout=60, env={**os.environ, **own.cli_env()})
    assert paused.returncode == 0 and not paused.stderr, paused
    wait_for(lambda: full(own), "a sandbox in the pool", 60)
    own.stop()
    left = sandkeep("uninstall", "--dry-run", "--keep-programs", "--state", state)
    assert "all sandboxes that run" in left.stdout, "the pool runs while the server does not"
    ran = sandkeep("backup", file, "--state", state)
    assert ran.returncode == 0, ran
    left = sandkeep("uninstall", "--dry-run", "--keep-programs", "--state", state)
    assert left.returncode == 0 and "all sandboxes that run" not in left.stdout, left
    assert file.stat().st_mode & 0o777 == 0o600, "it holds keys"

    own.start()
    other = Box(own)
    assert other.exec("nohup sleep 1000 > /dev/null 2>&1 &").ok
    ours = trees() & before
    # It asks, and a script cannot be asked.
    ran = sandkeep("uninstall", "--keep-programs", "--state", state)
    assert ran.returncode == 1 and "--yes" in ran.stderr and other.info()["state"] == "running", ran
    ran = sandkeep("uninstall", "--dry-run", "--keep-programs", "--state", state)
    assert ran.returncode == 0 and str(state) in ran.stdout and other.info()["state"] == "running", ran
    ran = sandkeep("uninstall", "--yes", "--keep-programs", "--state", state)
    assert ran.returncode == 0, ran
    own.process.wait(10)
    assert left_of(state) == {"mounts": [], "loops": [], "processes": [], "state": []}, left_of(state)
    named = set(re.findall(r"cgroups in (\S+)", ran.stdout))
    assert named and named <= ours and not named & trees(), (named, ours, trees())

    ran = sandkeep("restore", file, "--state", state)
    assert ran.returncode == 0, ran
    own.start()
    post(box, "resume")
    assert box.exec("cat /home/user/note").out == "kept\n"
    with Box(own, from_point=f"{box.id}:before") as copy:
        assert copy.exec("cat /home/user/note").out == "kept\n"
    # Nothing of anybody is written over.
    ran = sandkeep("restore", file, "--state", state)
    assert ran.returncode == 1 and "not empty" in ran.stderr, ran


def test_uninstall_removes_no_directory_that_is_not_a_servers(tmp_path):
    (tmp_path / "work").write_text("mine")
    for state in (tmp_path, tmp_path / "nothing"):
        ran = sandkeep("uninstall", "--yes", "--keep-programs", "--state", state)
        assert ran.returncode == 1 and "is not the state directory" in ran.stderr, ran
    assert (tmp_path / "work").read_text() == "mine"


def test_what_is_no_backup_is_not_restored(tmp_path):
    file = tmp_path / "file"
    for content in (b"", b"no archive", b"\x28\xb5\x2f\xfd cut off"):
        file.write_bytes(content)
        ran = sandkeep("restore", file, "--state", tmp_path / "state")
        assert ran.returncode == 1, (content, ran)
        assert not (tmp_path / "state").exists(), content


def test_a_rotated_key_counts_after_a_restart_and_the_old_one_no_more(own):
    own.stop()
    state, port = own.state, free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}

    @contextlib.contextmanager
    def serving(**more):
        flags = ["--listen", f"127.0.0.1:{port}", "--state", str(state), "--pool-size", "0", "--storage-size", SIZE]
        with (state / "own.log").open("wb") as log:
            process = subprocess.Popen([str(binary()), "serve", *flags], env=clean | more, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(lambda: answer("/v1/health", ""), "the server", 60)
            yield
        finally:
            process.terminate()
            process.wait(60)

    def answer(path, key):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"X-API-Key": key})
        try:
            return urllib.request.urlopen(request, timeout=5).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def key():
        return (state / "api-key").read_text().strip()

    with serving():
        old = key()
        assert answer("/v1/sandboxes", old) == 200
        ran = sandkeep("key", "rotate", "--state", state)
        assert ran.returncode == 0 and key() != old and key() not in ran.stdout + ran.stderr, ran
        assert "restarted" in ran.stderr and "SANDKEEP_API_KEY" in ran.stderr, ran
        assert (state / "api-key").stat().st_mode & 0o777 == 0o600
    with serving():
        assert answer("/v1/sandboxes", old) == 401
        assert answer("/v1/sandboxes", key()) == 200
    with serving(SANDKEEP_API_KEY=old):
        assert answer("/v1/sandboxes", old) == 200
        assert "the API key is the one of SANDKEEP_API_KEY" in (state / "own.log").read_text()

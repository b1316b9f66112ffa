"""The disk below the storage becomes full, by a sandbox or by something else on the host.

Until 0.1.0 one sandbox within its own disk limit broke the pool of all: btrfs went read-only for good.
"""

import contextlib
import os
import signal
import subprocess

import pytest
from boxkit import Box, wait_for
from fulldisk import MIB, SmallDisk, SmallServer, fill_in_background, run, stopped_writing
from sandkeep_server import Refused, binary

LEVELS = ["container", "gvisor", "microvm"]


@pytest.fixture
def disk(request):
    disk = SmallDisk(getattr(request, "param", 3))
    yield disk
    disk.close()


@pytest.fixture
def small(disk):
    server = SmallServer(disk).start()
    yield server
    server.close()


def still_works(box: Box, word: str) -> None:
    ran = box.root(f"cat /root/note && echo {word} > /root/{word} && sync /root/{word} && cat /root/{word}")
    assert ran.out == f"kept\n{word}\n", ran


def noted(server, **request) -> Box:
    box = Box(server, timeout_seconds=1800, **request)
    assert box.root("echo kept > /root/note; sync /root/note").ok
    return box


def events_of(box: Box) -> list[str]:
    return [event["event"] for event in box.server.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]]


def refused_for_space(call) -> None:
    with pytest.raises(Refused) as refused:
        call()
    error = refused.value.error
    assert error["code"] == "disk_full", error
    assert "storage" in error["message"] and error["hint"], error


@pytest.mark.parametrize("level", LEVELS)
def test_one_sandbox_within_its_limit_broke_the_pool_of_all(small, level):
    neighbour = noted(small, isolation="container")
    culprit = noted(small, isolation=level)
    fill_in_background(culprit, 5000)
    how = wait_for(lambda: small.is_read_only() and "read-only" or stopped_writing(culprit), "it writes no more", 300)
    assert how in ("held", "told"), how
    assert not small.is_read_only()
    still_works(neighbour, "during")
    wait_for(lambda: "storage_low" in small.reasons(), "health says so")
    assert small.health()["status"] == "degraded"
    refused_for_space(lambda: Box(small))
    if how == "held":
        refused_for_space(lambda: culprit.exec("true"))
        wait_for(lambda: "storage_low" in events_of(culprit), "its events say so")
    metrics = small.request("GET", "/metrics")[2].decode()
    assert "sandkeep_storage_low 1" in metrics, [line for line in metrics.splitlines() if "storage" in line]
    # One deletion is enough.
    small.json("DELETE", culprit.path)
    wait_for(lambda: small.health()["status"] == "ok", "the room is back", 120)
    still_works(neighbour, "after")
    with Box(small, isolation=level) as fresh:
        assert fresh.exec("echo fine").out == "fine\n"
    assert "sandkeep_storage_low 0" in small.request("GET", "/metrics")[2].decode()


@pytest.mark.parametrize("disk", [6], indirect=True)
@pytest.mark.parametrize("level", LEVELS)
def test_something_else_filled_the_disk_and_the_pool_was_read_only_for_good(disk, small, level):
    neighbour = noted(small, isolation="container")
    culprit = noted(small, isolation=level)
    disk.fill()
    assert disk.free() < 64 * MIB
    fill_in_background(culprit, 5000)
    how = wait_for(lambda: small.is_read_only() and "read-only" or stopped_writing(culprit), "it writes no more", 300)
    assert how in ("held", "told"), how
    assert not small.is_read_only()
    still_works(neighbour, "during")
    # A snapshot has nothing to be made on, and a pause leaves nobody between two states.
    refused_for_space(lambda: small.json("POST", neighbour.path + "/points", {"memory": True}, timeout=180))
    with contextlib.suppress(Refused):
        small.json("POST", neighbour.path + "/pause", {}, timeout=180)
    wait_for(lambda: neighbour.info()["state"] in ("running", "paused"), "it is in no state between")
    listed = {one["id"]: one["state"] for one in small.json("GET", "/v1/sandboxes")["sandboxes"]}
    assert listed[neighbour.id] == neighbour.info()["state"], listed
    if neighbour.info()["state"] == "paused":
        small.json("POST", neighbour.path + "/resume", {"timeout_seconds": 1800}, timeout=180)
    still_works(neighbour, "woken")
    # A server that starts now finds all of them.
    disk.fill()
    small.process.send_signal(signal.SIGKILL)
    small.process.wait()
    disk.fill()
    small.start()
    still_works(neighbour, "restarted")
    wait_for(lambda: "storage_low" in small.reasons(), "it says so again")
    # Room on the disk below is enough: who was held goes on by itself.
    disk.give_back()
    wait_for(lambda: small.health()["status"] == "ok" or stopped_writing(culprit) == "held", "the room is back", 120)
    wait_for(lambda: not culprit.info().get("held") or disk.free() < 600 * MIB, "who was held goes on", 120)
    small.json("DELETE", culprit.path)
    wait_for(lambda: small.health()["status"] == "ok", "deleting is enough", 120)
    with Box(small, isolation=level) as fresh:
        assert fresh.exec("echo fine").out == "fine\n"


def test_kills_work_and_the_ledger_is_written_on_a_full_disk(disk, small):
    boxes = [noted(small) for _ in range(4)]
    disk.fill()
    for box in boxes[1:]:
        small.json("DELETE", box.path)
        events = small.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]
        assert events[-1]["to"] == "gone", events[-1]
    # What the ledger and the audit log need was set aside before.
    assert run(binary(), "audit", "verify", small.state / "audit", check=False).returncode == 0
    still_works(boxes[0], "on")


def test_serve_without_the_flag_grew_a_pool_of_20_gib_to_100(disk):
    state = disk.root / "kept"
    archive = disk.dir / "tiny.tar"
    from tiny import tiny_template

    tiny_template(archive)
    run(binary(), "template", "import", "base", archive, "--state", state, "--storage-size", "1GiB")
    server = SmallServer.__new__(SmallServer)
    SmallServer.__mro__[1].__init__(server, "--pool-size", "0", state=state)
    server.disk, server.log_path = disk, disk.dir / "server.log"
    server.start()
    try:
        stat = os.statvfs(server.pool)
        assert stat.f_blocks * stat.f_frsize <= 1 << 30
        assert (state / "pool.img").stat().st_size <= 1100 * MIB
    finally:
        server.close()


def test_a_pool_that_does_not_fit_was_made_without_a_word(disk):
    def make(*flags):
        return run(binary(), "init", "--state", disk.root / "new", *flags, check=False)

    refused = make("--storage-size", "50GiB")
    assert refused.returncode != 0
    assert "50" in refused.stderr and "disk" in refused.stderr and "free" in refused.stderr, refused.stderr
    assert not (disk.root / "new" / "pool.img").exists()
    # Without a size it takes what there is.
    server = SmallServer(disk).start()
    try:
        host = server.json("GET", "/v1/host")["storage"]
        assert host["total_bytes"] + host["growable_bytes"] < 3 << 30, host
        # Everything it may ever write to is really there.
        stat = (server.state / "pool.img").stat()
        assert stat.st_blocks * 512 >= stat.st_size
        told = run(binary(), "--json", "doctor", "--state", server.state, check=False).stdout
        assert '"storage"' in told, told
    finally:
        server.close()


def test_a_pool_that_is_read_only_kept_the_server_from_starting(disk, small):
    box = noted(small)
    other = noted(small)
    run("mount", "-o", "remount,ro", small.pool)
    wait_for(lambda: "storage_read_only" in small.reasons(), "health says so")
    small.json("DELETE", other.path)
    with pytest.raises(Refused) as refused:
        Box(small)
    assert "read-only" in refused.value.error["message"] and "repair" in refused.value.error["hint"], refused.value
    small.kill_hard()
    small.start()
    assert "storage_read_only" in small.reasons()
    assert box.root("cat /root/note").out == "kept\n"
    # Who repairs it is told what is in the way.
    small.stop()
    repair = (binary(), "storage", "repair", "--state", small.state)
    refused = run(*repair, check=False)
    assert refused.returncode != 0 and "--end-sandboxes" in refused.stderr, refused
    done = run(*repair, "--end-sandboxes")
    assert "writable" in done.stdout, done
    small.start()
    assert small.health()["status"] == "ok"
    assert not small.is_read_only()
    with Box(small) as fresh:
        assert fresh.exec("echo fine").out == "fine\n"


def test_the_disk_below_has_what_the_pool_was_promised(disk, small):
    """Holes that something else on the host made are filled again."""
    image = small.state / "pool.img"
    subprocess.run(["fstrim", str(small.pool)], check=False, capture_output=True)
    stat = image.stat()
    assert stat.st_blocks * 512 >= stat.st_size

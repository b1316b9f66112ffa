"""Pauses, snapshots and forks through the official SDK."""

from e2b import SandboxState
from flavour import proxied, wait_for


def test_pause_and_connect(sdk, make):
    box = make(timeout=120)
    box.files.write("/home/user/note", "kept")
    handle = box.commands.run("sleep 1000", background=True)
    box.pause()
    assert box.is_running() is False
    assert box.get_info().state == SandboxState.PAUSED
    same = sdk.Sandbox.connect(box.sandbox_id, timeout=120)
    assert same.sandbox_id == box.sandbox_id
    assert same.is_running() is True
    assert same.files.read("/home/user/note") == "kept"
    assert handle.pid in [process.pid for process in same.commands.list()]
    assert same.get_info().state == SandboxState.RUNNING


def test_connect_to_a_running_box_changes_nothing(sdk, make):
    box = make(timeout=120)
    assert sdk.Sandbox.connect(box.sandbox_id, timeout=60).commands.run("echo on").stdout == "on\n"


def test_paused_boxes_are_listed_and_killed(sdk, make):
    box = make(timeout=120)
    box.pause()
    assert sdk.Sandbox.kill(box.sandbox_id) is True
    assert sdk.Sandbox.kill(box.sandbox_id) is False


def test_a_timeout_may_pause_and_traffic_wakes(make):
    box = make(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})
    wait_for(lambda: box.get_info().state == SandboxState.PAUSED, "it pauses", limit=60)
    assert box.commands.run("echo awake").stdout == "awake\n"


def test_a_snapshot_is_a_template(sdk, make):
    box = make(timeout=120)
    box.files.write("/home/user/note", "then")
    snapshot = box.create_snapshot()
    try:
        box.files.write("/home/user/note", "now")
        again = make(template=snapshot.snapshot_id, timeout=60)
        assert again.files.read("/home/user/note") == "then"
        assert again.sandbox_id != box.sandbox_id
        assert box.files.read("/home/user/note") == "now"
    finally:
        assert sdk.Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert sdk.Sandbox.delete_snapshot(snapshot.snapshot_id) is False


def test_forks_share_the_past_and_nothing_else(make):
    box = make(timeout=120)
    box.files.write("/home/user/note", "shared")
    forks = [proxied(fork) for fork in box.fork(count=2, timeout=60)]
    try:
        assert len({box.sandbox_id, *(fork.sandbox_id for fork in forks)}) == 3
        machines = {one.commands.run("cat /etc/machine-id").stdout for one in (box, *forks)}
        assert len(machines) == 3
        for fork in forks:
            assert fork.files.read("/home/user/note") == "shared"
            fork.files.write("/home/user/note", "mine")
        assert box.files.read("/home/user/note") == "shared"
    finally:
        for fork in forks:
            fork.kill()

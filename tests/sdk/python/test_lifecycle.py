import time
import uuid
from datetime import datetime, timezone

import pytest
from e2b import AuthenticationException, NotFoundException, SandboxException, SandboxQuery, SandboxState
from flavour import IS_OLD, wait_for


def test_create_and_kill(sdk):
    box = sdk.Sandbox.create(timeout=60)
    assert box.is_running() is True
    assert box.commands.run("echo alive").stdout == "alive\n"
    assert box.kill() is True
    assert box.is_running() is False
    assert box.kill() is False


def test_kill_by_id(sdk, make):
    box = make()
    assert sdk.Sandbox.kill(box.sandbox_id) is True
    assert sdk.Sandbox.kill(box.sandbox_id) is False
    assert sdk.Sandbox.kill("nosuchsandbox") is False


def test_info(make):
    box = make(metadata={"who": "info"}, timeout=100)
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert info.metadata == {"who": "info"}
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1
    assert info.memory_mb >= 128
    left = (info.end_at - datetime.now(timezone.utc)).total_seconds()
    assert 60 < left <= 101


def test_unknown_template(sdk):
    with pytest.raises(SandboxException, match="no-such-template"):
        sdk.Sandbox.create("no-such-template")


def test_a_wrong_key(sdk):
    with pytest.raises(AuthenticationException):
        sdk.Sandbox.create(api_key="e2b_" + "0" * 40)


def test_set_timeout_moves_the_end(box):
    box.set_timeout(600)
    left = (box.get_info().end_at - datetime.now(timezone.utc)).total_seconds()
    assert 500 < left <= 601
    box.set_timeout(30)
    left = (box.get_info().end_at - datetime.now(timezone.utc)).total_seconds()
    assert left <= 31


def test_a_box_ends_when_its_time_is_over(make):
    box = make(timeout=1)
    wait_for(lambda: not box.is_running(), "the box ends by itself")


def test_connect_to_a_running_box(sdk, box):
    box.files.write("/tmp/mark", "here")
    again = sdk.Sandbox.connect(box.sandbox_id)
    assert again.sandbox_id == box.sandbox_id
    assert again.files.read("/tmp/mark") == "here"


def test_connect_never_shortens(sdk, make):
    box = make(timeout=600)
    before = box.get_info().end_at
    sdk.Sandbox.connect(box.sandbox_id, timeout=10)
    assert box.get_info().end_at >= before


def test_connect_to_nothing(sdk):
    with pytest.raises(NotFoundException):
        sdk.Sandbox.connect("i00000000000000000000")


def test_list_by_metadata(sdk, make):
    mark = uuid.uuid4().hex
    tricky = {"run": mark, "a b": "c&d/é=+%20"}
    wanted = make(metadata=tricky)
    make(metadata={"run": mark})
    found = sdk.Sandbox.list(query=SandboxQuery(metadata=tricky)).next_items()
    assert [info.sandbox_id for info in found] == [wanted.sandbox_id]
    assert found[0].metadata == tricky


def test_list_in_pages(sdk, make):
    mark = {"pages": uuid.uuid4().hex}
    made = [make(metadata=mark).sandbox_id for _ in range(5)]
    pages = sdk.Sandbox.list(query=SandboxQuery(metadata=mark), limit=2)
    seen, sizes = [], []
    while pages.has_next:
        items = pages.next_items()
        sizes.append(len(items))
        seen += [info.sandbox_id for info in items]
    assert sizes == [2, 2, 1]
    assert seen == list(reversed(made))


def test_list_by_state(sdk, make):
    mark = {"state": uuid.uuid4().hex}
    box = make(metadata=mark)
    running = sdk.Sandbox.list(query=SandboxQuery(metadata=mark, state=[SandboxState.RUNNING])).next_items()
    assert [info.sandbox_id for info in running] == [box.sandbox_id]
    paused = sdk.Sandbox.list(query=SandboxQuery(metadata=mark, state=[SandboxState.PAUSED])).next_items()
    assert paused == []


def test_metrics(box):
    box.commands.run("head -c 20000000 /dev/zero > /tmp/fill; sync")
    metrics = wait_for(box.get_metrics, "a first sample", limit=30)
    last = metrics[-1]
    assert last.cpu_count >= 1
    assert last.mem_total > 0
    assert 0 < last.mem_used < last.mem_total
    assert last.disk_total > 0


def test_boxes_do_not_see_each_other(make):
    first, second = make(), make()
    first.files.write("/tmp/mine", "1")
    assert second.files.exists("/tmp/mine") is False
    first.commands.run("sleep 4321", background=True)
    assert "4321" not in second.commands.run("ps ax -o args | grep -v grep").stdout


@pytest.mark.skipif(IS_OLD, reason="2.45 cannot send an Idempotency-Key")
def test_the_same_key_gives_the_same_box(sdk, make):
    key = uuid.uuid4().hex
    first = make(idempotency_key=key)
    second = make(idempotency_key=key)
    assert first.sandbox_id == second.sandbox_id


def test_ports_of_the_box_are_reached_through_the_gateway(server, box):
    box.commands.run("python3 -m http.server 8123 --bind 127.0.0.1 --directory /etc", background=True)
    import urllib.error
    import urllib.request

    def fetch():
        request = urllib.request.Request(
            server.url + "/hostname", headers={"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8123"}
        )
        try:
            return urllib.request.urlopen(request, timeout=10).read()
        except urllib.error.HTTPError as error:
            assert error.code == 502, error.read()
            return None

    body = wait_for(fetch, "the server in the box answers")
    assert body == box.files.read("/etc/hostname").encode()


def test_time_does_not_stand_still(box):
    before = int(time.time())
    told = int(box.commands.run("date +%s").stdout)
    assert before <= told <= time.time()

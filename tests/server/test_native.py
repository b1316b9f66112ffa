"""The native API, as a client sees it."""

import base64
import json
import time
import urllib.parse
import uuid

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused


def test_health_needs_no_key(server):
    status, _, body = server.request("GET", "/v1/health", headers={"X-API-Key": ""})
    assert status == 200
    assert json.loads(body)["status"] == "ok"


def test_version(server):
    assert server.json("GET", "/v1/version")["version"]


def test_host_tells_levels(server):
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    assert levels["container"]["usable"] is True


def test_create_says_what_was_made(server, make):
    box = make(metadata={"k": "v"}, env={"A": "1"}, timeout_seconds=77, limits={"memory_mib": 300, "cpu_millis": 700})
    made = box.made
    assert made["state"] == "running"
    assert made["isolation"] == "container"
    assert made["template"] == "base"
    assert made["metadata"] == {"k": "v"}
    assert made["limits"]["memory_mib"] == 300
    assert made["limits"]["cpu_millis"] == 700
    assert box.info()["id"] == box.id


def test_a_box_without_an_end(server, make):
    box = make(timeout_seconds=None)
    assert box.info()["end_at"] is None


def test_limits_are_those_of_the_box(make):
    box = make(limits={"memory_mib": 256, "pids": 99, "open_files": 512})
    ran = box.exec("ulimit -n")
    assert ran.out.strip() == "512"


def test_levels_that_are_not_here_are_refused_with_words(server):
    with pytest.raises(Refused) as refused:
        Box(server, isolation="process")
    assert refused.value.status in (400, 501, 503)
    assert "process" in refused.value.error["message"]
    assert refused.value.error["hint"]


def test_list_filter_and_pages(server, make):
    mark = uuid.uuid4().hex
    ids = [make(metadata={"mark": mark}).id for _ in range(3)]
    query = urllib.parse.urlencode({"metadata": f"mark:{mark}", "limit": 2})
    page = server.json("GET", f"/v1/sandboxes?{query}")
    assert [box["id"] for box in page["sandboxes"]] == [ids[2], ids[1]]
    rest = server.json("GET", f"/v1/sandboxes?{query}&next_token={urllib.parse.quote(page['next_token'])}")
    assert [box["id"] for box in rest["sandboxes"]] == [ids[0]]
    assert rest.get("next_token") is None


def test_gone_boxes_say_why(server, make):
    box = make()
    server.json("DELETE", box.path)
    info = box.info()
    assert info["state"] == "gone"
    assert info["gone"]["reason"] == "killed"
    with pytest.raises(Refused) as refused:
        server.json("DELETE", box.path)
    assert refused.value.status == 404


def test_expired_boxes_say_so(make):
    box = make(timeout_seconds=1)
    wait_for(lambda: box.info()["state"] == "gone", "it ends")
    assert box.info()["gone"]["reason"] == "expired"


def test_a_box_whose_first_process_ends_is_gone(make):
    box = make()
    box.server.request("POST", box.path + "/exec", {"cmd": "kill -9 -1; kill -TERM 1; sleep 2", "user": "root"})
    # PID 1 of a pid namespace ignores signals from inside it has no handler for; either it lives or it is told.
    info = box.info()
    assert info["state"] == "running" or info["gone"]["reason"] == "exited"


def test_timeout_route(server, box):
    server.json("POST", box.path + "/timeout", {"timeout_seconds": 3000})
    assert box.info()["end_at"] is not None
    server.json("POST", box.path + "/timeout", {"timeout_seconds": None})
    assert box.info()["end_at"] is None


def test_idempotency_key(server, make):
    key = uuid.uuid4().hex
    headers = {"Idempotency-Key": key}
    first = server.json("POST", "/v1/sandboxes", {"metadata": {"n": "1"}}, headers=headers)
    again = server.json("POST", "/v1/sandboxes", {"metadata": {"n": "1"}}, headers=headers)
    assert first["id"] == again["id"]
    with pytest.raises(Refused) as refused:
        server.json("POST", "/v1/sandboxes", {"metadata": {"n": "2"}}, headers=headers)
    assert refused.value.status in (409, 422)
    server.json("DELETE", f"/v1/sandboxes/{first['id']}")


def test_exec(shared_box):
    ran = shared_box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (ran.out, ran.err, ran.code) == ("out\n", "err\n", 3)


def test_exec_options(shared_box):
    assert shared_box.exec("echo $X; pwd", env={"X": "y"}, cwd="/tmp").out == "y\n/tmp\n"
    assert shared_box.exec("cat", stdin="fed").out == "fed"
    assert shared_box.exec("whoami", user="root").out == "root\n"


def test_exec_of_nothing_there(shared_box):
    with pytest.raises(Refused) as refused:
        shared_box.exec(["/no/such/program"])
    assert refused.value.status == 400


def test_exec_deadline(shared_box):
    start = time.monotonic()
    with pytest.raises(Refused) as refused:
        shared_box.exec("sleep 600", timeout_ms=500)
    assert refused.value.status == 504
    assert refused.value.error["code"] == "deadline_exceeded"
    assert time.monotonic() - start < 30


def test_exec_bytes_that_are_no_text(shared_box):
    answer = shared_box.exec(r"printf '\377\376'").answer
    assert base64.b64decode(answer["stdout_base64"]) == b"\xff\xfe"


def test_exec_as_a_stream(server, shared_box):
    status, headers, body = server.request(
        "POST", shared_box.path + "/exec", {"cmd": "echo a; echo b >&2; exit 5"}, headers={"Accept": "application/x-ndjson"}
    )
    assert status == 200
    events = [json.loads(line) for line in body.splitlines() if line]
    assert events[0]["event"] == "started" and events[0]["pid"] > 0
    assert {"event": "stdout", "text": "a\n"} in events
    assert {"event": "stderr", "text": "b\n"} in events
    assert events[-1]["event"] == "exited" and events[-1]["exit_code"] == 5


def test_files(server, box):
    box.write("/tmp/a/b.bin", bytes(range(256)))
    assert box.read("/tmp/a/b.bin") == bytes(range(256))
    entries = server.json("GET", f"{box.path}/files/list?path=/tmp/a")["entries"]
    assert [entry["name"] for entry in entries] == ["b.bin"]
    assert server.json("GET", f"{box.path}/files/stat?path=/tmp/a/b.bin")["entry"]["size"] in (256, "256")
    server.json("POST", f"{box.path}/files/mkdir", {"path": "/tmp/new"})
    server.json("POST", f"{box.path}/files/move", {"source": "/tmp/a/b.bin", "destination": "/tmp/new/c.bin"})
    assert box.read("/tmp/new/c.bin") == bytes(range(256))
    status, _, _ = server.request("DELETE", f"{box.path}/files?path=/tmp/new")
    assert status in (200, 204)
    with pytest.raises(Refused):
        box.read("/tmp/new/c.bin")


def test_metrics_and_logs(server, box):
    box.exec("echo hi")
    samples = wait_for(lambda: server.json("GET", box.path + "/metrics")["samples"], "a first sample", limit=30)
    assert samples[-1]["memory_used"] > 0
    logs = server.json("GET", box.path + "/logs")
    assert "entries" in logs


def test_templates(server):
    names = [template["name"] for template in server.json("GET", "/v1/templates")["templates"]]
    assert "base" in names
    assert server.json("GET", "/v1/templates/base")["name"] == "base"
    with pytest.raises(Refused) as refused:
        server.json("GET", "/v1/templates/nope")
    assert refused.value.status == 404


def test_openapi_names_every_route(server):
    document = server.json("GET", "/v1/openapi.json")
    assert document["openapi"].startswith("3.1")
    for path in ("/v1/sandboxes", "/v1/sandboxes/{id}", "/v1/sandboxes/{id}/exec", "/v1/sandboxes/{id}/files", "/v1/events",
                 "/v1/templates", "/v1/health", "/v1/host"):
        assert path in document["paths"], path


def test_prometheus(server, shared_box):
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200
    assert b"sandkeep_boxes" in body


def test_oom_of_a_box_is_in_the_api(make):
    box = make(limits={"memory_mib": 64})
    box.exec(["python3", "-c", "x = bytearray(300_000_000)"])
    wait_for(lambda: box.info()["oom_kills"] >= 1, "oom_kills counts")

"""Templates over the HTTP calls of all generations of E2B clients."""

import json
import secrets
import uuid

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused
from tiny import tiny_template

# What clients of each generation insist on in every answer about a template.
LEGACY = {
    "templateID", "buildID", "cpuCount", "memoryMB", "diskSizeMB", "public", "aliases", "createdAt", "updatedAt",
    "createdBy", "lastSpawnedAt", "spawnCount", "buildCount", "envdVersion",
}  # fmt: skip
CURRENT = LEGACY | {"names", "buildStatus"}
BUILD = {"buildID", "status", "createdAt", "updatedAt", "cpuCount", "memoryMB"}


@pytest.fixture
def name(server):
    name = "gen-" + secrets.token_hex(4)
    yield name
    server.request("DELETE", f"/templates/{name}")


def ready(server, template, build):
    path = f"/templates/{template}/builds/{build}/status"

    def over():
        now = server.json("GET", path)
        assert now["status"] != "error", now
        return now["status"] == "ready" and now

    return wait_for(over, "it is built", 120)


def build_v2(server, name, *steps, **more):
    asked = server.json("POST", "/v2/templates", {"alias": name, "cpuCount": 1, "memoryMB": 512})
    assert LEGACY <= asked.keys(), LEGACY - asked.keys()
    assert (asked["cpuCount"], asked["memoryMB"], asked["aliases"]) == (1, 512, [name])
    status = server.json("GET", f"/templates/{name}/builds/{asked['buildID']}/status")
    assert status["status"] == "waiting"
    body = {"fromTemplate": "base", "steps": [{"type": "RUN", "args": [step]} for step in steps], **more}
    code, headers, _ = server.request("POST", f"/v2/templates/{name}/builds/{asked['buildID']}", body)
    assert code == 202 and {k.lower(): v for k, v in headers.items()}["content-length"] == "0"
    ready(server, name, asked["buildID"])
    return asked["buildID"]


def test_a_template_announced_the_v2_way(server, name):
    build = build_v2(server, name, "echo two > /home/user/v")
    with Box(server, template=name) as box:
        assert box.read("/home/user/v") == b"two\n"
        assert box.info()["limits"]["memory_mib"] == 512
    for bad in ({}, {"alias": "a b"}, {"alias": name, "memoryMB": 10**9}):
        with pytest.raises(Refused) as refused:
            server.json("POST", "/v2/templates", bad)
        assert refused.value.status == 400, bad
    # Nobody said what this one is made of.
    asked = server.json("POST", "/v2/templates", {"alias": name})
    with pytest.raises(Refused, match="not said yet"):
        server.json("POST", f"/templates/{name}/builds/{asked['buildID']}", {})
    assert asked["buildID"] != build


def test_an_image_without_the_account_user_gets_it_and_builds_and_sandboxes_act_as_it(server, name, tmp_path):
    image = "image-" + secrets.token_hex(4)
    tar = tiny_template(tmp_path / "image.tar", ("id", "pwd", "chown"), with_user=False)
    kind = {"Content-Type": "application/octet-stream"}
    try:
        assert server.request("POST", f"/v1/templates/{image}", tar.read_bytes(), headers=kind, timeout=120)[0] == 201
        with Box(server, template=image) as box:
            assert box.exec("id -un; id -u; pwd").out == "user\n1000\n/home/user\n"
            assert box.exec("stat -c '%U:%G %a' /home/user").out == "user:user 755\n"
        build_v2(server, name, "id -un > who", fromTemplate=image)
        with Box(server, template=name) as box:
            assert box.read("/home/user/who") == b"user\n"
            assert box.exec("id -un").out == "user\n"
    finally:
        server.request("DELETE", f"/v1/templates/{image}")


def test_a_template_from_a_dockerfile_the_v1_way(server, name):
    dockerfile = """
    FROM e2bdev/base:latest
    ENV MODE="first way" KEPT=1
    RUN id -un > /opt/who && \\
        echo "$MODE" > /opt/mode
    WORKDIR /srv/app
    RUN ["touch", "it is here"]
    USER user
    """
    asked = server.json("POST", "/templates", {"alias": name, "dockerfile": dockerfile, "startCmd": "sleep 1000"})
    assert LEGACY <= asked.keys()
    assert server.request("POST", f"/templates/{name}/builds/{asked['buildID']}")[0] == 202
    done = ready(server, name, asked["buildID"])
    assert done["logs"] and len(done["logs"]) == len(done["logEntries"])
    with Box(server, template=name) as box:
        said = box.exec("id -un; pwd; ls; cat /opt/who /opt/mode; echo $KEPT; pgrep -c sleep").out.splitlines()
        assert said == ["user", "/srv/app", "it is here", "root", "first way", "1", "1"]
    again = server.json("POST", f"/templates/{name}", {"dockerfile": "FROM e2bdev/base\nRUN echo 2 > /opt/second"})
    assert server.request("POST", f"/templates/{name}/builds/{again['buildID']}")[0] == 202
    ready(server, name, again["buildID"])
    with Box(server, template=name) as box:
        assert box.read("/opt/second") == b"2\n"


@pytest.mark.parametrize("dockerfile, words", [
    ("FROM registry.example/python:3.12", "sandkeep template import python-3-12"),
    ("FROM e2bdev/base\nCOPY app /app", "registry"),
    ("RUN true", "FROM"),
])
def test_a_dockerfile_that_can_not_be_built_is_refused_in_words(server, dockerfile, words):
    code, _, body = server.request("POST", "/templates", {"alias": "x", "dockerfile": dockerfile})
    assert code in (400, 501) and words in body.decode(), body
    with pytest.raises(Refused) as refused:
        server.json("POST", "/templates/no-such-template", {"dockerfile": "FROM e2bdev/base"})
    assert refused.value.status == 404


def test_lists_have_what_clients_insist_on(server, name):
    build = build_v2(server, name, "true")
    for listed in (server.json("GET", "/templates"), server.json("GET", "/v2/templates")):
        assert {"base", name} <= {one["templateID"] for one in listed}
        for one in listed:
            assert CURRENT <= one.keys(), CURRENT - one.keys()
            uuid.UUID(one["buildID"])
    (base,) = server.json("GET", "/default-templates")
    assert base["templateID"] == "base" and base["isDefault"]
    whole = server.json("GET", f"/templates/{name}")
    assert CURRENT <= whole.keys() and whole["builds"][0]["buildID"] == build == whole["buildID"]
    assert BUILD <= whole["builds"][0].keys() and whole["builds"][0]["status"] == "ready"
    assert server.json("GET", "/templates/base")["builds"]


def test_pages_of_templates(server, name):
    build_v2(server, name, "true")
    everything = [one["templateID"] for one in server.json("GET", "/v2/templates")]
    found, token = [], ""
    for _ in everything:
        _, headers, body = server.request("GET", f"/v2/templates?limit=1&nextToken={token}")
        (one,) = json.loads(body)
        found.append(one["templateID"])
        token = {k.lower(): v for k, v in headers.items()}.get("x-next-token")
        if not token:
            break
    assert found == everything
    for wrong in ("nextToken=nobody", "limit=0", "limit=1000"):
        assert server.request("GET", f"/v2/templates?{wrong}")[0] == 400, wrong


def test_the_log_of_a_build_from_both_ends(server, name):
    asked = server.json("POST", "/v2/templates", {"alias": name})
    path = f"/templates/{name}/builds/{asked['buildID']}"
    assert server.json("GET", path + "/logs") == {"logs": []}
    steps = [{"type": "RUN", "args": ["for n in $(seq 150); do echo line $n; done"]}]
    server.request("POST", f"/v2{path}", {"fromTemplate": "base", "steps": steps})
    ready(server, name, asked["buildID"])

    def logs(query=""):
        return server.json("GET", f"{path}/logs?{query}")["logs"]

    first = logs()
    assert len(first) == 100 and {"timestamp", "message", "level", "step"} <= first[5].keys()
    backward = logs("direction=backward&limit=3")
    assert len(backward) == 3 and backward[0]["timestamp"] >= backward[-1]["timestamp"] >= first[0]["timestamp"]
    assert not any(line["level"] == "info" for line in logs("level=warn"))
    assert logs("cursor=99999999999999") == []
    assert logs("source=persistent&direction=forward")[0] == first[0]
    for wrong in ("direction=up", "level=loud", "cursor=x"):
        assert server.request("GET", f"{path}/logs?{wrong}")[0] == 400, wrong
    assert server.request("GET", f"/templates/{name}/builds/{uuid.uuid4()}/logs")[0] == 404
    assert server.request("GET", f"/templates/base/builds/{asked['buildID']}/logs")[0] == 404


@pytest.mark.parametrize("version", ["", "/v2"])
def test_the_public_mark_is_kept_also_by_the_next_build(server, name, version):
    build_v2(server, name, "true")
    code, _, body = server.request("PATCH", f"{version}/templates/{name}", {"public": True})
    assert code == 200 and name.encode() in body
    build_v2(server, name, "true # again")
    assert server.json("GET", f"/templates/{name}")["public"] is True
    assert server.json("GET", f"/templates/aliases/{name}")["public"] is True
    assert server.request("PATCH", f"{version}/templates/{name}", {"public": False})[0] == 200
    assert server.json("GET", f"/templates/{name}")["public"] is False
    assert server.request("PATCH", f"{version}/templates/{name}", {})[0] == 200
    assert server.request("PATCH", f"{version}/templates/{name}", {"public": "yes"})[0] == 400
    assert server.request("PATCH", f"{version}/templates/nobody-has-this", {"public": True})[0] == 404


def test_tags_are_counted_and_told_apart(server, name):
    build = build_v2(server, name, "true")
    server.json("POST", "/templates/tags", {"target": name, "tags": ["v1.0", "stable"]})
    path = f"/templates/{name}/tags"
    assert server.json("GET", path + "/count") == {"total": 3}
    assert server.json("GET", path + "/exists?tag=Stable") == {"exists": True, "normalizedTag": "stable"}
    assert server.json("GET", path + "/exists?tag=v2")["exists"] is False
    assert server.request("GET", path + "/exists?tag=a%20b")[0] == 400
    groups = server.json("GET", path + "/groups?sort=name_asc&tagsLimit=2")
    assert [group["tag"] for group in groups["tags"]] == ["default", "stable"] and groups["nextCursor"] == "stable"
    rest = server.json("GET", path + "/groups?sort=name_asc&tagsLimit=2&tagsCursor=stable")
    assert [group["tag"] for group in rest["tags"]] == ["v1.0"] and rest["nextCursor"] is None
    assert [group["tag"] for group in server.json("GET", path + "/groups?search=sta")["tags"]] == ["stable"]
    (one,) = server.json("GET", path + "/v1.0/assignments")["data"]
    assert one["buildId"] == build and uuid.UUID(one["assignmentId"])
    ids = {group["assignments"][0]["assignmentId"] for group in groups["tags"] + rest["tags"]}
    assert len(ids) == 3 and one["assignmentId"] in ids
    assert server.request("GET", "/templates/nobody-has-this/tags/count")[0] == 404


def test_a_build_of_an_earlier_run_of_the_server_is_still_known(server, name):
    build = build_v2(server, name, "echo remembered")
    server.stop()
    server.start()
    done = server.json("GET", f"/templates/{name}/builds/{build}/status")
    assert done["status"] == "ready" and any("remembered" in line for line in done["logs"])
    logs = server.json("GET", f"/templates/{name}/builds/{build}/logs")["logs"]
    assert any("remembered" in line["message"] for line in logs)
    assert server.json("GET", f"/templates/{name}")["builds"][0]["buildID"] == build

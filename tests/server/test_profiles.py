"""Policies with a name of their own, in versions."""

import contextlib
import json
import os
import subprocess

import pytest
from boxkit import Box
from sandkeep_server import Refused, binary


@pytest.fixture
def name(server):
    name = f"team-{os.getpid()}"
    yield name
    with contextlib.suppress(Refused):
        server.json("DELETE", f"/v1/profiles/{name}")


def allowing(*hosts):
    return {"allow": list(hosts)}


def reach(box):
    return [rule["to"] for rule in box.server.json("GET", f"{box.path}/network")["allow"]]


def test_boxes_are_made_by_name_and_keep_the_version_they_were_made_with(server, make, name):
    assert server.json("PUT", f"/v1/profiles/{name}", allowing("one.example.org"))["version"] == 1
    first = make(network={"profile": name})
    assert server.json("PUT", f"/v1/profiles/{name}", allowing("two.example.org"))["version"] == 2
    # The same again is no new version.
    assert server.json("PUT", f"/v1/profiles/{name}", allowing("two.example.org"))["version"] == 2
    second, old = make(network={"profile": name}), make(network={"profile": f"{name}@1"})
    assert (reach(first), reach(second), reach(old)) == (["one.example.org"], ["two.example.org"], ["one.example.org"])
    assert reach_after_put(first, {"profile": f"{name}@2"}) == ["two.example.org"]
    versions = server.json("GET", f"/v1/profiles/{name}")["versions"]
    assert [v["version"] for v in versions] == [2, 1]
    listed = {p["name"]: p for p in server.json("GET", "/v1/profiles")["profiles"]}
    assert listed[name]["version"] == 2 and "version" not in listed["open"]
    answer = server.json("POST", "/v1/policy/test", {"policy": {"profile": f"{name}@1"}, "url": "https://one.example.org/"})
    assert answer["allowed"], answer
    server.json("DELETE", f"/v1/profiles/{name}")
    assert reach(second) == ["two.example.org"]


def reach_after_put(box, wish):
    box.server.json("PUT", f"{box.path}/network", wish)
    return reach(box)


def test_profiles_outlive_the_server(server, name):
    server.json("PUT", f"/v1/profiles/{name}", allowing("one.example.org"))
    server.kill_hard()
    server.start()
    assert server.json("GET", f"/v1/profiles/{name}")["versions"][0]["policy"]["allow"][0]["to"] == "one.example.org"


def test_mistakes_are_named(server, name):
    for path, body, field in [
        ("open", allowing(), "name"),
        ("A%2F..%2Fb", allowing(), "name"),
        ("x" * 65, allowing(), "name"),
        (name, {"allow": ["*.org"]}, "network.allow[0].to"),
        (name, {"credentials": []}, "credentials"),
    ]:
        with pytest.raises(Refused) as caught:
            server.json("PUT", f"/v1/profiles/{path}", body)
        assert (caught.value.status, caught.value.error["field"]) == (400, field), caught.value
    for wish in ("nobody", f"{name}@7", f"{name}@x"):
        with pytest.raises(Refused) as caught:
            Box(server, network={"profile": wish})
        assert caught.value.error["field"] == "network.profile"
    for method in ("GET", "DELETE"):
        with pytest.raises(Refused) as caught:
            server.json(method, f"/v1/profiles/{name}")
        assert caught.value.status == 404


def test_the_command_line_saves_uses_and_forgets_them(server, name, tmp_path):
    def cli(*words):
        env = {**os.environ, **server.cli_env()}
        return subprocess.run([str(binary()), *words], env=env, capture_output=True, text=True, timeout=120)

    file = tmp_path / "policy.json"
    file.write_text(json.dumps(allowing("one.example.org")))
    assert cli("policy", "save", name, str(file)).stdout == f"{name}@1\n"
    assert name in cli("policy", "profiles").stdout
    ran = cli("policy", "test", "--file", name, "https://one.example.org/")
    assert ran.returncode == 0, ran
    ran = cli("run", "--network", f"{name}@1", "--", "true")
    assert ran.returncode == 0, ran
    assert cli("policy", "forget", name).returncode == 0
    assert cli("policy", "forget", name).returncode != 0

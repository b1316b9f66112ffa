"""The operator chooses the wall: what a plain create gets, and what nobody gets."""

import secrets
import subprocess

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary
from servers import in_place_of

KEY = "sandkeep.isolation"


def refused(call, *words):
    with pytest.raises(Refused) as caught:
        call()
    error = caught.value.error
    assert caught.value.status == 403, error
    for word in ("too weak", *words):
        assert word in error["message"], error
    return error


def e2b_create(server, **metadata):
    made = server.json("POST", "/sandboxes", {"templateID": "base", "timeout": 60, "metadata": metadata})
    return server.json("GET", f"/v1/sandboxes/{made['sandboxID']}")


def build(server, name, **recipe):
    path = f"/v1/templates/{name}/builds"
    begun = server.json("POST", path, recipe)
    return wait_for(lambda: (now := server.json("GET", f"{path}/{begun['id']}"))["ended_at"] and now, "the build ends", 180)


@pytest.fixture
def name(server):
    name = "test-" + secrets.token_hex(4)
    yield name
    server.request("DELETE", f"/v1/templates/{name}-on")
    server.request("DELETE", f"/v1/templates/{name}")


def test_the_default_is_what_clients_get_that_cannot_name_a_level(server):
    with in_place_of(server, "--isolation-default", "gvisor", "--pool-size", "1") as own:
        assert own.json("GET", "/v1/host")["isolation_default"] == "gvisor"
        wait_for(lambda: own.json("GET", "/v1/host")["pooled"] == 1, "a sandbox waits")
        assert e2b_create(own)["isolation"] == "gvisor"
        with Box(own) as plain, Box(own, isolation="container") as named:
            assert plain.made["isolation"] == "gvisor" and "gVisor" in plain.root("dmesg").out
            assert named.made["isolation"] == "container"
        # By a word of theirs they can.
        assert e2b_create(own, **{KEY: "container"})["isolation"] == "container"
        with pytest.raises(Refused) as caught:
            e2b_create(own, **{KEY: "concrete"})
        assert caught.value.status == 400 and KEY in str(caught.value.body)


def test_nothing_weaker_than_the_minimum_is_made(server, name):
    setting = "the setting isolation_minimum"
    with in_place_of(server, "--pool-size", "1") as own:
        paused, running = (Box(own, isolation="container", timeout_seconds=1800) for _ in range(2))
        point = own.json("POST", running.path + "/points", {})
        files = own.json("POST", running.path + "/points", {"memory": False})
        assert point["memory"] and not files["memory"]
        _, _, archive = own.request("GET", f"/v1/points/{point['id']}/export", timeout=120)
        own.json("POST", paused.path + "/pause", {})

        own.stop()
        own.extra += ["--isolation-minimum", "gvisor"]
        own.start()
        host = own.json("GET", "/v1/host")
        assert (host["isolation_default"], host["isolation_minimum"]) == ("gvisor", "gvisor")
        error = refused(lambda: Box(own, isolation="container"), setting)
        assert "gvisor or microvm" in error["hint"]
        with pytest.raises(Refused) as caught:
            e2b_create(own, **{KEY: "container"})
        assert caught.value.status == 403
        assert e2b_create(own)["isolation"] == "gvisor"

        # Those that run go on; nothing is made of them.
        assert running.root("echo on").out == "on\n"
        for path, body in (
            (running.path + "/fork", {"count": 1}),
            (running.path + "/rollback", {"to": point["id"]}),
            (paused.path + "/resume", {}),
        ):
            refused(lambda: own.json("POST", path, body), setting)
        refused(lambda: Box(own, from_point=point["id"]), setting)
        with Box(own, from_point=files["id"]) as stronger:
            assert stronger.made["isolation"] == "gvisor"
        own.json("DELETE", f"/v1/points/{point['id']}")
        ran = subprocess.run(
            [binary(), "points", "import", "-"], env=own.cli_env(), input=archive, capture_output=True, timeout=120
        )
        assert ran.returncode != 0 and b"isolation_minimum" in ran.stderr and b"--files-only" in ran.stderr, ran
        ended = build(own, name, steps=[{"run": "true"}], isolation=["container"])
        assert ended["status"] == "failed" and "too weak" in ended["error"]["message"], ended
        assert build(own, name, steps=[{"run": "dmesg > /home/user/kernel", "user": "root"}])["status"] == "ready"
        with Box(own, template=name) as box:
            assert "gVisor" in box.root("cat /home/user/kernel").out

        # Nothing was lost by the refusals.
        own.stop()
        own.extra = own.extra[:-2]
        own.start()
        own.json("POST", paused.path + "/resume", {})
        assert paused.root("echo on").out == running.root("echo on").out == "on\n"
        own.json("DELETE", f"/v1/points/{files['id']}")


def test_a_template_demands_a_level_of_all_that_is_made_of_it(server, name):
    assert build(server, name, steps=[{"run": "true"}], isolation_minimum="gvisor")["status"] == "ready"
    assert build(server, name + "-on", steps=[{"run": "true"}], **{"from": name})["status"] == "ready"
    for template in (name, name + "-on"):
        refused(lambda: Box(server, template=template, isolation="container"), f'isolation_minimum of template "{template}"')
        with Box(server, template=template) as box:
            assert box.made["isolation"] == "gvisor"
    ended = build(server, name, steps=[{"run": "true"}], isolation_minimum="gvisor", isolation=["container"])
    assert ended["status"] == "failed" and "of the recipe" in ended["error"]["message"], ended


def test_a_network_policy_demands_a_level(server):
    profile = "walled-" + secrets.token_hex(3)
    policy = {"allow": ["example.org"], "isolation_minimum": "gvisor"}
    kept = server.json("PUT", f"/v1/profiles/{profile}", policy)
    assert kept["policy"]["isolation_minimum"] == "gvisor"
    wish = {"profile": profile}
    word = "isolation_minimum of the network policy"
    refused(lambda: Box(server, isolation="container", network=wish), word)
    with Box(server, network=wish) as box:
        assert box.made["isolation"] == "gvisor"
    with Box(server, isolation="container") as weaker:
        before = server.json("GET", weaker.path + "/network")
        refused(lambda: server.json("PUT", weaker.path + "/network", wish), word)
        assert server.json("GET", weaker.path + "/network") == before
    server.json("DELETE", f"/v1/profiles/{profile}")


def test_a_point_of_another_sandbox_leads_below_no_minimum(server, name):
    assert build(server, name, steps=[{"run": "true"}], isolation_minimum="gvisor")["status"] == "ready"
    wish = {"allow": [], "isolation_minimum": "gvisor"}
    with Box(server, network=wish) as walled, Box(server, template=name) as strict, Box(server, isolation="container") as weak:
        assert walled.made["isolation"] == strict.made["isolation"] == "gvisor"
        of_weak = server.json("POST", weak.path + "/points", {})["id"]
        of_strict = server.json("POST", strict.path + "/points", {"memory": False})["id"]
        refused(
            lambda: server.json("POST", walled.path + "/fork", {"count": 1, "at": of_weak}),
            "isolation_minimum of the network policy",
        )
        word = f'isolation_minimum of template "{name}"'
        refused(lambda: server.json("POST", weak.path + "/rollback", {"to": of_strict, "foreign": True}), word)
        refused(lambda: Box(server, from_point=of_strict, isolation="container"), word)
        assert weak.root("echo on").out == "on\n"
        for point in (of_weak, of_strict):
            server.json("DELETE", f"/v1/points/{point}")


@pytest.mark.parametrize("flags", [("--isolation-default", "container"), ("--pool-isolation", "container")])
def test_settings_that_contradict_each_other_are_refused_at_the_start(flags):
    ran = subprocess.run(
        [binary(), "serve", "--state", "/nonexistent/sandkeep", "--isolation-minimum", "gvisor", *flags],
        capture_output=True, text=True, timeout=60,
    )
    assert ran.returncode != 0
    assert "isolation_minimum is gvisor" in ran.stderr and flags[0].lstrip("-").replace("-", "_") in ran.stderr, ran.stderr

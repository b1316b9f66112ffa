"""What a new user met in the first hour: each test is named after what went wrong."""

import contextlib
import json
import os
import subprocess

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary
from servers import boxes_of, in_place_of

BUDGET = 20_000


def run_cli(server, *args, **options):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([str(binary()), *args], capture_output=True, text=True, timeout=120, env=env, **options)


def post(box, what, **wish):
    return box.server.json("POST", f"{box.path}/{what}", wish)


def note(box):
    return box.exec("cat /home/user/who").out.strip()


@pytest.fixture
def named(make, server):
    """Sandboxes that each have a snapshot of one name; and what goes when the test is over."""
    with contextlib.ExitStack() as over:

        def named(who, name="before"):
            box = make()
            assert box.exec(f"echo {who} > /home/user/who").ok
            box.point = post(box, "points", name=name)["id"]
            over.callback(forget, server, box.point)
            return box

        yield named


def forget(server, point):
    with contextlib.suppress(Refused):
        server.json("DELETE", f"/v1/points/{point}")


# ---- N1: the name of a snapshot belongs to its sandbox ----


def test_a_rollback_by_name_never_becomes_another_sandbox(server, named, make):
    b, c = named("b"), named("c")
    b.exec("echo later > /home/user/who")
    # The newest of that name is that of C.
    ran = run_cli(server, "rollback", b.id, "before")
    assert ran.returncode == 0, ran
    assert note(b) == "b"
    # One without a snapshot of this name is refused, whether one or many have it.
    other = make()
    with pytest.raises(Refused) as refused:
        post(other, "rollback", to="before")
    assert refused.value.status == 409 and refused.value.error["field"] == "to", refused.value.error
    for owner in (b, c):
        assert f"{owner.id}:before" in refused.value.error["hint"], refused.value.error
    # Nor by an id, unless it is said that it is meant.
    with pytest.raises(Refused) as refused:
        post(other, "rollback", to=c.point)
    assert refused.value.status == 409 and "foreign" in refused.value.error["hint"], refused.value.error
    ran = run_cli(server, "rollback", other.id, f"{c.id}:before")
    assert ran.returncode == 1 and "--foreign" in ran.stderr, ran
    assert len(ran.stderr.strip().splitlines()) == 2, ran.stderr
    assert not other.exec("test -e /home/user/who").ok
    ran = run_cli(server, "rollback", "--foreign", other.id, f"{c.id[:10]}:before")
    assert ran.returncode == 0, ran
    assert note(other) == "c"


def test_a_name_that_two_sandboxes_have_is_refused_wherever_none_is_at_hand(server, named, tmp_path):
    b, c = named("b"), named("c")
    file = tmp_path / "point.tar.zst"
    for args in (
        ("create", "--from-point", "before"),
        ("points", "export", "before", str(file)),
        ("points", "name", "before", "other"),
        ("points", "tag", "before", "keep"),
        ("points", "rm", "before"),
        ("diff", "before", c.point),
    ):
        ran = run_cli(server, *args)
        assert ran.returncode == 1, (args, ran)
        assert b.id in ran.stderr and c.id in ran.stderr, (args, ran.stderr)
    assert not file.exists()
    status, _, body = server.request("POST", "/sandboxes", {"templateID": "before", "timeout": 60})
    assert status == 409 and b.id in body.decode(), (status, body)
    status, _, body = server.request("DELETE", "/templates/before")
    assert status == 409, (status, body)
    assert {point["id"] for point in server.json("GET", "/v1/points")["points"]} >= {b.point, c.point}
    # Said exactly it is taken, natively and by an E2B client.
    with Box(server, from_point=f"{b.id}:before") as copy:
        assert note(copy) == "b"
    made = server.json("POST", "/sandboxes", {"templateID": f"{c.id}:before", "timeout": 60})
    copy = Box.known(server, made["sandboxID"])
    try:
        assert note(copy) == "c"
    finally:
        copy.kill()
    # The second of a comparison is looked for where the first is.
    b.exec("touch /home/user/more")
    post(b, "points", name="after")
    try:
        ran = run_cli(server, "diff", f"{b.id}:before", "after")
        assert ran.returncode == 0 and "/home/user/more" in ran.stdout, ran
    finally:
        server.json("DELETE", f"/v1/points/{b.id}:after")
    # The only one of its name needs no sandbox.
    server.json("DELETE", f"/v1/points/{b.id}:before")
    with Box(server, from_point="before") as copy:
        assert note(copy) == "c"


def test_a_fork_goes_back_to_what_it_descends_from_and_copies_no_other(server, named):
    b, c = named("b"), named("c")
    fork = Box.known(server, post(b, "fork")["forks"][0]["sandbox"]["id"])
    try:
        fork.exec("echo later > /home/user/who")
        post(fork, "rollback", to="before")
        assert note(fork) == "b"
        own = post(fork, "points", name="before")["id"]
        fork.exec("echo later > /home/user/who")
        assert post(fork, "rollback", to="before")["point"] == own, "its own comes first"
        forget(server, own)
    finally:
        fork.kill()
    post_name = server.json("PATCH", f"/v1/points/{c.point}", {"name": "only-c"})
    assert post_name["name"] == "only-c"
    with pytest.raises(Refused) as refused:
        post(b, "fork", at="only-c")
    assert refused.value.status == 409 and f"{c.id}:only-c" in refused.value.error["hint"]


def test_a_snapshot_can_not_be_named_like_an_id(box):
    with pytest.raises(Refused) as refused:
        post(box, "points", name="p" + "a" * 20)
    assert refused.value.status == 400 and refused.value.error["field"] == "name"


# ---- N2, N3, N10: what a sandbox may reach, and what it had of it ----


@pytest.fixture(scope="module")
def moated(server, outside):
    (outside.directory / "six").mkdir()
    (outside.directory / "six" / "index").write_text("six\n")
    (outside.directory / "big").write_bytes(b"x" * 3000)
    with in_place_of(server, "--pool-size", "0", *outside.flags(), where=outside.where()) as own:
        yield own


@pytest.fixture
def reach(moated):
    with boxes_of(moated) as make:
        yield make


def get(box, url, *flags):
    ran = box.exec(["curl", "-sS", "--max-time", "10", "-o", "/dev/null", "-w", "%{http_code}", *flags, url])
    return ran.out if ran.ok else ""


def numbers(box):
    traffic = box.server.json("GET", box.path + "/network/traffic")
    refused = box.server.json("GET", box.path + "/network/denials")["denials"]
    return traffic, {(denial["host"], denial["why"]): denial["count"] for denial in refused}


@pytest.mark.parametrize("how", ["pause", "killed", "stopped"])
def test_a_spent_budget_stays_spent(reach, moated, outside, how):
    """The count began at zero again with every pause and every server."""
    name = f"good.sandkeep.test:{outside.web.port}"
    box = reach(network={"allow": [name], "limits": {"total_bytes": BUDGET}})
    half = [get(box, outside.url(path="/big")) for _ in range(3)]
    assert half == ["200"] * 3
    get(box, "http://other.sandkeep.test/")
    before, denials = numbers(box)
    assert before["bytes_received"] > 9000 and before["denied"] >= 1 and denials, (before, denials)

    def interrupt():
        if how == "pause":
            post(box, "pause")
            at_rest, refused = numbers(box)
            post(box, "resume")
            return at_rest, refused
        moated.kill_hard() if how == "killed" else moated.stop()
        with outside.where():
            moated.start()
        return numbers(box)

    after, refused = interrupt()
    for field in ("bytes_sent", "bytes_received", "connections", "denied"):
        assert after[field] >= before[field], (field, before, after)
    assert refused.items() >= denials.items(), (denials, refused)
    passed = 0
    while get(box, outside.url(path="/big")) == "200":
        passed += 1
        assert passed <= 3, "more was let through than the budget"
    interrupt()
    assert get(box, outside.url(path="/big")) != "200", "what was spent is given back"
    assert any("all the bytes" in why or "used all of its" in why for _, why in numbers(box)[1]), numbers(box)
    # N10: the page that says why is not paid for.
    ran = box.exec(["curl", "-sS", "--max-time", "10", "http://sandkeep.internal/denials"])
    assert ran.ok and "denials" in ran.out, ran
    # Only who sets a policy gives new bytes.
    box.server.json("PUT", box.path + "/network", {"allow": [name], "limits": {"total_bytes": BUDGET}})
    assert get(box, outside.url(path="/big")) == "200"


def test_a_fork_begins_with_what_its_source_has_spent(reach, outside):
    name = f"good.sandkeep.test:{outside.web.port}"
    box = reach(network={"allow": [name], "limits": {"total_bytes": 9000}})
    while get(box, outside.url(path="/big")) == "200":
        pass
    fork = Box.known(box.server, post(box, "fork")["forks"][0]["sandbox"]["id"])
    try:
        assert get(fork, outside.url(path="/big")) != "200"
        assert numbers(fork)[0]["bytes_received"] < 3000, "what it moved is its own"
    finally:
        fork.kill()


def test_a_suggestion_never_opens_a_host_that_was_open_for_some_requests(reach, moated, outside, tmp_path):
    port = outside.web.port
    rule = {"to": "good.sandkeep.test", "ports": [port], "http": [{"methods": ["GET"], "path": "/six/*"}]}
    box = reach(network={"allow": [rule]})
    assert get(box, outside.url(path="/six/index")) == "200"
    assert get(box, outside.url(path="/hello.txt")) == "403"
    assert get(box, outside.url(path="/six/index"), "-X", "POST") == "403"
    denial = box.server.json("GET", box.path + "/network/denials")["denials"][0]
    assert denial["request"] == {"method": "POST", "path": "/six/index"}, denial
    assert "POST /six/index" in denial["hint"], denial
    ran = run_cli(moated, "policy", "suggest", box.id)
    assert ran.returncode == 0, ran
    policy = json.loads(ran.stdout)
    assert all("http" in rule for rule in policy["allow"]), policy
    file = tmp_path / "policy.json"
    file.write_text(ran.stdout)
    assert run_cli(moated, "policy", "set", box.id, str(file)).returncode == 0
    assert get(box, outside.url(path="/hello.txt")) == "200", "what was refused is open now"
    assert get(box, outside.url(path="/big")) == "403", "and nothing else"


# ---- N7: the time that was given ----


def test_a_timeout_is_kept_over_a_pause(server, make):
    box = make(timeout_seconds=120)
    server.json("POST", box.path + "/timeout", {"timeout_seconds": 8 * 3600})
    post(box, "pause")
    ran = run_cli(server, "resume", box.id)
    assert ran.returncode == 0 and ran.stdout.strip() == box.id, ran
    end = box.info()["end_at"]
    assert "ends at" in ran.stderr and end[:16] in ran.stderr, (ran.stderr, end)
    started = box.info()["started_at"]
    from datetime import datetime

    when = [datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (started, end)]
    assert (when[1] - when[0]).total_seconds() > 7 * 3600, when

"""What a new user met in the first hour, where sandboxes reach something."""

import json
import re

import pytest
from boxkit import Box, post, run_cli
from servers import boxes_of, in_place_of

BUDGET = 20_000


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
    # What a sandbox asks for must not come back as a pattern that fits everything.
    assert get(box, outside.url(path="/*")) == "403" and get(box, outside.url(path="/%2A")) == "403"
    ran = run_cli(moated, "policy", "suggest", box.id)
    assert ran.returncode == 0, ran
    policy = json.loads(ran.stdout)
    assert all("http" in rule for rule in policy["allow"]), policy
    file = tmp_path / "policy.json"
    file.write_text(ran.stdout)
    assert run_cli(moated, "policy", "set", box.id, str(file)).returncode == 0
    assert get(box, outside.url(path="/hello.txt")) == "200", "what was refused is open now"
    assert get(box, outside.url(path="/big")) == "403", "and nothing else"


def test_a_command_that_was_refused_something_says_so_at_its_end(reach, moated):
    box = reach()
    curl = ["curl", "-sS", "--max-time", "10", "http://192.0.2.1/"]
    ran = run_cli(moated, "exec", box.id, "--", *curl)
    assert ran.returncode == 7, ran
    # Not by its policy, which could not open this range either.
    assert "1 connection was refused: 192.0.2.1:80 (closed range); " in ran.stderr, ran
    assert f"sandkeep denials {box.id}" in ran.stderr, ran
    assert "policy" not in run_cli(moated, "exec", box.id, "--", "true").stderr


def test_the_words_after_a_command_are_about_that_command_alone(reach, moated):
    box = reach(network={"allow": ["typo.invalid:80"]})
    curl = ["curl", "-sS", "--max-time", "10"]

    def said(url):
        ran = run_cli(moated, "exec", box.id, "--", *curl, url)
        assert ran.returncode != 0, ran
        return ran.stderr.strip().splitlines()[-1]

    assert "192.0.2.1:80" in said("http://192.0.2.1/")
    last = said("http://192.0.2.2/")
    assert last.startswith("1 connection was refused: 192.0.2.2:80 (closed range); "), last
    assert said("http://192.0.2.2/") == last, "the same again counts as one, not as two"
    last = said("http://nowhere.test/")
    assert re.match(r"\d+ lookups? (was|were) refused by policy: nowhere.test \(no rule\); ", last), last
    last = said("http://typo.invalid/")
    assert re.match(r"\d+ lookups? failed: typo.invalid \(no such name\); ", last), last


def test_run_tells_what_was_refused_before_its_sandbox_is_gone(moated):
    ran = run_cli(moated, "run", "--", "curl", "-sS", "--max-time", "10", "http://192.0.2.1/")
    assert "1 connection was refused: 192.0.2.1:80 (closed range)\n" in ran.stderr, ran
    assert "  192.0.2.1:80: closed range; " in ran.stderr, ran
    assert "sandkeep denials" not in ran.stderr, ran

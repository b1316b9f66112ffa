"""A refusal tells the truth: its reason is in the list, the log, the events and the suggestion."""

import json
import os
import subprocess
import threading
import time

import pytest
from boxkit import wait_for
from outside import CLOSED
from sandkeep_server import binary
from servers import boxes_of, in_place_of

NAME = "rebound.sandkeep.test"
TYPO = "typo.sandkeep.test"


@pytest.fixture(scope="module")
def moated(server, outside):
    with in_place_of(server, "--pool-size", "0", *outside.flags(), where=outside.where()) as own:
        yield own


@pytest.fixture
def make(moated):
    with boxes_of(moated) as make:
        yield make


def cli(server, *words, **options):
    return subprocess.run(
        [binary(), *words], env={**os.environ, **server.cli_env()}, capture_output=True, text=True, timeout=120, **options
    )


def curl(box, host):
    begun = time.monotonic()
    ran = box.exec(["curl", "-sS", "--max-time", "20", f"http://{host}/"])
    assert ran.code == 6, f"could not resolve: {ran}"
    return time.monotonic() - begun


def denied(box, host):
    found = box.server.json("GET", f"{box.path}/network/denials")["denials"]
    return [denial for denial in found if denial["host"] == host]


def test_an_allowed_name_in_a_closed_range_asks_for_the_setting_and_not_for_a_rule(make, moated):
    box = make(network={"allow": [f"{NAME}:80"]})
    assert curl(box, NAME) < 5
    (denial,) = denied(box, NAME)
    assert denial["reason"] == "closed_range" and denial["range"] == "10.0.0.0/8", denial
    assert CLOSED in denial["why"] and "`allow_private`" in denial["hint"], denial
    shown = cli(moated, "denials", box.id)
    assert shown.returncode == 0 and f"{NAME} closed_range: " in shown.stdout, shown
    assert json.loads(cli(moated, "denials", box.id, "--json").stdout)["denials"][0]["reason"] == "closed_range"
    suggested = cli(moated, "policy", "suggest", box.id)
    assert "allow_private" in suggested.stderr and "nothing to add" in suggested.stderr, suggested
    assert len(json.loads(suggested.stdout)["allow"]) == 1, suggested
    tested = cli(moated, "policy", "test", "--box", box.id, f"http://{NAME}/")
    assert tested.returncode == 1 and "allow_private" in tested.stdout, tested
    entries = lambda: moated.json("GET", f"/v1/audit?sandbox_id={box.id}&kind=name_denied")["entries"]  # noqa: E731
    detail = wait_for(entries, "the log has it")[0]["detail"]
    assert detail["code"] == "closed_range" and CLOSED in detail["reason"], detail
    told = lambda: [e for e in events(moated, box) if e["event"] == "egress_denied"]  # noqa: E731
    assert wait_for(told, "the events have it")[0]["reason"] == "closed_range"


def events(server, box):
    return server.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]


def test_an_allowed_name_that_does_not_exist_is_not_called_refused(make, moated):
    box = make(network={"allow": [TYPO]})
    curl(box, TYPO)
    (denial,) = denied(box, TYPO)
    assert denial["reason"] == "no_such_name" and "is allowed, but" in denial["why"], denial
    ran = box.exec(["curl", "-sS", f"http://sandkeep.internal/why?host={TYPO}"])
    answer = json.loads(ran.out)
    assert answer["allowed"] and answer["reason"] == "no_such_name", answer
    tested = cli(moated, "policy", "test", "--box", box.id, f"https://{TYPO}/")
    assert tested.returncode == 0 and "but: " in tested.stdout, tested
    assert len(json.loads(cli(moated, "policy", "suggest", box.id).stdout)["allow"]) == 1


def test_denials_are_followed(make, moated):
    box = make()
    curl(box, "a.sandkeep.test")
    following = subprocess.Popen(
        [binary(), "denials", "--follow", "--json", box.id],
        env={**os.environ, **moated.cli_env()}, stdout=subprocess.PIPE, text=True,
    )
    try:
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(following.stdout), daemon=True)
        first = json.loads(following.stdout.readline())
        assert first["host"] == "a.sandkeep.test" and first["reason"] == "no_rule", first
        reader.start()
        curl(box, "b.sandkeep.test")
        wait_for(lambda: any("b.sandkeep.test" in line for line in list(lines)) or None, "the next one is told")
    finally:
        following.kill()
        following.wait()


def test_rules_that_can_never_work_are_warned_of(make, moated):
    made = cli(moated, "create", "--allow", "192.168.1.1:80", "--allow", "169.254.169.254:80")
    assert made.returncode == 0, made
    assert "192.168.1.1 port 80 lets nothing through" in made.stderr and "allow_private" in made.stderr, made
    assert "169.254.169.254 port 80 lets nothing through" in made.stderr, made
    assert "no rule or setting opens it" in made.stderr, made
    assert cli(moated, "kill", made.stdout.strip()).returncode == 0


@pytest.mark.parametrize("net", ["169.254.0.0/16", "127.0.0.0/8", "169.254.169.254/32"])
def test_a_range_that_nothing_opens_is_refused_as_a_setting(server, net):
    ran = subprocess.run(
        [binary(), "serve", "--state", str(server.state), "--allow-private", net],
        capture_output=True, text=True, timeout=60,
    )
    assert ran.returncode != 0 and net in ran.stderr and "which no sandbox can reach" in ran.stderr, ran

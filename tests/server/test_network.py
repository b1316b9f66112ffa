"""What boxes reach: nothing but what their policy names."""

import json
import os
import subprocess
import threading
import time

import pytest
from boxkit import Box, wait_for
from outside import ADDRESS, CLOSED
from sandkeep_server import Refused, binary
from servers import boxes_of, in_place_of

# Every refusal is immediate; only a hang runs into this.
CURL = ["curl", "-sS", "--max-time", "20"]
HANGS = 28


@pytest.fixture(scope="module")
def moated(server, outside):
    """A server that knows the outside, in place of the one of the whole run."""
    with in_place_of(server, "--pool-size", "2", *outside.flags(), where=outside.where()) as own:
        yield own


@pytest.fixture
def make(moated):
    with boxes_of(moated) as make:
        yield make


def network(box, method="GET", body=None, tail=""):
    return box.server.json(method, f"{box.path}/network{tail}", body)


def fetch(box, url):
    ran = box.exec([*CURL, url])
    assert ran.code != HANGS, ran
    return ran


def hello(box, url):
    return fetch(box, url).out == "hello from outside\n"


def connect(box, host, port):
    """What a program sees that connects and sends: the name of the error, or what it got."""
    ran = box.python(f"""
        import socket
        try:
            with socket.create_connection(({host!r}, {port}), timeout=20) as s:
                s.sendall(b"x" * 64)
                print("got", s.recv(100))
        except OSError as error:
            print(type(error).__name__)
    """)
    assert ran.ok, ran
    return ran.out.strip()


RESET = {"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"}


def test_a_box_that_says_nothing_reaches_nothing(make, outside):
    box = make()
    assert network(box) == {"default": "deny", "allow": [], "deny": [], "limits": {}}
    before = len(outside.web.hits)
    assert connect(box, ADDRESS, outside.web.port) in RESET
    assert connect(box, "192.0.2.1", 443) in RESET
    assert connect(box, "good.sandkeep.test", 80) == "gaierror"
    assert len(outside.web.hits) == before
    assert "good.sandkeep.test" not in outside.dns.asked, "a denied name never leaves the host"


def test_an_allowed_name_is_reached_by_curl_and_python(make, outside):
    box = make(network={"allow": [f"good.sandkeep.test:{outside.web.port}"]})
    assert hello(box, outside.url()), fetch(box, outside.url())
    ran = box.python(f"import urllib.request; print(urllib.request.urlopen({outside.url()!r}, timeout=20).read())")
    assert "hello from outside" in ran.out, ran
    # Another name at the same address, and the same name on another port, are not.
    assert not hello(box, outside.url("other.sandkeep.test"))
    assert connect(box, "good.sandkeep.test", outside.web.port + 1) in RESET
    moved = network(box, tail="/traffic")
    assert moved["bytes_received"] > 0 and moved["connections"] >= 2 and moved["denied"] >= 2, moved


def test_git_clones_from_an_allowed_host_only(make, outside, tmp_path):
    directory = tmp_path / "work"
    directory.mkdir()
    run = lambda *words: subprocess.run(["git", *words], cwd=directory, check=True, capture_output=True)  # noqa: E731
    run("init", "-q", "-b", "main")
    (directory / "read.me").write_text("cloned\n")
    run("add", ".")
    run("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "one")
    served = outside.directory / "repo.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(directory), str(served)], check=True)
    subprocess.run(["git", "update-server-info"], cwd=served, check=True)
    box = make(network={"allow": ["good.sandkeep.test"]})
    ran = box.exec(["sh", "-c", f"cd /tmp && git clone -q {outside.url(path='/repo.git')} r && cat r/read.me"])
    assert ran.out == "cloned\n", ran
    ran = box.exec(["git", "clone", "-q", outside.url("other.sandkeep.test", "/repo.git"), "/tmp/o"])
    assert ran.code not in (0, None), ran


def test_a_change_holds_at_once_and_cuts_what_no_longer_fits(make, outside):
    box = make(network={"allow": ["good.sandkeep.test"]})
    ended = []
    url = outside.url(path="/stream")
    flow = threading.Thread(
        target=lambda: ended.append(box.exec(["sh", "-c", f"curl -sS --max-time 60 {url} > /dev/null"]))
    )
    flow.start()
    wait_for(lambda: outside.web.streams_open == 1, "the stream runs")
    assert network(box, "PUT", {"profile": "air-gapped"})["allow"] == []
    wait_for(lambda: outside.web.streams_open == 0, "the stream is cut")
    flow.join(30)
    assert ended and ended[0].code not in (0, HANGS), ended
    assert not hello(box, outside.url())
    network(box, "PUT", {"allow": ["good.sandkeep.test"]})
    assert hello(box, outside.url())
    events = box.server.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]
    assert [e["event"] for e in events].count("network_changed") == 2, events


def test_open_still_closes_private_and_metadata_ranges(make, outside):
    box = make(network={"profile": "open"})
    assert hello(box, outside.url()), fetch(box, outside.url())
    assert connect(box, CLOSED, outside.hidden.port) in RESET
    assert connect(box, "169.254.170.2", 443) in RESET
    assert connect(box, "127.77.0.1", outside.web.port) in RESET
    # A name of the outside that leads inside.
    assert connect(box, "rebound.sandkeep.test", outside.hidden.port) in RESET | {"gaierror"}
    assert outside.hidden.hits == []


def test_refusals_are_listed_with_what_to_do(make, outside, moated):
    box = make()
    connect(box, "good.sandkeep.test", outside.web.port)
    connect(box, ADDRESS, 8443)

    def denials():
        return {(d["host"], d["via"]): d for d in network(box, tail="/denials")["denials"]}

    assert ("good.sandkeep.test", "dns") in denials(), denials()
    # The kernel refuses a connection first and tells of it then.
    one = wait_for(lambda: denials().get((ADDRESS, "tcp")), "the refusal is listed")
    assert one["port"] == 8443 and one["why"] and "policy" in one["hint"], one

    def told():
        events = moated.json("GET", f"/v1/events?format=json&sandbox_id={box.id}")["events"]
        return [e for e in events if e["event"] == "egress_denied" and e["host"] == ADDRESS]

    event = wait_for(told, "the refusal is an event")[0]
    assert event["port"] == 8443 and event["why"]


def test_policies_are_tested_without_sending_anything(make, moated):
    ask = lambda **body: moated.json("POST", "/v1/policy/test", body)  # noqa: E731
    policy = {"allow": [{"to": "api.example.org", "ports": [443], "http": [{"methods": ["GET"], "path": "/v1/*"}]}]}
    assert ask(policy=policy, url="https://api.example.org/v1/x")["allowed"]
    refused = ask(policy=policy, url="https://api.example.org/v1/x", method="POST")
    assert not refused["allowed"] and refused["why"] and refused["hint"]
    assert not ask(policy={"profile": "open"}, url="http://10.1.2.3/")["allowed"]
    box = make(network={"profile": "open"})
    assert ask(sandbox_id=box.id, url="https://example.org/")["rule"] == "open"
    names = [p["name"] for p in moated.json("GET", "/v1/profiles")["profiles"]]
    assert names == ["air-gapped", "package-registries", "open"]
    with pytest.raises(Refused) as caught:
        Box(moated, network={"allow": ["*.org"]})
    assert caught.value.error["field"] == "network.allow[0].to"


def test_pooled_boxes_get_their_policy(make, outside, moated):
    for _ in range(3):
        wait_for(lambda: moated.json("GET", "/v1/host")["pooled"] >= 1, "a box waits in the pool")
        box = make(network={"allow": ["good.sandkeep.test"]})
        assert hello(box, outside.url()), fetch(box, outside.url())


def test_a_policy_is_part_of_what_a_key_stands_for(moated):
    key = {"Idempotency-Key": f"net-{time.time_ns()}"}
    first = moated.json("POST", "/v1/sandboxes", {"network": {"profile": "open"}}, headers=key)
    again = moated.json("POST", "/v1/sandboxes", {"network": {"profile": "open"}}, headers=key)
    assert first["id"] == again["id"]
    with pytest.raises(Refused) as caught:
        moated.json("POST", "/v1/sandboxes", {}, headers=key)
    assert caught.value.status == 409
    moated.json("DELETE", f"/v1/sandboxes/{first['id']}")


def cli(server, *words):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([str(binary()), *words], env=env, capture_output=True, text=True, timeout=120)


def test_the_command_line_makes_shows_and_proposes_policies(make, outside, moated, tmp_path):
    ran = cli(moated, "run", "--allow", f"good.sandkeep.test:{outside.web.port}", "--", "curl", "-sS", outside.url())
    assert ran.stdout == "hello from outside\n", ran
    box = make()
    fetch(box, outside.url())
    ran = cli(moated, "policy", "suggest", box.id)
    assert ran.returncode == 0 and "good.sandkeep.test" in ran.stderr, ran
    proposal = tmp_path / "policy.json"
    proposal.write_text(ran.stdout)
    assert json.loads(ran.stdout)["allow"][0]["to"] == "good.sandkeep.test"
    ran = cli(moated, "policy", "test", "--file", str(proposal), "https://good.sandkeep.test/")
    assert ran.returncode == 0 and "allowed" in ran.stdout, ran
    assert cli(moated, "policy", "set", box.id, str(proposal)).returncode == 0
    shown = json.loads(cli(moated, "policy", "show", box.id).stdout)
    assert shown["allow"][0]["to"] == "good.sandkeep.test", shown
    ran = cli(moated, "policy", "test", "--box", box.id, "https://other.sandkeep.test/")
    assert ran.returncode == 1 and "refused" in ran.stdout, ran


def settled(count):
    """What it counts, once that has not changed for a second."""
    before = count()
    time.sleep(1)
    return before if count() == before else None


# Reads what never ends, and says when it did.
STREAM = "setsid sh -c \"curl -s -o /dev/null '{url}'; echo > /tmp/ended\" > /dev/null 2>&1 < /dev/null &"


def cut_off(box, outside, what):
    """Does something to a box in the middle of a download, which is over then; the way out is not."""
    wait_for(lambda: outside.web.streams_open == 0, "earlier downloads are over")
    assert box.exec(["sh", "-c", "rm -f /tmp/ended; " + STREAM.format(url=outside.url(path="/stream"))]).ok
    wait_for(lambda: outside.web.streams_open == 1, "the box downloads")
    done = what()
    wait_for(lambda: box.exec(["test", "-e", "/tmp/ended"]).ok, "the box knows that it is over")
    wait_for(lambda: outside.web.streams_open == 0, "so does the world")
    assert hello(box, outside.url())
    assert not hello(box, outside.url("other.sandkeep.test"))
    return done


@pytest.mark.parametrize("level", ["container", "gvisor"])
def test_what_is_open_ends_with_a_snapshot_and_the_way_out_stays(make, outside, moated, level):
    box = make(isolation=level, network={"allow": [f"good.sandkeep.test:{outside.web.port}"]})
    for _ in range(2):
        point = cut_off(box, outside, lambda: moated.json("POST", f"{box.path}/points", {}))
        assert point["memory"], point
        moated.json("DELETE", f"/v1/points/{point['id']}")


def test_what_is_open_ends_when_a_box_is_frozen_and_the_way_out_stays(make, outside, moated):
    box = make(network={"allow": [f"good.sandkeep.test:{outside.web.port}"]})
    # What CRIU can not write.
    box.exec(["sh", "-c", "setsid python3 -c \"import ctypes, os, time; assert ctypes.CDLL(None).mq_open(b'/held', os.O_CREAT | os.O_RDWR, 0o600, (ctypes.c_long * 8)(0, 1, 16, 0)) >= 0; open('/tmp/held', 'w'); time.sleep(3600)\" > /dev/null 2>&1 < /dev/null &"])
    wait_for(lambda: box.exec(["test", "-e", "/tmp/held"]).ok, "the queue is there")

    def freeze_and_wake():
        paused = moated.json("POST", f"{box.path}/pause", {})
        assert paused["pause"]["mode"] == "ram", paused
        wait_for(lambda: outside.web.streams_open == 0, "a frozen box downloads nothing")
        moated.json("POST", f"{box.path}/resume", {})

    for _ in range(2):
        cut_off(box, outside, freeze_and_wake)


def test_nothing_gets_out_while_the_server_is_dead_and_all_works_again_after(make, outside, moated):
    box = make(network={"allow": ["good.sandkeep.test"]}, timeout_seconds=1800)
    url = outside.url(path="/hello.txt?beat")
    beat = f"while :; do curl -s --max-time 2 -o /dev/null '{url}'; curl -s --max-time 2 -o /dev/null http://{ADDRESS}:{outside.web.port}/hello.txt?beat; sleep 0.05; done"
    box.exec(["sh", "-c", f"setsid sh -c \"{beat}\" > /dev/null 2>&1 < /dev/null &"])
    beats = lambda: sum("beat" in hit for hit in outside.web.hits)  # noqa: E731
    wait_for(lambda: beats() > 3, "the box calls")
    moated.kill_hard()
    # A request that was already under way may still be noted; after that nothing more comes.
    at_death = wait_for(lambda: settled(beats), "the last requests are noted")
    time.sleep(1)
    assert beats() == at_death
    moated.start()
    wait_for(lambda: beats() > at_death + 3, "the box calls again")
    assert network(box)["allow"] == [{"to": "good.sandkeep.test"}]
    assert not hello(box, outside.url("other.sandkeep.test"))

"""What passes the moat passes whole: large bodies both ways, many at once, within the limits of the policy."""

import hashlib
import os

import pytest
from boxkit import wait_for

SIZE = 48 << 20


@pytest.fixture(scope="module")
def large(world):
    data = os.urandom(SIZE)
    (world.directory / "large").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


# Looked into, where a rule is about requests; passed on unseen, where it is not.
UNSEEN = {"allow": ["good.test"]}
SEEN = {"allow": [{"to": "good.test", "http": [{"methods": ["GET", "POST"], "path": "/*"}]}]}


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("network", [UNSEEN, SEEN], ids=["unseen", "seen"])
def test_large_bodies_pass_whole_both_ways(make_walled, world, large, scheme, network):
    box = make_walled(network=network)
    url = f"{scheme}://good.test"
    ran = box.exec(["sh", "-c", f"curl -sSk --max-time 300 -o /tmp/large {url}/large && sha256sum < /tmp/large"], http_timeout=400)
    assert ran.out.split()[:1] == [large], ran
    ran = box.exec(["curl", "-sSk", "--max-time", "300", "--data-binary", "@/tmp/large", f"{url}/up"], http_timeout=400)
    assert ran.out == large, ran
    moved = box.server.json("GET", f"{box.path}/network/traffic")
    assert moved["bytes_received"] >= SIZE and moved["bytes_sent"] >= SIZE, moved


def test_many_flows_at_once_do_not_mix(make_walled, world, large):
    """Each gets its own bytes, also where one reader is slow."""
    box = make_walled(network=UNSEEN)
    words = """
    for n in 1 2 3 4 5 6; do (curl -sSk --max-time 300 https://good.test/large | sha256sum) & done
    (curl -sSk --max-time 300 --limit-rate 8M https://good.test/large | sha256sum) &
    wait
    """
    ran = box.exec(["bash", "-c", words], http_timeout=400)
    assert ran.out.split() == [large, "-"] * 7, ran


def test_a_box_gets_no_more_bytes_than_its_policy_gives_it(make_walled, world, large):
    box = make_walled(network=UNSEEN | {"limits": {"total_bytes": 4 << 20}})
    ran = box.exec(["curl", "-sSk", "--max-time", "300", "-o", "/tmp/large", "https://good.test/large"], http_timeout=400)
    assert ran.code not in (0, 28), ran
    assert 0 < len(box.read("/tmp/large")) <= 4 << 20
    ran = box.exec(["curl", "-sSk", "--max-time", "60", "https://good.test/hello.txt"])
    assert ran.code not in (0, 28), ran
    denials = box.server.json("GET", f"{box.path}/network/denials")["denials"]
    assert any("bytes" in d["why"] and "total_bytes" in d["hint"] or "all of its" in d["why"] for d in denials), denials
    # A new policy starts anew.
    box.server.json("PUT", f"{box.path}/network", UNSEEN)
    assert box.exec(["curl", "-sSk", "--max-time", "60", "https://good.test/hello.txt"]).ok


def test_a_box_has_no_more_connections_than_its_policy_gives_it(make_walled, world):
    box = make_walled(network={"allow": ["good.test"], "limits": {"concurrent_connections": 2}})
    hold = "for n in 1 2; do setsid curl -s -o /dev/null http://good.test/stream > /dev/null 2>&1 < /dev/null & done"
    box.exec(["bash", "-c", hold])
    wait_for(lambda: world.open_streams == 2, "two streams run", limit=60)
    ran = box.exec(["curl", "-sS", "--max-time", "60", "http://good.test/hello.txt"])
    assert ran.code not in (0, 28), ran
    box.exec(["pkill", "curl"])
    wait_for(lambda: box.exec(["curl", "-sS", "--max-time", "60", "http://good.test/hello.txt"]).ok, "there is room again", limit=60)

"""Each row of docs/fork-correctness.md: what must be one machine's own is not shared by a copy."""

import time

import pytest
from boxkit import Box
from identitykit import checked, token


@pytest.fixture(params=["gvisor", "container"])
def family(request, server):
    """A box, and two forks of one point of it."""
    with Box(server, isolation=request.param, timeout_seconds=600) as box:
        assert box.root("echo shared > /home/user/note").ok
        made = server.json("POST", box.path + "/fork", {"count": 2})["forks"]
        forks = [Box.known(server, one["sandbox"]["id"]) for one in made]
        yield [box, *forks]
        for fork in forks:
            fork.kill()


def different(family, command):
    said = [one.root(command).out for one in family]
    assert len(set(said)) == len(family) and all(said), (command, said)


def test_random_numbers_of_the_kernel(family):
    different(family, "python3 -c 'import os; print(os.urandom(32).hex())'")
    different(family, "head -c 32 /dev/urandom | od -An -tx1")
    different(family, "python3 -c 'import uuid; print(uuid.uuid4())'")


def test_machine_id_and_names(family):
    different(family, "cat /etc/machine-id")
    different(family, "hostname")
    different(family, "cat /etc/hostname")
    different(family, "echo $E2B_SANDBOX_ID")


def test_access_tokens(server, family):
    tokens = [one.info()["access_token"] for one in family]
    assert len(set(tokens)) == 3
    # The token of one opens no other.
    for other in tokens[1:]:
        status, _, _ = server.request(
            "GET", "/files?path=/home/user/note",
            headers={"E2b-Sandbox-Id": family[0].id, "E2b-Sandbox-Port": "49983", "X-Access-Token": other},
        )
        assert status == 401


def test_identity_in_tokens(server, family):
    subjects = []
    for one in family:
        read = checked(server, token(one))
        assert read["sub"].endswith(f"/box/{one.id}"), read
        subjects.append(read["sub"])
    assert len(set(subjects)) == 3


@pytest.mark.parametrize("level", ["gvisor", "container"])
def test_the_wall_clock_is_right_after_a_pause(server, level):
    with Box(server, isolation=level, timeout_seconds=600) as box:
        server.json("POST", box.path + "/pause", {})
        paused = time.time()
        # Long enough to tell a clock that stood still from one that is merely slow to be asked.
        while time.time() - paused < 3:
            time.sleep(0.2)
        server.json("POST", box.path + "/resume", {})
        before = time.time()
        said = float(box.root("date +%s.%N").out)
        after = time.time()
        assert before - 1 <= said <= after + 1, (before, said, after)

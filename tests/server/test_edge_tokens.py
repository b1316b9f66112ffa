"""Tokens of a box that the edge adds to its requests, so that programs in it need not handle them."""

import pytest
from boxkit import Box, wait_for
from identitykit import VAULT, checked
from origin import Origin
from sandkeep_server import Refused

CURL = ["curl", "-sS", "--max-time", "60"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """In place of the world of the other tests, so that `walled` runs in this one."""
    origin = Origin(tmp_path_factory.mktemp("origin"))
    yield origin
    origin.close()


def bearer(world, path):
    [value] = world.of(path)[-1].all("Authorization")
    assert value.startswith("Bearer "), value
    return value.removeprefix("Bearer ")


def test_a_token_goes_with_requests_to_its_host_only(walled, world):
    network = {
        "allow": ["good.test:443", "other.test:443"],
        "credentials": [{"token": {"audience": VAULT}, "host": "good.test"}],
    }
    newest = walled.json("GET", "/v1/audit?limit=1")["entries"]
    since = newest[0]["seq"] if newest else 0
    with Box(walled, network=network, identity={"org": "acme"}) as box:
        ran = box.exec([*CURL, "-H", "Authorization: Bearer mine", "https://good.test/edge"])
        assert ran.out == "open\n", ran
        read = checked(walled, bearer(world, "/edge"))
        assert (read["sandbox"], read["org"], read["aud"]) == (box.id, "acme", VAULT)
        # It does not come back to the box, and does not go elsewhere.
        ran = box.exec([*CURL, "https://good.test/echo"])
        assert bearer(world, "/echo") not in ran.out, ran
        box.exec([*CURL, "-k", "https://other.test/elsewhere"])
        assert world.of("/elsewhere")[-1].all("Authorization") == []

        def told(kind):
            return walled.json("GET", f"/v1/audit?after={since}&sandbox_id={box.id}&kind={kind}")["entries"]

        [issued] = told("token_issued")
        assert issued["detail"]["audience"] == VAULT and issued["detail"]["jti"] == read["jti"]
        used = wait_for(lambda: len(told("secret_used")) >= 2 and told("secret_used"), "both uses are in the log")
        assert {(e["detail"]["name"], e["detail"]["host"]) for e in used} == {(f"token:{VAULT}", "good.test")}


def test_a_token_opens_no_host(walled, world):
    with pytest.raises(Refused) as caught:
        Box(walled, network={"allow": [], "credentials": [{"token": {"audience": VAULT}, "host": "good.test"}]})
    assert caught.value.status == 400, caught.value


def test_e2b_headers_may_name_a_token(walled, world):
    made = walled.json(
        "POST", "/v2/sandboxes",
        {
            "templateID": "base",
            "timeout": 300,
            "iam": {"tokens": {"vault": {"audience": VAULT, "tokenType": "JWT-SVID"}}},
            "network": {
                "allowOut": ["good.test"],
                "denyOut": ["0.0.0.0/0"],
                "rules": {
                    "good.test": [{"transform": {"headers": {"Authorization": "Bearer ${e2b.identity.tokens.vault}"}}}]
                },
            },
        },
    )  # fmt: skip
    with Box.known(walled, made["sandboxID"]) as box:
        assert box.exec([*CURL, "https://good.test/e2b"]).out == "open\n"
        assert checked(walled, bearer(world, "/e2b"))["sandbox"] == box.id

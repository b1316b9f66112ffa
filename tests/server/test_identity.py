"""Who a box is: its metadata service, its tokens, and who checks them.

Named after the attacks on identity in docs/threats.md.
"""

import json
import subprocess

import jwt
import pytest
from boxkit import Box, wait_for
from identitykit import CURL, INSIDE, VAULT, anonymous, ask, checked, keys, session, token, verify
from sandkeep_server import Refused, binary

METADATA = "http://169.254.169.254"
WHO = {"org": "acme", "task": "fix-42", "scopes": ["repo:acme/web:read", "ci"]}


def refused(server, *args, **more):
    with pytest.raises(Refused) as caught:
        verify(server, *args, **more)
    return caught.value


def test_a_box_proves_who_it_is_to_anybody(server, make):
    box = make(identity=WHO, network={"profile": "air-gapped"})
    read = checked(server, token(box))
    assert read["sub"] == f"spiffe://127.0.0.1/box/{box.id}"
    assert read["aud"] == VAULT and read["sandbox"] == box.id and read["template"] == "base"
    assert (read["org"], read["task"], read["scope"]) == ("acme", "fix-42", "repo:acme/web:read ci")
    assert 0 < read["exp"] - read["iat"] <= 900
    headers, document = anonymous(server, "/.well-known/openid-configuration")
    assert document["issuer"] == server.url and document["jwks_uri"].startswith(server.url)
    assert "public" in headers["cache-control"]
    for key in keys(server):
        assert "d" not in key, "a private key is published"
    known = verify(server, token(box), sandbox_id=box.id)
    assert known["subject"] == read["sub"] and known["scopes"] == WHO["scopes"], known


@pytest.mark.parametrize("network", [{"profile": "air-gapped"}, {"profile": "open"}], ids=["air-gapped", "open"])
def test_the_metadata_service_answers_under_every_policy(server, make, network):
    box = make(identity=WHO, network=network)
    for host in (INSIDE, METADATA):
        status, body = ask(box, "/v1/identity", "-H", session(box, host), host=host)
        read = json.loads(body)
        assert status == 200 and read["sandbox"] == box.id and read["org"] == "acme", body
        assert read["scopes"] == WHO["scopes"] and "parent" not in read
    status, body = ask(box, "/why?host=closed.example.org")
    assert status == 200 and json.loads(body)["allowed"] == (network["profile"] == "open"), body
    assert "PUT /v1/session" in ask(box, "/")[1]


def test_aws_tools_find_their_two_steps(server, make):
    box = make()
    status, text = ask(
        box, "/latest/api/token", "-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 60", host=METADATA
    )
    assert status == 200
    status, _ = ask(box, "/v1/identity", "-H", f"X-aws-ec2-metadata-token: {text}", host=METADATA)
    assert status == 200


def test_ssrf_to_the_metadata_service(server, make):
    """A program that fetches what it is told gets neither identity nor token."""
    box = make()
    for path in ("/v1/identity", f"/v1/token?audience={VAULT}"):
        assert ask(box, path)[0] == 401
        assert ask(box, path, "-H", "X-Sandkeep-Metadata-Token: guessed")[0] == 401
        assert ask(box, path, "-H", session(box), "-H", "X-Forwarded-For: 192.0.2.1")[0] == 403
        assert ask(box, path, "-H", session(box), "-H", "Host: attacker.example.org")[0] == 403
    status, _ = ask(box, "/v1/session")
    assert status == 405
    status, _ = ask(box, "/v1/session", "-X", "PUT", "-H", "X-Sandkeep-Metadata-Ttl-Seconds: 999999")
    assert status == 400


def test_real_metadata_addresses_are_never_reached(server, make):
    """What answers at 169.254.169.254 is ours, and its other ports and neighbours are nobody's."""
    box = make(network={"profile": "open"})
    status, body = ask(box, "/latest/meta-data/iam/security-credentials/", host=METADATA)
    assert status == 404 and "metadata service has no such page" in body, body
    for target in (f"{METADATA}:8080/", "http://169.254.170.2/", "http://169.254.169.253/", "http://[fd00:ec2::254]/"):
        ran = box.exec([*CURL, target])
        assert ran.code not in (0, 28), (target, ran)


def test_token_of_one_box_from_another(server, make):
    a, b = make(identity=WHO), make()
    text = token(a)
    assert verify(server, text, sandbox_id=a.id)["sandbox_id"] == a.id
    error = refused(server, text, sandbox_id=b.id)
    assert error.status == 403 and "another box" in error.error["message"]
    # A session of one box opens nothing in the other, and each is told only of itself.
    assert ask(b, "/v1/identity", "-H", session(a))[0] == 401
    assert checked(server, token(b))["sandbox"] == b.id
    assert "org" not in checked(server, token(b))


def test_token_after_kill(server, make):
    box = make(identity=WHO)
    text = token(box)
    verify(server, text)
    box.kill()
    error = refused(server, text)
    assert error.status == 401 and "gone" in error.error["message"]


def test_token_replayed_elsewhere(server, make):
    box = make()
    text = token(box)
    assert refused(server, text, audience="https://other.example.org").status == 401
    with pytest.raises(jwt.InvalidAudienceError):
        checked(server, text, audience="https://other.example.org")
    head, claims, signature = text.split(".")
    for forged in (f"{head}.{claims}.", f"{head}.{claims}.{signature[::-1]}", "x", "a.b.c", text + "a" * 20_000):
        assert refused(server, forged).status == 401
    none = jwt.encode(jwt.decode(text, options={"verify_signature": False}), "", algorithm="none", headers=jwt.get_unverified_header(text) | {"alg": "none"})
    assert refused(server, none).status == 401
    # It opens no door of the server itself.
    status, _, _ = server.request("GET", "/v1/sandboxes", headers={"X-API-Key": "", "Authorization": f"Bearer {text}"})
    assert status == 401


def test_questions_that_can_not_be_meant_are_refused(server, make):
    box = make()
    status, body = ask(box, "/v1/token?audience=" + "x" * 600, "-H", session(box))
    assert status == 400, body
    status, body = ask(box, "/v1/token", "-H", session(box))
    assert status == 400, body


def test_rotation_keeps_old_tokens_good(server, make):
    box = make()
    before = token(box)
    known = {key["kid"] for key in keys(server)}
    ran = subprocess.run(
        [str(binary()), "--json", "identity", "rotate"],
        env={**server.cli_env(), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True, timeout=120,
    )
    kid = json.loads(ran.stdout)["kid"]
    assert kid not in known
    after = token(box)
    assert jwt.get_unverified_header(after)["kid"] == kid
    assert {key["kid"] for key in keys(server)} == known | {kid}
    for text in (before, after):
        assert checked(server, text)["sandbox"] == box.id
        verify(server, text)


def test_identity_and_tokens_survive_a_restart(server, make):
    box = make(identity=WHO)
    text = token(box)
    server.kill_hard()
    server.start()

    def again():
        ran = box.exec([*CURL, "-X", "PUT", "-H", "X-Sandkeep-Metadata-Ttl-Seconds: 60", f"{INSIDE}/v1/session"])
        return ran.ok and not ran.out.startswith("{")

    wait_for(again, "the box has its network again")
    assert verify(server, text)["org"] == "acme"
    read = checked(server, token(box))
    assert (read["org"], read["task"], read["scope"]) == ("acme", "fix-42", "repo:acme/web:read ci")


def test_each_algorithm_by_setting(server, make):
    """Another algorithm is a rotation: tokens of before stay good, others verify both."""
    box = make()
    texts = [token(box)]
    extra = list(server.extra)
    try:
        for algorithm in ("EdDSA", "RS256"):
            server.stop()
            server.extra = [*extra, "--token-algorithm", algorithm]
            server.start()
            wait_for(lambda: box.exec([*CURL, f"{INSIDE}/"]).ok, "the box has its network again")
            texts.append(token(box))
            assert jwt.get_unverified_header(texts[-1])["alg"] == algorithm
            for text in texts:
                assert checked(server, text)["sandbox"] == box.id
    finally:
        server.stop()
        server.extra = extra
        server.start()


def test_e2b_iam_tokens(server):
    made = server.json(
        "POST", "/v2/sandboxes",
        {"templateID": "base", "timeout": 300, "iam": {"tokens": {"vault": {"audience": VAULT, "tokenType": "JWT-SVID"}}}},
    )
    with Box.known(server, made["sandboxID"]) as box:
        status, text = ask(box, "/v1/token?name=vault", "-H", session(box))
        assert status == 200 and checked(server, text)["sandbox"] == box.id
        assert ask(box, "/v1/token?name=other", "-H", session(box))[0] == 404
    for tokens in (
        {"a": {"audience": VAULT, "tokenType": "X509-SVID"}},
        {"a": {"audience": ""}},
        {str(n): {"audience": VAULT} for n in range(6)},
    ):
        with pytest.raises(Refused) as caught:
            server.json("POST", "/v2/sandboxes", {"templateID": "base", "iam": {"tokens": tokens}})
        assert caught.value.status == 400


def test_bad_identities_are_refused_by_name(server):
    for identity, field in (
        ({"org": ""}, "identity.org"),
        ({"org": "two words"}, "identity.org"),
        ({"scopes": ["a b"]}, "identity.scopes"),
        ({"scopes": ["s"] * 33}, "identity.scopes"),
        ({"parent": "i0123456789abcdefghij"}, "identity.parent"),
        ({"tokens": {"a b": "x"}}, "identity.tokens"),
        ([], "identity"),
    ):
        with pytest.raises(Refused) as caught:
            server.json("POST", "/v1/sandboxes", {"identity": identity})
        assert caught.value.status == 400
        assert caught.value.error["field"].startswith(field), (identity, caught.value)

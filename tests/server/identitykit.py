"""Asking for identities from inside a box, and checking them from outside, for tests."""

from __future__ import annotations

import json

import jwt

VAULT = "https://vault.example.org"
INSIDE = "http://sandkeep.internal"
CURL = ["curl", "-sS", "--max-time", "30"]


def ask(box, path, *more, host=INSIDE):
    """(status, body) of a request to the box's own metadata service."""
    ran = box.exec([*CURL, "-w", "\n%{http_code}", *more, host + path])
    assert ran.ok, ran
    body, _, status = ran.out.rpartition("\n")
    return int(status), body


def session(box, host=INSIDE):
    status, token = ask(box, "/v1/session", "-X", "PUT", "-H", "X-Sandkeep-Metadata-Ttl-Seconds: 600", host=host)
    assert status == 200, token
    return f"X-Sandkeep-Metadata-Token: {token}"


def token(box, audience=VAULT):
    status, text = ask(box, f"/v1/token?audience={audience}", "-H", session(box))
    assert status == 200, text
    return text


def anonymous(server, path):
    """As a verifier elsewhere asks: without any key."""
    status, headers, body = server.request("GET", path, headers={"X-API-Key": ""})
    assert status == 200, body
    return headers, json.loads(body)


def keys(server):
    return anonymous(server, "/.well-known/jwks.json")[1]["keys"]


def checked(server, text, audience=VAULT):
    """What a verifier elsewhere reads from a token, with nothing but our two documents."""
    _, document = anonymous(server, "/.well-known/openid-configuration")
    kid = jwt.get_unverified_header(text)["kid"]
    key = next(key for key in keys(server) if key["kid"] == kid)
    algorithms = document["id_token_signing_alg_values_supported"]
    return jwt.decode(
        text, jwt.PyJWK(key), algorithms=algorithms, audience=audience, issuer=document["issuer"], leeway=30
    )


def verify(server, text, audience=VAULT, **more):
    return server.json("POST", "/v1/identity/verify", {"token": text, "audience": audience, **more})

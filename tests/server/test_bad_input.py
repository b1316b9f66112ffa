"""Malformed, over-long, unknown: a typed refusal that names what is wrong."""

import json

import pytest
from boxkit import raw
from sandkeep_server import Refused

GHOST = "i00000000000000000000"


def error_of(server, method, path, body=None, headers=None):
    status, _, data = server.request(method, path, body, headers=headers)
    return status, json.loads(data)["error"]


def test_no_key_and_wrong_key(server):
    for headers in ({"X-API-Key": ""}, {"X-API-Key": "wrong"}, {"X-API-Key": server.key[:-1]}, {"X-API-Key": server.key + "0"}):
        status, error = error_of(server, "GET", "/v1/sandboxes", headers=headers)
        assert status == 401
        assert error["code"] == "unauthenticated"
        assert error["hint"]


def test_bearer_works_too(server):
    status, _, _ = server.request("GET", "/v1/sandboxes", headers={"X-API-Key": "", "Authorization": f"Bearer {server.key}"})
    assert status == 200


@pytest.mark.parametrize("method,path", [("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files?path=/x"), ("GET", "/metrics"),
                                         ("GET", "/logs"), ("POST", "/timeout"), ("GET", "/files/list?path=/")])
@pytest.mark.parametrize("name", [GHOST, "nonsense", "..%2f..%2fetc", "i" * 4000])
def test_unknown_ids_are_404(server, method, path, name):
    body = {"cmd": "true"} if path == "/exec" else {"timeout_seconds": 5} if path == "/timeout" else None
    status, error = error_of(server, method, f"/v1/sandboxes/{name}{path}", body)
    assert status == 404, error
    assert error["code"] == "not_found"


@pytest.mark.parametrize("body,word", [
    (b"{", "JSON"), (b"", "JSON"), (b"[]", ""), (b"null", ""), (b'{"template": 5}', "template"), (b'{"limits": {"memory_mib": "much"}}', "memory_mib"),
    (b'{"limits": {"memory_mib": -1}}', "memory_mib"), (b'{"timeout_seconds": "soon"}', "timeout_seconds"), (b'{"tempalte": "base"}', "tempalte"),
    (b'{"metadata": {"a": 1}}', "metadata"), (b'\xff\xfe', ""), (b'{"isolation": "bunker"}', "bunker"), (b'{"env": {"A=B": "x"}}', "A=B"),
    (b'{"env": {"A": "x\\u0000y"}}', "NUL"), (b'{"template": "../../etc"}', "template"), (b'{"timeout_seconds": -5}', "timeout_seconds"),
    (b'{"timeout_seconds": 99999999999999}', "timeout"), (b'{"limits": {"memory_mib": 999999999}}', "memory_mib"), (b'{"limits": {"pids": 0}}', "pids"),
])
def test_malformed_creates_name_the_field(server, body, word):
    status, error = error_of(server, "POST", "/v1/sandboxes", body)
    assert status in (400, 422), error
    assert word.lower() in json.dumps(error).lower(), error


def test_an_unknown_template_says_which_exist(server):
    status, error = error_of(server, "POST", "/v1/sandboxes", {"template": "nope"})
    assert status == 404
    assert "nope" in error["message"]
    assert "base" in json.dumps(error)


def test_wrong_content_type(server):
    status, error = error_of(server, "POST", "/v1/sandboxes", b"template=base", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert status == 415
    assert error["message"]


def test_unknown_routes_and_methods(server):
    status, error = error_of(server, "GET", "/v1/nothing-here")
    assert (status, error["code"]) == (404, "not_found")
    status, headers, data = server.request("PATCH", "/v1/sandboxes")
    assert status == 405
    assert json.loads(data)["error"]["message"]


def test_bad_queries(server):
    for query in ("limit=many", "next_token=forged", "state=flying"):
        status, error = error_of(server, "GET", f"/v1/sandboxes?{query}")
        assert status == 400, query
        assert query.split("=")[0].replace("next_token", "oken") in json.dumps(error)


@pytest.mark.parametrize("body", [{"cmd": ""}, {"cmd": []}, {}, {"cmd": 5}, {"cmd": ["a\0b"]}, {"cmd": "true", "user": "no-such-user"},
                                  {"cmd": "true", "cwd": "/no/such/dir"}, {"cmd": "true", "env": {"=": "x"}}, {"cmd": "true", "timeout_ms": -1}])
def test_malformed_execs(server, shared_box, body):
    status, error = error_of(server, "POST", shared_box.path + "/exec", body)
    assert status in (400, 422), error
    assert error["message"]


def test_a_long_command_is_refused_with_words_or_runs(server, shared_box):
    status, _, body = server.request("POST", shared_box.path + "/exec", {"cmd": ["echo", "x" * 900_000]})
    assert status in (400, 413), body[:300]


def test_metadata_over_the_limit(server):
    status, error = error_of(server, "POST", "/v1/sandboxes", {"metadata": {"a": "x" * 70_000}})
    assert status in (400, 413)
    assert "65536" in error["message"]


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\0\0\0\0", b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\nGET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/health HTTP/1.1\nHost x\n\n", b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
])
def test_what_is_no_http_is_answered_or_closed(server, data):
    got = raw(server, data, limit=10)
    assert not got or b" 200 " not in got.split(b"\r\n")[0] or b"health" in data
    assert server.json("GET", "/v1/health")["status"] == "ok"


@pytest.mark.parametrize("data,status,code", [
    (b"GET / HTTP/9.9\r\n\r\n", b"400", "invalid_argument"),
    (b"NONSENSE\r\n\r\n", b"400", "invalid_argument"),
    (b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", b"400", "invalid_argument"),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000, b"431", "too_large"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n", b"431", "too_large"),
])
def test_a_head_that_is_refused_is_told_why(server, data, status, code):
    got = raw(server, data, limit=30)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status, got[:300]
    error = json.loads(body)["error"]
    assert error["code"] == code and error["hint"], error


def test_e2b_errors_have_code_and_message(server):
    for method, path, body, expected in (
        ("GET", f"/sandboxes/{GHOST}", None, 404), ("DELETE", f"/sandboxes/{GHOST}", None, 404), ("POST", "/v2/sandboxes", b"{", 400),
        ("POST", "/v2/sandboxes", {}, 400), ("POST", "/sandboxes", {"templateID": "nope"}, 404),
        ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 0}, 400), ("POST", f"/sandboxes/{GHOST}/pause", {}, 404),
        ("POST", f"/sandboxes/{GHOST}/timeout", {"timeout": 5}, 404), ("GET", "/v2/sandboxes?order=sideways", None, 400),
        ("GET", "/v2/sandboxes?limit=x", None, 400),
    ):
        status, _, data = server.request(method, path, body)
        answer = json.loads(data)
        assert status == expected, (path, status, answer)
        assert answer["code"] == expected and answer["message"], answer


def test_refusals_come_back_typed_for_a_gone_box(server, make):
    box = make()
    box.kill()
    with pytest.raises(Refused) as refused:
        box.exec("true")
    assert refused.value.status in (404, 409)
    assert refused.value.error["message"]


def test_no_secret_in_the_log(server, shared_box):
    token = server.json("GET", f"/sandboxes/{shared_box.id}")["envdAccessToken"]
    server.request("GET", f"/files?path=/x&signature={token}")
    text = server.log_path.read_text(errors="replace")
    assert server.key not in text
    assert token not in text

"""From outside to a port of a box."""

import base64
import http.client
import json
import os
import socket
import threading

import pytest
from boxkit import raw, wait_for

WEB = """
import http.server, socketserver, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def answer(self, data, code=200):
        self.send_response(code); self.send_header('Content-Length', str(len(data))); self.end_headers(); self.wfile.write(data)
    def do_GET(self):
        if self.path == '/slow':
            self.send_response(200); self.send_header('Transfer-Encoding', 'chunked'); self.end_headers()
            for n in range(1000):
                self.wfile.write(b'5\\r\\ntick\\n\\r\\n'); self.wfile.flush(); time.sleep(0.05)
        elif self.path == '/headers': self.answer(str(self.headers).encode())
        elif self.path == '/ws':
            self.send_response(101); self.send_header('Connection', 'Upgrade'); self.send_header('Upgrade', 'echo'); self.end_headers()
            while True:
                data = self.connection.recv(1000)
                if not data: break
                self.connection.sendall(b'<' + data + b'>')
            self.close_connection = True
        else: self.answer(('you asked ' + self.path).encode())
    def do_POST(self):
        size = int(self.headers.get('Content-Length', 0)); self.answer(b'got %d' % len(self.rfile.read(size)))
    def log_message(self, *a): pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer): daemon_threads = True
Server(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""


KEY_LINE = "E2B-Traffic-Access-Token: {traffic_token}\r\n"


@pytest.fixture(scope="module")
def web(server, shared_box):
    shared_box.write("/tmp/web.py", WEB.encode())
    shared_box.exec("nohup python3 /tmp/web.py 8000 >/tmp/web.log 2>&1 & true")
    wait_for(lambda: ask(server, shared_box, "/")[0] == 200, "the web server in the box")
    return shared_box


def headers_for(box, port=8000):
    return {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(port), **token_of(box)}


def token_of(box):
    return {"E2B-Traffic-Access-Token": box.made["traffic_token"]} if "traffic_token" in box.made else {}


def ask(server, box, path, port=8000, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body=body, headers={**headers_for(box, port), **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_by_headers(server, web):
    assert ask(server, web, "/a?b=c")[1] == b"you asked /a?b=c"


@pytest.mark.parametrize("domain", ["localhost", "boxes.example.test", "e2b.localhost:8443"])
def test_by_host_name(server, web, domain):
    token = web.made["traffic_token"]
    got = raw(server, f"GET /x HTTP/1.1\r\nHost: 8000-{web.id}.{domain}\r\nE2B-Traffic-Access-Token: {token}\r\nConnection: close\r\n\r\n".encode())
    assert b"you asked /x" in got, got


def test_bodies(server, web):
    assert ask(server, web, "/", method="POST", body=b"z" * 3_000_000)[1] == b"got 3000000"


def test_no_api_key_reaches_the_box(server, web):
    seen = ask(server, web, "/headers", **{"X-Forwarded-For": "6.6.6.6"})[1].decode().lower()
    assert "e2b-sandbox-id" not in seen
    assert "6.6.6.6" not in seen
    assert server.key not in seen


@pytest.mark.parametrize("sent", [
    {"X-API-Key": "{key}"}, {"Authorization": "Bearer {key}"}, {"Authorization": "Basic {basic}"}, {"X-Custom": "{key}"}, {"Cookie": "k={key}"},
    {"Authorization": "Basic {unpadded}"}, {"Authorization": "Basic {for_urls}"}, {"X-Custom": "{percent}"}, {"X-Custom": "tok-{key}"},
    {"X-Custom": "xx{key}xx"}, {"X-{key}": "1"}, {"Cookie": "a=b; session={basic}"}, {"X-Custom": "{basic}"},
    {"Sec-WebSocket-Protocol": "base64url.bearer.authorization.k8s.io.{for_urls}, v1"},
])
def test_the_api_key_of_the_server_was_handed_to_the_program(server, web, sent):
    basic = base64.b64encode(f"user:{server.key}".encode()).decode()
    forms = {"key": server.key, "basic": basic, "unpadded": basic.rstrip("="), "percent": server.key.replace("_", "%5f"),
             "for_urls": base64.urlsafe_b64encode(f"?~>{server.key}".encode()).decode().rstrip("=")}
    headers = {name.format(**forms): value.format(**forms) for name, value in sent.items()}
    status, body, _ = ask(server, web, "/headers", **headers)
    assert status == 403, body
    assert "API key" in json.loads(body)["message"]
    assert server.key.encode() not in body
    for at in (f"?key={server.key}", f"/xx{server.key}xx", f"?t={forms['for_urls']}", f"/{basic.rstrip('=')}/x"):
        assert ask(server, web, f"/headers{at}")[0] == 403, at


def test_the_api_key_in_the_name_of_the_host(server, web):
    token = web.made["traffic_token"]
    host = f"8000-{web.id}-{server.key}.localhost"
    got = raw(server, f"GET /x HTTP/1.1\r\nHost: {host}\r\nE2B-Traffic-Access-Token: {token}\r\nConnection: close\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.1 403") and b"API key" in got, got


def test_a_refused_api_key_is_in_the_audit_log(server, make):
    box = make()
    assert ask(server, box, "/", port=8123, **{"X-API-Key": server.key})[0] == 403

    def told():
        records = server.json("GET", f"/v1/audit?sandbox_id={box.id}")["entries"]
        return [r for r in records if r["action"] == "api_key_refused" and r["detail"]["port"] == 8123]

    wait_for(told, "the audit log tells of it")


def test_the_api_key_does_not_reach_the_agent(server, shared_box):
    """E2B's clients may send it along: it is taken out, and the request is served."""
    token = shared_box.made["access_token"]
    assert ask(server, shared_box, "/metrics", port=49983, **{"X-Access-Token": token, "X-API-Key": server.key})[0] == 200
    assert ask(server, shared_box, f"/metrics?k={server.key}", port=49983, **{"X-Access-Token": token})[0] == 403


def plain(server, box, path="/", port=8000, method="GET", **headers):
    """Without the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, headers={"Host": f"{port}-{box.id}.localhost:{server.port}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_a_port_was_open_to_all_who_know_the_id(server, web, make):
    for headers in ({}, {"E2B-Traffic-Access-Token": "guess"}, {"E2B-Traffic-Access-Token": make().made["traffic_token"]},
                    {"X-Access-Token": web.made["access_token"]}, {"E2B-Traffic-Access-Token": web.made["access_token"]}):
        status, body, _ = plain(server, web, **headers)
        assert status == 403, (headers, body)
        assert json.loads(body)["sandboxId"] == web.id
    status, body, _ = plain(server, web, Connection="Upgrade", Upgrade="echo")
    assert status == 403
    status, body, headers = plain(server, web, Accept="text/html")
    assert status == 403 and b"<html" in body and b"sandkeep url" in body
    assert plain(server, web, **token_of(web))[:2] == (200, b"you asked /")


def test_the_token_of_a_port_opens_the_port_alone(server, web):
    token = web.made["traffic_token"]
    assert agent(server, web, "/metrics", token)[0] == 401
    assert server.request("GET", "/v1/sandboxes", headers={"X-API-Key": token})[0] == 401
    seen = ask(server, web, "/headers")[1].decode()
    assert token not in seen and "traffic" not in seen.lower()


def test_a_link_opens_a_session_in_a_browser(server, web):
    token = web.made["traffic_token"]
    status, _, headers = plain(server, web, f"/x?a=b&sandkeep_token={token}")
    assert status == 303 and headers["location"] == "/x?a=b"
    cookie = headers["set-cookie"].split(";")[0]
    assert "HttpOnly" in headers["set-cookie"]
    assert plain(server, web, "/x?a=b", Cookie=f"own=1; {cookie}")[:2] == (200, b"you asked /x?a=b")
    seen = plain(server, web, "/headers", Cookie=f"own=1; {cookie}")[1].decode()
    assert token not in seen and "own=1" in seen
    # A page of another sandbox rides on the session of the browser.
    assert plain(server, web, Cookie=cookie, Origin="http://8000-i0000.localhost")[0] == 403
    assert plain(server, web, f"/x?sandkeep_token={token[:-1]}x")[0] == 403


def test_a_private_port_does_not_wake_its_sandbox_for_strangers(server, make):
    box = make(auto_resume=True, timeout_seconds=None)
    server.json("POST", f"{box.path}/pause")
    assert plain(server, box)[0] == 403
    assert box.info()["state"] == "paused"
    assert ask(server, box, "/", port=8000)[0] == 502
    assert box.info()["state"] == "running"


def test_ports_are_public_for_those_who_ask_for_it(server, make):
    box = make(ports="public")
    assert "traffic_token" not in box.made
    assert plain(server, box)[0] == 502
    forks = server.json("POST", f"{box.path}/fork", {"count": 1})
    fork = forks["forks"][0]["sandbox"]
    assert server.json("GET", f"/v1/sandboxes/{fork['id']}")["ports"] == "public"
    private = server.json("POST", "/v2/sandboxes", {"templateID": "base", "network": {"allowPublicTraffic": False}})
    assert private["trafficAccessToken"]
    usual = server.json("POST", "/v2/sandboxes", {"templateID": "base"})
    assert usual["trafficAccessToken"] is None


def test_upgrades_pass(server, web):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            f"GET /ws HTTP/1.1\r\nHost: 8000-{web.id}.localhost\r\n{KEY_LINE.format(**web.made)}Connection: Upgrade\r\nUpgrade: echo\r\n\r\n".encode()
        )
        got = b""
        while b"\r\n\r\n" not in got:
            got += connection.recv(1000)
        assert b" 101 " in got
        connection.sendall(b"hello")
        assert connection.recv(100) == b"<hello>"


def test_a_closed_port_is_502_with_words(server, web):
    status, body, headers = ask(server, web, "/", port=9)
    assert status == 502
    answer = json.loads(body)
    assert "port is not open" in answer["message"]
    assert answer["sandboxId"] == web.id and answer["port"] == 9 and answer["code"] == 502
    assert headers["content-type"].startswith("application/json")


def test_an_unknown_box_is_502_with_words(server, web):
    ghost = type("Ghost", (), {"id": "i00000000000000000000", "made": {}})
    status, body, _ = ask(server, ghost, "/")
    assert status == 502
    assert "was not found" in json.loads(body)["message"]


def test_a_browser_gets_a_page(server, web):
    status, body, headers = ask(server, web, "/", port=9, Accept="text/html,application/xhtml+xml")
    assert status == 502 and b"<html" in body.lower()


@pytest.mark.parametrize("headers", [{"E2b-Sandbox-Id": "../x", "E2b-Sandbox-Port": "80"}, {"E2b-Sandbox-Id": "i" * 21, "E2b-Sandbox-Port": "99999"},
                                     {"E2b-Sandbox-Id": "i" * 21, "E2b-Sandbox-Port": "x"}])
def test_malformed_targets(server, headers):
    status, _, _ = server.request("GET", "/", headers=headers)
    assert 400 <= status < 600 and status != 500


def agent(server, box, path, token, method="GET", body=None):
    return ask(server, box, path, port=49983, method=method, body=body, **({"X-Access-Token": token} if token else {}))


def test_the_agent_needs_its_token(server, shared_box, make):
    token = server.json("GET", f"/sandboxes/{shared_box.id}")["envdAccessToken"]
    assert agent(server, shared_box, "/health", None)[0] == 204
    assert agent(server, shared_box, "/metrics", token)[0] == 200
    for wrong in (None, "guess", token[:-1], server.json("GET", f"/sandboxes/{make().id}")["envdAccessToken"]):
        assert agent(server, shared_box, "/metrics", wrong)[0] == 401
        assert agent(server, shared_box, "/process.Process/List", wrong, "POST", b"{}")[0] == 401


@pytest.mark.parametrize("path", ["/init", "/sandkeep.host/init", "/sandkeep.host/logs", "//sandkeep.host/init", "/./sandkeep.host/init", "/files/../sandkeep.host/init",
                                  "/%73andkeep.host/init", "/freeze", "/process.Process/../sandkeep.host/init", "/"])
def test_the_hosts_own_calls_are_not_for_clients(server, shared_box, path):
    token = server.json("GET", f"/sandboxes/{shared_box.id}")["envdAccessToken"]
    for method in ("GET", "POST"):
        status = agent(server, shared_box, path, token, method, b"{}")[0]
        assert status in (404, 405), (method, path, status)


def test_connect_is_not_for_clients(server, shared_box):
    token = server.json("GET", f"/sandboxes/{shared_box.id}")["envdAccessToken"]
    got = raw(
        server,
        f"CONNECT 127.0.0.1:8000 HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nE2b-Sandbox-Id: {shared_box.id}\r\nE2b-Sandbox-Port: 49983\r\n"
        f"X-Access-Token: {token}\r\n\r\n".encode(),
    )
    assert b" 200 " not in got.split(b"\r\n")[0]


def test_a_killed_box_cuts_the_stream(server, make):
    box = make()
    box.write("/tmp/web.py", WEB.encode())
    box.exec("nohup python3 /tmp/web.py 8000 >/dev/null 2>&1 & true")
    wait_for(lambda: ask(server, box, "/")[0] == 200, "the web server")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/slow", headers=headers_for(box))
    answer = connection.getresponse()
    assert answer.read(5) == b"tick\n"
    threading.Timer(0.3, box.kill).start()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()


def test_files_in_every_form(server, box):
    token = server.json("GET", f"/sandboxes/{box.id}")["envdAccessToken"]
    auth = {"X-Access-Token": token}
    status, body, _ = ask(server, box, "/files?path=/tmp/a", 49983, "POST", b"0123456789", **auth, **{"Content-Type": "application/octet-stream"})
    assert status == 200 and json.loads(body)[0]["path"] == "/tmp/a"
    status, body, headers = ask(server, box, "/files?path=/tmp/a", 49983, Range="bytes=2-5", **auth)
    assert (status, body) == (206, b"2345")
    assert headers["content-range"] == "bytes 2-5/10"
    assert ask(server, box, "/files?path=/tmp/a", 49983, Range="bytes=50-", **auth)[0] == 416
    _, _, headers = ask(server, box, "/files?path=/tmp/a", 49983, **auth)
    again = ask(server, box, "/files?path=/tmp/a", 49983, **auth, **{"If-Modified-Since": headers["last-modified"]})
    assert again[0] == 304
    box.write("/tmp/zip", b"a" * 100_000)
    status, body, headers = ask(server, box, "/files?path=/tmp/zip", 49983, **auth, **{"Accept-Encoding": "gzip"})
    if headers.get("content-encoding") == "gzip":
        import gzip

        body = gzip.decompress(body)
    assert body == b"a" * 100_000


def test_users_of_files(server, box):
    token = server.json("GET", f"/sandboxes/{box.id}")["envdAccessToken"]
    basic = "Basic " + base64.b64encode(b"root:").decode()
    status, body, _ = ask(server, box, "/files?path=who", 49983, "POST", b"x",
                          **{"X-Access-Token": token, "Content-Type": "application/octet-stream", "Authorization": basic})
    assert status == 200 and json.loads(body)[0]["path"] in ("/root/who", "/home/user/who")
    assert ask(server, box, "/files?path=x&username=ghost", 49983, **{"X-Access-Token": token})[0] == 401


def test_many_requests_on_one_connection(server, web):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for n in range(50):
        connection.request("GET", f"/{n}", headers=headers_for(web))
        assert connection.getresponse().read() == f"you asked /{n}".encode()
    connection.close()


def test_clients_that_vanish_leave_no_descriptor(server, web):
    def descriptors():
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    before = descriptors()
    for _ in range(50):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(f"GET /slow HTTP/1.1\r\nHost: 8000-{web.id}.localhost\r\n{KEY_LINE.format(**web.made)}\r\n".encode())
        connection.recv(10)
        connection.close()
    wait_for(lambda: descriptors() <= before + 20, "the server lets go")

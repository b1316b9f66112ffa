"""What every request passes through, and commands whose client talks or vanishes."""

import base64
import contextlib
import json
import os
import socket
import struct

import pytest
from boxkit import Box, wait_for


class Client:
    """A WebSocket of a few lines: enough to talk to the server, and to vanish."""

    def __init__(self, server, path, first):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        self.reader = self.socket.makefile("rb")
        assert b" 101 " in self.reader.readline()
        while self.reader.readline().strip():
            pass
        self.text(first)

    def send(self, kind, data):
        head = bytes([0x80 | kind]) + (
            bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0xFE]) + struct.pack(">H", len(data))
        )
        # A mask of zeros is a mask, too.
        self.socket.sendall(head + bytes(4) + data)

    def text(self, value):
        self.send(1, (value if isinstance(value, str) else json.dumps(value)).encode())

    def bytes(self, data):
        self.send(2, data)

    def receive(self):
        """The next message: a dictionary for text, bytes for binary, None at the end."""
        while True:
            head = self.reader.read(2)
            if len(head) < 2:
                return None
            size = head[1] & 0x7F
            if size == 126:
                size = struct.unpack(">H", self.reader.read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self.reader.read(8))[0]
            data = self.reader.read(size)
            kind = head[0] & 0x0F
            if kind == 1:
                return json.loads(data)
            if kind == 2:
                return data
            if kind == 8:
                return None

    def rest(self):
        """What was written to each channel until the end, and the last text."""
        written, last = {1: b"", 2: b"", 3: b""}, None
        while (message := self.receive()) is not None:
            if isinstance(message, bytes):
                written[message[0]] += message[1:]
            else:
                last = message
        return written, last

    def close(self):
        with contextlib.suppress(OSError):
            # Without a farewell: a reset, as when a laptop is shut.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.reader.close()
        self.socket.close()


def runs(box, mark):
    return box.exec(["pgrep", "-f", f"sleep {mark}"]).ok


def test_no_documented_route_answers_without_the_key(server):
    document = server.json("GET", "/v1/openapi.json")
    routes = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert len(routes) > 20
    for method, path in routes + [("GET", "/metrics"), ("GET", "/v1/openapi.json"), ("GET", "/v1/nothing")]:
        status, _, body = server.request(method, path.replace("{id}", "i" + "0" * 20), headers={"X-API-Key": "e2b_00"})
        if path == "/v1/health":
            assert status == 200
        else:
            assert status == 401, (method, path)
            assert json.loads(body)["error"]["code"] == "unauthenticated"


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes", "/templates", "/anything"])
def test_e2b_routes_refuse_in_their_own_words(server, path):
    status, _, body = server.request("GET", path, headers={"X-API-Key": "e2b_00"})
    assert status == 401
    assert json.loads(body)["code"] == 401


def test_browsers_may_ask_before_they_have_a_key(server):
    status, headers, _ = server.request(
        "OPTIONS", "/v2/sandboxes",
        headers={"X-API-Key": "", "Origin": "http://page.test", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "x-api-key,content-type"},
    )
    headers = {name.lower(): value for name, value in headers.items()}
    assert status == 200
    assert headers["access-control-allow-origin"] == "*"
    assert "x-api-key" in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers


def test_a_wrong_method_names_the_right_ones(server):
    status, headers, _ = server.request("PATCH", "/v1/sandboxes")
    headers = {name.lower(): value for name, value in headers.items()}
    assert status == 405
    assert {"GET", "POST"} <= set(headers["allow"].split(","))


@pytest.mark.parametrize("setting", [
    {"network": {"egressProxy": {"address": "p.test:1"}}},
    {"volumeMounts": [{"name": "v", "path": "/v"}]}, {"newThing": 1},
])
def test_settings_that_can_not_be_kept_are_refused(server, setting):
    status, _, body = server.request("POST", "/v2/sandboxes", {"templateID": "base", **setting})
    answer = json.loads(body)
    assert (status, answer["code"]) == (501, 501), answer
    assert answer["message"]


def test_rooms_that_are_not_built_say_so(server):
    status, _, body = server.request("POST", "/volumes", {})
    assert (status, json.loads(body)["code"]) == (501, 501)


def test_talking_to_a_command(server, shared_box):
    client = Client(server, shared_box.path + "/exec", {"cmd": "cat; echo err >&2; exit 4"})
    assert client.receive()["started"]["pid"] > 0
    client.bytes(b"hello\n")
    client.text({"close_stdin": True})
    written, last = client.rest()
    assert (written[1], written[2]) == (b"hello\n", b"err\n")
    assert last == {"exited": {"exit_code": 4, "signal": None}}


@pytest.mark.parametrize("signal,code", [("INT", 130), ("HUP", 129), ("QUIT", 131), ("TERM", 143), ("KILL", 137)])
def test_signals_reach_the_command(server, shared_box, signal, code):
    # A shell that waits starts its children with INT and QUIT ignored; sleep alone does not.
    client = Client(server, shared_box.path + "/exec", {"cmd": ["sleep", "600"]})
    client.receive()
    client.text({"signal": signal})
    _, last = client.rest()
    assert last["exited"] == {"exit_code": code, "signal": signal}


def test_a_terminal(server, shared_box):
    client = Client(server, shared_box.path + "/exec", {"cmd": ["bash", "--norc"], "tty": {"cols": 80, "rows": 24}})
    client.receive()
    client.text({"resize": {"cols": 101, "rows": 33}})
    client.bytes(b"stty size; tty; exit 9\n")
    written, last = client.rest()
    assert b"33 101" in written[3] and b"/dev/pts/" in written[3]
    assert last["exited"]["exit_code"] == 9


@pytest.mark.parametrize("first", ["nope", '{"cmd": 5}', '{"cmd": "true", "user": "ghost"}', '{"cmd": "true", "tty": {"cols": 0, "rows": 1}}'])
def test_what_can_not_be_run_is_told(server, shared_box, first):
    _, last = Client(server, shared_box.path + "/exec", first).rest()
    assert last["error"]["code"] == "invalid_argument"


def test_a_client_that_vanishes_takes_its_command_along(server, shared_box):
    client = Client(server, shared_box.path + "/exec", {"cmd": "sleep 12001"})
    client.receive()
    assert runs(shared_box, 12001)
    client.close()
    wait_for(lambda: not runs(shared_box, 12001), "the command is killed")


def test_unless_it_is_detached(server, shared_box):
    client = Client(server, shared_box.path + "/exec", {"cmd": "sleep 12002", "detach": True})
    client.receive()
    other = Client(server, shared_box.path + "/exec", {"cmd": "sleep 12003"})
    other.receive()
    client.close()
    other.close()
    wait_for(lambda: not runs(shared_box, 12003), "the other is killed")
    assert runs(shared_box, 12002)


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
def test_a_request_that_vanishes_takes_its_command_along(server, shared_box, accept):
    body = json.dumps({"cmd": "sleep 12004"}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            f"POST {shared_box.path}/exec HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nAccept: {accept}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        wait_for(lambda: runs(shared_box, 12004), "the command runs")
    wait_for(lambda: not runs(shared_box, 12004), "the command is killed")


def test_output_until_the_time_was_over_is_kept(server, shared_box):
    status, _, body = server.request("POST", shared_box.path + "/exec", {"cmd": "echo part; sleep 600", "timeout_ms": 1000})
    answer = json.loads(body)
    assert status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    assert answer["stdout"] == "part\n"


def test_a_box_that_ends_says_why_to_its_commands(server, box):
    client = Client(server, box.path + "/exec", {"cmd": "sleep 600"})
    client.receive()
    box.kill()
    _, last = client.rest()
    assert "killed on request" in last["error"]["message"]


def test_who_was_cut_off_at_the_end_of_a_sandbox_was_told_nothing(server):
    """The request asked once more whether it had been cut off when it had heard so already, and broke down."""
    for _ in range(8):
        with Box(server, timeout_seconds=600) as box:
            clients = [Client(server, box.path + "/exec", {"cmd": "sleep 600"}) for _ in range(8)]
            for client in clients:
                client.receive()
            box.kill()
            told = [client.rest()[1] for client in clients]
        assert all(last and "killed on request" in last["error"]["message"] for last in told), told


def test_large_output_is_cut_and_it_is_said(shared_box):
    ran = shared_box.exec("head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert len(ran.out) == 1024 * 1024
    assert ran.answer["stdout_truncated"] is True
    assert (ran.err, ran.answer["stderr_truncated"]) == ("end\n", False)


def test_a_range_of_a_file(server, box):
    box.write("/tmp/digits", b"0123456789")
    status, headers, body = server.request("GET", box.path + "/files?path=/tmp/digits", headers={"Range": "bytes=2-4"})
    headers = {name.lower(): value for name, value in headers.items()}
    assert (status, body) == (206, b"234")
    assert headers["content-range"] == "bytes 2-4/10"
    assert headers["content-disposition"] == "attachment"

"""Sandboxes that take what is everybody's of the server: its descriptors and its attention."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import hostile
import pytest
from boxkit import Box, wait_for
from servers import in_place_of

BOXES, SECONDS = 6, 40


def flooding(boxes, to):
    for box in boxes:
        hostile.begin(box, SECONDS, to)
    for box in boxes:
        wait_for(lambda box=box: hostile.has_begun(box), "it floods", limit=120)


def descriptors(server) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def test_silent_connections_of_sandboxes_without_a_policy_exhaust_no_descriptors(server):
    """t5.py: five of them took all 20000, and the API answered nobody."""
    before = descriptors(server)
    begun = Path(server.log_path).stat().st_size
    boxes = [Box(server, network={}, timeout_seconds=600) for _ in range(BOXES)]
    try:
        # The sandbox's own metadata address, for which no policy is needed.
        flooding(boxes, "169.254.169.254:80")
        for _ in range(20):
            assert server.request("GET", "/v1/health", timeout=60)[0] == 200
            time.sleep(0.1)
        with Box(server, timeout_seconds=120) as another:
            assert another.exec("echo fine").out == "fine\n"
        # 32 of each, and what a sandbox takes anyway.
        assert descriptors(server) - before < 100 * (BOXES + 1)
    finally:
        for box in boxes:
            box.kill()
    with open(server.log_path, "rb") as log:
        log.seek(begun)
        said = log.read().decode(errors="replace")
    assert "os error 24" not in said and "Too many open files" not in said
    assert said.count("could not take up what a box sent") <= BOXES, said[-2000:]


@pytest.fixture
def narrow(server):
    """A server with few places."""
    with in_place_of(server, "--pool-size", "0", "--max-connections", "200") as own:
        yield own


def test_clients_that_never_send_a_head_leave_room_for_those_who_have_the_key(narrow):
    """More connections than the server has places, all the time. Nothing is said on them."""
    silent: list[socket.socket] = []
    stop = threading.Event()

    def connect():
        while not stop.is_set() and len(silent) < 5000:
            s = socket.socket()
            s.setblocking(False)
            s.connect_ex(("127.0.0.1", narrow.port))
            silent.append(s)
            time.sleep(0.002)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        wait_for(lambda: len(silent) > 400, "they are more than there are places")
        for _ in range(30):
            assert narrow.request("GET", "/v1/sandboxes", timeout=60)[0] == 200
            time.sleep(0.05)
        with Box(narrow, timeout_seconds=120) as another:
            assert another.exec("echo fine").out == "fine\n"
    finally:
        stop.set()
        thread.join()
        for s in silent:
            s.close()


def test_who_has_no_key_is_answered_and_sent_away(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
        s.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while piece := s.recv(65536):
            got += piece
    assert got.startswith(b"HTTP/1.1 401") and b"connection: close" in got.lower(), got


ENDLESS = """
import http.server, time
class Endless(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"1\\r\\nx\\r\\n")
        time.sleep(600)
class Many(http.server.ThreadingHTTPServer):
    request_queue_size = 512
Many(("", 8000), Endless).serve_forever()
"""


def first_words(s: socket.socket) -> bytes:
    try:
        return s.recv(4096)[:12]
    except ConnectionError:
        return b"reset"


def test_connections_to_public_ports_locked_out_who_has_the_key(narrow):
    """Answers that never end are busy, so none of them could be sent away for a new connection."""
    with Box(narrow, ports="public", timeout_seconds=600) as box:
        box.write("/tmp/endless.py", ENDLESS.encode())
        assert box.exec("nohup python3 /tmp/endless.py >/dev/null 2>&1 &").ok
        wait_for(lambda: box.exec("ss -ltn | grep -q :8000 || python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000), 1)'").ok, "it listens")
        asked = f"GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.id}\r\nE2b-Sandbox-Port: 8000\r\n\r\n".encode()
        held: list[socket.socket] = []
        try:
            for _ in range(190):
                s = socket.create_connection(("127.0.0.1", narrow.port), timeout=30)
                s.sendall(asked)
                held.append(s)
            answers = [first_words(s) for s in held]
            assert answers.count(b"HTTP/1.1 200") >= 140, answers
            # Beyond three quarters of the places nobody is answered without the key.
            assert answers.count(b"HTTP/1.1 200") <= 150, answers
            for _ in range(20):
                assert narrow.request("GET", "/v1/sandboxes", timeout=60)[0] == 200
        finally:
            for s in held:
                s.close()

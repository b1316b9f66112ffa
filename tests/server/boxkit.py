"""A box through the native API, for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import textwrap
import time
import urllib.parse

from sandkeep_server import Refused, Server, binary


class Ran:
    def __init__(self, answer: dict):
        self.answer = answer
        self.code = answer.get("exit_code")
        self.out = answer.get("stdout") or ""
        self.err = answer.get("stderr") or ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __repr__(self) -> str:
        return f"Ran(code={self.code}, out={self.out[-800:]!r}, err={self.err[-800:]!r})"


class Box:
    def __init__(self, server: Server, **request):
        request.setdefault("timeout_seconds", 300)
        self.server = server
        timeout = request.pop("http_timeout", 60)
        self.made = server.json("POST", "/v1/sandboxes", request, timeout=timeout)
        self.id = self.made["id"]
        self.path = f"/v1/sandboxes/{self.id}"

    @classmethod
    def known(cls, server: Server, id: str) -> Box:
        """One that was made in another way."""
        box = cls.__new__(cls)
        box.server, box.id, box.path = server, id, f"/v1/sandboxes/{id}"
        box.made = box.info()
        return box

    def exec(self, cmd, **options) -> Ran:
        timeout = options.pop("http_timeout", 120)
        return Ran(self.server.json("POST", self.path + "/exec", {"cmd": cmd, **options}, timeout=timeout))

    def root(self, cmd, **options) -> Ran:
        return self.exec(cmd, user="root", **options)

    def python(self, code: str, user: str = "root") -> Ran:
        return self.exec(["python3", "-c", textwrap.dedent(code)], user=user)

    def write(self, path: str, data: bytes, user: str | None = None):
        query = {"path": path} | ({"user": user} if user else {})
        status, _, body = self.server.request(
            "PUT", f"{self.path}/files?{urllib.parse.urlencode(query)}", data,
            headers={"Content-Type": "application/octet-stream"},
        )
        assert status < 300, (status, body)

    def read(self, path: str) -> bytes:
        status, _, body = self.server.request("GET", f"{self.path}/files?{urllib.parse.urlencode({'path': path})}")
        if status >= 400:
            import json

            raise Refused(status, json.loads(body))
        return body

    def port_headers(self, port: int) -> dict:
        """What a client of a port of it sends; its ports are private unless it was made with others."""
        token = self.info().get("traffic_token")
        return {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": str(port)} | ({"E2B-Traffic-Access-Token": token} if token else {})

    def info(self) -> dict:
        return self.server.json("GET", self.path)

    def kill(self):
        with contextlib.suppress(Refused):
            self.server.json("DELETE", self.path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def run_cli(server: Server, *args: str, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, **server.cli_env()}
    options = {"stdin": subprocess.DEVNULL} | options if "input" not in options else options
    return subprocess.run([str(binary()), *args], capture_output=True, text=True, timeout=120, env=env, **options)


def post(box: Box, what: str, **wish) -> dict:
    return box.server.json("POST", f"{box.path}/{what}", wish)


def wait_for(condition, what: str, limit: float = 60.0):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {limit:.0f} s: {what}")


def raw(server: Server, data: bytes, limit: float = 15.0) -> bytes:
    """Sends bytes as they are and reads until the other side closes, or until it has been quiet for a while."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=limit) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        got = b""
        end = time.monotonic() + limit
        connection.settimeout(1.0)
        while time.monotonic() < end:
            try:
                chunk = connection.recv(65_536)
            except TimeoutError:
                if got:
                    break
                continue
            except ConnectionError:
                break
            if not chunk:
                break
            got += chunk
        return got


# A process whose memory tells whether it is the same: it counts how often it was asked.
COUNTER = """
import http.server
count = 0
class Count(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(count).encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer(("0.0.0.0", 8077), Count).serve_forever()
"""
COUNTER_PORT = 8077
ASK_COUNTER = "curl -sS --retry 60 --retry-delay 1 --retry-connrefused --max-time 60 http://127.0.0.1:8077/"


def start_counter(box: Box):
    box.write("/root/counter.py", COUNTER.encode(), user="root")
    assert box.root("nohup python3 /root/counter.py >/dev/null 2>&1 &").ok
    assert box.root(ASK_COUNTER).out == "1"


# Calls the kernel directly: the attack, not the tool that wraps it.
SYSCALL = """
import ctypes, os, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return result, errno.errorcode.get(ctypes.get_errno(), 'none')
"""


def syscall(box: Box, expression: str, user: str = "root") -> str:
    """Evaluates an expression using `call(number, …)` in the box and returns what it printed."""
    ran = box.exec(["python3", "-c", f"{SYSCALL}\nprint({expression})"], user=user)
    assert ran.ok, ran
    return ran.out.strip()

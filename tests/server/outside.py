"""A small outside world for boxes, in a network namespace of its own: a DNS server that knows a few
names, HTTP servers that note who called. The server under test runs at the other end of a cable to it,
in a second namespace: it reaches no address of its own machine."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import os
import threading
import time
from pathlib import Path

from servers import in_namespace
from world import inside, ip, new_namespace

RANGE = "198.18.77.0/24"
ADDRESS = "198.18.77.1"
RESOLVER = "198.18.77.53"
HERE, THERE = "198.18.76.1", "198.18.76.2"
# There, but in no range the operator opened.
CLOSED = "10.77.77.77"
NAMES = {
    "good.sandkeep.test": ADDRESS,
    "other.sandkeep.test": ADDRESS,
    "rebound.sandkeep.test": CLOSED,
}


class Dns(threading.Thread):
    """Answers A questions about NAMES; notes every name it was asked for."""

    def __init__(self):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((RESOLVER, 53))
        self.asked: list[str] = []

    def run(self):
        while True:
            try:
                query, sender = self.socket.recvfrom(4096)
            except OSError:
                return
            with contextlib.suppress(OSError):
                self.socket.sendto(self.answer(query), sender)

    def answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        question = query[12 : at + 5]
        kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
        name = ".".join(labels)
        self.asked.append(name)
        address = NAMES.get(name)
        found = [address] if address and kind == 1 else []
        code = 0 if address else 3
        head = query[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(found), 0, 0)
        records = b"".join(
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton(a) for a in found
        )
        return head + question + records


class Web:
    """Serves a directory, `/stream` without end, and notes every path."""

    def __init__(self, address: str, directory: Path):
        self.hits: list[str] = []
        self.streams_open = 0
        web = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, directory=str(directory), **kwargs)

            def log_message(self, *_):
                pass

            def do_GET(self):
                web.hits.append(self.path)
                if self.path == "/stream":
                    return self.stream()
                super().do_GET()

            def stream(self):
                self.send_response(200)
                self.end_headers()
                web.streams_open += 1
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(b"tick\n")
                        self.wfile.flush()
                        time.sleep(0.02)
                web.streams_open -= 1

        self.server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Outside:
    def __init__(self, directory: Path):
        self.directory = directory
        self.here, self.there = new_namespace(), new_namespace()
        inside(self.here, self.lay_cable)
        inside(self.there, self.other_end)
        inside(self.here, lambda: ip("route", "add", "default", "via", THERE))
        (directory / "hello.txt").write_text("hello from outside\n")
        self.web = inside(self.there, lambda: Web(ADDRESS, directory))
        self.hidden = inside(self.there, lambda: Web(CLOSED, directory))
        self.dns = inside(self.there, Dns)
        self.dns.start()

    def lay_cable(self):
        ip("link", "set", "lo", "up")
        ip("link", "add", "way-out", "type", "veth", "peer", "name", "outside")
        ip("link", "set", "outside", "netns", f"/proc/{os.getpid()}/fd/{self.there}")
        ip("address", "add", f"{HERE}/30", "dev", "way-out")
        ip("link", "set", "way-out", "up")

    def other_end(self):
        ip("link", "set", "lo", "up")
        ip("address", "add", f"{THERE}/30", "dev", "outside")
        ip("link", "set", "outside", "up")
        for address in (ADDRESS, CLOSED, RESOLVER):
            ip("address", "add", f"{address}/32", "dev", "lo")

    def where(self):
        """For a server of this outside, and whoever talks to that."""
        return in_namespace(self.here)

    def url(self, host: str = "good.sandkeep.test", path: str = "/hello.txt") -> str:
        return f"http://{host}:{self.web.port}{path}"

    def flags(self) -> list[str]:
        return ["--dns", f"{RESOLVER}:53", "--allow-private", RANGE]

    def close(self):
        self.web.close()
        self.hidden.close()
        self.dns.socket.close()
        os.close(self.here)
        os.close(self.there)

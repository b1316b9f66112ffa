"""A small outside world for boxes: an address of our own on this host, a DNS server that knows a few
names, an HTTP server that notes who called. The address is from a range nobody routes."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

RANGE = "198.18.77.0/24"
ADDRESS = "198.18.77.1"
# On this host, but in no range the operator opened.
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
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
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
        self.addresses = [ADDRESS, CLOSED]
        for address in self.addresses:
            subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True)
        (directory / "hello.txt").write_text("hello from outside\n")
        self.web = Web(ADDRESS, directory)
        self.hidden = Web(CLOSED, directory)
        self.dns = Dns()
        self.dns.start()

    def url(self, host: str = "good.sandkeep.test", path: str = "/hello.txt") -> str:
        return f"http://{host}:{self.web.port}{path}"

    def flags(self) -> list[str]:
        return ["--dns", f"127.0.0.1:{self.dns.port}", "--allow-private", RANGE]

    def close(self):
        self.web.close()
        self.hidden.close()
        self.dns.socket.close()
        for address in self.addresses:
            subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=False)

"""A whole world for boxes, in two network namespaces of our own.

The server under test runs in the first, whose only way out is a cable to the second. There *every*
address is answered: whatever gets past the moat, to whatever address, is seen, both by servers that
note who called and by a capture of all packets on the cable. Nothing of the machine is touched.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import http.server
import os
import socket
import ssl
import struct
import subprocess
import threading
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
PACKET_OUTGOING = 4

HERE, THERE = "198.18.0.1", "198.18.0.2"
RESOLVER = "198.18.0.53"
GOOD, GOOD6 = "198.18.7.1", "2001:db8:77::1"
EVIL = "198.18.66.6"
# Public to this server: whatever else is private stays closed.
OPENED = ["198.18.0.0/16", "2001:db8:77::/48"]
PRIVATE = "10.77.77.77"
METADATA = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254"]

_libc = ctypes.CDLL(None, use_errno=True)


def _in_thread(work):
    """Runs `work` in a thread that is not used for anything else, and gives its result."""
    done: list = []

    def run():
        try:
            done.append((work(), None))
        except BaseException as error:  # noqa: BLE001 it is raised again in the caller
            done.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = done[0]
    if error is not None:
        raise error
    return result


def enter(namespace: int):
    """Moves this thread, and the threads and programs it starts from now on."""
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def own_namespace() -> int:
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    def make():
        if _libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        return own_namespace()

    return _in_thread(make)


def inside(namespace: int, work):
    def run():
        enter(namespace)
        return work()

    return _in_thread(run)


def ip(*words: str):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Dns:
    """Knows what `records` says; notes every question. A record is a list of (type, data) or a function."""

    A, CNAME, TXT, AAAA, HTTPS = 1, 5, 16, 28, 65

    def __init__(self, there: int):
        self.asked: list[tuple[str, int]] = []
        self.records: dict[str, object] = {}

        def bind():
            bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            bound.bind((RESOLVER, 53))
            return bound

        self.socket = inside(there, bind)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                query, sender = self.socket.recvfrom(4096)
            except OSError:
                return
            with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
                self.socket.sendto(self.answer(query), sender)

    def answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
        name = ".".join(labels)
        self.asked.append((name, kind))
        known = self.records.get(name)
        records = known() if callable(known) else known
        found = [(t, data) for t, data in records or [] if t in (kind, self.CNAME)]
        body = b""
        for t, data in found:
            # Names after a CNAME belong to the last of the chain; ours always have one link.
            owner = b"\xc0\x0c"
            if t != self.CNAME and any(other == self.CNAME for other, _ in found):
                owner = encoded_name(next(d for other, d in found if other == self.CNAME))
            raw = rdata(t, data)
            body += owner + struct.pack("!HHIH", t, 1, 0, len(raw)) + raw
        head = query[:2] + struct.pack("!HHHHH", 0x8180 | (0 if known is not None else 3), 1, len(found), 0, 0)
        return head + query[12 : at + 5] + body

    def names(self) -> set[str]:
        return {name for name, _ in self.asked}


def encoded_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def rdata(kind: int, data) -> bytes:
    if kind == Dns.A:
        return socket.inet_aton(data)
    if kind == Dns.AAAA:
        return socket.inet_pton(socket.AF_INET6, data)
    if kind == Dns.CNAME:
        return encoded_name(data)
    if kind == Dns.TXT:
        return bytes([len(data)]) + data.encode()
    return data


class Capture:
    """Counts every packet that comes over the cable, by (protocol, address, port)."""

    def __init__(self, there: int, device: str):
        self.seen: collections.Counter = collections.Counter()

        def bind():
            bound = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            bound.bind((device, 0))
            return bound

        self.socket = inside(there, bind)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                frame, address = self.socket.recvfrom(128)
            except OSError:
                return
            if address[2] != PACKET_OUTGOING and (found := parsed(frame)):
                self.seen[found] += 1

    def settled(self, quiet: float = 1.0, limit: float = 60.0) -> int:
        """Waits until nothing comes for a while; gives the number of packets so far."""
        end, last = time.monotonic() + limit, self.packets()
        while time.monotonic() < end:
            time.sleep(quiet)
            if (now := self.packets()) == last:
                return now
            last = now
        raise AssertionError(f"packets kept coming for {limit:.0f} s: {self.seen}")

    def packets(self, at: str | None = None) -> int:
        return sum(count for (_, address, _), count in list(self.seen.items()) if at in (None, address))


def parsed(frame: bytes):
    kind = struct.unpack("!H", frame[12:14])[0]
    packet = frame[14:]
    if kind == 0x0800:
        size, protocol, address = (packet[0] & 15) * 4, packet[9], socket.inet_ntoa(packet[16:20])
    elif kind == 0x86DD:
        size, protocol, address = 40, packet[6], socket.inet_ntop(socket.AF_INET6, packet[24:40])
        if protocol in (0, socket.IPPROTO_ICMPV6) and address.startswith(("ff02:", "fe80:", "fd77:")):
            return None  # neighbours finding each other
    else:
        return None
    port = struct.unpack("!H", packet[size + 2 : size + 4])[0] if protocol in (6, 17) else 0
    return protocol, address, port


class Call:
    """A connection, and each request on it."""

    def __init__(self, to: str, port: int, server_name: str | None = None):
        self.to, self.port, self.server_name = to, port, server_name
        self.host = self.path = self.method = None
        self.raw = b""

    def __repr__(self):
        return f"Call({self.to}:{self.port} sni={self.server_name} {self.method} {self.host}{self.path} {self.raw[:40]!r})"


class World:
    """HTTP on 80, the same in TLS on 443, a server that greets on 22, listeners elsewhere; everywhere."""

    OTHER_PORTS = (853, 5432, 8080, 8443)

    def __init__(self, directory: Path):
        self.directory = directory
        self.calls: list[Call] = []
        self.open_streams = 0
        self.lock = threading.Lock()
        self.listening: list[socket.socket] = []
        self.here, self.there = new_namespace(), new_namespace()
        self.wire()
        self.dns = Dns(self.there)
        self.dns.records |= {
            "good.test": [(Dns.A, GOOD)],
            "other.test": [(Dns.A, GOOD)],
            "six.test": [(Dns.AAAA, GOOD6)],
            "evil.test": [(Dns.A, EVIL)],
        }
        self.capture = Capture(self.there, "world")
        self.tls = self.tls_context()
        for port, serve in [(80, self.http), (443, self.https), (22, self.greeter)] + [
            (port, self.silent) for port in self.OTHER_PORTS
        ]:
            self.listen(port, serve)
        (directory / "hello.txt").write_text("hello from the world\n")

    def wire(self):
        def cable():
            ip("link", "set", "lo", "up")
            ip("link", "add", "way-out", "type", "veth", "peer", "name", "world")
            ip("link", "set", "world", "netns", f"/proc/{os.getpid()}/fd/{self.there}")
            ip("address", "add", f"{HERE}/30", "dev", "way-out")
            ip("-6", "address", "add", "fd77::1/64", "dev", "way-out", "nodad")
            ip("link", "set", "way-out", "up")

        def ways_out():
            ip("route", "add", "default", "via", THERE)
            ip("-6", "route", "add", "default", "via", "fd77::2")

        def other_end():
            ip("link", "set", "lo", "up")
            ip("address", "add", f"{THERE}/30", "dev", "world")
            ip("-6", "address", "add", "fd77::2/64", "dev", "world", "nodad")
            ip("link", "set", "world", "up")
            # Every address of the world is here.
            ip("route", "add", "local", "0.0.0.0/0", "dev", "lo", "table", "main")
            ip("-6", "route", "add", "local", "::/0", "dev", "lo", "table", "main")

        inside(self.here, cable)
        inside(self.there, other_end)
        inside(self.here, ways_out)

    def flags(self) -> list[str]:
        return ["--dns", f"{RESOLVER}:53", "--allow-private", ",".join(OPENED), "--upstream-ca", str(self.directory / "ca.pem")]

    def tls_context(self) -> ssl.SSLContext:
        of = lambda name: str(self.directory / name)  # noqa: E731
        make = lambda *words: subprocess.run(  # noqa: E731
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", *words],
            check=True, capture_output=True,
        )  # fmt: skip
        make("-keyout", of("ca.key"), "-out", of("ca.pem"), "-subj", "/CN=the world")
        make(
            "-keyout", of("key.pem"), "-out", of("cert.pem"), "-subj", "/CN=good.test", "-CA", of("ca.pem"), "-CAkey", of("ca.key"),
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-addext", "subjectAltName=DNS:good.test,DNS:other.test,DNS:six.test,DNS:evil.test",
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(of("cert.pem"), of("key.pem"))

        def named(connection, name, _):
            connection.server_name_seen = name

        context.sni_callback = named
        return context

    def listen(self, port: int, serve):
        def bind():
            bound = []
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address, port))
                listener.listen(256)
                bound.append(listener)
            return bound

        for listener in inside(self.there, bind):
            self.listening.append(listener)
            threading.Thread(target=self.accept, args=(listener, port, serve), daemon=True).start()

    def accept(self, listener, port, serve):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            call = Call(connection.getsockname()[0], port)
            # Before anything is answered: who got an answer was noted.
            self.calls.append(call)
            threading.Thread(target=self.one, args=(serve, connection, call), daemon=True).start()

    def one(self, serve, connection, call):
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(60)
            serve(connection, call)

    def silent(self, connection, call):
        call.raw = connection.recv(4096)

    def greeter(self, connection, call):
        connection.sendall(b"SSH-2.0-world\r\n")
        call.raw = connection.recv(4096)
        connection.sendall(b"you said " + call.raw)

    def https(self, connection, call):
        with self.tls.wrap_socket(connection, server_side=True) as wrapped:
            call.server_name = getattr(wrapped, "server_name_seen", None)
            self.http(wrapped, call)

    def http(self, connection, first):
        world = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def note(self):
                call = Call(first.to, first.port, first.server_name)
                call.method, call.path, call.host = self.command, self.path, self.headers.get("Host")
                world.calls.append(call)

            def do_GET(self):
                self.note()
                if self.path.startswith("/to?"):
                    self.send_response(302)
                    self.send_header("Location", self.path[4:])
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                if self.path == "/stream":
                    return self.stream()
                super().do_GET()

            def do_POST(self):
                self.note()
                size, got = int(self.headers.get("Content-Length", 0)), hashlib.sha256()
                while size > 0 and (piece := self.rfile.read(min(size, 65_536))):
                    size -= len(piece)
                    got.update(piece)
                self.send_response(200)
                self.send_header("Content-Length", "64")
                self.end_headers()
                self.wfile.write(got.hexdigest().encode())

            do_PUT = do_CONNECT = do_DELETE = do_POST

            def stream(self):
                self.close_connection = True
                self.send_response(200)
                self.end_headers()
                world.streams(1)
                try:
                    while True:
                        self.wfile.write(b"tick\n" * 200)
                        time.sleep(0.01)
                finally:
                    world.streams(-1)

        Handler(connection, ("world", 0), None, directory=str(self.directory))

    def streams(self, change: int):
        with self.lock:
            self.open_streams += change

    def calls_to(self, address: str) -> list[Call]:
        return [call for call in list(self.calls) if call.to == address]

    def close(self):
        for listener in self.listening:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for bound in (self.dns.socket, self.capture.socket):
            bound.close()
        os.close(self.here)
        os.close(self.there)

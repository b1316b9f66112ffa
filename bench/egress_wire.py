"""Both ends of the wire for bench/egress, with nothing but the standard library: the client runs
on the host and, the same file, in a box.

    egress_wire.py origin CERTIFICATE          serves, on all addresses (a PEM file, with its key)
    egress_wire.py WHAT ADDRESS [ARGUMENT]     measures, and prints one line of JSON
"""

import json
import multiprocessing
import os
import resource
import socket
import ssl
import struct
import sys
import threading
import time

ECHO, SOURCE, SINK, WEB, SECURE = 7001, 7002, 7003, 80, 443
NAME = "origin.test"
# Between two events of a stream, in seconds.
EVERY = 0.025
PIECE = 1 << 20
NOW = struct.pack("ii", 1, 0)


def serve(port, work):
    listener = socket.create_server(("0.0.0.0", port), backlog=4096, reuse_port=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=guarded, args=(work, connection), daemon=True).start()


def guarded(work, connection):
    try:
        with connection:
            work(connection)
    except OSError:
        pass


def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)


def source(connection):
    left, piece = int(connection.recv(32).strip()[1:]), memoryview(bytes(PIECE))
    while left > 0:
        left -= connection.send(piece[: min(left, PIECE)])


def sink(connection):
    buffer, got = bytearray(PIECE), 0
    while count := connection.recv_into(buffer):
        got += count
    connection.sendall(b"%d" % got)


def web(connection):
    asked = b""
    while data := connection.recv(65536):
        asked += data
        while b"\r\n\r\n" in asked:
            asked = asked.split(b"\r\n\r\n", 1)[1]
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n")


def secure(connection):
    """`/bytes/N` sends so many; `/events/N` events with the time they were sent at, which holds for all who share
    a kernel; everything else is answered in three bytes."""
    tls, asked = SERVING.wrap_socket(connection, server_side=True), b""
    while data := tls.recv(65536):
        asked += data
        while b"\r\n\r\n" in asked:
            head, asked = asked.split(b"\r\n\r\n", 1)
            _, what, *count = head.split(b" ")[1].split(b"/")
            if what == b"bytes":
                left = int(count[0])
                tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left)
                while left > 0:
                    left -= tls.send(TEXT[: min(left, PIECE)])
            elif what == b"events":
                tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(int(count[0])):
                    event = b'data: {"at": %r}\n\n' % time.monotonic()
                    tls.sendall(b"%x\r\n%s\r\n" % (len(event), event))
                    time.sleep(EVERY)
                tls.sendall(b"0\r\n\r\n")
            else:
                tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n")


# What is like an answer of an API, escapes and all.
TEXT = memoryview((b'{"id": 1234567, "name": "A <b>name</b>", "text": "some words\\nand more, 100%"},\n' * PIECE)[:PIECE])
SERVING = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def origin(certificate):
    SERVING.load_cert_chain(certificate)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    threading.stack_size(256 * 1024)
    for port, work in ((ECHO, echo), (SOURCE, source), (SINK, sink), (WEB, web), (SECURE, secure)):
        threading.Thread(target=serve, args=(port, work), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def dial(address, port):
    connection = socket.create_connection((address, port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(connection, data=b"\x01"):
    connection.sendall(data)
    assert connection.recv(65536)


def hang_up(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)
    connection.close()


def each(count, work):
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1000)
    return samples


def fresh(address, port, data):
    connection = dial(address, port)
    ask(connection, data)
    hang_up(connection)


def no_name(_address):
    """A name that no rule allows."""
    socket.getaddrinfo("denied.test", 80)


def no_address(address):
    """An address that no rule allows; the connection is refused when it is made or at its first byte."""
    with dial(address, ECHO) as connection:
        connection.sendall(b"\x01")
        if not connection.recv(1):
            raise ConnectionResetError


UNCHECKED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
UNCHECKED.check_hostname, UNCHECKED.verify_mode = False, ssl.CERT_NONE


def ask_secure(address, path):
    """A connection of its own, and what it is answered from the first byte on."""
    tls = UNCHECKED.wrap_socket(dial(NAME if address == "name" else address, SECURE), server_hostname=NAME)
    tls.sendall(b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path.encode(), NAME.encode()))
    return tls


def fresh_secure(address):
    with ask_secure(address, "/") as tls:
        assert tls.recv(65536)


def secure_down(address, count):
    with ask_secure(address, f"/bytes/{count}") as tls:
        buffer, got, start = bytearray(PIECE), 0, time.perf_counter()
        while got < count:
            got += tls.recv_into(buffer)
        return got / (time.perf_counter() - start)


def lags(address, count):
    """How long events of a stream take, in milliseconds."""
    with ask_secure(address, f"/events/{count}") as tls:
        got, samples = b"", []
        while len(samples) < count:
            got += tls.recv(65536)
            now = time.monotonic()
            while b'{"at": ' in got and b"}" in got:
                _, got = got.split(b'{"at": ', 1)
                at, got = got.split(b"}", 1)
                samples.append((now - float(at)) * 1000)
        return samples


def no_server_name(address):
    """TLS for a server that no rule allows."""
    with dial(address, 443) as connection:
        UNCHECKED.wrap_socket(connection, server_hostname="denied.test")


def no_host(address):
    """HTTP for a host that no rule allows."""
    with dial(address, WEB) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: denied.test\r\n\r\n")
        if connection.recv(65536)[:12] in (b"", b"HTTP/1.1 403"):
            raise ConnectionResetError


def no_datagram(address):
    """QUIC, which nobody gets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(5)
        one.connect((address, 443))
        one.send(b"\xc0" * 1200)
        one.recv(1)


REFUSED = {
    "refused-name": no_name,
    "refused-address": no_address,
    "refused-server-name": no_server_name,
    "refused-host": no_host,
    "refused-datagram": no_datagram,
}


def refused(attempt, address):
    """An attempt that must fail, and not by a wait that ran out."""
    try:
        attempt(address)
    except TimeoutError as error:
        raise SystemExit(f"a refusal that hung: {error}") from None
    except OSError:
        return
    raise SystemExit("what must be refused went through")


def measure(what, address, argument):
    if what in REFUSED:
        return each(argument, lambda: refused(REFUSED[what], address))
    if what == "round-trip":
        with dial(address, ECHO) as connection:
            return each(argument, lambda: ask(connection, b"\x01" * 64))
    if what == "first-byte":
        return each(argument, lambda: fresh(address, ECHO, b"\x01"))
    if what == "web":
        request = b"GET / HTTP/1.1\r\nHost: origin.test\r\n\r\n"
        return each(argument, lambda: fresh("origin.test" if address == "name" else address, WEB, request))
    if what == "secure-first-byte":
        return each(argument, lambda: fresh_secure(address))
    if what == "secure-down":
        return secure_down(address, argument)
    if what == "events":
        return lags(address, argument)
    if what == "connections":
        return rate(address, argument)
    if what == "down":
        connection, buffer, got = dial(address, SOURCE), bytearray(PIECE), 0
        start = time.perf_counter()
        connection.sendall(b"\x01%d" % argument)
        while got < argument:
            got += connection.recv_into(buffer)
        return got / (time.perf_counter() - start)
    if what == "up":
        connection, piece, left = dial(address, SINK), memoryview(b"\x01" * PIECE), argument
        start = time.perf_counter()
        while left > 0:
            left -= connection.send(piece[: min(left, PIECE)])
        connection.shutdown(socket.SHUT_WR)
        assert int(connection.recv(64)) == argument
        return argument / (time.perf_counter() - start)
    if what == "hold":
        return hold(address, argument)
    raise SystemExit(f"unknown: {what}")


def rate(address, seconds):
    """Connections in a second, from two processes."""
    counts = multiprocessing.Array("q", 2)

    def run(at):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            fresh(address, ECHO, b"\x01")
            counts[at] += 1

    workers = [multiprocessing.Process(target=run, args=(at,)) for at in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / seconds


def hold(address, count):
    """Holds connections that all have spoken until a file appears."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held = [dial(address, ECHO) for _ in range(count)]
    for connection in held:
        ask(connection)
    open("/tmp/held", "w").close()
    while not os.path.exists("/tmp/let-go"):
        time.sleep(0.05)
    return len(held)


if __name__ == "__main__":
    if sys.argv[1] == "origin":
        origin(sys.argv[2])
    else:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)))

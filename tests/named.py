"""A network of its own in which every name below a domain leads to this machine, as the DNS of a
wildcard domain does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "server"))

from servers import in_namespace  # noqa: E402
from world import inside, new_namespace  # noqa: E402

RESOLVER = "127.0.0.53"
MS_BIND = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def _answer(query: bytes, domain: str) -> bytes:
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    question = query[12 : at + 5]
    kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
    ours = ".".join(labels).endswith("." + domain)
    record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton("127.0.0.1")
    found = [record] if ours and kind == 1 else []
    head = query[:2] + struct.pack("!HHHHH", 0x8180 | (0 if ours else 3), 1, len(found), 0, 0)
    return head + question + b"".join(found)


def _serve(domain: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((RESOLVER, 53))

    def run():
        with contextlib.suppress(OSError):
            while True:
                query, sender = bound.recvfrom(4096)
                bound.sendto(_answer(query, domain), sender)

    threading.Thread(target=run, daemon=True).start()
    return bound


def _mount(source: str, target: str):
    if _libc.mount(source.encode(), target.encode(), None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), f"mount {target}")


@contextlib.contextmanager
def names_lead_here(domain: str):
    """For this process and those it starts meanwhile. The tests have a mount namespace of their own."""
    namespace = new_namespace()
    inside(namespace, lambda: subprocess.run(["ip", "link", "set", "lo", "up"], check=True))
    bound = inside(namespace, lambda: _serve(domain))
    try:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(f"nameserver {RESOLVER}\n")
            file.flush()
            _mount(file.name, "/etc/resolv.conf")
            try:
                with in_namespace(namespace):
                    yield
            finally:
                _libc.umount2(b"/etc/resolv.conf", 2)
    finally:
        bound.close()
        os.close(namespace)

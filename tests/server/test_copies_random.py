"""Copies do not share their randomness: what a resident program draws from a generator that knows
fork() is its own in every copy, at every level. See docs/fork-correctness.md for those that do not."""

import hashlib
import json
import os
import platform
import secrets
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from test_template_build import Build, of, packed, send

LEVELS = [
    "container",
    "gvisor",
    pytest.param(
        "microvm",
        marks=pytest.mark.skipif(
            shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
            reason="QEMU is not installed; script/test installs it",
        ),
    ),
]
# The smallest machine there is: emulated, every vCPU and page costs.
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
PORT = 8097

# Three generators as programs have them, in a process that runs when it is copied:
# - BoringSSL and AWS-LC: a page that is zero tells that this is a copy, and the seed is drawn anew;
# - Go and glibc >= 2.41: the vDSO's getrandom, with its state in pages of the same kind;
# - OpenSSL as Python has it: it looks at the pid alone.
DRAW = f"""
import ctypes, hashlib, http.server, json, mmap, os, ssl, struct

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.getauxval.restype = ctypes.c_ulong
PRIVATE_ANONYMOUS, WIPEONFORK, PAGE = 0x22, 18, 4096

class Boring:
    # What it knows of itself is in ordinary memory; only the sign is wiped.
    def __init__(self):
        self.page = libc.mmap(None, PAGE, 3, PRIVATE_ANONYMOUS, -1, 0)
        self.knows = libc.madvise(self.page, PAGE, WIPEONFORK) == 0
        self.seed, self.count, self.seeded = b'', 0, 0
    def draw(self):
        sign = ctypes.c_uint32.from_address(self.page)
        if not self.knows or sign.value == 0:
            sign.value, self.seed, self.count = 1, os.urandom(32), 0
            self.seeded += 1
        self.count += 1
        return hashlib.sha256(self.seed + self.count.to_bytes(8, 'little')).hexdigest()

class Vdso:
    # The function of the kernel's own library, found as a linker finds it.
    def __init__(self):
        self.call = None
        base = libc.getauxval(33)
        if not base:
            return
        at = lambda form, where: struct.unpack(form, ctypes.string_at(base + where, struct.calcsize(form)))
        phoff, = at('<Q', 32)
        phnum, = at('<H', 56)
        dynamic = bias = None
        for n in range(phnum):
            kind, _, offset, vaddr, _, size, _, _ = at('<IIQQQQQQ', phoff + 56 * n)
            if kind == 1 and bias is None:
                bias = offset - vaddr
            if kind == 2:
                dynamic = offset, size
        tags = {{}}
        for n in range(0, dynamic[1], 16):
            tag, value = at('<QQ', dynamic[0] + n)
            tags.setdefault(tag, (value + bias) % (1 << 64))
        symbols, strings = tags[6], tags[5]
        if not 0 < symbols < strings < 1 << 16:
            return
        for n in range(1, (strings - symbols) // 24):
            name, info, _, _, value, _ = at('<IBBHQQ', symbols + 24 * n)
            text = ctypes.string_at(base + strings + name)
            if text == b'__vdso_getrandom':
                kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t)
                self.call = kind(base + (value + bias) % (1 << 64))
                break
        if not self.call:
            return
        params = (ctypes.c_uint32 * 16)()
        assert self.call(None, 0, 0, params, ctypes.c_size_t(-1).value) == 0
        self.size = params[0]
        self.state = libc.mmap(None, PAGE, params[1], params[2], -1, 0)
        assert self.state and self.state != ctypes.c_void_p(-1).value
    def draw(self):
        if not self.call:
            return None
        drawn = ctypes.create_string_buffer(32)
        assert self.call(drawn, 32, 0, self.state, self.size) == 32
        return drawn.raw.hex()

boring, vdso = Boring(), Vdso()

class Draw(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        drawn = {{'boring': boring.draw(), 'vdso': vdso.draw(), 'openssl': ssl.RAND_bytes(16).hex(), 'kernel': os.urandom(16).hex()}}
        body = json.dumps({{'pid': os.getpid(), 'seeded': boring.seeded, 'count': boring.count, 'drawn': drawn}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

for warm in (boring, vdso):
    warm.draw()
ssl.RAND_bytes(1)
http.server.HTTPServer(('127.0.0.1', {PORT}), Draw).serve_forever()
"""
# Of these a copy must draw others; what OpenSSL does is in the documentation.
FRESH = ("boring", "vdso", "kernel")


def draw(box):
    ran = box.exec(["curl", "-sS", "--retry", "60", "--retry-connrefused", "--max-time", "60", f"http://127.0.0.1:{PORT}/"])
    assert ran.ok, ran
    return json.loads(ran.out)


def apart(*draws):
    """No two of them drew the same."""
    for name in FRESH:
        drawn = [one["drawn"][name] for one in draws if one["drawn"][name] is not None]
        assert len(set(drawn)) == len(drawn), (name, drawn)


def begin(server, level):
    limits = {"limits": SMALL, "http_timeout": 300} if level == "microvm" else {}
    box = Box(server, isolation=level, timeout_seconds=1800, **limits)
    box.write("/home/user/draw.py", DRAW.encode())
    assert box.exec("nohup python3 /home/user/draw.py >/tmp/draw.log 2>&1 &").ok
    return box


def copies_of(server, box, count=2):
    made = server.json("POST", box.path + "/fork", {"count": count}, timeout=300)
    return [Box.known(server, one["sandbox"]["id"]) for one in made["forks"]]


@pytest.mark.parametrize("level", LEVELS)
def test_copies_shared_their_randomness(server, level):
    """Forks, sandboxes of one snapshot, and what came after a rollback."""
    made = [begin(server, level)]
    box = made[0]
    try:
        before = draw(box)
        forks = copies_of(server, box)
        made += forks
        after = [draw(one) for one in (box, *forks)]
        assert len({one["pid"] for one in (before, *after)}) == 1, "they are one process, copied"
        apart(before, *after)

        point = server.json("POST", box.path + "/points", {}, timeout=120)
        try:
            assert point["memory"], point
            # It goes on, and is no copy: its generator is not disturbed.
            first = draw(box)
            if level != "gvisor":
                assert first["seeded"] == after[0]["seeded"] and first["count"] == after[0]["count"] + 1, (after[0], first)
            limits = {"http_timeout": 300} if level == "microvm" else {}
            twins = [Box(server, from_point=point["id"], timeout_seconds=1800, **limits) for _ in range(2)]
            made += twins
            drawn = [draw(one) for one in twins]
            apart(first, *drawn)
            server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=120)
            again = draw(box)
            assert again["pid"] == first["pid"], "it is the process of the snapshot"
            apart(first, *drawn, again)
        finally:
            server.json("DELETE", f"/v1/points/{point['id']}")
    finally:
        for one in made:
            one.kill()


@pytest.mark.parametrize("level", LEVELS)
def test_boxes_of_a_warm_template_shared_their_randomness(server, level):
    name = "random-" + secrets.token_hex(4)
    key = send(server, name, packed(**{"draw.py": DRAW.encode()}))
    limits = SMALL if level == "microvm" else {"memory_mib": 384}
    try:
        Build(
            server, name,
            steps=[{"workdir": "/srv/app"}, {"copy": "draw.py", "to": "/srv/app/draw.py", "files": key}],
            start="exec python3 /srv/app/draw.py", ready={"port": PORT, "timeout_seconds": 60},
            limits=limits, isolation=[level],
        ).ready()
        warm_at(server, name, level)
        with of(server, name, isolation=level, http_timeout=300) as one, of(server, name, isolation=level, http_timeout=300) as two:
            drawn = [draw(box) for box in (one, two)]
            assert drawn[0]["pid"] == drawn[1]["pid"], "they go on with the process of the template"
            apart(*drawn)
    finally:
        server.request("DELETE", f"/v1/templates/{name}")


def warm_at(server, name, level):
    def warm():
        (found,) = server.json("GET", f"/v1/templates/{name}")["built"]["levels"]
        assert found["isolation"] == level
        return found["warm"]

    # Machines are warmed after the build.
    wait_for(warm, f"it is warm at {level}", 300)


# --- the real thing: Chromium says hello --------------------------------------------------------

CDP = 9222
# Whoever is connected to gets no answer: the hello alone is wanted.
LISTEN = """
import json, os, socket, sys, urllib.request
listener = socket.create_server(('127.0.0.1', 0))
listener.settimeout(60)
url = f'https://127.0.0.1:{listener.getsockname()[1]}/'
request = urllib.request.Request('http://127.0.0.1:9222/json/new?' + url, method='PUT')
urllib.request.urlopen(request, timeout=60).read()
taken, _ = listener.accept()
taken.settimeout(60)
hello = b''
while len(hello) < 5 or len(hello) < 5 + int.from_bytes(hello[3:5], 'big'):
    more = taken.recv(65536)
    assert more, 'it ended'
    hello += more
print(hello.hex())
"""


def hello(box):
    """The parts of a ClientHello that must be no other's: random, session id and key shares."""
    ran = box.exec(["python3", "-c", LISTEN], http_timeout=180)
    assert ran.ok, ran
    data = bytes.fromhex(ran.out.strip())
    assert data[0] == 22 and data[5] == 1, "it is a ClientHello"
    at = 5 + 4 + 2
    parts = {"random": data[at : at + 32]}
    at += 32
    length = data[at]
    parts["session"] = data[at + 1 : at + 1 + length]
    at += 1 + length
    at += 2 + struct.unpack(">H", data[at : at + 2])[0]
    at += 1 + data[at]
    end = at + 2 + struct.unpack(">H", data[at : at + 2])[0]
    at += 2
    while at < end:
        kind, length = struct.unpack(">HH", data[at : at + 4])
        at += 4
        if kind == 51:
            share = at + 2
            while share < at + length:
                group, size = struct.unpack(">HH", data[share : share + 4])
                # GREASE has one byte that says nothing.
                if size > 1:
                    parts[f"share {group:#x}"] = data[share + 4 : share + 4 + size]
                share += 4 + size
        at += length
    assert any(name.startswith("share") for name in parts), parts
    return parts


# What Chromium comes with but a shell without a screen does not load, and what is large.
NOT_NEEDED = ("libllvm", "libz3", "libgl1-mesa-dri", "fonts-", "xkb-data")


@pytest.fixture(scope="module")
def chromium(server, tmp_path_factory):
    """Debian's headless shell with what the base template lacks of it, as one archive. Kept in .cache."""
    kept = Path(__file__).resolve().parents[2] / ".cache" / "chromium" / f"headless-{platform.machine()}.tar.gz"
    if not kept.exists():
        work = tmp_path_factory.mktemp("chromium")
        (work / "debs" / "partial").mkdir(parents=True)
        status = server.state / "pool" / "templates" / "base" / "root" / "var" / "lib" / "dpkg" / "status"
        subprocess.run(
            [
                "apt-get", "-o", f"Dir::State::status={status}", "-o", f"Dir::Cache::archives={work / 'debs'}",
                "-o", "APT::Sandbox::User=root", "install", "--no-install-recommends", "--download-only", "-y",
                "chromium-headless-shell",
            ],
            check=True, capture_output=True, timeout=600,
        )
        for deb in sorted((work / "debs").glob("*.deb")):
            if not deb.name.startswith(NOT_NEEDED):
                subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "tree")], check=True)
        for more in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/lib/chromium/locales"):
            shutil.rmtree(work / "tree" / more, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        with tarfile.open(fresh, "w:gz", compresslevel=1) as tar:
            tar.add(work / "tree", ".")
        fresh.rename(kept)
    return kept.read_bytes()


@pytest.mark.parametrize("level", LEVELS)
def test_two_boxes_of_a_warm_chromium_said_the_same_hello(server, chromium, level):
    """Byte by byte the same ClientHello: whoever has one sandbox of a template had the keys of every other."""
    name = "chromium-" + secrets.token_hex(4)
    key = hashlib.sha256(chromium).hexdigest()
    status, _, body = server.request(
        "PUT", f"/v1/templates/{name}/files/{key}", chromium,
        headers={"Content-Type": "application/octet-stream"}, timeout=300,
    )
    assert status == 204, body
    command = (
        "exec /usr/lib/chromium/chromium-headless-shell --no-sandbox --disable-gpu --ignore-certificate-errors "
        f"--remote-debugging-port={CDP} --user-data-dir=/tmp/profile --no-first-run --disable-background-networking "
        "--disable-breakpad --disable-component-update --disable-sync --mute-audio about:blank"
    )
    # It has drawn before it is copied: the first connection makes the generator.
    ready = f"curl -fs localhost:{CDP}/json/version && python3 -c \"$(cat /srv/listen.py)\""
    try:
        listen = send(server, name, packed(**{"listen.py": LISTEN.encode()}))
        Build(
            server, name,
            steps=[
                {"copy": ".", "to": "/opt/chromium", "user": "root", "files": key},
                {"run": "tar -C /opt/chromium -c . | tar -C / -x --keep-directory-symlink && rm -rf /opt/chromium && ldconfig", "user": "root"},
                {"copy": "listen.py", "to": "/srv/listen.py", "user": "root", "files": listen},
            ],
            start=command, ready={"command": ready, "timeout_seconds": 240},
            limits={"memory_mib": 1024}, isolation=[level],
        ).ready()
        warm_at(server, name, level)
        with of(server, name, isolation=level, http_timeout=300) as one, of(server, name, isolation=level, http_timeout=300) as two:
            hellos = [hello(box) for box in (one, two)]
            assert set(hellos[0]) == set(hellos[1])
            same = [part for part in hellos[0] if hellos[0][part] == hellos[1][part]]
            assert not same, {part: hellos[0][part].hex()[:64] for part in same}
    finally:
        server.request("DELETE", f"/v1/templates/{name}")

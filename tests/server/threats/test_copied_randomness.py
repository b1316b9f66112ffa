"""The attack on copies: who has one sandbox of a snapshot or of a warm template computes the keys of all the others.

A resident program keeps a generator of random numbers as BoringSSL does (in a page that the kernel empties in a copy),
one as OpenSSL does (which nothing outside can reseed), and one of its own. Copies must not draw what others draw.
"""

import json
import os
import shutil

import pytest
from boxkit import Box, wait_for
from test_template_build import Build

SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
MICROVM = pytest.param(
    "microvm",
    marks=pytest.mark.skipif(
        shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
        reason="QEMU is not installed; script/test installs it",
    ),
)
PORT = 8055
RESIDENT = r"""
import collections, ctypes, hashlib, http.server, json, mmap, os, random, signal, ssl, threading, time

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
refused = libc.madvise(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), ctypes.c_size_t(4096), 18)
plain = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page[0] = plain[0] = 1
lock, key, draws, noticed, after, seen, hooked = threading.Lock(), os.urandom(32), 0, [], [], [], 0

def draw():
    global key, draws
    with lock:
        draws += 1
        # Where the page is not emptied, the kernel is asked each time: as BoringSSL does.
        if page[0] == 0 or refused:
            if page[0] == 0:
                noticed.append(draws)
            key, page[0] = os.urandom(32), 1
        value = hashlib.sha256(key + draws.to_bytes(8, "big")).hexdigest()
        if noticed and len(after) < 200:
            after.append(value)
        return value

def always():
    while True:
        draw()
        time.sleep(0.0005)

GENERATION = "/run/sandkeep/generation"
generation = lambda: open(GENERATION).read() if os.path.exists(GENERATION) else ""

def watch():
    notes = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(notes, GENERATION.encode(), 2) < 0:
        return
    while True:
        os.read(notes, 4096)
        seen.append(generation())

def told(*_):
    global hooked
    random.seed()
    ssl.RAND_add(os.urandom(32), 32.0)
    hooked += 1
    open("/run/hooked", "w").write(str(hooked))

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = json.dumps({
            "refused": refused, "plain": plain[0], "noticed": noticed, "after": after, "nonce": draw(), "generation": generation(),
            "seen": seen, "kernel": os.urandom(16).hex(), "openssl": ssl.RAND_bytes(16).hex(), "random": random.getrandbits(128), "hooked": hooked,
        }).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_):
        pass

signal.signal(signal.SIGHUP, told)
ssl.RAND_bytes(16), random.random()
if "watch" in os.sys.argv:
    threading.Thread(target=watch, daemon=True).start()
threading.Thread(target=always, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 8055), Answer).serve_forever()
"""
ASK = f"curl -sS --retry 60 --retry-delay 1 --retry-connrefused --max-time 60 http://127.0.0.1:{PORT}/"


def made(server, level, **request):
    wish = {"limits": SMALL, "http_timeout": 300} if level == "microvm" else {}
    return Box(server, isolation=level, timeout_seconds=1800, **wish, **request)


def ask(box):
    ran = box.root(ASK)
    assert ran.ok, ran
    return json.loads(ran.out)


def resident(box, *words):
    box.write("/root/resident.py", RESIDENT.encode(), user="root")
    assert box.root(f"nohup python3 /root/resident.py {' '.join(words)} >/root/said 2>&1 &").ok
    return ask(box)


def apart(said, *names):
    for name in names:
        values = [json.dumps(one[name]) for one in said]
        assert len(set(values)) == len(said), (name, values)


@pytest.mark.parametrize("level", ["container", "gvisor", MICROVM])
def test_copies_of_a_snapshot_draw_nothing_that_another_one_draws(server, level):
    with made(server, level) as box:
        first = resident(box)
        assert first["noticed"] == [], first
        point = server.json("POST", box.path + "/points", {"memory": True}, timeout=300)
        original = ask(box)
        forks = server.json("POST", box.path + "/fork", {"count": 2, "at": point["id"]}, timeout=300)["forks"]
        copies = [Box.known(server, fork["sandbox"]["id"]) for fork in forks]
        try:
            said = [ask(one) for one in copies]
            server.json("POST", box.path + "/rollback", {"to": point["id"]}, timeout=300)
            said.append(ask(box))
        finally:
            for one in copies:
                one.kill()
        server.json("DELETE", f"/v1/points/{point['id']}")
    # What was only written down is not touched: it is the one it was.
    assert original["noticed"] == [] and original["plain"] == 1, original
    assert all(one["plain"] == 1 for one in said), "only pages that asked for it are emptied"
    if original["refused"]:
        # Said to the program, which then asks the kernel each time.
        assert level == "gvisor", level
    else:
        # Each noticed it, once, and at the same draw: none of them drew anything in between.
        assert [len(one["noticed"]) for one in said] == [1, 1, 1], [one["noticed"] for one in said]
        assert len({one["noticed"][0] for one in said}) == 1, [one["noticed"] for one in said]
        drawn = [set(one["after"]) for one in said]
        assert all(drawn) and not (drawn[0] & drawn[1] or drawn[1] & drawn[2] or drawn[0] & drawn[2])
    apart([original, *said], "nonce", "kernel")
    assert original["generation"] == first["generation"], original
    assert all(len(one["generation"]) == 33 for one in [first, *said]), said
    apart([original, *said], "generation")


@pytest.mark.parametrize("level", ["container", "gvisor", MICROVM])
def test_a_pause_is_no_copy_and_a_copy_is_seen_by_who_waits_for_it(server, level):
    with made(server, level) as box:
        first = resident(box, "watch")
        file = box.exec("stat -c '%U %a' /run/sandkeep /run/sandkeep/generation; echo x > /run/sandkeep/generation")
        assert file.out == "root 755\nroot 644\n" and not file.ok, file
        server.json("POST", box.path + "/pause", {}, timeout=300)
        server.json("POST", box.path + "/resume", {}, timeout=300)
        woken = ask(box)
        assert woken["generation"] == first["generation"] and woken["seen"] == [], woken
        fork = server.json("POST", box.path + "/fork", {"count": 1}, timeout=300)["forks"][0]
        copy = Box.known(server, fork["sandbox"]["id"])
        try:
            said = wait_for(lambda: (now := ask(copy))["seen"] and now, "the program heard of it")
        finally:
            copy.kill()
        assert said["generation"] != first["generation"] and said["seen"] == [said["generation"]], said


HOOK = "rm -f /run/hooked; pkill -HUP -f '[r]esident.py' && for i in $(seq 300); do [ -s /run/hooked ] && exit; sleep 0.1; done; exit 1"


def build(server, name, level, hook):
    return Build(
        server,
        name,
        isolation=[level],
        limits=SMALL if level == "microvm" else {},
        steps=[{"user": "root"}, {"run": f"cat > /root/resident.py <<'END'\n{RESIDENT}\nEND"}],
        start="exec python3 /root/resident.py",
        ready={"command": ASK, "timeout_seconds": 300},
        after_restore=hook,
    )


@pytest.mark.parametrize("level", ["container", "gvisor", MICROVM])
def test_programs_that_nothing_outside_can_reseed_are_told_before_anybody_has_their_copy(server, level):
    """OpenSSL and generators of the program itself, in two sandboxes of a warm template, a fork, and after a rollback."""
    name = f"hooked-{level}"
    try:
        shown = build(server, name, level, HOOK).ready()
        assert shown["built"]["after_restore"] == HOOK, shown
        warm = lambda: server.json("GET", f"/v1/templates/{name}")["built"]["levels"][0]["warm"]  # noqa: E731
        wait_for(warm, "it is warm", 600)
        with made(server, level, template=name) as one, made(server, level, template=name) as two:
            fork = server.json("POST", two.path + "/fork", {"count": 1}, timeout=300)["forks"][0]
            three = Box.known(server, fork["sandbox"]["id"])
            said = [ask(one), ask(two), ask(three)]
            three.kill()
            assert [one["hooked"] for one in said] == [1, 1, 2], said
            apart(said, "generation", "nonce", "kernel", "openssl", "random")
    finally:
        server.request("DELETE", f"/v1/templates/{name}")


@pytest.mark.parametrize("level", ["container"])
def test_a_copy_whose_programs_were_not_told_is_given_to_nobody(server, level):
    name = f"untold-{level}"
    hook = "[ ! -e /root/fails ] || { echo the generator does not answer >&2; exit 3; }"
    try:
        build(server, name, level, hook).ready()
        with made(server, level, template=name) as box:
            assert box.root("touch /root/fails").ok
            said = server.json("POST", box.path + "/fork", {"count": 1}, timeout=300)["forks"][0]
            assert "sandbox" not in said, said
            message = said["error"]["message"]
            assert "after_restore" in message and "exit status 3" in message and "the generator does not answer" in message, said
            assert ask(box)["hooked"] == 0
        # One that fails at once is not published.
        done = build(server, name, level, "echo not ready >&2; exit 4").ended()
        assert done["status"] == "failed" and "after_restore" in done["error"]["message"], done
        assert "not ready" in done["error"]["message"], done
    finally:
        server.request("DELETE", f"/v1/templates/{name}")

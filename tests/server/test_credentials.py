"""Credentials at the edge: programs in a box use secrets that are nowhere in the box."""

import base64
import contextlib
import json
import os
import secrets as randomness
import subprocess
import time
import urllib.parse
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from origin import FORMS, Origin
from sandkeep_server import Refused, binary
from servers import boxes_of

# Only a hang runs into this.
CURL = ["curl", "-sS", "--max-time", "60"]
ALLOW = ["good.test:443"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """In place of the world of the other tests, so that `walled` runs in this one."""
    origin = Origin(tmp_path_factory.mktemp("origin"))
    yield origin
    origin.close()


@pytest.fixture
def make(walled):
    with boxes_of(walled) as make:
        yield make


@pytest.fixture
def secret(walled, world):
    """A fresh secret `token` that the origin asks for; gives its value."""
    value = store(walled, world)
    yield value
    with contextlib.suppress(Refused):
        walled.json("DELETE", "/v1/secrets/token?force=true")


def store(server, world, name="token"):
    value = "canary-" + randomness.token_hex(20)
    server.json("POST", "/v1/secrets", {"name": name, "value": value})
    world.expected = value
    return value


def bound(**more):
    return {"allow": ALLOW, "credentials": [{"secret": "token", "host": "good.test", **more}]}


def fetch(box, path="/need", host="good.test", *words):
    return box.exec([*CURL, *words, f"https://{host}{path}"])


def body_of(ran):
    return json.loads(ran.out)


def test_secrets_go_in_and_never_come_out(walled):
    value = "canary-" + randomness.token_hex(20)
    made = walled.json("POST", "/v1/secrets", {"name": "mine", "value": value, "metadata": {"team": "a"}})
    assert (made["name"], made["version"], made["bound_to"]) == ("mine", 1, []), made
    status, _, answer = walled.request("POST", "/v1/secrets", {"name": "mine", "value": value + "2"})
    assert status == 200 and json.loads(answer)["version"] == 2
    assert json.loads(answer)["metadata"] == {"team": "a"}
    for path in ("/v1/secrets", "/secrets", "/secrets/mine"):
        status, _, answer = walled.request("GET", path)
        assert status == 200 and b"mine" in answer and b"canary" not in answer, answer
    for bad in ({"name": "a b", "value": value}, {"name": "x", "value": ""}, {"name": "inline-x", "value": value}):
        with pytest.raises(Refused) as refused:
            walled.json("POST", "/v1/secrets", bad)
        assert refused.value.status == 400 and value not in str(refused.value), refused.value
    walled.json("DELETE", "/v1/secrets/mine")
    with pytest.raises(Refused) as refused:
        walled.json("DELETE", "/v1/secrets/mine")
    assert refused.value.status == 404


def test_curl_python_node_and_git_use_a_credential_they_do_not_have(make, world, secret):
    served = world.directory / "repo.git"
    if not served.exists():
        work = world.directory / "work"
        run = lambda *words, at=work: subprocess.run(["git", *words], cwd=at, check=True, capture_output=True)  # noqa: E731
        work.mkdir()
        run("init", "-q", "-b", "main")
        (work / "read.me").write_text("cloned\n")
        run("add", ".")
        run("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "one")
        run("clone", "-q", "--bare", str(work), str(served))
        run("update-server-info", at=served)
    network = bound(path="/need")
    network["credentials"].append(
        {"secret": "token", "host": "good.test", "path": "/repo.git/*", "basic": {"user": "robot"}}
    )
    box = make(network=network)
    programs = {
        "curl": [*CURL, "https://good.test/need"],
        "urllib": ["python3", "-c", "import urllib.request as u; print(u.urlopen('https://good.test/need', timeout=60).read())"],
        "requests": ["python3", "-c", "from pip._vendor import requests as r; print(r.get('https://good.test/need', timeout=60).text)"],
        "node": ["node", "-e", "require('https').get('https://good.test/need', r => r.pipe(process.stdout))"],
        "git": ["sh", "-c", "git clone -q https://good.test/repo.git /tmp/cloned && cat /tmp/cloned/read.me"],
        "without the variables": ["env", "-i", "PATH=/usr/bin:/bin", *CURL, "https://good.test/need"],
    }  # fmt: skip
    for name, words in programs.items():
        ran = box.exec(words)
        assert ran.ok and ("cloned" if name == "git" else "welcome") in ran.out, (name, ran)
        assert secret not in ran.out + ran.err
    seen = [r for r in world.requests if secret in str(r.headers)]
    assert len(seen) >= 5, world.requests


def test_guest_header_beside_the_injected_one_is_removed(make, world, secret):
    box = make(network=bound())
    ran = fetch(box, "/need", "good.test", "-H", "Authorization: Bearer mine", "-H", "AUTHORIZATION: Basic eDp5")
    assert ran.out == "welcome\n", ran
    assert world.of("/need")[-1].all("Authorization") == [f"Bearer {secret}"]
    # Folded over two lines, and listed as a header of the connection to be dropped on the way.
    for head in (
        "Authorization: mine\\r\\n folded",
        "Authorization: mine\\r\\nConnection: Authorization",
        "authorization : mine",
    ):
        before = len(world.requests)
        box.python(f"""
            import socket, ssl
            raw = socket.create_connection(("good.test", 443), timeout=60)
            tls = ssl.create_default_context().wrap_socket(raw, server_hostname="good.test")
            tls.sendall(b"GET /need HTTP/1.1\\r\\nHost: good.test\\r\\n{head}\\r\\nConnection: close\\r\\n\\r\\n")
            print(tls.recv(4096))
        """)
        for request in world.requests[before:]:
            assert request.all("Authorization") == [f"Bearer {secret}"], request


def test_a_value_is_not_reflected_into_the_box(make, world, secret):
    box = make(network=bound())
    shown = [secret, base64.b64encode(secret.encode()).decode()]
    for path in ("/echo", "/echo-header", "/echo-pieces"):
        before = len(world.requests)
        ran = fetch(box, path, "good.test", "-i")
        assert len(world.requests) > before, "it did reach the origin"
        assert not any(text in ran.out + ran.err for text in shown), (path, ran)
    why = box.server.json("GET", f"{box.path}/network/denials")["denials"]
    assert any("secret" in denial["why"] for denial in why), why


def test_a_value_is_not_reflected_in_any_usual_encoding(walled, make, world):
    value = f"wJal-{randomness.token_hex(8)}/K7_+{randomness.token_hex(8)}="
    walled.json("POST", "/v1/secrets", {"name": "token", "value": value})
    box = make(network=bound())
    passed = []
    for form, shown in FORMS.items():
        before = len(world.requests)
        ran = fetch(box, f"/echo-as?{urllib.parse.quote(form)}", "good.test", "--output", "/tmp/got")
        assert len(world.requests) > before, "it did reach the origin"
        if ran.ok and "secret_reflected" not in box.root(["cat", "/tmp/got"]).out:
            passed.append((form, shown(f"Bearer {value}")))
    walled.json("DELETE", "/v1/secrets/token?force=true")
    assert not passed, passed


# What a program in the box can do: it has the origin give back a guess, and looks at how it comes.
GUESSER = """
import socket, ssl

def ask(path, body):
    raw = socket.create_connection(("good.test", 443), timeout=60)
    tls = ssl.create_default_context().wrap_socket(raw, server_hostname="good.test")
    head = f"POST {path} HTTP/1.1\\r\\nHost: good.test\\r\\nConnection: close\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    tls.sendall(head.encode() + body)
    return tls

def chunk_sizes(guess):
    got = b""
    with ask("/say", b"here it is: " + guess + b"|and this was all") as tls:
        while data := tls.recv(65536):
            got += data
    rest, sizes = got.split(b"\\r\\n\\r\\n", 1)[1], []
    while rest:
        size, rest = rest.split(b"\\r\\n", 1)
        sizes.append(int(size, 16))
        rest = rest[int(size, 16) + 2:]
    return sizes

def after_a_pause(guess):
    got = b""
    with ask("/say-paused", b"data: " + guess) as tls:
        try:
            while data := tls.recv(65536):
                got += data
                if b"credential_suspended" in got:
                    return "suspended"
                if got.endswith(guess + b"\\r\\n"):
                    return "all"
        except TimeoutError:
            return "held"
        except OSError:
            pass
    return "cut"

def recovered(known, seen, times, most):
    while len(known) < most:
        for letter in b"0123456789abcdef":
            guess = known + bytes([letter])
            if all(seen(guess) not in (seen(known + b"~"), "suspended") for _ in range(times)):
                known = guess
                break
        else:
            break
    return known.decode()
"""


def guessed(box, program):
    box.write("/tmp/guesser.py", (GUESSER + program).encode())
    ran = box.exec(["python3", "/tmp/guesser.py"], http_timeout=600, timeout_ms=600_000)
    assert ran.ok, ran
    return ran.out.strip()


def guessable(server, world):
    value = "ghp_" + randomness.token_hex(8)
    server.json("POST", "/v1/secrets", {"name": "token", "value": value})
    world.expected = value
    return value


def test_the_search_for_a_secret_is_no_oracle(walled, make, world):
    value = guessable(walled, world)
    box = make(network=bound())
    # From nothing, and from each beginning but the whole.
    found = guessed(box, f"""
for known in range(4, {len(value) - 1}):
    print(recovered({value!r}[:known].encode(), chunk_sizes, 3, {len(value) - 1}))
""").splitlines()  # fmt: skip
    assert found == [value[:known] for known in range(4, len(value) - 1)], "found out more than it knew"
    walled.json("DELETE", "/v1/secrets/token?force=true")


def test_guessing_a_secret_by_pauses_suspends_it(walled, make, world):
    value = guessable(walled, world)
    box = make(network=bound())
    run = f"print(recovered({value!r}[:%d].encode(), after_a_pause, 1, {len(value)}))"
    assert guessed(box, run % 4) == value[:4], "five letters tell nothing"
    found = guessed(box, run % 5)
    assert len(found) <= 8, f"three near-misses tell no more than three letters: {found}"
    denials = [denial["why"] for denial in walled.json("GET", f"{box.path}/network/denials")["denials"]]
    for count in (1, 2, 3):
        assert any(f'"token": near-miss {count} of 3' in why for why in denials), denials
    entries = walled.json("GET", f"/v1/audit?sandbox_id={box.id}&kind=connection_denied&limit=1000")["entries"]
    reasons = [str(entry["detail"]) for entry in entries]
    assert sum("near-miss" in reason for reason in reasons) == 3, reasons
    assert not any(value[:6] in str(entry) for entry in entries)
    # Suspended for this box, and for no other.
    before = len(world.requests)
    assert body_of(fetch(box))["error"] == "credential_suspended"
    assert len(world.requests) == before
    assert fetch(make(network=bound())).out == "welcome\n", "another one has its own count"
    # Who set it decides what then.
    walled.json("PUT", f"{box.path}/network", {"credentials": bound()["credentials"]})
    assert fetch(box).out == "welcome\n"
    assert len(guessed(box, run % 5)) <= 8
    assert body_of(fetch(box))["error"] == "credential_suspended"
    store(walled, world)
    assert fetch(box).out == "welcome\n"
    walled.json("DELETE", "/v1/secrets/token?force=true")


def test_a_placeholder_is_replaced_for_its_host_alone(make, world, secret):
    text = "PLACEHOLDER_token_0001"
    network = bound(placeholder={"text": text})
    network["allow"] = ["good.test:443", "other.test:443"]
    box = make(network=network)
    header = ["-H", f"Authorization: Bearer {text}"]
    assert fetch(box, "/need", "good.test", *header).out == "welcome\n"
    # Nobody looks into connections to the other one, so the box meets an authority it does not know.
    assert "who are you" in fetch(box, "/need", "other.test", "--insecure", *header).out
    assert world.of("/need")[-1].all("Authorization") == [f"Bearer {text}"], "another host gets what the box said"
    # In a URL or a body it stays what it is: both end up in logs and databases.
    fetch(box, f"/open?key={text}", "good.test", "-d", f"body={text}")
    last = world.requests[-1]
    assert text in last.path and text.encode() in last.body and secret not in repr(last), last


def test_query_and_other_headers(make, world, secret):
    network = {"allow": ALLOW, "credentials": [
        {"secret": "token", "host": "good.test", "path": "/query", "query": {"name": "key"}},
        {"secret": "token", "host": "good.test", "path": "/named", "methods": ["POST"],
         "header": {"name": "X-Api-Key", "format": "v1 {}"}},
    ]}  # fmt: skip
    box = make(network=network)
    fetch(box, "/query?a=1&key=mine")
    assert world.requests[-1].path == f"/query?a=1&key={secret.replace('-', '%2D')}"
    fetch(box, "/named", "good.test", "-d", "x=1")
    assert world.requests[-1].all("X-Api-Key") == [f"v1 {secret}"]
    fetch(box, "/named")
    assert world.requests[-1].all("X-Api-Key") == [], "only with the method it is bound to"


def test_a_wrong_upstream_certificate_is_refused(make, world, secret):
    box = make(network={"allow": ["strange.test"], "credentials": [{"secret": "token", "host": "strange.test"}]})
    before = len(world.requests)
    ran = fetch(box, "/need", "strange.test")
    assert body_of(ran)["error"] == "upstream_untrusted", ran
    assert len(world.requests) == before, "nothing was sent"


def test_a_credential_never_widens_reach(walled, make, world, secret):
    with pytest.raises(Refused) as refused:
        make(network={"allow": ALLOW, "credentials": [{"secret": "token", "host": "closed.test"}]})
    assert refused.value.status == 400 and refused.value.error["field"] == "network.credentials[0].host"
    box = make(network=bound())
    assert fetch(box).out == "welcome\n"
    held = walled.json("PUT", f"{box.path}/network", {"allow": ["other.test"]})
    assert held["credentials"], "left out, they stay"
    before = len(world.requests)
    ran = fetch(box)
    assert not ran.ok and "welcome" not in ran.out, ran
    assert len(world.requests) == before


def test_rotation_holds_at_once(walled, make, world, secret):
    box = make(network=bound())
    assert fetch(box).out == "welcome\n"
    new = store(walled, world)
    assert new != secret
    assert fetch(box).out == "welcome\n"
    assert world.of("/need")[-1].all("Authorization") == [f"Bearer {new}"]


def test_the_first_credential_may_come_later_and_go_again(walled, make, world, secret):
    box = make(network={"allow": ALLOW})
    ran = fetch(box)
    assert not ran.ok, "without a credential nobody looks into it, and the box does not know the origin's authority"
    assert box.root(["test", "-e", "/usr/local/share/ca-certificates/sandkeep.crt"]).code == 1
    held = walled.json("PUT", f"{box.path}/network", {"credentials": bound()["credentials"]})
    assert held["allow"][0]["to"] == "good.test" and len(held["credentials"]) == 1, held
    assert fetch(box).out == "welcome\n"
    walled.json("PUT", f"{box.path}/network", {"credentials": []})
    assert "credentials" not in walled.json("GET", f"{box.path}/network")
    assert not fetch(box).ok


def test_http_rules_hold_inside_tls(make, world):
    rule = {"to": "good.test", "ports": [443], "http": [{"methods": ["GET"], "path": "/open/*"}]}
    box = make(network={"allow": [rule]})
    assert fetch(box, "/open/a").out == "open\n"
    before = len(world.requests)
    for words in (["-d", "x=1"], ["-X", "DELETE"]):
        refusal = body_of(fetch(box, "/open/a", "good.test", *words))
        assert refusal["error"] == "egress_denied" and refusal["host"] == "good.test", refusal
    assert body_of(fetch(box, "/closed"))["hint"]
    assert len(world.requests) == before


def test_unknown_and_bound_secrets(walled, make, world, secret):
    with pytest.raises(Refused) as refused:
        make(network={"allow": ALLOW, "credentials": [{"secret": "nobody", "host": "good.test"}]})
    assert refused.value.status == 400 and refused.value.error["field"] == "network.credentials[0].secret"
    box = make(network=bound())
    listed = {s["name"]: s for s in walled.json("GET", "/v1/secrets")["secrets"]}
    assert listed["token"]["bound_to"] == [{"sandbox_id": box.id, "host": "good.test", "port": 443}]
    with pytest.raises(Refused) as refused:
        walled.json("DELETE", "/v1/secrets/token")
    assert refused.value.status == 409 and box.id in refused.value.error["message"]
    walled.json("DELETE", "/v1/secrets/token?force=true")
    before = len(world.requests)
    assert body_of(fetch(box))["error"] == "credential_unavailable"
    assert len(world.requests) == before, "a request that needs it is not sent without it"


def test_e2b_rules_set_headers_at_the_edge(walled, world):
    value = "canary-" + randomness.token_hex(20)
    world.expected = value
    rules = {"good.test": [{"transform": {"headers": {"Authorization": f"Bearer {value}", "X-Team": "a"}}}],
             "closed.test": [{"transform": {"headers": {"X-Team": "a"}}}]}  # fmt: skip
    network = {"allowOut": ["good.test"], "denyOut": ["0.0.0.0/0"], "rules": rules}
    made = walled.json("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 300, "network": network})
    try:
        box = Box.__new__(Box)
        box.server, box.id, box.path = walled, made["sandboxID"], f"/v1/sandboxes/{made['sandboxID']}"
        ran = fetch(box)
        assert ran.out == "welcome\n", ran
        assert world.requests[-1].all("X-Team") == ["a"]
        assert not fetch(box, "/open", "closed.test").ok, "a rule does not open its host"
        assert value not in json.dumps(walled.json("GET", f"{box.path}/network"))
        assert all("inline" not in s["name"] for s in walled.json("GET", "/v1/secrets")["secrets"])
        walled.request("PUT", f"/sandboxes/{box.id}/network", {"allowOut": ["good.test"], "denyOut": ["0.0.0.0/0"]})
        assert "credentials" not in walled.json("GET", f"{box.path}/network")
    finally:
        walled.request("DELETE", f"/sandboxes/{made['sandboxID']}")


def test_java_is_told_too(walled, make, secret):
    box = make(network={"allow": ALLOW})
    tool = "#!/bin/sh\necho \"$@\" >> /tmp/keytool\n"
    box.root(["sh", "-c", f"printf '%s' '{tool}' > /usr/bin/keytool && chmod 755 /usr/bin/keytool"])
    walled.json("PUT", f"{box.path}/network", {"credentials": bound()["credentials"]})
    asked = box.root(["cat", "/tmp/keytool"]).out
    assert "-importcert" in asked and "sandkeep.crt" in asked, asked


def test_a_program_that_speaks_only_http_2_gets_its_credential(make, world, secret):
    box = make(network=bound())
    program = """
        const session = require('http2').connect('https://good.test')
        const request = session.request({ ':path': '/need' })
        request.on('response', headers => process.stdout.write(session.alpnProtocol + ' ' + headers[':status'] + ' '))
        request.on('data', data => process.stdout.write(data))
        request.on('end', () => session.close())
    """
    ran = box.exec(["node", "-e", program])
    assert ran.out == "h2 200 welcome\n", ran
    assert world.of("/need")[-1].all("Authorization") == [f"Bearer {secret}"]


def test_a_program_that_speaks_no_http_is_told_why(make, world, secret):
    box = make(network=bound())
    ran = box.python("""
        import socket, ssl
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h3"])
        try:
            context.wrap_socket(socket.create_connection(("good.test", 443), timeout=60), server_hostname="good.test")
            print("open")
        except ssl.SSLError as error:
            print("refused", error)
    """)
    assert ran.out.startswith("refused"), ran
    why = box.server.json("GET", f"{box.path}/network/denials")["denials"]
    assert any("neither HTTP/1.1 nor HTTP/2" in denial["why"] for denial in why), why


def test_works_after_kill_9_of_the_server(walled, make, world, secret):
    box = make(network=bound())
    assert fetch(box).out == "welcome\n"
    before = box.root(["cat", "/usr/local/share/ca-certificates/sandkeep.crt"]).out
    assert "BEGIN CERTIFICATE" in before
    walled.kill_hard()
    walled.start()
    # The moat comes back in the background; until then nothing gets out.
    ran = wait_for(lambda: (r := fetch(box)).ok and r, "the box reaches the origin again")
    assert ran.out == "welcome\n", ran
    assert box.root(["cat", "/usr/local/share/ca-certificates/sandkeep.crt"]).out == before, "the key is the same"
    new = store(walled, world)
    assert fetch(box).out == "welcome\n"
    assert world.of("/need")[-1].all("Authorization") == [f"Bearer {new}"]


def test_the_command_line(walled, world, secret):
    env = {**os.environ, **walled.cli_env()}

    def sandkeep(*words, **options):
        return subprocess.run([binary(), *words], env=env, capture_output=True, text=True, timeout=120, **options)

    value = "canary-" + randomness.token_hex(20)
    ran = sandkeep("secret", "set", "cli", input=value + "\n")
    assert ran.returncode == 0 and "version 1" in ran.stdout, ran
    world.expected = value
    made = sandkeep("create", "--allow", "good.test:443", "--credential", "cli@good.test")
    assert made.returncode == 0, made
    box = made.stdout.strip()
    try:
        ran = sandkeep("exec", box, "--", *CURL, "https://good.test/need")
        assert ran.stdout == "welcome\n", ran
        assert "cli" in sandkeep("inspect", box).stdout
        listed = sandkeep("secret", "ls")
        assert box in listed.stdout and value not in listed.stdout, listed
        assert sandkeep("secret", "rm", "cli").returncode == 1
    finally:
        sandkeep("kill", box)
    assert sandkeep("secret", "rm", "cli").returncode == 0
    assert "SECRET@HOST" in sandkeep("create", "--credential", "nonsense").stderr


def test_the_canary_is_nowhere(walled, make, world):
    """On the box's disk, in the memory and environment of its processes, in logs, audit, ledger: nowhere.

    A decoy that the box does hold shows that the search would have found it."""
    begun = time.time() - 1
    value, decoy = store(walled, world), "decoy-" + randomness.token_hex(20)
    box = make(network=bound(), env={"DECOY": decoy}, metadata={"decoy": decoy})
    box.root(["sh", "-c", f"{' '.join(CURL)} https://good.test/need > /root/answer; echo $DECOY > /root/decoy; sync"])
    assert box.read("/root/answer") == b"welcome\n"
    # A program that made a request and lives on, with all of it in its memory.
    box.exec(["sh", "-c", "nohup python3 -c '"
              "import os, urllib.request as u, time; kept = u.urlopen(\"https://good.test/need\").read();"
              "decoy = os.environ[\"DECOY\"] + \"!\";"
              "open(\"/tmp/asked\", \"wb\").write(kept); time.sleep(600)' > /tmp/log 2>&1 &"])  # fmt: skip
    wait_for(lambda: box.exec(["cat", "/tmp/asked"]).out == "welcome\n", "the program has asked")
    for path in ("/echo", "/echo-header", "/echo-pieces"):
        fetch(box, path)
    with pytest.raises(Refused):
        walled.json("POST", "/v1/secrets", {"name": "bad name", "value": value})

    encoded = base64.b64encode(value.encode()).rstrip(b"=")[:-1]
    canaries = [value.encode(), encoded, value.encode("utf-16-le")]
    decoys: set[str] = set()
    for kind, where, data in everywhere(walled, box, begun):
        assert not any(canary in data for canary in canaries), f"the canary is in {where}"
        if decoy.encode() in data:
            decoys.add(kind)
    assert {"memory", "environment", "disk", "ledger.db"} <= decoys, decoys


def everywhere(server, box, begun):
    """All places a value could be left in, as (kind, place, bytes)."""
    processes = box_processes(box.id)
    assert len(processes) >= 2, processes
    for pid in processes:
        for data in memory_of(pid):
            yield "memory", f"the memory of {pid}", data
        yield "environment", f"the environment of {pid}", Path(f"/proc/{pid}/environ").read_bytes()
    disk, pool = server.state / "pool" / "disks" / box.id, server.state / "pool"
    for file in everything(disk):
        if file.stat().st_mtime >= begun:
            yield "disk", file, file.read_bytes()
    kept = [f for f in everything(server.state, but=pool) if f.stat().st_mtime >= begun]
    assert "test-server.log" in {f.name for f in kept}, kept
    for file in kept:
        if file.name != "pool.img":
            # The ledger's newest pages are in the log beside it.
            yield file.name.removesuffix("-wal"), file, file.read_bytes()


def everything(root: Path, but: Path | None = None):
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if Path(directory) / name != but]
        for name in names:
            path = Path(directory) / name
            if path.is_file() and not path.is_symlink():
                yield path


def box_processes(id: str) -> list[int]:
    """All of the box's process namespace, the agent included; a program of the box leads to it."""
    spaces: dict[str, list[int]] = {}
    own = None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                space = os.readlink(entry / "ns/pid")
                spaces.setdefault(space, []).append(int(entry.name))
                if f"E2B_SANDBOX_ID={id}".encode() in (entry / "environ").read_bytes():
                    own = space
    return spaces.get(own, [])


def memory_of(pid: int):
    """Every piece of memory that a process may have written to; pieces overlap, so that nothing hides on a seam."""
    with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            span, mode, *rest = line.split()
            if not mode.startswith("rw"):
                continue
            at, end = (int(part, 16) for part in span.split("-"))
            while at < end:
                try:
                    mem.seek(at)
                    data = mem.read(min(end - at, 16 << 20))
                except OSError:
                    break
                if not data:
                    break
                yield data
                at += len(data) if at + len(data) >= end else max(1, len(data) - 4096)

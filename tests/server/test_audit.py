"""What happened, who did it, and proof that nobody changed the record."""

import hashlib
import json
import subprocess
import threading

import pytest
from boxkit import wait_for
from outside import ADDRESS
from sandkeep_server import Refused, binary
from servers import boxes_of, in_place_of

CURL = ["curl", "-sS", "--max-time", "30"]


@pytest.fixture(scope="module")
def watched(server, outside):
    """A server that knows the outside, in place of the one of the whole run."""
    with in_place_of(server, "--pool-size", "1", "--audit-file-size", "64KiB", *outside.flags(), where=outside.where()) as own:
        yield own


@pytest.fixture
def make(watched):
    with boxes_of(watched) as make_one:

        def make(**request):
            newest = entries(watched, limit=1)
            box = make_one(**request)
            # The log of the whole run is long; what is asked for is read from here on.
            box.since = newest[0]["seq"] if newest else 0
            return box

        yield make


def entries(server, **query):
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return server.json("GET", f"/v1/audit?{text}")["entries"]


def of(box, kind):
    return entries(box.server, sandbox_id=box.id, kind=kind, after=box.since, limit=1000)


def soon(box, kind, count=1):
    return wait_for(lambda: (found := of(box, kind)) and len(found) >= count and found, f"{kind} is in the log")


def key_id(server):
    return "key:" + hashlib.sha256(server.key.encode()).hexdigest()[:12]


def cli(server, *words, check=True):
    return subprocess.run(
        [str(binary()), *words], env={**server.cli_env(), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=check, timeout=120,
    )


def sound(server):
    verdict = server.json("GET", "/v1/audit/verify")
    assert verdict["sound"] and verdict["broken"] is None, verdict
    return verdict


def test_every_connection_has_its_entry(make, outside, watched):
    box = make(network={"allow": [f"good.sandkeep.test:{outside.web.port}"]})
    assert box.exec([*CURL, outside.url()]).ok
    opened = soon(box, "connection_opened")
    allowed = soon(box, "connection_allowed")
    assert len(opened) == len(allowed) == 1
    detail = allowed[0]["detail"]
    assert detail["host"] == "good.sandkeep.test" and detail["port"] == outside.web.port
    assert "good.sandkeep.test" in detail["rule"]
    assert detail["bytes_out"] > 0 and detail["bytes_in"] > 0 and detail["duration_ms"] >= 0
    assert allowed[0]["actor"] == f"box:{box.id}"
    for _ in range(3):
        assert not box.exec([*CURL, "--fail", f"http://{ADDRESS}:1/"]).ok
    denied = soon(box, "connection_denied", 3)
    assert len(denied) == 3, "each refusal by itself"
    assert denied[0]["detail"]["host"] == ADDRESS and denied[0]["detail"]["reason"]
    assert not box.exec([*CURL, "http://other.sandkeep.test/"]).ok
    assert soon(box, "name_denied")[0]["detail"]["host"] == "other.sandkeep.test"
    sound(watched)


def test_the_life_of_a_box_and_who_decided_it(make, watched):
    box = make(network={"profile": "air-gapped"})
    watched.json("PUT", f"{box.path}/network", {"allow": ["a.example.org", "b.example.org"]})
    box.kill()
    killed = soon(box, "sandbox_killed")[0]
    created = soon(box, "sandbox_created")[0]
    changed = soon(box, "policy_changed")[0]
    me = key_id(watched)
    assert {entry["actor"] for entry in (killed, created, changed)} == {me}
    assert watched.key not in json.dumps(entries(watched, limit=1000))
    assert created["detail"]["template"] == "base" and changed["detail"]["rules"] == 2
    assert created["seq"] < changed["seq"] < killed["seq"]
    expired = make(timeout_seconds=1)
    assert soon(expired, "sandbox_killed")[0]["actor"] == "server"


def test_tokens_and_keys_are_on_record(make, watched):
    box = make()
    ran = box.exec(["sh", "-c", (
        "S=$(curl -sSX PUT -H 'X-Sandkeep-Metadata-Ttl-Seconds: 60' http://sandkeep.internal/v1/session) && "
        "curl -sSH \"X-Sandkeep-Metadata-Token: $S\" 'http://sandkeep.internal/v1/token?audience=aud.example.org'"
    )])
    token = ran.out
    assert token.count(".") == 2, ran
    issued = of(box, "token_issued")
    assert len(issued) == 1, "on record before the box has it"
    assert issued[0]["detail"]["audience"] == "aud.example.org" and issued[0]["detail"]["jti"]
    assert token.split(".")[2] not in json.dumps(entries(watched, limit=1000))
    kid = watched.json("POST", "/v1/identity/rotate")["kid"]
    rotated = entries(watched, kind="signing_key_rotated")[0]
    assert rotated["detail"]["kid"] == kid and rotated["actor"] == key_id(watched)


def test_secrets_are_named_and_not_shown(watched):
    name = "audit-canary"
    watched.json("POST", "/v1/secrets", {"name": name, "value": "canary-5e1f"})
    watched.json("POST", "/v1/secrets", {"name": name, "value": "canary-5e1f-2"})
    watched.json("DELETE", f"/v1/secrets/{name}")
    for kind in ("secret_created", "secret_changed", "secret_deleted"):
        found = entries(watched, kind=kind)[0]
        assert found["detail"]["name"] == name and found["actor"] == key_id(watched)
    for file in (watched.state / "audit").glob("*.jsonl"):
        assert b"canary-5e1f" not in file.read_bytes()


def test_pages_and_filters(make, watched):
    newest = entries(watched, limit=1)[0]
    older = entries(watched, limit=2, before=newest["seq"])
    assert [e["seq"] for e in older] == [newest["seq"] - 1, newest["seq"] - 2]
    ahead = entries(watched, after=older[1]["seq"], limit=2)
    assert [e["seq"] for e in ahead] == [newest["seq"] - 1, newest["seq"]]
    for query, field in ((dict(limit=0), "limit"), (dict(kind="lunch"), "kind"), (dict(sandbox_id="x"), "sandbox_id")):
        with pytest.raises(Refused) as caught:
            entries(watched, **query)
        assert caught.value.status == 400 and caught.value.error["field"] == field
    status, _, _ = watched.request("GET", "/v1/audit", headers={"X-API-Key": "wrong"})
    assert status == 401


def test_a_flood_of_refusals_is_summed_and_counted(make, watched):
    box = make()
    ran = box.python(f"""
        import concurrent.futures, socket
        def knock(_):
            try:
                with socket.create_connection(("{ADDRESS}", 9), timeout=60) as s:
                    s.sendall(b"not http")
                    s.recv(1)
            except OSError:
                pass
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(knock, range(1000)))
    """)
    assert ran.ok, ran

    def all_counted():
        one_by_one = len(of(box, "connection_denied"))
        summed = sum(entry["detail"]["count"] for entry in of(box, "denials_summed"))
        return one_by_one + summed == 1000 and one_by_one

    wait_for(all_counted, "every refusal is counted")


def test_it_survives_kill_9_in_the_middle(make, outside, watched):
    """Lines are there before the kill, the chain goes on behind it, and what was half written is mended."""
    box = make(network={"allow": ["good.sandkeep.test"]})
    url = outside.url(path="/stream")
    flow = threading.Thread(
        target=lambda: box.exec(["sh", "-c", f"nohup curl -sS --max-time 120 {url} > /dev/null 2>&1 & sleep 0.1"])
    )
    flow.start()
    wait_for(lambda: outside.web.streams_open >= 1, "the stream runs")
    flow.join(60)
    opened = soon(box, "connection_opened")
    other = make()
    before = sound(watched)
    other_path = other.path
    watched.json("DELETE", other_path)
    # Right after the answer: what the ledger has and the log has not yet is taken up later.
    watched.kill_hard()
    torn = max((watched.state / "audit").glob("*.jsonl"))
    with torn.open("ab") as file:
        file.write(b'{"seq":999999,"at":"2026-')
    watched.start()
    after = sound(watched)
    assert after["entries"] > before["entries"]
    assert entries(watched, kind="log_repaired")[0]["detail"]["bytes_cut"] >= 25
    assert of(box, "connection_opened") == opened
    killed = soon(other, "sandbox_killed")
    assert len(killed) == 1 and killed[0]["actor"] == key_id(watched)
    # Told once, however often the server comes back.
    watched.kill_hard()
    watched.start()
    assert len(soon(other, "sandbox_killed")) == 1
    assert len(soon(other, "sandbox_created")) == 1


def files(server):
    return sorted((server.state / "audit").glob("*.jsonl"))


def grown(make, outside, server, count):
    """Connections, until the log has that many files."""
    box = make(network={"allow": ["good.sandkeep.test"]})

    def more():
        ran = box.python(f"""
            import urllib.request
            for _ in range(50):
                urllib.request.urlopen({outside.url()!r}, timeout=30).read()
        """)
        assert ran.ok, ran
        return len(files(server)) >= count and files(server)

    return wait_for(more, f"the log has {count} files", limit=300)


def test_the_log_goes_on_in_a_new_file(make, outside, watched):
    before = files(watched)
    found = grown(make, outside, watched, len(before) + 1)
    verdict = sound(watched)
    assert verdict["first"] == 1, "the chain goes over all files"
    for file in set(found) - set(before):
        assert file.stat().st_size <= 64 * 1024
        assert file.stat().st_mode & 0o777 == 0o600


def test_the_command_line_tells_and_verifies(make, watched):
    box = make()
    soon(box, "sandbox_created")
    told = cli(watched, "audit", "--box", box.id, "--kind", "sandbox_created").stdout
    assert key_id(watched) in told and "sandbox_created" in told and box.id in told
    lines = cli(watched, "--json", "audit", "--box", box.id).stdout.splitlines()
    assert json.loads(lines[0])["sandbox"] == box.id
    assert "sound" in cli(watched, "audit", "verify").stdout
    follow = subprocess.Popen(
        [str(binary()), "--json", "audit", "--box", box.id, "--kind", "policy_changed", "-f"],
        env={**watched.cli_env(), "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True,
    )
    try:
        watched.json("PUT", f"{box.path}/network", {"allow": ["a.example.org"]})
        assert json.loads(follow.stdout.readline())["action"] == "policy_changed"
    finally:
        follow.kill()
        follow.wait()


def test_tampering_is_found(make, outside, watched, tmp_path):
    """On copies: a changed, a removed and an inserted line, a missing file."""
    source = grown(make, outside, watched, 3)

    def verdict(change):
        place = tmp_path / change.__name__
        place.mkdir()
        for file in source:
            (place / file.name).write_bytes(file.read_bytes())
        change(place)
        ran = cli(watched, "--json", "audit", "verify", str(place), check=False)
        told = json.loads(ran.stdout)
        assert ran.returncode == (0 if told["sound"] else 1)
        return told

    def edit(place, change):
        file = place / source[0].name
        lines = file.read_text().splitlines(keepends=True)
        change(lines)
        file.write_text("".join(lines))

    def untouched(place):
        pass

    def changed(place):
        edit(place, lambda lines: lines.__setitem__(2, lines[2].replace('"seq":3', '"seq":3 ')))

    def removed(place):
        edit(place, lambda lines: lines.pop(2))

    def inserted(place):
        edit(place, lambda lines: lines.insert(2, lines[1]))

    def missing_file(place):
        (place / source[1].name).unlink()

    assert verdict(untouched)["sound"]
    for change in (changed, removed, inserted):
        told = verdict(change)
        assert not told["sound"] and told["broken"]["line"] == 3, told
        assert told["broken"]["segment"] == source[0].name
    assert cli(watched, "audit", "verify", str(source[0])).returncode == 0
    one = tmp_path / "one.jsonl"
    one.write_text(source[0].read_text().replace("box", "b0x", 1))
    assert "broken" in cli(watched, "audit", "verify", str(one), check=False).stdout
    assert not verdict(missing_file)["sound"]

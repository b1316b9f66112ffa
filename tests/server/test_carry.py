"""Points as files: from one server to another, whole or not at all."""

import hashlib
import http.client
import io
import json
import os
import secrets
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary, state_dir
from tiny import ASK, ASK_LINKED, COUNTER, LINKED, TinyServer, memory_levels, tiny_state


# The smallest machine there is: emulated, every vCPU and page costs.
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
MACHINES = shutil.which("qemu-system-x86_64") is not None or "SANDKEEP_TEST_MICROVM" in os.environ
needs_machines = pytest.mark.skipif(not MACHINES, reason="QEMU is not installed; script/test installs it")


def small(level) -> dict:
    """What a box of a level is asked for with; the first machine of a server is booted meanwhile."""
    if level != "microvm":
        return {"isolation": level}
    return {"isolation": level, "limits": SMALL, "http_timeout": 300, "timeout_seconds": 1800}


def throw_away(server):
    server.close()
    shutil.rmtree(server.state, ignore_errors=True)


@pytest.fixture(scope="module")
def here():
    server = TinyServer(tiny_state(state_dir().parent / f"here-{secrets.token_hex(3)}")).start()
    yield server
    throw_away(server)


@pytest.fixture(scope="module")
def there():
    """Another machine, as far as anything of the first is concerned."""
    server = TinyServer(tiny_state(state_dir().parent / f"there-{secrets.token_hex(3)}")).start()
    yield server
    throw_away(server)


@pytest.fixture
def packed(here, there, tmp_path):
    """Makes a point of a level on the first machine and a file of it."""
    made = []

    def pack(level, before=lambda box: None, **wish):
        with Box(here, **small(level)) as box:
            assert box.root(COUNTER).ok
            assert box.root(ASK).out == "1\n"
            assert box.root("echo kept > /home/user/note; ln /home/user/note /home/user/again; sync").ok
            before(box)
            point = here.json("POST", box.path + "/points", wish, timeout=300)
        made.append(point["id"])
        file = tmp_path / f"{point['id']}.point.tar.zst"
        done = cli(here, "points", "export", point["id"], str(file))
        assert done.returncode == 0, done.stderr
        return point, file

    yield pack
    for server in (here, there):
        for id in made:
            server.request("DELETE", f"/v1/points/{id}")


def cli(server, *words, **options):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([binary(), *words], env=env, capture_output=True, timeout=300, **options)


def upload(server, data: bytes, query: str = ""):
    status, _, body = server.request(
        "POST", f"/v1/points/import{query}", data, headers={"Content-Type": "application/zstd"}, timeout=300
    )
    return status, json.loads(body)


def nothing_left(server):
    # Disks of the template are made ahead there, too; points have a directory for theirs.
    staging = server.state / "pool" / "staging"
    wait_for(lambda: not [*staging.glob("*/disk"), *staging.glob("*/memory")], "nothing half-made is left")


def test_files_move_to_another_machine(here, there, packed):
    point, file = packed("container", memory=False, name="carried", tags=["one"])
    moved = cli(there, "--json", "points", "import", str(file))
    assert moved.returncode == 0, moved.stderr
    view = json.loads(moved.stdout)
    same = ("id", "sandbox_id", "name", "tags", "created_at", "template", "isolation", "memory", "engine")
    assert {key: view[key] for key in same} == {key: point[key] for key in same}
    # Where it came from may be gone: it is a thing of its own.
    here.json("DELETE", f"/v1/points/{point['id']}")
    with Box(there, from_point="carried") as box:
        assert box.root("cat /home/user/again; stat -c %h /home/user/note").out == "kept\n2\n"
        assert box.made["isolation"] == "container"
    status, body = upload(there, file.read_bytes())
    assert status == 409 and "already" in body["error"]["message"], body
    # And back again, through a pipe.
    packed_again = cli(there, "points", "export", "carried").stdout
    back = cli(here, "points", "import", "-", input=packed_again)
    assert back.stdout.decode().strip() == point["id"], back.stderr
    nothing_left(there)


def test_memory_moves_to_another_machine(here, there, packed):
    levels = [level for level in memory_levels(here) if level != "container"]
    for level in levels + ["microvm"] * MACHINES:
        point, file = packed(level, memory=True)
        status, view = upload(there, file.read_bytes())
        assert status == 201 and view["memory"] is True and view["engine"] == point["engine"], view
        boxes = [Box(there, from_point=point["id"], http_timeout=300) for _ in range(2)]
        try:
            assert [box.root(ASK).out for box in boxes] == ["2\n", "2\n"], "the same process, with its memory"
            (fork,) = there.json("POST", boxes[0].path + "/fork", {"count": 1}, timeout=300)["forks"]
            boxes.append(Box.known(there, fork["sandbox"]["id"]))
            assert boxes[-1].root(ASK).out == "3\n", "and what is made from it"
            names = {box.root("hostname").out for box in boxes}
            assert len(names) == 3, names
        finally:
            for box in boxes:
                box.kill()
        # Back where it came from it is as good.
        here.json("DELETE", f"/v1/points/{point['id']}")
        assert upload(here, file.read_bytes())[0] == 201
        with Box(here, from_point=point["id"], http_timeout=300) as box:
            assert box.root(ASK).out == "2\n"


def trust(server, *keys: str):
    server.stop()
    server.env = {"SANDKEEP_TRUSTED_SERVERS": ",".join(keys)} if keys else {}
    server.start()


@pytest.fixture
def distrusting(there):
    yield
    trust(there)


def test_memory_of_containers_moves_to_servers_that_trust_the_first(here, there, packed, distrusting):
    def link(box):
        assert box.root(LINKED).ok
        assert box.root(ASK_LINKED).out == "over 1\n"

    point, file = packed("container", before=link, memory=True)
    assert point["engine"].startswith("criu "), point
    key, own = (cli(server, "points", "key", text=True).stdout.strip() for server in (here, there))
    assert key.startswith("ed25519:") and key != own
    # A stranger says no, and what to do.
    refused = cli(there, "points", "import", str(file), text=True)
    assert refused.returncode == 1 and key in refused.stderr, refused
    assert "trusted_servers" in refused.stderr and "--files-only" in refused.stderr, refused
    trust(there, own)
    status, body = upload(there, file.read_bytes())
    assert status == 400 and body["error"]["code"] == "not_enforceable" and key in body["error"]["message"], body
    assert there.request("GET", f"/v1/points/{point['id']}")[0] == 404
    nothing_left(there)

    trust(there, own, key)
    status, body = upload(there, unsigned(file))
    assert status == 400 and "nobody signed it" in body["error"]["message"], body
    nothing_left(there)
    status, view = upload(there, file.read_bytes())
    assert status == 201 and view["memory"] is True and view["engine"] == point["engine"], view
    (noted,) = there.json("GET", "/v1/audit?kind=point_imported&limit=1")["entries"]
    assert noted["detail"] == {"point": point["id"], "signer": key, "memory": True}, noted
    boxes = [Box(there, from_point=point["id"]) for _ in range(2)]
    try:
        for box in boxes:
            assert box.root(ASK).out == "2\n", "the same process, with its memory"
            assert box.root(ASK_LINKED).out == "over 2\n", "and its connection"
        (fork,) = there.json("POST", boxes[0].path + "/fork", {"count": 1}, timeout=300)["forks"]
        boxes.append(Box.known(there, fork["sandbox"]["id"]))
        assert boxes[-1].root(ASK).out + boxes[-1].root(ASK_LINKED).out == "3\nover 3\n"
    finally:
        for box in boxes:
            box.kill()

    # Its own it takes back without being told to.
    here.json("DELETE", f"/v1/points/{point['id']}")
    assert upload(here, file.read_bytes())[0] == 201
    with Box(here, from_point=point["id"]) as box:
        assert box.root(ASK).out + box.root(ASK_LINKED).out == "2\nover 2\n"


def test_a_server_that_is_to_trust_nonsense_does_not_start(there):
    command = [binary(), "serve", "--state", str(there.state), "--trusted-servers", "keep.example.org"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "keep.example.org" in refused.stderr and "sandkeep points key" in refused.stderr, refused


# With the end of their lines as many bytes as go into a page without a rest.
MARK, FORGED = b"what a box has in its memory...", b"what a stranger put in there..."


def unsigned(file: Path, change=lambda label, body, content: body) -> bytes:
    """The file by nobody, as anybody can make one: changed, with sums that are right."""
    tar = subprocess.run(["zstd", "-dcq", str(file)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        entries = {entry.name: entry for entry in archive}

    def content(name):
        begin = entries[name].offset_data
        return tar[begin : begin + entries[name].size]

    def entry(name, data):
        header = tarfile.TarInfo(name)
        header.size = len(data)
        return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)

    label = json.loads(content("point.json"))
    del label["signer"]
    begin, end = entries["disk"].offset, entries["seal.json"].offset
    body = change(label, tar[begin:end], content)
    before = entry("point.json", json.dumps(label).encode()) + body
    seal = json.dumps({"sha256": hashlib.sha256(before).hexdigest()}).encode()
    packed = before + entry("seal.json", seal) + bytes(1024)
    return subprocess.run(["zstd", "-cq"], input=packed, capture_output=True, check=True).stdout


def forged_memory(label, body, content) -> bytes:
    """Another memory of the same name."""
    # A point has an id; that of the machine it began with is in the image.
    label["point"]["id"] = f"p{secrets.token_hex(10)}"
    (base,) = (about for about in label["memory"] if about["name"] == "base")
    pages = content("memory/base")
    assert pages.count(MARK) >= 1000, "all of the memory is in it"
    forged = pages.replace(MARK, FORGED)
    del base["blake3"]
    base["sha256"] = hashlib.sha256(forged).hexdigest()
    return body.replace(pages, forged)


@needs_machines
def test_a_forged_memory_reaches_no_box_of_others(here, there, packed):
    """It says that it is the memory which others begin with, and is another."""

    def mark(box):
        assert box.root(f"for n in $(seq 1000); do echo '{MARK.decode()}'; done > /dev/shm/mark").ok
        # A server that does not know what a box began with writes all of its memory as such.
        here.stop()
        here.start()

    point, file = packed("microvm", before=mark, memory=True)
    data = unsigned(file, forged_memory)
    assert upload(there, file.read_bytes())[0] == 201
    status, forged = upload(there, data)
    assert status == 201 and forged["id"] != point["id"], forged
    wanted = [(forged, FORGED), (point, MARK), (forged, FORGED), (point, MARK)]
    boxes = []
    try:
        for of, mark in wanted:
            boxes.append(Box(there, from_point=of["id"], http_timeout=300))
            assert boxes[-1].root("head -n 1 /dev/shm/mark").out == f"{mark.decode()}\n"
    finally:
        for box in boxes:
            box.kill()
        there.request("DELETE", f"/v1/points/{forged['id']}")


@pytest.fixture
def other_engine(there, tmp_path):
    """The second machine gets other builds of runsc and QEMU."""
    real = os.environ.get("SANDKEEP_TEST_RUNSC") or shutil.which("runsc")
    other = tmp_path / "bin" / "runsc"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo "runsc version release-20991231.0";; *) exec {real} "$@";; esac\n')
    other.chmod(0o755)
    there.stop()
    there.env = {"SANDKEEP_RUNSC": str(other)}
    if MACHINES:
        # Another kernel of machines is another build.
        kernel = tmp_path / "kernel"
        shutil.copytree(os.environ["SANDKEEP_TEST_MICROVM"], kernel)
        with open(kernel / "vmlinuz", "ab") as image:
            image.write(b"other")
        there.env["SANDKEEP_MICROVM_KERNEL"] = str(kernel)
    there.start()
    yield
    there.end_boxes()
    there.stop()
    there.env = {}
    there.start()


def test_memory_of_another_engine_is_refused_in_words(there, packed, other_engine):
    point, file = packed("gvisor", memory=True)
    status, body = upload(there, file.read_bytes())
    error = body["error"]
    assert status == 400 and error["code"] == "not_enforceable", body
    assert "20991231" in error["message"] and point["engine"].split()[1] in error["message"], error
    assert "files-only" in error["hint"], error
    assert there.request("GET", f"/v1/points/{point['id']}")[0] == 404
    nothing_left(there)
    # Its files are good everywhere.
    done = cli(there, "points", "import", "--files-only", str(file))
    assert done.returncode == 0, done.stderr
    view = there.json("GET", f"/v1/points/{point['id']}")
    assert view["memory"] is False and "without its memory" in view["why_disk_only"], view
    with Box(there, from_point=point["id"], isolation="container") as box:
        assert box.exec("cat /home/user/note").out == "kept\n"


@needs_machines
def test_memory_of_another_machine_is_refused_in_words(there, packed, other_engine):
    point, file = packed("microvm", memory=True)
    # The answer comes long before all of the file is sent.
    refused = cli(there, "points", "import", str(file), text=True)
    assert refused.returncode == 1, refused
    assert f"was written by {point['engine']}, this server has qemu" in refused.stderr, refused
    assert "files-only" in refused.stderr, refused
    nothing_left(there)
    assert upload(there, file.read_bytes(), "?files_only=true")[0] == 201


@needs_machines
def test_files_of_a_machine_move_and_their_disk_grows(there, packed):
    point, file = packed("microvm", memory=False)
    assert upload(there, file.read_bytes())[0] == 201
    larger = {"limits": SMALL | {"disk_mib": 1536}}
    with Box(there, from_point=point["id"], **(small("microvm") | larger)) as box:
        assert box.root("cat /home/user/again").out == "kept\n"
        blocks, size = map(int, box.root("stat -f -c '%b %S' /").out.split())
        assert blocks * size > 1536 << 20, (blocks, size)
        # More than the smaller disk could hold.
        assert box.root("dd if=/dev/zero of=/root/more bs=1M count=900 && sync", http_timeout=300).ok


def test_files_that_are_not_whole_leave_nothing(there, packed):
    point, file = packed("gvisor", memory=True)
    whole = file.read_bytes()
    taken = 0
    for place in [9, 200, *(len(whole) * n // 10 for n in range(1, 10)), len(whole) - 9]:
        flipped = bytearray(whole)
        flipped[place] ^= 0x20
        status, body = upload(there, bytes(flipped))
        if status == 201:
            # Zstd has bits that change nothing; then what was unpacked is what was sealed.
            taken += 1
            there.json("DELETE", f"/v1/points/{point['id']}")
            continue
        assert status == 400 and body["error"]["field"] == "archive", (place, body)
    assert taken < 3, f"{taken} of 12 changed files were taken"
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        status, body = upload(there, whole[:length])
        assert status == 400 and "no whole exported point" in body["error"]["message"], (length, body)
    # A client that goes away in the middle.
    connection = http.client.HTTPConnection("127.0.0.1", there.port, timeout=60)
    connection.putrequest("POST", "/v1/points/import")
    connection.putheader("X-API-Key", there.key)
    connection.putheader("Content-Length", str(len(whole)))
    connection.endheaders()
    connection.send(whole[: len(whole) // 2])
    connection.close()
    nothing_left(there)
    assert there.request("GET", f"/v1/points/{point['id']}")[0] == 404
    assert upload(there, whole)[0] == 201


def test_what_can_not_be_exported_says_why(here, tmp_path):
    assert here.request("GET", "/v1/points/nosuchpoint/export")[0] == 404
    done = cli(here, "points", "export", "nosuchpoint", str(tmp_path / "file"))
    assert done.returncode == 1 and b"not found" in done.stderr
    assert list(tmp_path.iterdir()) == [], "no empty file stays"


def one_file(server, point_id: str) -> Path:
    files = sorted((server.state / "pool" / "points" / point_id / "memory").iterdir(), key=lambda f: -f.stat().st_size)
    return files[0]


def test_a_damaged_pause_is_refused_and_stays_a_pause(here):
    with Box(here, isolation="gvisor", timeout_seconds=1800) as box:
        assert box.root(COUNTER).ok and box.root(ASK).out == "1\n"
        known = set((here.state / "pool" / "points").iterdir())
        view = here.json("POST", box.path + "/pause", {})
        assert view["pause"]["mode"] == "disk", view
        (place,) = set((here.state / "pool" / "points").iterdir()) - known
        memory, manifest = one_file(here, place.name), place / "manifest.json"
        for file in (memory, manifest):
            whole = file.read_bytes()
            for wrong in (whole[:-1], whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :], None):
                if wrong is None:
                    file.unlink()
                else:
                    file.write_bytes(wrong)
                with pytest.raises(Refused) as refused:
                    here.json("POST", box.path + "/resume", {})
                assert refused.value.status in (404, 409), refused.value
                assert place.name in refused.value.error["message"], refused.value
                assert box.info()["state"] == "paused"
            file.write_bytes(whole)
        here.json("POST", box.path + "/resume", {})
        assert box.root(ASK).out == "2\n", "nothing was lost by trying"
        # Whoever lost the memory for good still has the files.
        assert box.root("echo kept > /root/note").ok
        known = set((here.state / "pool" / "points").iterdir())
        here.json("POST", box.path + "/pause", {})
        (place,) = set((here.state / "pool" / "points").iterdir()) - known
        one_file(here, place.name).unlink()
        here.json("POST", box.path + "/resume", {"memory": False})
        assert box.root("cat /root/note").out == "kept\n"

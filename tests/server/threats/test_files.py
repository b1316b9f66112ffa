"""threats.md 4.3: files and links, against every file route."""

import hashlib
import json
import threading
import urllib.parse
from pathlib import Path

import pytest
from boxkit import Box
from sandkeep_server import Refused

MARK = "only-on-the-host"


@pytest.fixture(scope="module")
def host_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text(MARK)
    return path


def file_url(box, path, route="files"):
    return f"{box.path}/{route}?{urllib.parse.urlencode({'path': path})}"


@pytest.mark.parametrize("shape", ["{}", "/..{}", "/../../../../..{}", "/proc/self/root{}", "/proc/1/root{}", "/tmp/../..{}", "/proc/self/cwd/../..{}"])
def test_symlink_and_dotdot_stay_in_the_box(server, shared_box, host_file, shape):
    status, _, body = server.request("GET", file_url(shared_box, shape.format(host_file)))
    assert MARK.encode() not in body
    assert status in (400, 403, 404), (status, body)


def test_a_link_points_inside_the_box(server, box, host_file):
    box.root(f"ln -s {host_file} /tmp/link; ln -s / /tmp/rootlink")
    status, _, body = server.request("GET", file_url(box, "/tmp/link"))
    assert status == 404 and MARK.encode() not in body
    box.write("/tmp/rootlink/etc/from-api", b"inside")
    assert not Path("/etc/from-api").exists()
    assert box.root("cat /etc/from-api").out == "inside"


def test_swapped_links_under_load_stay_inside(server, box, host_file):
    """A thread swaps a directory for a link while every route is used."""
    box.root("mkdir -p /tmp/real; echo inside > /tmp/real/f")
    box.root(
        f"nohup sh -c 'while :; do rm -rf /tmp/swap; mkdir /tmp/swap; rm -rf /tmp/swap; ln -s {host_file.parent} /tmp/swap; done' >/dev/null 2>&1 &"
    )
    for n in range(60):
        for method, route in (("GET", "files"), ("GET", "files/list"), ("GET", "files/stat")):
            _, _, body = server.request(method, file_url(box, f"/tmp/swap/{host_file.name}", route))
            assert MARK.encode() not in body
        server.request("PUT", file_url(box, f"/tmp/swap/out{n}"), b"x", headers={"Content-Type": "application/octet-stream"})
    assert list(host_file.parent.iterdir()) == [host_file]


@pytest.mark.parametrize("path", ["a\0b", "/tmp/" + "x" * 5000, "/tmp/" + "d/" * 3000 + "f", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_odd_paths_are_answered_with_words(server, shared_box, path):
    for route in ("files", "files/list", "files/stat"):
        status, _, body = server.request("GET", file_url(shared_box, path, route))
        assert 400 <= status < 500, (route, status, body)
        assert json.loads(body)["error"]["message"]


def test_names_that_are_no_utf8_are_listed(server, box):
    box.python(r"open(b'/tmp/\xff\xfe-name', 'w').write('x')")
    listed = server.json("GET", file_url(box, "/tmp", "files/list"))
    assert any("-name" in entry["name"] for entry in listed["entries"])


def test_special_files_do_not_hang_the_reader(server, box):
    box.root("mkfifo /tmp/fifo; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/tmp/sock')\"")
    for path in ("/tmp/fifo", "/tmp/sock", "/dev/zero", "/dev/tty", "/proc/kmsg"):
        status, _, _ = server.request("GET", file_url(box, path), timeout=20)
        assert 400 <= status < 600, path


def test_many_files_are_bounded(server, box):
    assert box.python("""
        import os
        os.makedirs('/tmp/many')
        for n in range(120_000): os.close(os.open(f'/tmp/many/{n}', os.O_CREAT | os.O_WRONLY))
    """).ok
    status, _, body = server.request("GET", file_url(box, "/tmp/many", "files/list"), timeout=60)
    assert status == 200 or json.loads(body)["error"]["message"]
    assert box.exec("echo alive").out == "alive\n"


def test_event_storms_are_bounded(server, box):
    info = server.json("GET", f"/sandboxes/{box.id}")
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": info["envdAccessToken"]}
    made = json.loads(server.request("POST", "/filesystem.Filesystem/CreateWatcher", {"path": "/tmp"}, headers=headers)[2])
    assert box.python("for n in range(60_000): open('/tmp/storm', 'w').close()").ok
    status, _, body = server.request("POST", "/filesystem.Filesystem/GetWatcherEvents", {"watcherId": made["watcherId"]}, headers=headers)
    assert status == 200
    assert len(json.loads(body)["events"]) <= 20_000
    assert box.exec("echo alive").out == "alive\n"


def signed(server, box, path, operation="read", expires=None, token=None):
    import base64

    token = token or server.json("GET", f"/sandboxes/{box.id}")["envdAccessToken"]
    text = f"{path}:{operation}::{token}" + (f":{expires}" if expires else "")
    signature = "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"path": path, "signature": signature} | ({"signature_expiration": str(expires)} if expires else {})
    return "/files?" + urllib.parse.urlencode(query)


def plain(server, method, url, headers=None):
    """Without the API key: a signed URL is all there is."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(server.url + url, method=method, headers=headers or {}, data=b"x" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_signed_url_tampering(server, make):
    box, other = make(), make()
    box.write("/tmp/a", b"A")
    other.write("/tmp/a", b"OTHER")
    url = signed(server, box, "/tmp/a")
    assert plain(server, "GET", url) == (200, b"A")
    assert plain(server, "GET", url.replace("%2Ftmp%2Fa", "%2Ftmp%2Fb"))[0] in (401, 404)
    assert plain(server, "POST", url, {"Content-Type": "application/octet-stream"})[0] in (401, 404)
    assert plain(server, "GET", signed(server, box, "/tmp/a", "write"))[0] in (401, 404)
    assert plain(server, "GET", signed(server, box, "/tmp/a", token="guess"))[0] in (401, 404)
    assert plain(server, "GET", signed(server, box, "/tmp/a", expires=1))[0] == 401
    assert plain(server, "GET", url + "&username=root")[0] in (401, 404)
    to_other = {"E2b-Sandbox-Id": other.id, "E2b-Sandbox-Port": "49983"}
    assert plain(server, "GET", url, to_other)[0] == 401
    box.kill()
    assert plain(server, "GET", url)[0] in (401, 404, 502)


def test_uploads_that_break_off_leave_nothing_hanging(server, box):
    import socket

    for n in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(
                f"PUT {file_url(box, f'/tmp/part{n}')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\n"
                "Content-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\npart".encode()
            )
    def open_files():
        return int(box.root("ls /proc/1/fd | wc -l").out)

    from boxkit import wait_for

    wait_for(lambda: open_files() < 30, "the agent closes what the clients left")


def test_reading_at_once_from_many_threads(server, box):
    box.write("/tmp/shared", b"z" * 2_000_000)
    faults = []

    def read():
        if box.read("/tmp/shared") != b"z" * 2_000_000:
            faults.append("wrong bytes")

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults


def test_what_is_not_there_is_a_typed_404(server, shared_box):
    with pytest.raises(Refused) as refused:
        shared_box.read("/no/such/file")
    assert refused.value.status == 404
    assert refused.value.error["code"] == "not_found"


def test_box_of_another_name_is_404(server):
    ghost = Box.__new__(Box)
    ghost.path = "/v1/sandboxes/i00000000000000000000"
    status, _, _ = server.request("GET", file_url(ghost, "/etc/passwd"))
    assert status == 404

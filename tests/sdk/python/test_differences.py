"""Where clients of E2B once found a difference: each test is named after what they met."""

import http.client
import json
import re
import socket
import struct
import threading
import urllib.parse
import urllib.request

import pytest
from e2b import CommandExitException, FileType, TimeoutException
from flavour import wait_for


def call(server, path):
    request = urllib.request.Request(server.url + path, headers={"X-API-KEY": server.key})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def processes(box, pattern):
    """Those whose command line matches, without the one that looks."""
    return box.commands.run(f"pgrep -cf '[{pattern[0]}]{pattern[1:]}' || true").stdout.strip()


def test_setsid_ends_with_the_code_of_its_command_and_its_whole_output(box):
    with pytest.raises(CommandExitException) as raised:
        box.commands.run("setsid sh -c 'exit 3'")
    assert raised.value.exit_code == 3
    assert box.commands.run("setsid sh -c 'echo a; sleep 0.3; echo b'").stdout == "a\nb\n"


@pytest.mark.parametrize("command", ["setsid sleep 4321", "setsid sh -c 'sleep 4321; true'; true", "(sleep 4321 &); exec setsid sleep 4321"])
def test_a_timeout_ends_what_made_a_session_of_its_own(box, command):
    with pytest.raises(TimeoutException):
        box.commands.run(command, timeout=1)
    wait_for(lambda: processes(box, "sleep 4321") == "0", f"the end of {command!r}", 10)


def test_a_kill_ends_what_made_a_session_of_its_own(box):
    handle = box.commands.run("setsid sh -c 'sleep 4322 & sleep 4322'; true", background=True)
    wait_for(lambda: processes(box, "sleep 4322") not in ("0", "1"), "the start")
    assert handle.kill()
    wait_for(lambda: processes(box, "sleep 4322") == "0", "the end", 10)


def test_get_host_names_this_server_and_leads_to_the_port(server, sdk, box):
    """Without a domain in the answer the SDK takes a public one, and sends there what is meant for the sandbox."""
    box.commands.run("mkdir -p /tmp/www && echo here > /tmp/www/index.html")
    box.commands.run("python3 -m http.server 8000 -d /tmp/www", background=True)
    for found in (box, sdk.Sandbox.connect(box.sandbox_id)):
        host = found.get_host(8000)
        assert host == f"8000-{box.sandbox_id}.localhost:{server.port}"

        def ask(host=host):
            connection = http.client.HTTPConnection("127.0.0.1", int(host.rsplit(":")[-1]), timeout=20)
            connection.request("GET", "/", headers={"Host": host})
            answer = connection.getresponse()
            return answer.status == 200 and answer.read()

        assert wait_for(ask, "the program on the port") == b"here\n"


def test_started_after_includes_the_very_moment(server, box):
    # Every generation writes it into the query like this.
    started = call(server, f"/sandboxes/{box.sandbox_id}")["startedAt"]
    listed = call(server, "/v2/sandboxes?startedAfter=" + urllib.parse.quote(started))
    assert box.sandbox_id in [one["sandboxID"] for one in listed]


def test_an_empty_directory_has_a_size(box):
    box.files.make_dir("/home/user/empty")
    assert box.files.get_info("/home/user/empty").size == 4096
    entry = next(entry for entry in box.files.list("/home/user") if entry.name == "empty")
    assert entry.size == 4096


def test_links_that_lead_nowhere_are_listed(box):
    box.commands.run("mkdir /tmp/l && cd /tmp/l && ln -s gone dangling && ln -s loop loop && touch f && ln -s f fine")
    entries = {entry.name: entry for entry in box.files.list("/tmp/l")}
    assert sorted(entries) == ["dangling", "f", "fine", "loop"]
    assert entries["dangling"].type == entries["loop"].type == FileType.SYMLINK
    assert entries["dangling"].symlink_target == "/tmp/l/gone"
    # One that leads somewhere is described by that, in every generation.
    assert entries["fine"].type == FileType.FILE


def test_lines_of_the_log_are_json_with_a_level_and_nothing_fails_in_a_fresh_sandbox(server, box):
    box.commands.run("true")
    lines = [json.loads(entry["line"]) for entry in call(server, f"/sandboxes/{box.sandbox_id}/logs")["logs"]]
    assert lines
    for line in lines:
        assert line["level"] in ("info", "warn", "error") and line["logger"] and line["message"]
    assert not [line for line in lines if line["level"] != "info"]


def test_a_sandbox_that_is_killed_under_a_command_is_told_as_such(make):
    box = make()
    handle = box.commands.run("echo ready; sleep 60", background=True)
    failed = []

    def wait():
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 what it is, is the question
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: box.commands.list(), "the command")
    box.kill()
    thread.join(60)
    assert len(failed) == 1
    assert re.search("killed|end of life|not found|not running", str(failed[0])), failed
    assert "sandbox timeout" not in str(failed[0]) or "end of life" in str(failed[0]), failed


def start_request(command):
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}, "stdin": False}).encode()
    return struct.pack(">BI", 0, len(message)) + message


def test_a_stream_that_is_cut_is_reset_and_what_was_written_arrives(server, make):
    """A connection that is closed in the middle of an answer passes for one that came to its end."""
    box = make()
    token = box._envd_access_token
    body = start_request("head -c 300000 /dev/zero; echo written; sleep 60")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = (
            f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\nE2b-Sandbox-Port: 49983\r\n"
            f"X-Access-Token: {token}\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        wait_for(lambda: "sleep 60" in box.commands.run("ps -eo args").stdout, "the command")
        box.kill()
        read = b""
        with pytest.raises(ConnectionResetError):
            while part := connection.recv(65536):
                read += part
    # 300 000 zeros in base64, and the word after them.
    assert read.startswith(b"HTTP/1.1 200") and len(read) > 400_000


ECHO = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = (self.headers["Host"] + " " + self.headers["X-Forwarded-Host"]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(said))); self.end_headers(); self.wfile.write(said)
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""


def test_a_program_is_asked_by_the_masked_host(server, make):
    for network, told in (({}, "{host}"), ({"mask_request_host": "localhost:${PORT}"}, "localhost:8000")):
        box = make(network=network)
        box.files.write("/tmp/echo.py", ECHO)
        box.commands.run("python3 /tmp/echo.py", background=True)
        host = box.get_host(8000)

        def ask(host=host):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request("GET", "/", headers={"Host": host})
            answer = connection.getresponse()
            return answer.status == 200 and answer.read().decode()

        assert wait_for(ask, "the program") == f"{told.format(host=host)} {host}"
        shown = call(server, f"/sandboxes/{box.sandbox_id}")["network"]
        assert shown.get("maskRequestHost") == network.get("mask_request_host")
        assert shown["allowPublicTraffic"] is True


def test_mcp_is_taken_and_the_client_looks_for_its_gateway(sdk):
    """The base template has none, which is what the client says then."""
    with pytest.raises(Exception, match="Failed to start MCP gateway"):
        sdk.Sandbox.create("base", mcp={"time": {}}, timeout=60)

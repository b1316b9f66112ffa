"""threats.md 4.5: one box uses up what it can; the host and the others go on."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from boxkit import Box, raw, wait_for
from sandkeep_server import Refused


def memory_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_fork_bomb_is_held_and_the_neighbour_answers(make):
    bomb = make(limits={"pids": 64})
    neighbour = make()
    bomb.exec("nohup bash -c ':(){ :|:& };:' >/dev/null 2>&1 & true")
    for _ in range(10):
        assert neighbour.exec("echo fine").out == "fine\n"
    pids = int(bomb.info()["usage"]["pids"])
    assert pids <= 64
    bomb.kill()
    assert neighbour.exec("echo fine").out == "fine\n"


def test_memory_hog_dies_alone_and_it_is_told(server, make):
    hog = make(limits={"memory_mib": 96})
    neighbour = make()
    ran = hog.exec(["python3", "-c", "x = bytearray(400_000_000); print('SURVIVED')"])
    assert not ran.ok and "SURVIVED" not in ran.out
    assert hog.exec("echo agent-lives").out == "agent-lives\n"
    assert neighbour.exec("echo fine").out == "fine\n"
    wait_for(lambda: hog.info()["oom_kills"] >= 1, "the API counts the kill")
    events = server.json("GET", f"/v1/events?format=json&sandbox_id={hog.id}")["events"]
    assert any(event["event"] == "out_of_memory" for event in events)


def test_memory_by_files_in_tmpfs_is_counted(make):
    hog = make(limits={"memory_mib": 64})
    ran = hog.root("head -c 300000000 /dev/zero > /dev/shm/fill || head -c 300000000 /dev/zero > /run/fill")
    assert not ran.ok
    assert hog.exec("echo agent-lives").out == "agent-lives\n"


@pytest.mark.parametrize("path", ["/home/user", "/tmp", "/var/log", "/root", "/opt", "/var/tmp"])
def test_disk_filler_stops_at_the_quota(make, path):
    box = make(limits={"disk_mib": 48})
    ran = box.root(f"head -c 200000000 /dev/urandom > {path}/fill; sync; stat -c %s {path}/fill")
    assert int(ran.out.split()[-1]) <= 56 * 1024 * 1024
    assert "quota" in ran.err.lower() or "space" in ran.err.lower()
    box.root(f"rm {path}/fill; sync")
    assert box.exec("echo x > /tmp/after && cat /tmp/after").ok


def test_disk_filler_through_the_api_is_told_507(server, make):
    box = make(limits={"disk_mib": 32})
    status, _, body = server.request(
        "PUT", f"{box.path}/files?path=/tmp/fill", b"z" * 80_000_000, headers={"Content-Type": "application/octet-stream"}
    )
    assert status == 507, body
    assert json.loads(body)["error"]["code"] == "disk_full"


def test_inode_filler_hurts_only_itself(make):
    box = make(limits={"disk_mib": 32})
    ran = box.python("""
        import os
        try:
            for n in range(2_000_000): os.close(os.open(f'/tmp/{n}', os.O_CREAT))
        except OSError as error:
            print('stopped', error.errno)
    """)
    assert "stopped" in ran.out or not ran.ok
    with contextlib.suppress(Refused):
        box.kill()


def test_descriptors_in_the_box_end_at_the_limit(make):
    box = make(limits={"open_files": 256})
    ran = box.exec(["python3", "-c", "import os\ntry:\n  [os.dup(0) for _ in range(1000)]\nexcept OSError as e: print(e.errno)"])
    assert ran.out.strip() == "24", ran


def test_output_flood_with_a_slow_reader_is_bounded(server, box):
    info = server.json("GET", f"/sandboxes/{box.id}")
    message = json.dumps({"process": {"cmd": "/usr/bin/yes", "args": ["x" * 200]}, "stdin": False}).encode()
    frame = b"\0" + len(message).to_bytes(4, "big") + message
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(
            (f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.id}\r\nE2b-Sandbox-Port: 49983\r\n"
             f"X-Access-Token: {info['envdAccessToken']}\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n"
             f"Content-Length: {len(frame)}\r\n\r\n").encode() + frame
        )
        slow.recv(1000)
        before = memory_of(server.pid)
        time.sleep(3)
        assert memory_of(server.pid) - before < 64 * 1024 * 1024
        agent = int(box.root("grep VmRSS /proc/1/status").out.split()[1]) * 1024
        assert agent < 64 * 1024 * 1024
        assert box.exec("echo alive").out == "alive\n"


def test_exec_output_is_cut_and_said(box):
    ran = box.exec("head -c 20000000 /dev/zero | tr '\\0' x")
    assert ran.ok
    assert len(ran.out) < 20_000_000
    assert ran.answer["stdout_truncated"] is True


def test_slowloris_does_not_stop_the_rest(server):
    slow = []
    try:
        for _ in range(500):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            slow.append(connection)
        for _ in range(20):
            assert server.request("GET", "/v1/health", timeout=60)[0] == 200
    finally:
        for connection in slow:
            connection.close()


def test_ten_thousand_idle_connections_do_not_hurt(server, shared_box):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000
    if hard < wanted + 500:
        pytest.fail(f"this needs {wanted + 500} open files; the hard limit here is {hard}: raise it with `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idle = []
    try:
        before = memory_of(server.pid)
        for n in range(wanted):
            connection = socket.socket()
            # Many source addresses: one has not enough free ports on every host.
            connection.bind((f"127.0.0.{1 + n % 50}", 0))
            connection.connect(("127.0.0.1", server.port))
            idle.append(connection)
        assert server.request("GET", "/v1/health", timeout=60)[0] == 200
        assert shared_box.exec("echo fine").out == "fine\n"
        assert memory_of(server.pid) - before < 400 * 1024 * 1024
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 500, "the server closes them too", limit=30)


@pytest.mark.parametrize("size,fine", [(1000, True), (200_000, False)])
def test_huge_headers(server, size, fine):
    got = raw(server, b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Big: " + b"a" * size + b"\r\n\r\n")
    status = int(got.split()[1]) if got else 0
    assert (status == 200) is fine, got[:200]


def test_huge_bodies_are_refused_with_the_limit(server):
    body = json.dumps({"template": "base", "metadata": {"x": "y" * 3_000_000}}).encode()
    status, _, answer = server.request("POST", "/v1/sandboxes", body)
    assert status == 413
    assert any(character.isdigit() for character in json.loads(answer)["error"]["message"])


def test_huge_frames_to_the_agent(server, box):
    info = server.json("GET", f"/sandboxes/{box.id}")
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "49983", "X-Access-Token": info["envdAccessToken"],
               "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    status, _, body = server.request("POST", "/process.Process/Start", b"\0\xff\xff\xff\xff{", headers=headers)
    assert status == 200 and b"error" in body
    assert box.exec("echo alive").out == "alive\n"


def test_a_storm_of_creates_is_fair(server):
    made, refused, faults = [], [], []

    def create():
        try:
            made.append(Box(server, timeout_seconds=120))
        except Refused as error:
            (refused if error.error.get("retryable") else faults).append(error)
        except Exception as error:  # noqa: BLE001
            faults.append(error)

    threads = [threading.Thread(target=create) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    try:
        assert not faults
        assert len(made) + len(refused) == 60
        assert len(made) >= 30
        for box in made[:5]:
            assert box.exec("echo up").out == "up\n"
    finally:
        for box in made:
            box.kill()


def test_vanished_clients_leave_no_process(server, box):
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = json.dumps({"cmd": "sleep 4444"}).encode()
            connection.sendall(
                f"POST {box.path}/exec HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
            time.sleep(0.05)
    wait_for(lambda: "sleep 4444" not in box.root("ps ax -o args | grep -v grep").out, "commands of vanished clients end")


def test_cpu_hog_is_held(make):
    box = make(limits={"cpu_millis": 200})
    ran = box.exec(["python3", "-c", "import time\nend=time.time()+2\nwhile time.time()<end: pass\nprint(time.process_time())"])
    assert float(ran.out) < 1.2

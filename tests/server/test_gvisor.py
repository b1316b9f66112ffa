"""The gVisor level through the server: the same box, on another kernel."""

import os
import platform
import shutil

import pytest
from boxkit import ASK_COUNTER, Box, start_counter, wait_for
from sandkeep_server import Refused

pytestmark = pytest.mark.skipif(
    shutil.which("runsc") is None and "SANDKEEP_TEST_GVISOR" not in os.environ,
    reason="runsc is not installed; script/test installs it",
)

# Every refusal is immediate; only a hang runs into this.
CURL = ["curl", "-sS", "--max-time", "60"]
HANGS = 28


@pytest.fixture
def gvisor(server):
    with Box(server, isolation="gvisor") as box:
        yield box


def test_a_box_on_another_kernel(gvisor):
    assert gvisor.made["isolation"] == "gvisor"
    # Releases pretend to be different kernels; none is the host's.
    assert gvisor.root(["uname", "-r"]).out.strip() != platform.release()
    assert "gVisor" in gvisor.root("dmesg").out
    ran = gvisor.exec("id -un; echo $0; cd; echo kept > file; cat file", cwd="/")
    assert ran.ok and ran.out.startswith("user\n") and ran.out.endswith("kept\n"), ran
    gvisor.write("/home/user/note", b"from outside")
    assert gvisor.exec(["cat", "/home/user/note"]).out == "from outside"
    gvisor.exec("echo inside > /home/user/told")
    assert gvisor.read("/home/user/told") == b"inside\n"


def test_nothing_of_the_host_is_in_it(gvisor):
    ran = gvisor.root("cat /proc/1/cmdline | tr '\\0' ' '; ls /dev | tr '\\n' ' '")
    assert ran.out.startswith("sandkeep-agent --network"), ran
    assert "kvm" not in ran.out and "sda" not in ran.out and "vda" not in ran.out
    # The agent's door is shut for everybody in the box, root included.
    ran = gvisor.python("""
        import socket
        for host in ("127.0.0.1", "10.0.0.2"):
            door = socket.create_connection((host, 61612), 30)
            door.settimeout(30)
            door.sendall(b"x" * 64 + b"\\nGET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            try:
                print(door.recv(100))
            except ConnectionError:
                print(b"")
    """)
    assert ran.out == "b''\nb''\n", ran
    # Nor does a process have what the agent has.
    caps = gvisor.root("grep CapBnd /proc/self/status").out.split()[-1]
    assert int(caps, 16) & (1 << 21 | 1 << 13 | 1 << 12 | 1 << 19) == 0, caps


def test_the_default_is_not_gvisor(server):
    with Box(server) as box:
        assert box.made["isolation"] == "container", "sudo must work where nobody asked"


def test_boxes_are_found_again_after_a_kill(server, gvisor):
    assert gvisor.root("echo here > /run/note").ok
    server.kill_hard()
    server.start()
    assert gvisor.root("cat /run/note").out == "here\n"
    assert gvisor.info()["state"] == "running"


def test_a_box_without_memory_ends_and_says_why(server):
    with Box(server, isolation="gvisor", limits={"memory_mib": 128}) as box:
        try:
            box.exec("tail /dev/zero", http_timeout=120)
        except (Refused, OSError):
            pass

        def gone():
            try:
                return box.info()["state"] in ("gone", "stopping")
            except Refused as refused:
                return refused.status == 404

        wait_for(gone, "the box is gone", 60)


def test_memory_and_processes_live_through_a_pause_and_in_forks(server, gvisor):
    start_counter(gvisor)
    paused = server.json("POST", gvisor.path + "/pause", {})
    assert paused["state"] == "paused", paused
    server.kill_hard()
    server.start()
    server.json("POST", gvisor.path + "/resume", {})
    assert gvisor.root(ASK_COUNTER).out == "2", "the same process, with its memory"
    forks = server.json("POST", gvisor.path + "/fork", {"count": 2})["forks"]
    names = {gvisor.root(["hostname"]).out}
    try:
        for fork in forks:
            box = Box.known(server, fork["sandbox"]["id"])
            assert box.root(ASK_COUNTER).out == "3", "each goes on by itself"
            names.add(box.root(["hostname"]).out)
    finally:
        for fork in forks:
            Box.known(server, fork["sandbox"]["id"]).kill()
    assert len(names) == 3, names
    assert gvisor.root(ASK_COUNTER).out == "3"


def test_a_state_that_runsc_refuses_is_a_typed_error_that_names_the_path(server, gvisor):
    """A deleted pipe that is still open on the disk cannot be written. The sandbox is not touched."""
    held = gvisor.root(
        "mkfifo /root/deleted; nohup sh -c 'exec 3<> /root/deleted; rm /root/deleted; echo yes > /run/held; exec sleep 1000'"
        " >/dev/null 2>&1 & until [ -s /run/held ]; do sleep 0.1; done; pgrep sleep"
    ).out
    for call, body in (("points", {"memory": True}), ("fork", {"count": 1})):
        try:
            answer = server.json("POST", f"{gvisor.path}/{call}", body, timeout=120)
        except Refused as refused:
            assert refused.status in (400, 409, 422, 501) and refused.error["code"], refused
            assert "/root/deleted" in refused.error["message"], refused
        else:
            # A fork begins without memory then.
            assert call == "fork", answer
            for fork in answer["forks"]:
                copy = Box.known(server, fork["sandbox"]["id"])
                assert not copy.root("pgrep sleep").ok
                copy.kill()
        assert gvisor.info()["state"] == "running" and gvisor.root("pgrep sleep").out == held
    point = server.json("POST", gvisor.path + "/points", {})
    assert not point["memory"] and "/root/deleted" in point["why_disk_only"], point
    server.json("DELETE", f"/v1/points/{point['id']}")
    rest = server.json("POST", gvisor.path + "/pause", {}, timeout=120)["pause"]
    assert rest["mode"] == "ram" and "/root/deleted" in rest["why"], rest
    server.json("POST", gvisor.path + "/resume", {})
    assert gvisor.root("pgrep sleep").out == held
    # What is in the way can be put away.
    assert gvisor.root("pkill sleep").ok
    assert server.json("POST", gvisor.path + "/pause", {}, timeout=120)["pause"]["mode"] == "disk"
    server.json("POST", gvisor.path + "/resume", {})
    assert gvisor.root("echo up").out == "up\n"


def test_the_moat_is_around_it(moated, outside):
    allow = {"allow": [f"good.sandkeep.test:{outside.web.port}"]}
    with Box(moated, isolation="gvisor", network=allow) as box:
        reached = box.exec([*CURL, outside.url()])
        assert reached.out == "hello from outside\n", reached
        for url in (outside.url("other.sandkeep.test"), "http://198.51.100.7/"):
            ran = box.exec([*CURL, url])
            assert "hello" not in ran.out and ran.code != HANGS, ran
        # What is neither TCP nor DNS is refused at once.
        ran = box.python("""
            import socket
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.settimeout(60)
            udp.connect(("198.51.100.7", 443))
            try:
                udp.send(b"QUIC")
                udp.recv(9)
            except TimeoutError:
                print("hangs")
            except OSError as error:
                print(type(error).__name__)
        """)
        assert ran.ok and ran.out.strip() not in ("", "hangs"), ran
        denied = moated.json("GET", f"{box.path}/network/denials")
        assert "other.sandkeep.test" in str(denied), denied

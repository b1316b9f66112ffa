"""The microVM level through the server: the same box, in a machine of its own."""

import os
import shutil

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)

# Every refusal is immediate; only a hang runs into this.
CURL = ["curl", "-sS", "--max-time", "60"]
HANGS = 28
# The smallest machine there is: emulated, every vCPU and page costs.
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
COUNTER = """
import http.server
count = 0
class Count(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(count).encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 8077), Count).serve_forever()
"""
ASK = "curl -sS --retry 60 --retry-delay 1 --retry-connrefused --max-time 60 http://127.0.0.1:8077/"
FORKS = 2


def machine(server, **request):
    return Box(server, isolation="microvm", limits=SMALL, **request)


@pytest.fixture(scope="module")
def microvm(server):
    # The first one makes the disk of the template and boots the machine.
    with machine(server) as box:
        yield box


def test_a_box_in_a_machine_of_its_own(server, microvm):
    assert microvm.made["isolation"] == "microvm"
    assert microvm.root(["uname", "-r"]).out.strip() != os.uname().release
    ran = microvm.exec("id -un; cd; echo kept > file; cat file; sudo -n id -un", cwd="/")
    assert ran.ok and ran.out == "user\nkept\nroot\n", ran
    microvm.write("/home/user/note", b"from outside")
    assert microvm.exec(["cat", "/home/user/note"]).out == "from outside"
    microvm.exec("echo inside > /home/user/told")
    assert microvm.read("/home/user/told") == b"inside\n"
    # Root of the machine may do what root may, and the host's disks are not there.
    ran = microvm.root("mount -t tmpfs none /mnt && umount /mnt && ls /sys/block; cat /proc/1/comm")
    assert ran.out == "vda\ninit\n", ran
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    checks = {check["name"]: check for check in levels["microvm"]["checks"]}
    assert checks["acceleration"]["found"].startswith(("kvm", "emulated")), checks


def test_nobody_gets_an_emulated_machine_who_did_not_ask(server):
    with Box(server) as box:
        real = any(flag in open("/proc/cpuinfo").read() for flag in (" vmx", " svm"))
        assert box.made["isolation"] == ("microvm" if real else "container")


def test_files_points_and_levels_do_not_mix(server, microvm):
    point = server.json("POST", microvm.path + "/points", {"memory": False})
    with pytest.raises(Refused) as refused:
        Box(server, isolation="container", from_point=point["id"])
    assert "microvm" in str(refused.value), refused.value


def test_memory_lives_through_pauses_kills_forks_and_rollbacks(server, microvm):
    microvm.write("/root/counter.py", COUNTER.encode(), user="root")
    assert microvm.root("nohup python3 /root/counter.py >/dev/null 2>&1 &").ok
    assert microvm.root(ASK).out == "1"
    server.kill_hard()
    server.start()
    assert microvm.root(ASK).out == "2", "the machine went on without a server"
    paused = server.json("POST", microvm.path + "/pause", {}, timeout=300)
    assert paused["state"] == "paused", paused
    server.kill_hard()
    server.start()
    server.json("POST", microvm.path + "/resume", {}, timeout=300)
    assert microvm.root(ASK).out == "3", "the same process, with its memory"

    forks = server.json("POST", microvm.path + "/fork", {"count": FORKS}, timeout=300)["forks"]
    seen = [microvm]
    try:
        seen += [Box.known(server, fork["sandbox"]["id"]) for fork in forks]
        assert [box.root(ASK).out for box in seen] == ["4"] * len(seen), "each goes on by itself"
        # Copies are the same in nothing that must differ.
        for what in (
            "hostname",
            "cat /etc/machine-id",
            "head -c 16 /dev/urandom | od -An -tx1",
            "cat /proc/sys/kernel/random/uuid",
        ):
            answers = [box.root(what).out for box in seen]
            assert len(set(answers)) == len(seen), (what, answers)
    finally:
        for box in seen[1:]:
            box.kill()


def test_rollback_takes_memory_and_files_back(server, microvm):
    assert microvm.root("echo before > /root/when; echo before > /run/when; sync").ok
    point = server.json("POST", microvm.path + "/points", {"memory": True}, timeout=300)
    assert microvm.root("echo after > /root/when; echo after > /run/when").ok
    server.json("POST", microvm.path + "/rollback", {"to": point["id"]}, timeout=300)
    assert microvm.root("cat /root/when /run/when").out == "before\nbefore\n"


def test_a_box_that_powers_off_is_gone(server):
    with machine(server) as box:
        try:
            box.root("echo o > /proc/sysrq-trigger; sleep 60", http_timeout=60)
        except (Refused, OSError):
            pass

        def gone():
            try:
                return box.info()["state"] in ("gone", "stopping")
            except Refused as refused:
                return refused.status == 404

        wait_for(gone, "the box is gone", 60)


def test_the_moat_is_around_it(moated, outside):
    allow = {"allow": [f"good.sandkeep.test:{outside.web.port}"]}
    with machine(moated, network=allow) as box:
        reached = box.exec([*CURL, outside.url()])
        assert reached.out == "hello from outside\n", reached
        for url in (outside.url("other.sandkeep.test"), "http://198.51.100.7/"):
            ran = box.exec([*CURL, url])
            assert "hello" not in ran.out and ran.code != HANGS, ran
        # Root of a machine can send what it likes: none of it arrives anywhere.
        ran = box.python("""
            import socket
            raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
            raw.settimeout(5)
            raw.sendto(b"\\x08\\0\\xf7\\xff\\0\\0\\0\\0", ("198.51.100.7", 1))
            try:
                print(raw.recv(9) and "answered")
            except OSError:
                print("nothing")
        """)
        assert ran.out in ("nothing\n", "answered\n"), ran
        denied = moated.json("GET", f"{box.path}/network/denials")
        assert "other.sandkeep.test" in str(denied), denied

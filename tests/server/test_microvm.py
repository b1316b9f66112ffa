"""The microVM level through the server: the same box, in a machine of its own."""

import os
import secrets
import shutil
import subprocess

import pytest
from boxkit import ASK_COUNTER, COUNTER_PORT, Box, start_counter, wait_for
from identitykit import checked, token
from sandkeep_server import Refused, binary
from servers import in_place_of
from test_cli import Terminal
from test_template_build import told, warmed

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)

# Every refusal is immediate; only a hang runs into this.
CURL = ["curl", "-sS", "--max-time", "60"]
HANGS = 28
# The smallest machine there is: emulated, every vCPU and page costs.
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}
FORKS = 2


def machine(server, **request):
    request.setdefault("timeout_seconds", 1800)
    # The first of a shape waits for a machine to be booted.
    request.setdefault("http_timeout", 300)
    return Box(server, isolation="microvm", limits=SMALL | request.pop("limits", {}), **request)


def cli(server, *words):
    env = {**os.environ, **server.cli_env()}
    return subprocess.run([binary(), *words], env=env, capture_output=True, text=True, timeout=300)


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
    ran = microvm.root("mount -t tmpfs none /mnt && umount /mnt && ls /sys/block | grep -v loop; cat /proc/1/comm")
    assert ran.out == "vda\ninit\n", ran
    # What runs it is said, of this box and of the host.
    acceleration = microvm.info()["acceleration"]
    shown = cli(server, "inspect", microvm.id)
    assert acceleration in ("kvm", "emulated"), acceleration
    assert f"acceleration       {acceleration}\n" in shown.stdout, shown
    levels = {level["level"]: level for level in server.json("GET", "/v1/host")["levels"]}
    checks = {check["name"]: check for check in levels["microvm"]["checks"]}
    assert checks["acceleration"]["found"].startswith(acceleration), checks


def test_as_much_environment_as_is_allowed_is_there_from_the_first_command_on(server, microvm):
    """It travels with the first order, over a serial port; the worst of it takes six bytes for one."""
    much = {"SHORT": "here", "LONG": "\x01" * 65_000}
    with machine(server, env=much) as box:
        ran = box.exec(["python3", "-c", "import os; print(os.environ['SHORT'], len(os.environ['LONG']))"])
        assert ran.out == "here 65000\n", ran
        server.json("POST", box.path + "/pause", {})
        server.json("POST", box.path + "/resume", {})
        assert box.exec("echo $SHORT ${#LONG} $(hostname)").out == f"here 65000 {box.id}\n"


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
    start_counter(microvm)
    server.kill_hard()
    server.start()
    assert microvm.root(ASK_COUNTER).out == "2", "the machine went on without a server"
    paused = server.json("POST", microvm.path + "/pause", {}, timeout=300)
    assert paused["state"] == "paused", paused
    server.kill_hard()
    server.start()
    server.json("POST", microvm.path + "/resume", {}, timeout=300)
    assert microvm.root(ASK_COUNTER).out == "3", "the same process, with its memory"

    # An ssh server proves by these which machine it is.
    assert microvm.root("mkdir -p /etc/ssh && ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key").ok
    forks = server.json("POST", microvm.path + "/fork", {"count": FORKS}, timeout=300)["forks"]
    seen = [microvm]
    try:
        seen += [Box.known(server, fork["sandbox"]["id"]) for fork in forks]
        assert [box.root(ASK_COUNTER).out for box in seen] == ["4"] * len(seen), "each goes on by itself"
        # Copies are the same in nothing that must differ.
        for what in (
            "hostname",
            "cat /etc/machine-id",
            "head -c 16 /dev/urandom | od -An -tx1",
            "cat /proc/sys/kernel/random/uuid",
        ):
            answers = [box.root(what).out for box in seen]
            assert len(set(answers)) == len(seen), (what, answers)
        subjects = {checked(server, token(box))["sub"] for box in seen}
        assert len(subjects) == len(seen), subjects
        key = "cat /etc/ssh/ssh_host_ed25519_key.pub"
        for box in seen:
            wait_for(lambda: box.root(key).ok, "it has a key again", 120)
        answers = [box.root(key).out for box in seen]
        assert len(set(answers)) == len(seen), answers
    finally:
        for box in seen[1:]:
            box.kill()


def test_rollback_takes_memory_and_files_back(server, microvm):
    assert microvm.root("echo before > /root/when; echo before > /run/when; sync").ok
    point = server.json("POST", microvm.path + "/points", {"memory": True}, timeout=300)
    assert microvm.root("echo after > /root/when; echo after > /run/when").ok
    server.json("POST", microvm.path + "/rollback", {"to": point["id"]}, timeout=300)
    assert microvm.root("cat /root/when /run/when").out == "before\nbefore\n"


def test_memory_that_was_freed_goes_back_and_the_rest_stays(server):
    with machine(server, limits={"memory_mib": 400}) as box:

        def used():
            return box.info()["usage"]["memory_bytes"] >> 20

        look = "sha256sum /dev/shm/kept"
        kept = box.root(f"head -c 16M /dev/urandom > /dev/shm/kept; {look}").out
        assert box.root("head -c 200M /dev/urandom > /dev/shm/taken").ok
        full = wait_for(lambda: max(used() - 200, 0), "it is seen") + 200
        assert box.root("rm /dev/shm/taken").ok
        wait_for(lambda: used() < full - 120, "it goes back", 180)
        assert box.root(look).out == kept
        # What was given back is in no image, what was not is.
        server.json("POST", box.path + "/pause", {}, timeout=300)
        server.json("POST", box.path + "/resume", {}, timeout=300)
        assert box.root(look).out == kept
        (fork,) = server.json("POST", box.path + "/fork", {"count": 1}, timeout=300)["forks"]
        copy = Box.known(server, fork["sandbox"]["id"])
        try:
            assert copy.root(look).out == kept
            assert copy.root("head -c 200M /dev/zero | sha256sum > /dev/null; rm /dev/shm/kept").ok
            assert box.root(look).out == kept
        finally:
            copy.kill()


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


def test_points_are_compared_by_the_files_in_them(server, microvm):
    microvm.root("mkdir -p /srv/work; echo one > /srv/work/file; echo gone > /srv/work/old")
    # Nobody synced: the kernel of the machine may keep all of this back.
    before = server.json("POST", microvm.path + "/points", {"memory": False}, timeout=300)["id"]
    microvm.root("cd /srv/work; echo two > file; rm old; mkdir new; seq 20000 > new/numbers")
    after = server.json("POST", microvm.path + "/points", {"memory": True}, timeout=300)["id"]
    diff = server.json("GET", f"/v1/points/{before}/diff/{after}?text=true", timeout=300)
    changes = {change["path"]: change for change in diff["changes"]}
    told = {path: (change["kind"], change["bytes_before"], change["bytes_after"]) for path, change in changes.items()}
    assert told.items() >= {
        "/srv/work/file": ("changed", 4, 4),
        "/srv/work/old": ("removed", 5, None),
        "/srv/work/new": ("added", None, 0),
        "/srv/work/new/numbers": ("added", None, 108894),
    }.items(), told
    assert "-one\n+two\n" in changes["/srv/work/file"]["text"], changes
    assert len(changes) < 20, "nothing else was touched"
    assert "~ /srv/work/file" in cli(server, "diff", before, after).stdout


def test_a_disk_that_its_box_destroyed_is_refused_in_words(server):
    with machine(server) as box:
        before = server.json("POST", box.path + "/points", {"memory": False}, timeout=300)["id"]
        box.root("dd if=/dev/urandom of=/dev/vda bs=1M count=64 conv=notrunc oflag=direct 2>/dev/null")
        after = server.json("POST", box.path + "/points", {"memory": True}, timeout=300)["id"]
        with pytest.raises(Refused) as refused:
            server.json("GET", f"/v1/points/{before}/diff/{after}", timeout=300)
        assert refused.value.status == 409 and "can not be read" in str(refused.value), refused.value
        for point in (before, after):
            server.json("DELETE", f"/v1/points/{point}")


def test_a_terminal_in_a_machine(server, microvm):
    terminal = Terminal(server, "shell", microvm.id)
    terminal.resize(33, 77)
    terminal.type("until [ \"$(stty size)\" = '33 77' ]; do sleep 0.5; done; echo resized-$((1+1))\n")
    terminal.expect("resized-2", 120)
    terminal.type("sleep 600\n")
    wait_for(lambda: microvm.exec(["pgrep", "-fx", "sleep 600"]).ok, "the shell runs it")
    terminal.type("\x03")
    terminal.type("echo after-$((1+1)); exit 5\n")
    terminal.expect("after-2")
    assert terminal.end() == 5


def test_limits_hold_and_are_told(server, microvm):
    # The disk: what is not there can not be had, and the box goes on.
    ran = microvm.root("fallocate -l 2G /root/huge; echo $?; rm -f /root/huge; echo fine > /root/small && cat /root/small")
    assert ran.out == "1\nfine\n" and "No space" in ran.err, ran
    # The memory: who wants too much dies, and nobody else.
    before = microvm.info()["oom_kills"]
    ran = microvm.python("b'x' * (400 << 20)")
    assert not ran.ok and "MemoryError" not in ran.err, ran
    assert microvm.root("echo alive").out == "alive\n"
    wait_for(lambda: microvm.info()["oom_kills"] > before, "it is told", 60)
    usage = microvm.info()["usage"]
    assert usage["memory_bytes"] > 1 << 20 and usage["cpu_usec"] > 0 and usage["pids"] > 0, usage
    samples = server.json("GET", microvm.path + "/metrics")["samples"]
    assert samples and samples[-1]["memory_used"] > 1 << 20, samples
    assert microvm.root(["nproc"]).out == "1\n"


def test_the_worst_is_undone(server):
    """With automatic points: before a command that looks like it, one is made."""
    with machine(server, auto_points={"before_matching": ["risky"]}) as box:
        assert box.root("echo precious > /home/user/work").ok
        try:
            box.root("rm -rf --no-preserve-root / 2>/dev/null; true", http_timeout=600, timeout_ms=500_000)
        except Refused:
            pass
        made = server.json("GET", box.path + "/points")["points"]
        assert [point["kind"] for point in made] == ["auto"], made
        view = server.json("POST", box.path + "/rollback", {"to": made[0]["id"]}, timeout=300)
        assert view["id"] == box.id and view["state"] == "running", view
        assert box.exec("cat /home/user/work").out == "precious\n"


def test_nobody_wants_it_so_it_rests_and_wakes_for_whoever_calls(server):
    with machine(server, timeout_seconds=None, idle_seconds=1, auto_resume=True) as box:
        start_counter(box)
        to_port = box.port_headers(COUNTER_PORT)
        for ask in ("api", "port"):
            wait_for(lambda: server.json("GET", "/v1/sandboxes?state=paused")["sandboxes"], "it rests", 180)
            if ask == "api":
                assert box.root(ASK_COUNTER, http_timeout=300).out == "2"
            else:
                headers = {**to_port, "X-API-Key": ""}
                status, _, body = server.request("GET", "/", headers=headers, timeout=300)
                assert (status, body) == (200, b"3"), (status, body)


def test_as_many_processors_as_were_asked_for(server):
    with in_place_of(server, "--pool-size", "0", "--max-cpu-millis", "16000") as own:
        with machine(own, limits={"cpu_millis": 4000}) as box:
            assert box.root(["nproc"]).out == "4\n"
        with pytest.raises(Refused) as refused:
            machine(own, limits={"cpu_millis": 9000})
        assert refused.value.error["field"] == "limits.cpu_millis" and "at most 8" in str(refused.value), refused.value


def test_a_template_is_warmed_in_a_machine(server):
    name = "warm-vm-" + secrets.token_hex(4)
    try:
        made = warmed(server, name, isolation=["microvm"], limits=SMALL).ended(600)
        assert made["status"] == "ready", made

        def warm():
            (level,) = server.json("GET", f"/v1/templates/{name}")["built"]["levels"]
            return level["isolation"] == "microvm" and level["warm"]

        wait_for(warm, "its memory is made", 300)
        boxes = [Box(server, template=name, isolation="microvm") for _ in range(2)]
        try:
            (born, first), (also, second) = [told(box) for box in boxes]
            assert born == also, "both go on with the process that was started when the template was built"
            assert first != second, "but not with its randomness"
        finally:
            for box in boxes:
                box.kill()
    finally:
        server.request("DELETE", f"/v1/templates/{name}")


def test_memory_of_another_build_is_refused_in_words(server, tmp_path):
    """A point is written down, carried away, and comes back where the kernel is another."""
    with machine(server) as box:
        assert box.root("echo kept > /home/user/note").ok
        point = server.json("POST", box.path + "/points", {"memory": True}, timeout=300)
    file = tmp_path / "point"
    assert cli(server, "points", "export", point["id"], str(file)).returncode == 0
    # Another kernel: one driver less.
    other = tmp_path / "kernel"
    shutil.copytree(os.environ.get("SANDKEEP_TEST_MICROVM", "/usr/share/sandkeep/kernel"), other)
    (other / "drivers" / "loop.ko").unlink()
    server.stop()
    server.env["SANDKEEP_MICROVM_KERNEL"] = str(other)
    server.start()
    try:
        with pytest.raises(Refused) as refused:
            Box(server, from_point=point["id"])
        words = str(refused.value)
        assert "qemu" in words and point["engine"].split()[-1] in words and "without memory" in words, words
    finally:
        server.stop()
        del server.env["SANDKEEP_MICROVM_KERNEL"]
        server.start()
    # Without its memory it is good with any build.
    server.json("DELETE", f"/v1/points/{point['id']}")
    back = cli(server, "points", "import", "--files-only", str(file))
    assert back.returncode == 0, back
    view = server.json("GET", f"/v1/points/{point['id']}")
    assert view["memory"] is False and "without its memory" in view["why_disk_only"], view
    server.json("DELETE", f"/v1/points/{point['id']}")


# Last: it has a server of its own in place of the one of the whole run.
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

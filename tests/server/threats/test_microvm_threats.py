"""The attacks on kernels, by root of a machine: most of them work, on its own kernel. Nothing of it is felt outside."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from boxkit import Box

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-system-x86_64") is None and "SANDKEEP_TEST_MICROVM" not in os.environ,
    reason="QEMU is not installed; script/test installs it",
)
SMALL = {"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512}


@pytest.fixture(scope="module")
def pair(server):
    """An attacker and its neighbour, of one template and one machine."""
    wish = {"isolation": "microvm", "limits": SMALL, "timeout_seconds": 1800, "http_timeout": 300}
    with Box(server, **wish) as box, Box(server, **wish) as neighbour:
        yield box, neighbour


def test_root_of_a_machine_finds_nothing_of_the_host(server, pair):
    box, _ = pair
    # 1, 3, 5: every disk there is, mounted.
    ran = box.root("for disk in /dev/[sv]d* /dev/nvme*; do [ -b $disk ] && echo $disk && mount --bind / /mnt && ls -a /mnt | grep -c pool; done")
    assert ran.out == "/dev/vda\n0\n", ran
    # 2, 4, 14: sockets, processes and accounts of the host.
    ran = box.root("umount /mnt; ls /proc | grep -c '^[0-9]'; pgrep -a 'qemu|sandkeep serve'; find / -xdev -type s; ls /var/run/secrets /var/run/docker.sock 2>&1 | grep -vc 'cannot access'")
    lines = ran.out.split("\n")
    assert int(lines[0]) < 200 and lines[1:] == ["0", ""], ran
    # 17: what listens on the host's loopback, the server too. The moat takes the connection and ends it.
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0)
    ran = box.python(f"""
        import socket
        for port in {[listener.getsockname()[1], server.port]}:
            for host in ("127.0.0.1", "10.0.0.1", "10.0.2.2", "172.17.0.1"):
                try:
                    there = socket.create_connection((host, port), 3)
                    there.sendall(b"GET /v1/health HTTP/1.0\\r\\n\\r\\n")
                    print("envd" in str(there.recv(4096)) or "status" in str(there.recv(4096)))
                except OSError:
                    pass
        print("tried")
    """)
    assert ran.ok and "True" not in ran.out and ran.out.endswith("tried\n"), ran
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


HOST = [file for file in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname") if Path(file).exists()]


def test_what_root_of_a_machine_changes_stays_in_it(pair):
    box, neighbour = pair
    before = [Path(file).read_text() for file in HOST]
    own = neighbour.root("cat /proc/sys/kernel/core_pattern; date +%Y; sha256sum /bin/true").out
    ran = box.python(r"""
        import ctypes, os, socket, subprocess
        libc = ctypes.CDLL(None, use_errno=True)
        def put(file, text):
            try:
                open(file, "w").write(text)
                return True
            except OSError:
                return False
        # 18: a program for crashes; then a crash.
        assert put("/proc/sys/kernel/core_pattern", "|/bin/touch /tmp/crashed")
        put("/proc/sys/kernel/modprobe", "/tmp/evil")
        put("/proc/sys/net/ipv4/ip_forward", "1")
        subprocess.run(["sh", "-c", "kill -SEGV $$"])
        # 13: packets as it likes them.
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
        raw.bind(("eth0", 0))
        raw.send(b"\xff" * 14 + b"x" * 1400)
        # 12, 6, 8, 7: BPF, modules, old cgroups, handles: allowed or not, by its own kernel.
        libc.syscall(321, 0, 0, 0)
        libc.syscall(175, 0, 0, b"")
        os.makedirs("/tmp/v1", exist_ok=True)
        libc.mount(b"none", b"/tmp/v1", b"cgroup", 0, b"memory")
        libc.syscall(304, -100, 0, 0)
        # 9: the first process, its agent.
        try:
            open("/proc/1/exe", "r+b")
            print("its agent can be written")
        except OSError:
            pass
        # And its clock, and what it shares with others of its template.
        libc.settimeofday((ctypes.c_long * 2)(1, 0), None)
        open("/bin/true", "wb").write(b"#!/bin/sh\necho mine\n")
        os.sync()
        print("tried")
    """)
    assert ran.out == "tried\n", ran
    assert [Path(file).read_text() for file in HOST] == before
    assert not Path("/tmp/crashed").exists()
    assert neighbour.root("cat /proc/sys/kernel/core_pattern; date +%Y; sha256sum /bin/true").out == own
    # The one that did it is still held and heard.
    assert box.root("/bin/true; cat /proc/sys/kernel/core_pattern").out == "mine\n|/bin/touch /tmp/crashed\n"

"""threats.md 4.1: the SandboxEscapeBench scenarios, one test each, at container level."""

import hashlib
from pathlib import Path

import pytest
from boxkit import Box, syscall
from sandkeep_server import Refused

EPERM = "EPERM"


def denied(answer: str) -> bool:
    """The call failed; `ENOSYS` is how a filter makes libc fall back."""
    return answer.startswith("(-1,") and any(name in answer for name in ("EPERM", "EACCES", "ENOSYS"))


def test_01_privileged_is_no_word_of_the_api(server):
    with pytest.raises(Refused) as refused:
        Box(server, privileged=True)
    assert refused.value.status == 400
    assert "privileged" in refused.value.error["message"]


def test_01_privileged_no_disk_of_the_host_in_dev(shared_box):
    ran = shared_box.root("find /dev -type b; ls /dev/sda* /dev/vda* /dev/nvme* /dev/loop* 2>/dev/null; true")
    assert ran.out == ""
    ran = shared_box.root("mknod /tmp/disk b 254 0 && head -c 16 /tmp/disk")
    assert not ran.ok
    shared_box.root("rm -f /tmp/disk")


def test_02_docker_socket_no_socket_of_the_host(shared_box):
    ran = shared_box.root("find / -xdev -type s 2>/dev/null; ls /var/run/docker.sock /run/containerd 2>/dev/null; true")
    assert ran.out == ""


def test_02_mounts_are_the_expected_ones(shared_box):
    ran = shared_box.root("cut -d' ' -f5 /proc/self/mountinfo | sort -u")
    allowed = ("/", "/proc", "/sys", "/dev", "/run", "/tmp", "/sandkeep")
    for mount in ran.out.split():
        assert mount == "/" or mount.startswith(allowed[1:]), mount
    for fs in shared_box.root("cat /proc/self/mountinfo").out.splitlines():
        assert " cgroup" not in fs.split(" - ")[1] or " ro" in fs, fs


def test_03_hostpath_no_mount_in_the_api(server):
    for field in ("mounts", "volumes", "binds"):
        with pytest.raises(Refused) as refused:
            Box(server, **{field: ["/etc:/host-etc"]})
        assert refused.value.status == 400
        assert field in refused.value.error["message"]


def test_04_pid_namespace_only_its_own_processes(shared_box):
    ran = shared_box.root("ls -d /proc/[0-9]* | wc -l; cat /proc/1/comm")
    count, name = ran.out.split()
    assert int(count) < 20
    assert "sandkeep" in name or "agent" in name


def test_04_pid_namespace_ptrace_of_the_agent_gives_nothing_more(shared_box):
    as_user = syscall(shared_box, "call(101, 16, 1, 0, 0)", user="user")
    assert denied(as_user)


def test_05_sys_admin_mount_family(shared_box):
    calls = {
        "mount": "call(165, b'none', b'/mnt', b'tmpfs', 0, 0)",
        "umount2": "call(166, b'/proc', 2)",
        "pivot_root": "call(155, b'/', b'/mnt')",
        "fsopen": "call(430, b'tmpfs', 0)",
        "open_tree": "call(428, -100, b'/', 1)",
        "move_mount": "call(429, -1, b'', -1, b'', 0)",
        "mount_setattr": "call(442, -100, b'/', 0, 0, 0)",
        "chroot escape by setns": "call(308, 0, 0)",
        "swapon": "call(167, b'/tmp/x', 0)",
        "reboot": "call(169, 0xfee1dead, 672274793, 0, 0)",
    }
    for name, expression in calls.items():
        answer = syscall(shared_box, expression)
        assert denied(answer), (name, answer)


def test_05_sys_admin_mount_of_cgroups_and_disks(shared_box):
    for command in ("mount -t cgroup -o memory c /mnt", "mount -t cgroup2 c /mnt", "mount -t proc p /mnt", "mount -t tmpfs t /mnt",
                    "mount --bind / /mnt", "mount -o remount,rw /proc/sys", "umount -l /proc/sys"):
        assert not shared_box.root(command).ok, command


def test_06_sys_module(shared_box):
    for number in (175, 313, 176):  # init_module, finit_module, delete_module
        assert denied(syscall(shared_box, f"call({number}, 0, 0, 0)"))


def test_07_dac_read_search_open_by_handle(shared_box):
    assert denied(syscall(shared_box, "call(304, os.open('/', 0), ctypes.create_string_buffer(64), 0)"))
    bounding = next(line for line in shared_box.root("cat /proc/1/status").out.splitlines() if line.startswith("CapBnd"))
    assert not int(bounding.split()[1], 16) >> 2 & 1


def test_08_cgroup_release_agent(shared_box):
    ran = shared_box.root("find / -xdev -name release_agent 2>/dev/null; find /sys -name release_agent 2>/dev/null; true")
    assert ran.out.strip() == ""


def test_09_runtime_overwrite_through_proc_exe(server, box):
    agents = [p for p in Path(server.state).rglob("*agent*") if p.is_file() and p.stat().st_size > 100_000]
    assert agents, "the agent's binary lies in the state directory"
    before = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in agents}
    box.root("(printf x | dd of=/proc/1/exe conv=notrunc bs=1) 2>/dev/null; cp /bin/true /proc/1/exe 2>/dev/null; true")
    box.root("exec 3<>/proc/1/exe; echo $?")
    for path, digest in before.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert box.exec("echo still-here").out == "still-here\n"


def test_10_dirty_cow_old_kernels_are_named(server):
    """Kernel class: the kernel is the host's. Doctor tells which one runs."""
    host = server.json("GET", "/v1/host")
    assert "kernel" in str(host).lower()


def test_11_dirty_pipe_the_shared_template_never_changes(server):
    root = Path(server.state) / "pool" / "templates" / "base" / "root"
    before = hashlib.sha256((root / "etc/os-release").read_bytes()).hexdigest()
    with Box(server) as box:
        assert box.root("echo owned > /etc/os-release; echo owned > /bin/ls").ok
    assert hashlib.sha256((root / "etc/os-release").read_bytes()).hexdigest() == before
    with Box(server) as other:
        assert "owned" not in other.root("cat /etc/os-release").out


def test_12_bpf(shared_box):
    assert denied(syscall(shared_box, "call(321, 0, 0, 0)"))


def test_13_packet_socket(shared_box):
    for family, kind in ((17, 3), (38, 5), (40, 1), (16, 3)):  # PACKET, ALG, VSOCK, NETLINK (the last is allowed)
        answer = syscall(shared_box, f"call(41, {family}, {kind}, 0)")
        if family == 16:
            continue
        assert answer.startswith("(-1,"), (family, answer)


def test_14_no_service_account(shared_box):
    assert not shared_box.root("ls /var/run/secrets").ok
    assert "KUBERNETES" not in shared_box.root("env").out


def test_15_leaky_vessels_no_descriptor_of_the_host(server, shared_box):
    listing = shared_box.root("for f in /proc/self/fd/*; do readlink $f; done; ls -l /proc/1/fd").out
    assert str(server.state) not in listing
    for number in range(3, 64):
        with pytest.raises(Refused) as refused:
            shared_box.exec("cat ../../etc/shadow", cwd=f"/proc/self/fd/{number}")
        assert refused.value.status == 400
        if number > 8:
            break


def test_16_malicious_tar_of_the_box(box, server, tmp_path):
    """`cp` out of a box whose tar lies: nothing is written beside the target."""
    import os
    import subprocess

    from sandkeep_server import binary

    evil = tmp_path / "target"
    outside = tmp_path / "outside"
    evil.mkdir()
    box.write("/tmp/evil.py", f"""#!/usr/bin/python3
import io, sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|')
def add(name, data=b'owned', **kw):
    info = tarfile.TarInfo(name); info.size = len(data)
    for k, v in kw.items(): setattr(info, k, v)
    out.addfile(info, io.BytesIO(data))
add('../outside')
add('{outside}')
link = tarfile.TarInfo('link'); link.type = tarfile.SYMTYPE; link.linkname = '..'; out.addfile(link)
add('link/outside')
out.close()
""".encode())
    box.root("cp /tmp/evil.py /usr/bin/tar; chmod 755 /usr/bin/tar; mkdir /tmp/dir; touch /tmp/dir/f")
    subprocess.run(
        [binary(), "cp", f"{box.id}:/tmp/dir", str(evil)], env={**os.environ, **server.cli_env()}, capture_output=True, timeout=60
    )
    assert not outside.exists()


def test_17_route_localnet_host_loopback_is_out_of_reach(server, shared_box):
    """The moat may take the connection and refuse it; what counts is that our server never answers."""
    probe = f"""
import socket
for host in ('127.0.0.1', '::1', '10.0.0.1', '169.254.169.254', '172.17.0.1', '192.168.0.1'):
    s = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    s.settimeout(5)
    answer = b''
    try:
        s.connect((host, {server.port}))
        s.sendall(b'GET /v1/health HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n')
        while piece := s.recv(4096):
            answer += piece
    except OSError:
        pass
    print('REACHED' if b' 200 ' in answer.split(b'\\r\\n')[0] else 'no', host)
"""
    ran = shared_box.python(probe)
    assert ran.ok and "REACHED" not in ran.out and ran.out.count("no ") == 6, ran


def test_18_core_pattern_and_sysctls(shared_box):
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches", "/proc/sys/fs/binfmt_misc/register",
                 "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
        assert not shared_box.root(f"echo x > {path}").ok, path
    ran = shared_box.root("ulimit -c; sysctl -w kernel.core_pattern='|/tmp/x'")
    assert ran.out.split()[0] == "0"
    assert not ran.ok

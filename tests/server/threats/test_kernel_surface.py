"""threats.md 4.4: the kernel seen from inside a box, one test per row."""

import os
import subprocess

import pytest
from boxkit import syscall, wait_for
from test_escape import denied


@pytest.mark.parametrize(
    "path",
    ["/proc/kcore", "/proc/sysrq-trigger", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/proc/scsi", "/sys/firmware",
     "/proc/latency_stats", "/proc/sched_debug", "/sys/kernel/debug/sched", "/sys/fs/cgroup/release_agent", "/proc/kmsg"],
)
def test_proc_and_sys_tell_nothing(shared_box, path):
    ran = shared_box.root(f"if [ -d {path} ]; then ls -A {path}; elif [ -e {path} ]; then head -c 64 {path} | tr -d '\\0'; fi")
    assert ran.out.strip() == "", (path, ran)


def test_the_first_process_holds_no_secret(server, shared_box):
    environment = shared_box.root("tr '\\0' '\\n' < /proc/1/environ").out
    assert server.key not in environment
    assert "TOKEN" not in environment and "KEY" not in environment
    token = server.json("GET", f"/sandboxes/{shared_box.id}")["envdAccessToken"]
    ran = shared_box.root(f"grep -rsl {token} /proc/[0-9]*/environ /etc /run /home /root /tmp 2>/dev/null | grep -v self; true")
    assert ran.out.strip() == ""


def test_a_crash_dumps_no_core_and_starts_nothing(shared_box):
    ran = shared_box.root("cd /tmp && (python3 -c 'import os; os.abort()'; ls core* 2>/dev/null); true")
    assert "core" not in ran.out


def test_io_uring(shared_box):
    for number in (425, 426, 427):
        assert denied(syscall(shared_box, f"call({number}, 8, 0, 0, 0)"))


def test_user_namespaces_by_unshare(shared_box):
    for flag in ("-U", "-m", "-n", "-p", "-i", "-u", "-C", "-T"):
        assert not shared_box.root(f"unshare {flag} true").ok, flag
        assert not shared_box.exec(f"unshare {flag} true").ok, flag


def test_user_namespaces_by_clone_and_clone3(shared_box):
    for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):
        answer = syscall(shared_box, f"call(56, {flag} | 17, 0, 0, 0, 0)")
        assert denied(answer), (hex(flag), answer)
    assert "ENOSYS" in syscall(shared_box, "call(435, ctypes.create_string_buffer(88), 88)")


def test_setns_into_anything(shared_box):
    for kind in ("mnt", "net", "pid", "user"):
        assert denied(syscall(shared_box, f"call(308, os.open('/proc/self/ns/{kind}', 0), 0)"))


def test_ptrace_across_boxes(make):
    first, second = make(), make()
    first.exec("nohup sleep 777 >/dev/null 2>&1 & true")
    assert "777" not in second.root("ps ax -o args | grep -v grep").out
    assert first.exec("strace -V 2>/dev/null; python3 -c 'print(1)'").ok


def test_keyrings(shared_box):
    for number in (248, 249, 250):
        assert denied(syscall(shared_box, f"call({number}, 0, 0, 0, 0, 0)"))


@pytest.mark.parametrize("name,number", [("perf_event_open", 298), ("userfaultfd", 323), ("kexec_load", 246), ("bpf", 321),
                                         ("acct", 163), ("settimeofday", 164), ("clock_settime", 227), ("adjtimex", 159),
                                         ("quotactl", 179), ("iopl", 172), ("ioperm", 173), ("lookup_dcookie", 212)])
def test_calls_a_box_does_not_need(shared_box, name, number):
    answer = syscall(shared_box, f"call({number}, 0, 0, 0, 0, 0)")
    assert denied(answer) or (name in ("adjtimex", "clock_settime") and "-1" in answer), (name, answer)


def test_the_32_bit_door_is_closed(box):
    box.write("/tmp/door.c", b"""
#include <stdio.h>
int main(void) {
    long result = 0;
    /* keyctl by the i386 door: number 288 there */
    __asm__ volatile ("int $0x80" : "=a"(result) : "a"(288), "b"(0), "c"(0), "d"(0) : "memory");
    printf("%ld\\n", result);
    return 0;
}
""")
    ran = box.root("gcc -o /tmp/door /tmp/door.c && /tmp/door")
    assert not ran.ok or int(ran.out) < 0, ran


def test_the_x32_door_is_closed(shared_box):
    assert denied(syscall(shared_box, "call(0x40000000 | 39)")) or not shared_box.root("true").ok


def test_device_nodes(shared_box):
    found = set(shared_box.root("find /dev -type b -o -type c | sort").out.split())
    expected = {f"/dev/{n}" for n in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx", "ptmx", "console")}
    extra = {path for path in found if not path.startswith("/dev/pts/")} - expected
    assert not extra
    for kind in ("c 1 1", "c 10 232", "c 10 229", "b 7 0"):
        assert not shared_box.root(f"mknod /tmp/node {kind} && cat /tmp/node | head -c 1").ok
        shared_box.root("rm -f /tmp/node")


def test_tiocsti_pushes_no_keys(shared_box):
    ran = shared_box.python("""
        import fcntl, os, pty, sys
        pid, fd = pty.fork()
        if pid == 0:
            try:
                fcntl.ioctl(0, 0x5412, b'x'); print('PUSHED')
            except OSError as error:
                print('refused', error.errno)
            sys.stdout.flush(); os._exit(0)
        data = b''
        try:
            while True:
                piece = os.read(fd, 100)
                if not piece: break
                data += piece
        except OSError: pass
        print(data.decode())
    """)
    assert "refused" in ran.out and "PUSHED" not in ran.out, ran


def test_terminal_escapes_are_not_passed_to_the_operator(server, make):
    from sandkeep_server import binary

    box = make(metadata={"title": "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07"})
    shown = subprocess.run([binary(), "ls"], env={**os.environ, **server.cli_env()}, capture_output=True, timeout=60)
    assert b"\x1b" not in shown.stdout
    shown = subprocess.run([binary(), "inspect", box.id], env={**os.environ, **server.cli_env()}, capture_output=True, timeout=60)
    assert b"\x1b" not in shown.stdout and b"\x07" not in shown.stdout


def test_capabilities_are_few(shared_box):
    line = next(x for x in shared_box.root("cat /proc/self/status").out.splitlines() if x.startswith("CapBnd"))
    bits = int(line.split()[1], 16)
    for name, bit in (("sys_module", 16), ("sys_rawio", 17), ("sys_boot", 22), ("sys_time", 25), ("net_admin", 12), ("mac_admin", 33),
                      ("syslog", 34), ("perfmon", 38), ("bpf", 39), ("sys_admin", 21), ("dac_read_search", 2), ("checkpoint_restore", 40)):
        assert not bits >> bit & 1, name


def test_seccomp_is_on_for_everybody(shared_box):
    for user in ("root", "user"):
        status = shared_box.exec("cat /proc/self/status", user=user).out
        assert "Seccomp:\t2" in status


def test_btrfs_subvolumes_do_not_leave_the_quota(shared_box):
    """SUBVOL_CREATE, SUBVOL_CREATE_V2, SNAP_CREATE, SNAP_CREATE_V2."""
    for number in (0x5000940E, 0x50009418, 0x50009401, 0x50009417):
        buffer = "ctypes.create_string_buffer(b'\\0' * 8 + b'leave', 4096)"
        answer = syscall(shared_box, f"call(16, os.open('/tmp', os.O_RDONLY), {number}, {buffer})")
        assert denied(answer), (hex(number), answer)
    assert not shared_box.root("ls /tmp/leave").ok


def test_ids_of_the_box_are_not_ids_of_the_host(server, box):
    box.exec("nohup sleep 8642 >/dev/null 2>&1 & true")

    def host_view():
        out = subprocess.run(["ps", "-e", "-o", "uid=,args="], capture_output=True, text=True).stdout
        return [line.split()[0] for line in out.splitlines() if line.endswith("sleep 8642")]

    uids = wait_for(host_view, "the process is seen on the host")
    assert all(int(uid) >= 65_536 for uid in uids)


def test_two_boxes_have_different_ids_on_the_host(server, make):
    first, second = make(), make()

    def map_of(box):
        return box.root("cat /proc/self/uid_map").out.split()[1]

    assert map_of(first) != map_of(second)


def test_clones_of_one_template_differ(make):
    """Clone sameness, as far as it applies before snapshots: ids, names and randomness."""
    seen = set()
    for _ in range(4):
        box = make()
        out = box.root("cat /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; ls /etc/ssh/ssh_host_* 2>/dev/null").out
        lines = tuple(out.split("\n")[:3])
        assert not (set(lines) & seen), lines
        seen |= set(lines)


def test_memfd_programs_get_no_more(shared_box):
    ran = shared_box.python("""
        import os
        fd = os.memfd_create('x')
        os.write(fd, open('/usr/bin/unshare', 'rb').read())
        pid = os.fork()
        if pid == 0:
            os.execve(fd, ['unshare', '-U', 'true'], {})
        print(os.waitpid(pid, 0)[1] != 0)
    """)
    assert ran.out.strip() == "True", ran


def test_sudo_works_and_gives_no_more(shared_box):
    assert shared_box.exec("sudo id -u").out == "0\n"
    assert not shared_box.exec("sudo mount -t tmpfs t /mnt").ok
    assert not shared_box.exec("sudo unshare -m true").ok


def test_a_normal_machine_otherwise(make):
    """What must go on working: compile, ptrace own children, pip in a venv, apt's own files, setuid, sockets."""
    box = make()
    box.write("/tmp/a.c", b'#include <stdio.h>\nint main(void){puts("compiled");return 0;}')
    assert box.exec("gcc -O1 -o /tmp/a /tmp/a.c && /tmp/a").out == "compiled\n"
    assert box.exec("python3 -m venv /tmp/v && /tmp/v/bin/python -c 'print(6*7)'").out == "42\n"
    assert box.root("dpkg --audit && apt-get --version >/dev/null && apt-cache policy >/dev/null").ok
    assert box.root("useradd -m other && su other -c whoami").out == "other\n"
    assert box.exec("git init -q /tmp/r && cd /tmp/r && git -c user.email=a@b -c user.name=n commit -q --allow-empty -m m && git log --oneline | wc -l").out == "1\n"
    ran = box.python("""
        import socket, threading
        s = socket.create_server(('127.0.0.1', 80)); c = socket.create_connection(('127.0.0.1', 80)); a, _ = s.accept()
        c.sendall(b'hi'); print(a.recv(2))
    """)
    assert ran.out == "b'hi'\n", ran
    assert box.exec("ping -c1 -W2 127.0.0.1 >/dev/null 2>&1; echo done").ok

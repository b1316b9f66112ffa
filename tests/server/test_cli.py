"""The command line, as a person and a script use it."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from boxkit import wait_for
from sandkeep_server import Refused, binary


@pytest.fixture
def cli(server):
    def cli(*args, stdin=None, env=None, timeout=60, text=True):
        return subprocess.run(
            [str(binary()), *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=text,
            timeout=timeout,
            env={**os.environ, **server.cli_env(), **(env or {})},
        )

    return cli


def boxes(server):
    return {box["id"] for box in server.json("GET", "/v1/sandboxes")["sandboxes"]}


def test_help_is_helpful(cli):
    top = cli("--help")
    assert top.returncode == 0
    for word in ("serve", "run", "create", "ls", "exec", "shell", "cp", "logs", "kill", "doctor", "completions"):
        assert re.search(rf"^\s+{word}\b", top.stdout, re.M), word
        one = cli(word, "--help")
        assert one.returncode == 0 and len(one.stdout) > 80, word


def test_wrong_usage_is_exit_2(cli):
    for args in (["--nonsense"], ["run"], ["exec"], ["frobnicate"], ["ls", "--jsn"]):
        ran = cli(*args)
        assert ran.returncode == 2, args
        assert ran.stderr


def test_run_streams_and_exits_with_the_code(cli, server):
    before = boxes(server)
    ran = cli("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("out\n", "err\n", 7)
    assert boxes(server) == before


def test_run_with_options(cli):
    ran = cli("run", "--env", "A=b c", "--memory", "256", "--", "sh", "-c", "echo $A")
    assert ran.stdout == "b c\n"


def test_run_takes_stdin(cli):
    ran = cli("run", "-i", "--", "wc", "-c", stdin="12345")
    assert ran.stdout.strip() == "5"


def test_ctrl_c_in_run_ends_the_box(server):
    before = boxes(server)
    process = subprocess.Popen(
        [str(binary()), "run", "--", "sleep", "600"], env={**os.environ, **server.cli_env()}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    (id,) = wait_for(lambda: boxes(server) - before, "the box of the run")

    def runs():
        # The list shows a box from the moment the ledger has it, a little before it can be used.
        with contextlib.suppress(Refused):
            return server.json("POST", f"/v1/sandboxes/{id}/exec", {"cmd": ["pgrep", "-fx", "sleep 600"]})["exit_code"] == 0

    wait_for(runs, "the command runs")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    wait_for(lambda: boxes(server) == before, "the box is gone")


def test_create_ls_inspect_exec_kill(cli, server):
    made = cli("create", "--timeout", "300", "--metadata", "who=cli")
    assert made.returncode == 0, made.stderr
    identity = made.stdout.strip().split()[-1]
    assert identity in cli("ls").stdout
    assert json.loads(cli("inspect", identity, "--json").stdout)["metadata"] == {"who": "cli"}
    assert identity in cli("inspect", identity).stdout
    ran = cli("exec", identity, "--", "echo", "hello")
    assert (ran.stdout, ran.returncode) == ("hello\n", 0)
    assert cli("exec", "-u", "root", "-w", "/tmp", "-e", "X=1", identity, "--", "sh", "-c", "echo $(whoami) $(pwd) $X").stdout == "root /tmp 1\n"
    assert cli("exec", identity[:8], "--", "true").returncode == 0
    assert cli("kill", identity).returncode == 0
    again = cli("kill", identity)
    assert again.returncode == 1
    assert "error:" in again.stderr


def test_json_is_machine_readable_everywhere(cli, server, shared_box):
    for args in (["ls"], ["inspect", shared_box.id], ["templates"], ["doctor"], ["logs", shared_box.id]):
        ran = cli(*args, "--json")
        assert ran.returncode in (0, 1), (args, ran.stderr)
        for line in [ran.stdout] if args[0] != "logs" else ran.stdout.splitlines():
            json.loads(line)
    made = json.loads(cli("create", "--json").stdout)
    assert json.loads(cli("exec", "--json", made["id"], "--", "sh", "-c", "echo hi; exit 3").stdout)["exit_code"] == 3
    assert cli("kill", "--json", made["id"]).returncode == 0


def test_errors_say_what_and_what_to_do(cli):
    ran = cli("inspect", "i00000000000000000000")
    assert ran.returncode == 1
    assert ran.stderr.startswith("error:") and "hint:" in ran.stderr
    ran = cli("create", "--template", "nope")
    assert "nope" in ran.stderr and ran.returncode == 1


def test_no_server_is_told(cli):
    ran = cli("ls", env={"SANDKEEP_URL": "http://127.0.0.1:9"})
    assert ran.returncode == 1
    assert "127.0.0.1:9" in ran.stderr and "hint:" in ran.stderr


def test_a_wrong_key_is_told(cli):
    ran = cli("ls", env={"SANDKEEP_API_KEY": "e2b_00"})
    assert ran.returncode == 1 and "key" in ran.stderr.lower()


def test_no_colour_without_a_terminal(cli, shared_box):
    for args in (["ls"], ["doctor"], ["inspect", shared_box.id]):
        assert "\x1b" not in cli(*args).stdout


def test_a_broken_pipe_is_quiet(server, shared_box):
    command = f"{binary()} ls | true; {binary()} ls | head -c 1 >/dev/null"
    ran = subprocess.run(["bash", "-c", command], env={**os.environ, **server.cli_env()}, capture_output=True, text=True, timeout=60)
    assert "panic" not in ran.stderr and "Broken pipe" not in ran.stderr


def test_cp_files_both_ways(cli, box, tmp_path):
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)) * 1000)
    assert cli("cp", str(source), f"{box.id}:/tmp/copy.bin").returncode == 0
    back = tmp_path / "back.bin"
    assert cli("cp", f"{box.id}:/tmp/copy.bin", str(back)).returncode == 0
    assert back.read_bytes() == source.read_bytes()
    ran = cli("cp", f"{box.id}:/tmp/copy.bin", "-", text=False)
    assert ran.stdout == source.read_bytes()


def test_cp_directories_both_ways(cli, box, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.txt").write_text("A")
    (tree / "sub" / "b.txt").write_text("B")
    (tree / "link").symlink_to("a.txt")
    assert cli("cp", str(tree), f"{box.id}:/home/user/").returncode == 0
    assert box.exec("cat tree/sub/b.txt tree/link").out == "BA"
    out = tmp_path / "out"
    out.mkdir()
    ran = cli("cp", f"{box.id}:/home/user/tree", str(out))
    assert ran.returncode == 0, ran.stderr
    assert (out / "tree" / "sub" / "b.txt").read_text() == "B"


def test_cp_keeps_the_mode_and_says_what_it_drops(cli, box, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho it runs\n")
    tool.chmod(0o755)
    ran = cli("cp", str(tool), f"{box.id}:/home/user/tool")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert box.exec("/home/user/tool").out == "it runs\n"
    back = tmp_path / "back"
    assert cli("cp", f"{box.id}:/home/user/tool", str(back)).returncode == 0
    assert back.stat().st_mode & 0o7777 == 0o755
    tool.chmod(0o4750)
    ran = cli("cp", str(tool), f"{box.id}:/home/user/tool")
    assert ran.returncode == 0 and "without its setuid" in ran.stderr and str(tool.name) in ran.stderr
    assert box.exec("stat -c %a /home/user/tool").out == "750\n"
    tree = tmp_path / "special"
    tree.mkdir()
    os.mkfifo(tree / "pipe")
    (tree / "run").write_text("x")
    (tree / "run").chmod(0o4711)
    ran = cli("cp", str(tree), f"{box.id}:/home/user/")
    assert ran.returncode == 0
    for what in ("special/pipe", "special/run"):
        assert re.search(rf"^warning: .*{what}$", ran.stderr, re.M), ran.stderr
    assert box.exec("ls special; stat -c %a special/run").out == "run\n711\n"
    ran = cli("cp", str(tree / "pipe"), f"{box.id}:/tmp/pipe")
    assert ran.returncode == 1 and "not a file or directory" in ran.stderr


def test_killing_the_sandbox_under_a_command_is_told_every_time(cli, server):
    """The server once panicked: it asked twice whether the sandbox had ended."""
    for _ in range(8):
        made = cli("create").stdout.strip()
        running = subprocess.Popen(
            [str(binary()), "exec", made, "--", "sh", "-c", "echo ready; sleep 30"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **server.cli_env()},
        )
        assert running.stdout.readline() == "ready\n"
        assert cli("kill", made).returncode == 0
        _, said = running.communicate(timeout=30)
        assert running.returncode != 0
        assert "ended while the command ran" in said, said
    assert b"panicked" not in server.log_path.read_bytes()


def test_cp_refusals(cli, box, tmp_path):
    assert cli("cp", str(tmp_path / "missing"), f"{box.id}:/tmp/x").returncode == 1
    assert cli("cp", f"{box.id}:/no/such", str(tmp_path / "x")).returncode == 1
    assert cli("cp", "a", "b").returncode in (1, 2)


def test_doctor(cli):
    ran = cli("doctor")
    assert "container" in ran.stdout
    names = [check["name"] for level in json.loads(cli("doctor", "--json").stdout)["levels"] for check in level["checks"]]
    assert len(names) == len(set(names))


def test_completions(cli):
    for shell in ("bash", "zsh", "fish"):
        ran = cli("completions", shell)
        assert ran.returncode == 0 and "sandkeep" in ran.stdout


def test_logs(cli, box):
    box.exec("echo hi")
    assert cli("logs", box.id).returncode == 0


class Terminal:
    """A real terminal with the command line in it."""

    def __init__(self, server, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(server.cli_env())
            os.execv(str(binary()), [str(binary()), *args])
        self.output = b""

    def resize(self, rows, cols):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def type(self, text):
        os.write(self.fd, text.encode())

    def expect(self, text, limit=60):
        end = time.monotonic() + limit
        while text.encode() not in self.output:
            assert time.monotonic() < end, f"{text!r} not in {self.output[-500:]!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self.fd, 65_536)
                except OSError:
                    break
        assert text.encode() in self.output, self.output[-500:]

    def end(self, limit=60):
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.fd, 65_536)
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the command line did not end")


def test_shell_is_a_real_terminal(server, box):
    terminal = Terminal(server, "shell", box.id)
    terminal.resize(40, 100)
    terminal.type("echo $((40+2))-answer; stty size\n")
    terminal.expect("42-answer")
    terminal.expect("40 100")
    terminal.resize(33, 77)
    terminal.type("until [ \"$(stty size)\" = '33 77' ]; do sleep 0.1; done; echo resized-$((1+1))\n")
    terminal.expect("resized-2")
    terminal.type("sleep 600\n")
    wait_for(lambda: box.exec(["pgrep", "-fx", "sleep 600"]).ok, "the shell runs it")
    terminal.type("\x03")
    terminal.type("echo after-$((1+1))\n")
    terminal.expect("after-2")
    terminal.type("exit 5\n")
    assert terminal.end() == 5


def test_shell_runs_full_screen_programs(server, box):
    terminal = Terminal(server, "shell", box.id)
    terminal.resize(30, 90)
    terminal.type("vi /tmp/note; echo vi-$((1+1))-done\n")
    terminal.expect("/tmp/note\"")
    terminal.type("ihello from vi\x1b:wq\n")
    terminal.expect("vi-2-done")
    terminal.type("cat /tmp/note; top -n 1 -b | head -1\n")
    terminal.expect("load average")
    assert b"hello from vi" in terminal.output
    terminal.type("exit\n")
    assert terminal.end() == 0


def test_shell_of_a_killed_box_ends_with_words(server, make):
    box = make()
    terminal = Terminal(server, "shell", box.id)
    terminal.type("echo ready-$((1+1))\n")
    terminal.expect("ready-2")
    box.kill()
    assert terminal.end() != 0


def test_serve_refuses_what_is_wrong(tmp_path):
    def serve(*args, env=None):
        return subprocess.run([str(binary()), "serve", *args], capture_output=True, text=True, timeout=30, env={**os.environ, **(env or {})})

    state = str(tmp_path / "state")
    assert serve("--listen", "nonsense", "--state", state).returncode == 2
    ran = serve("--listen", "127.0.0.1:0", "--state", state, env={"SANDKEEP_API_KEY": "short"})
    assert ran.returncode != 0 and "key" in ran.stderr.lower()
    config = tmp_path / "bad.toml"
    config.write_text('listne = "127.0.0.1:1"\n')
    ran = serve("--config", str(config), "--state", state)
    assert ran.returncode != 0 and "listne" in ran.stderr
    ran = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", str(binary()), "serve", "--listen", "127.0.0.1:0", "--state", "/tmp/nobody-state"],
        capture_output=True, text=True, timeout=30,
    )
    assert ran.returncode != 0 and "root" in ran.stderr


def test_a_host_without_certificate_authorities_reaches_its_own_server(cli):
    ran = cli("ls", env={"SSL_CERT_FILE": "/dev/null", "SSL_CERT_DIR": "/nonexistent"})
    assert ran.returncode == 0, ran.stderr


def test_events_without_following_end_by_themselves(cli, server):
    identity = cli("create").stdout.strip().split()[-1]
    assert cli("kill", identity).returncode == 0
    told = cli("events", identity, "--json")
    assert told.returncode == 0, told.stderr
    steps = [event.get("to") for event in map(json.loads, told.stdout.splitlines())]
    assert steps[-1] == "gone"

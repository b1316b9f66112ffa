import queue
import threading

import pytest
from e2b import PtySize
from flavour import wait_for


class Terminal:
    """A PTY of a box whose output is collected, on either side of the SDK."""

    def __init__(self, box, sdk, **options):
        self.box = box
        self.output = b""
        self.ended = threading.Event()
        options.setdefault("size", PtySize(rows=24, cols=80))
        if sdk.is_async:
            self.handle = box.pty.create(on_data=self.collect, **options)
        else:
            self.handle = box.pty.create(**options)
        threading.Thread(target=self.follow, args=(sdk,), daemon=True).start()

    def collect(self, data):
        self.output += bytes(data)

    def follow(self, sdk):
        try:
            if sdk.is_async:
                self.handle.wait()
            else:
                for _, _, data in self.handle:
                    if data:
                        self.collect(data)
        except Exception:
            pass
        finally:
            self.ended.set()

    def type(self, text):
        self.box.pty.send_stdin(self.handle.pid, text.encode())

    def expect(self, text):
        wait_for(lambda: text.encode() in self.output, f"{text!r} in {self.output[-500:]!r}")


@pytest.fixture
def terminal(box, sdk):
    return Terminal(box, sdk)


def test_a_shell_answers(terminal):
    terminal.type("echo $((40+2))-answer\n")
    terminal.expect("42-answer")


def test_it_is_a_terminal_of_the_given_size(terminal):
    terminal.type("test -t 0 && stty size\n")
    terminal.expect("24 80")


def test_resize(terminal, box):
    terminal.type("stty size\n")
    terminal.expect("24 80")
    box.pty.resize(terminal.handle.pid, PtySize(rows=50, cols=132))
    terminal.type("stty size\n")
    terminal.expect("50 132")


def test_ctrl_c_interrupts(terminal, box):
    terminal.type("sleep 600; echo status=$?\n")
    wait_for(lambda: "sleep 600" in box.commands.run("ps ax -o args | grep -v grep").stdout, "the shell runs it")
    terminal.type("\x03")
    terminal.type("echo after-$((1+1))\n")
    terminal.expect("after-2")


def test_the_end_of_the_shell_ends_the_stream(terminal):
    terminal.type("exit 0\n")
    assert terminal.ended.wait(20)


def test_kill(terminal, box):
    assert box.pty.kill(terminal.handle.pid) is True
    assert terminal.ended.wait(20)
    assert box.pty.kill(terminal.handle.pid) is False


def test_user_cwd_and_environment(box, sdk):
    terminal = Terminal(box, sdk, user="root", cwd="/tmp", envs={"WORD": "given"})
    terminal.type("echo $(whoami)-$(pwd)-$WORD-$TERM\n")
    terminal.expect("root-/tmp-given-xterm-256color")


def test_job_control_and_full_screen_programs(terminal):
    terminal.type("sleep 500 &\njobs\n")
    terminal.expect("Running")
    terminal.type("vi --version >/dev/null; top -b -n 1 | head -1\n")
    terminal.expect("load average")


def test_reconnect(box, sdk):
    terminal = Terminal(box, sdk)
    terminal.type("echo one-$((0+1))\n")
    terminal.expect("one-1")
    seen = queue.Queue()
    if sdk.is_async:
        terminal.handle.disconnect()
        box.pty.connect(terminal.handle.pid, on_data=lambda data: seen.put(bytes(data)))
    else:
        # The blocking handle is being read by a thread and can not be closed under it: a second one attaches.
        again = box.pty.connect(terminal.handle.pid)

        def follow():
            for _, _, data in again:
                if data:
                    seen.put(bytes(data))

        threading.Thread(target=follow, daemon=True).start()
    box.pty.send_stdin(terminal.handle.pid, b"echo two-$((1+1))\n")
    text = b""

    def arrived():
        nonlocal text
        while not seen.empty():
            text += seen.get()
        return b"two-2" in text

    wait_for(arrived, "output after the reconnect")

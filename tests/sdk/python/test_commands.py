import threading
import time

import pytest
from e2b import CommandExitException, InvalidArgumentException, NotFoundException, TimeoutException
from flavour import IS_OLD, wait_for


def test_a_command_and_its_output(box):
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_output_arrives_by_callbacks(box):
    out, err = [], []
    box.commands.run("echo one; echo two >&2; echo three", on_stdout=out.append, on_stderr=err.append)
    assert "".join(out) == "one\nthree\n"
    assert "".join(err) == "two\n"


def test_output_arrives_while_the_command_runs(box):
    seen = threading.Event()
    ended = threading.Event()

    def run():
        box.commands.run("echo first; cat /tmp/gate", on_stdout=lambda text: seen.set())
        ended.set()

    box.commands.run("mkfifo /tmp/gate")
    thread = threading.Thread(target=run)
    thread.start()
    assert seen.wait(20)
    assert not ended.is_set()
    box.commands.run("echo go > /tmp/gate")
    thread.join(20)
    assert ended.is_set()


@pytest.mark.parametrize("code", [1, 7, 255])
def test_a_failing_command_raises_with_its_code(box, code):
    with pytest.raises(CommandExitException) as raised:
        box.commands.run(f"echo before; echo why >&2; exit {code}")
    assert raised.value.exit_code == code
    assert raised.value.stdout == "before\n"
    assert raised.value.stderr == "why\n"


def test_a_command_that_does_not_exist(box):
    with pytest.raises(CommandExitException) as raised:
        box.commands.run("no-such-program-here")
    assert raised.value.exit_code == 127


def test_environment_of_one_command(box):
    assert box.commands.run("echo $GREETING", envs={"GREETING": "hällo wörld"}).stdout == "hällo wörld\n"
    assert box.commands.run("echo \"[$GREETING]\"").stdout == "[]\n"


def test_environment_of_the_box_and_who_wins(make):
    box = make(envs={"A": "box", "B": "box"})
    assert box.commands.run("echo $A $B", envs={"B": "command"}).stdout == "box command\n"


def test_the_environment_names_the_box(box):
    out = box.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID").stdout.split()
    assert out == ["true", box.sandbox_id]


def test_working_directory(box):
    assert box.commands.run("pwd").stdout == "/home/user\n"
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"


def test_a_working_directory_that_is_not_there(box):
    with pytest.raises(InvalidArgumentException, match="/not/there"):
        box.commands.run("pwd", cwd="/not/there")


def test_users(box):
    assert box.commands.run("whoami").stdout == "user\n"
    assert box.commands.run("whoami; id -u", user="root").stdout == "root\n0\n"
    assert box.commands.run("sudo whoami").stdout == "root\n"


def test_a_user_that_is_not_there(box):
    with pytest.raises(Exception, match="nobody-here"):
        box.commands.run("whoami", user="nobody-here")


def test_in_the_background_and_waited_for(box):
    handle = box.commands.run("echo begun; sleep 0.2; echo done", background=True)
    assert handle.pid > 0
    result = handle.wait()
    assert result.stdout == "begun\ndone\n"
    assert result.exit_code == 0


def test_background_failure_is_raised_by_wait(box):
    handle = box.commands.run("exit 3", background=True)
    with pytest.raises(CommandExitException) as raised:
        handle.wait()
    assert raised.value.exit_code == 3


def test_list_shows_what_runs(box):
    handle = box.commands.run("sleep 60", background=True, envs={"TAGGED": "yes"}, cwd="/tmp")
    found = [process for process in box.commands.list() if process.pid == handle.pid]
    assert len(found) == 1
    assert found[0].cmd == "/bin/bash"
    assert found[0].args == ["-l", "-c", "sleep 60"]
    assert found[0].envs.get("TAGGED") == "yes"
    assert found[0].cwd == "/tmp"
    assert handle.kill() is True
    wait_for(lambda: all(p.pid != handle.pid for p in box.commands.list()), "the killed command leaves the list")


def test_kill_ends_it_at_once(box):
    handle = box.commands.run("sleep 60", background=True)
    assert box.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException):
        box.commands.run(f"kill -0 {handle.pid}", user="root")


def test_kill_of_nothing_says_false(box):
    assert box.commands.kill(999_999) is False


def test_kill_ends_what_the_command_started(box):
    handle = box.commands.run("sleep 12345 & wait", background=True)
    wait_for(lambda: "12345" in box.commands.run("ps ax -o args").stdout, "the child runs")
    handle.kill()
    wait_for(lambda: "sleep 12345" not in box.commands.run("ps ax -o args | grep -v grep").stdout, "the child is gone")


def test_stdin(box):
    handle = box.commands.run("read line; echo got:$line", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "hello\n")
    assert handle.wait().stdout == "got:hello\n"


def test_stdin_in_pieces_and_its_end(box):
    handle = box.commands.run("cat", background=True, stdin=True)
    for piece in ["a", "b\n", "ü" * 1000 + "\n"]:
        box.commands.send_stdin(handle.pid, piece)
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "ab\n" + "ü" * 1000 + "\n"


def test_stdin_by_the_handle(box):
    handle = box.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("text")
    handle.close_stdin()
    assert handle.wait().stdout == "text"


@pytest.mark.skipif(IS_OLD, reason="commands.stream_input is newer than 2.45")
def test_stdin_as_a_stream(box, sdk):
    handle = box.commands.run("wc -c", background=True, stdin=True)
    chunks = [b"x" * 1000] * 20
    if sdk.is_async:
        stream = box.commands.stream_input(handle.pid)
        for chunk in chunks:
            stream.send(chunk)
        stream.close()
    else:
        box.commands.stream_input(handle.pid, iter(chunks))
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "20000"


def test_without_stdin_reading_ends_at_once(box):
    assert box.commands.run("cat; echo end").stdout == "end\n"


def test_reconnect_to_a_running_command(box):
    first = box.commands.run("read line; echo after:$line; exit 4", background=True, stdin=True)
    first.disconnect()
    again = box.commands.connect(first.pid)
    box.commands.send_stdin(first.pid, "now\n")
    with pytest.raises(CommandExitException) as raised:
        again.wait()
    assert raised.value.exit_code == 4
    assert raised.value.stdout == "after:now\n"


def test_disconnecting_leaves_the_command(box):
    handle = box.commands.run("sleep 60", background=True)
    handle.disconnect()
    time.sleep(0.2)
    assert any(process.pid == handle.pid for process in box.commands.list())
    assert box.commands.kill(handle.pid) is True


def test_connecting_to_no_process(box):
    with pytest.raises(NotFoundException):
        handle = box.commands.connect(999_999)
        handle.wait()


def test_the_end_is_replayed_to_who_comes_late(box):
    handle = box.commands.run("exit 9", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    late = box.commands.connect(handle.pid)
    with pytest.raises(CommandExitException) as raised:
        late.wait()
    assert raised.value.exit_code == 9


def test_a_timeout_ends_the_command(box):
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 3600", timeout=1)
    wait_for(lambda: "sleep 3600" not in box.commands.run("ps ax -o args | grep -v grep").stdout, "it was ended")


def test_children_left_behind_do_not_hold_the_command(box):
    # It would wait for longer than a command may take.
    assert box.commands.run("sleep 600 & echo back").stdout == "back\n"


def test_large_output_is_whole(box):
    result = box.commands.run("seq 1 400000")
    lines = result.stdout.splitlines()
    assert len(lines) == 400_000
    assert (lines[0], lines[-1]) == ("1", "400000")


def test_bytes_that_are_no_text_do_not_break_the_stream(box):
    result = box.commands.run(r"printf 'a\xff\xfeb\n'; echo next")
    assert result.stdout.endswith("next\n")


def test_a_character_split_over_chunks_stays_whole(box):
    result = box.commands.run("python3 -c \"print('é' * 100000, end='')\"")
    assert result.stdout == "é" * 100_000


def test_many_commands_at_once(box):
    handles = [box.commands.run(f"sleep 0.1; echo {n}", background=True) for n in range(20)]
    assert [handle.wait().stdout for handle in handles] == [f"{n}\n" for n in range(20)]


def test_a_killed_box_ends_the_command_with_words(make):
    box = make()
    handle = box.commands.run("sleep 60", background=True)
    box.kill()
    with pytest.raises(TimeoutException):
        handle.wait()


def test_signal_death_is_told(box):
    with pytest.raises(CommandExitException) as raised:
        box.commands.run("kill -9 $$")
    assert raised.value.exit_code != 0

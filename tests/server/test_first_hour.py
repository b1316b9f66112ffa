"""What a new user met in the first hour: each test is named after what went wrong."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from datetime import datetime

import pytest
from boxkit import Box, post, run_cli, wait_for
from sandkeep_server import Refused, binary


def note(box):
    return box.exec("cat /home/user/who").out.strip()


@pytest.fixture
def named(make, server):
    """Sandboxes that each have a snapshot of one name; and what goes when the test is over."""
    with contextlib.ExitStack() as over:

        def named(who, name="before"):
            box = make()
            assert box.exec(f"echo {who} > /home/user/who").ok
            box.point = post(box, "points", name=name)["id"]
            over.callback(forget, server, box.point)
            return box

        yield named


def forget(server, point):
    with contextlib.suppress(Refused):
        server.json("DELETE", f"/v1/points/{point}")


# ---- N1: the name of a snapshot belongs to its sandbox ----


def test_a_rollback_by_name_never_becomes_another_sandbox(server, named, make):
    b, c = named("b"), named("c")
    b.exec("echo later > /home/user/who")
    # The newest of that name is that of C.
    ran = run_cli(server, "rollback", b.id, "before")
    assert ran.returncode == 0, ran
    assert note(b) == "b"
    # One without a snapshot of this name is refused, whether one or many have it.
    other = make()
    with pytest.raises(Refused) as refused:
        post(other, "rollback", to="before")
    assert refused.value.status == 409 and refused.value.error["field"] == "to", refused.value.error
    for owner in (b, c):
        assert f"{owner.id}:before" in refused.value.error["hint"], refused.value.error
    # Nor by an id, unless it is said that it is meant.
    with pytest.raises(Refused) as refused:
        post(other, "rollback", to=c.point)
    assert refused.value.status == 409 and "foreign" in refused.value.error["hint"], refused.value.error
    ran = run_cli(server, "rollback", other.id, f"{c.id}:before")
    assert ran.returncode == 1 and "--foreign" in ran.stderr, ran
    assert len(ran.stderr.strip().splitlines()) == 2, ran.stderr
    assert not other.exec("test -e /home/user/who").ok
    ran = run_cli(server, "rollback", "--foreign", other.id, f"{c.id[:10]}:before")
    assert ran.returncode == 0, ran
    assert note(other) == "c"


def test_a_name_that_two_sandboxes_have_is_refused_wherever_none_is_at_hand(server, named, tmp_path):
    b, c = named("b"), named("c")
    file = tmp_path / "point.tar.zst"
    for args in (
        ("create", "--from-point", "before"),
        ("points", "export", "before", str(file)),
        ("points", "name", "before", "other"),
        ("points", "tag", "before", "keep"),
        ("points", "rm", "before"),
        ("diff", "before", c.point),
    ):
        ran = run_cli(server, *args)
        assert ran.returncode == 1, (args, ran)
        assert b.id in ran.stderr and c.id in ran.stderr, (args, ran.stderr)
    assert not file.exists()
    status, _, body = server.request("POST", "/sandboxes", {"templateID": "before", "timeout": 60})
    assert status == 409 and b.id in body.decode(), (status, body)
    status, _, body = server.request("DELETE", "/templates/before")
    assert status == 409, (status, body)
    assert {point["id"] for point in server.json("GET", "/v1/points")["points"]} >= {b.point, c.point}
    # Said exactly it is taken, natively and by an E2B client.
    with Box(server, from_point=f"{b.id}:before") as copy:
        assert note(copy) == "b"
    made = server.json("POST", "/sandboxes", {"templateID": f"{c.id}:before", "timeout": 60})
    copy = Box.known(server, made["sandboxID"])
    try:
        assert note(copy) == "c"
    finally:
        copy.kill()
    # The second of a comparison is looked for where the first is.
    b.exec("touch /home/user/more")
    post(b, "points", name="after")
    try:
        ran = run_cli(server, "diff", f"{b.id}:before", "after")
        assert ran.returncode == 0 and "/home/user/more" in ran.stdout, ran
    finally:
        server.json("DELETE", f"/v1/points/{b.id}:after")
    # The only one of its name needs no sandbox.
    server.json("DELETE", f"/v1/points/{b.id}:before")
    with Box(server, from_point="before") as copy:
        assert note(copy) == "c"


def test_a_fork_goes_back_to_what_it_descends_from_and_copies_no_other(server, named):
    b, c = named("b"), named("c")
    fork = Box.known(server, post(b, "fork")["forks"][0]["sandbox"]["id"])
    try:
        fork.exec("echo later > /home/user/who")
        post(fork, "rollback", to="before")
        assert note(fork) == "b"
        own = post(fork, "points", name="before")["id"]
        fork.exec("echo later > /home/user/who")
        assert post(fork, "rollback", to="before")["point"] == own, "its own comes first"
        forget(server, own)
    finally:
        fork.kill()
    post_name = server.json("PATCH", f"/v1/points/{c.point}", {"name": "only-c"})
    assert post_name["name"] == "only-c"
    with pytest.raises(Refused) as refused:
        post(b, "fork", at="only-c")
    assert refused.value.status == 409 and f"{c.id}:only-c" in refused.value.error["hint"]


def test_a_snapshot_can_not_be_named_like_an_id(box):
    with pytest.raises(Refused) as refused:
        post(box, "points", name="p" + "a" * 20)
    assert refused.value.status == 400 and refused.value.error["field"] == "name"


# ---- N7: the time that was given ----


def test_a_timeout_is_kept_over_a_pause(server, make):
    box = make(timeout_seconds=120)
    server.json("POST", box.path + "/timeout", {"timeout_seconds": 8 * 3600})
    post(box, "pause")
    ran = run_cli(server, "resume", box.id)
    assert ran.returncode == 0 and ran.stdout.strip() == box.id, ran
    end = box.info()["end_at"]
    assert "ends at" in ran.stderr and end[:16] in ran.stderr, (ran.stderr, end)
    started = box.info()["started_at"]
    when = [datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (started, end)]
    assert (when[1] - when[0]).total_seconds() > 7 * 3600, when


# ---- N5: commands and a server that is restarted ----


def start(server, *args, **options):
    env = {**os.environ, **server.cli_env()}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([str(binary()), *args], env=env, **pipes)


SLOW = "echo begun; until [ -e /home/user/go ]; do sleep 0.1; done; echo later; exit 7"


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_command_survives_a_restart_and_exec_finds_it_again(server, make, how):
    box = make()
    running = start(server, "exec", box.id, "--", "sh", "-c", SLOW)
    assert running.stdout.readline() == "begun\n"
    server.stop() if how == "stopped" else server.kill_hard()
    server.start()
    processes = server.json("GET", box.path + "/processes")["processes"]
    assert [process["args"][-1] for process in processes] == [SLOW], processes
    time.sleep(1)
    box.write("/home/user/go", b"")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 7, (running.returncode, out, err)
    assert out == "later\n" and "looking for it again" in err, (out, err)
    assert re.search(r"the connection was lost for \d+ s; output written meanwhile is missing", err), err


def test_output_lost_over_a_restart_is_not_told_as_whole(server, make):
    box = make()
    running = start(server, "--json", "exec", box.id, "--", "sh", "-c", "touch /home/user/begun; " + SLOW)
    wait_for(lambda: box.exec("test -e /home/user/begun").ok, "the command runs", 20)
    server.stop()
    server.start()
    time.sleep(1)
    box.write("/home/user/go", b"")
    out, err = running.communicate(timeout=60)
    view = json.loads(out)
    assert view["exit_code"] == 7 and view["truncated"] is True, (view, err)
    assert "connection was lost" in view["truncated_because"], view
    whole = json.loads(run_cli(server, "--json", "exec", box.id, "--", "echo", "all").stdout)
    assert whole["truncated"] is False and "truncated_because" not in whole, whole


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_listener_that_leaves_does_not_end_the_command(server, make, how):
    box = make()
    first = start(server, "exec", box.id, "--", "sh", "-c", SLOW)
    assert first.stdout.readline() == "begun\n"
    pid = server.json("GET", box.path + "/processes")["processes"][0]["pid"]
    listener = start(server, "exec", "--attach", str(pid), box.id)
    time.sleep(1)
    listener.send_signal(how)
    _, err = listener.communicate(timeout=10)
    if how != signal.SIGKILL:
        assert listener.returncode == 128 + how, (listener.returncode, err)
        assert f"detached; the command continues: sandkeep exec --attach {pid} {box.id}" in err, err
    time.sleep(1)
    assert server.json("GET", box.path + "/processes")["processes"], "the command runs on"
    box.write("/home/user/go", b"")
    assert first.communicate(timeout=60)[0] == "later\n" and first.returncode == 7


def attach_and_vanish(server, box, first):
    """A client of the WebSocket that says one thing, hears that it was begun and is gone."""
    text = json.dumps(first).encode()
    assert len(text) < 126
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as wire:
        wire.sendall(
            f"GET {box.path}/exec HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.key}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        # Masked, with a mask that changes nothing.
        wire.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)
        heard = b""
        while b'"started"' not in heard:
            piece = wire.recv(4096)
            assert piece, heard
            heard += piece


@pytest.mark.parametrize("said, runs", [({}, True), ({"detach": True}, True), ({"detach": False}, False)])
def test_a_client_that_attaches_ends_the_command_only_when_it_asks_for_that(server, make, said, runs):
    box = make()
    first = start(server, "exec", box.id, "--", "sh", "-c", SLOW)
    assert first.stdout.readline() == "begun\n"

    def there():
        return server.json("GET", box.path + "/processes")["processes"]

    attach_and_vanish(server, box, {"attach": there()[0]["pid"]} | said)
    if runs:
        time.sleep(1)
        assert there(), "the command runs on"
        box.write("/home/user/go", b"")
        assert first.communicate(timeout=20)[0] == "later\n"
    else:
        wait_for(lambda: not there(), "the command ended with its client", 10)
        first.communicate(timeout=20)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["exec", "run"])
def test_ctrl_c_ends_a_client_whose_server_is_away(server, make, what, how):
    where = [make().id] if what == "exec" else []
    running = start(server, what, *where, "--", "sh", "-c", SLOW)
    try:
        assert running.stdout.readline() == "begun\n"
        server.stop()
        assert "looking for it again" in running.stderr.readline()
        running.send_signal(how)
        began = time.monotonic()
        _, err = running.communicate(timeout=10)
        assert time.monotonic() - began < 3, err
        assert running.returncode == 128 + how, (running.returncode, err)
        assert "the command continues" in err and "sandkeep exec --attach" in err, err
        assert what == "exec" or "sandkeep kill" in err, err
    finally:
        running.kill()
        server.start()
        for left in server.json("GET", "/v1/sandboxes")["sandboxes"] if what == "run" else []:
            server.json("DELETE", f"/v1/sandboxes/{left['id']}")


def test_a_command_can_be_attached_to_by_its_pid(server, make):
    box = make()
    first = start(server, "exec", box.id, "--", "sh", "-c", SLOW)
    assert first.stdout.readline() == "begun\n"
    listed = run_cli(server, "ps", box.id)
    assert listed.returncode == 0 and "until [" in listed.stdout, listed
    pid = re.search(r"^\s*(\d+)", listed.stdout, re.M)[1]
    second = start(server, "exec", "--attach", pid, box.id)
    time.sleep(1)
    box.write("/home/user/go", b"")
    assert second.communicate(timeout=60)[0] == "later\n"
    assert first.communicate(timeout=60)[0] == "later\n"
    assert (first.returncode, second.returncode) == (7, 7)
    ran = run_cli(server, "exec", "--attach", "99999", box.id)
    assert ran.returncode == 1 and "sandkeep ps" in ran.stderr, ran


def test_a_command_ends_with_a_client_that_leaves(server, make):
    """Only a server that stops leaves it running."""
    box = make()
    running = start(server, "exec", box.id, "--", "sh", "-c", SLOW)
    assert running.stdout.readline() == "begun\n"
    running.send_signal(signal.SIGKILL)
    running.wait()
    wait_for(lambda: not server.json("GET", box.path + "/processes")["processes"], "the command ended with its client", 20)


# ---- N13, N14: files and recipes ----


def test_a_directory_is_copied_from_sandbox_to_sandbox_through_a_pipe(server, make):
    source, target = make(), make()
    assert source.exec("mkdir -p dir/sub && echo deep > dir/sub/file && chmod 750 dir/sub && ln -s sub dir/link").ok
    shell = f"{binary()} cp {source.id}:dir - | {binary()} cp - {target.id}:copy"
    env = {**os.environ, **server.cli_env()}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done
    assert target.exec("cat copy/link/file && stat -c %a copy/sub").out == "deep\n750\n"
    # What anybody else packed stays a file.
    with start(server, "cp", f"{source.id}:dir", "-", text=False) as packing:
        packed = packing.stdout.read()
    listed = subprocess.run(["tar", "--list"], input=packed, capture_output=True)
    assert b"sub/file" in listed.stdout and not listed.stderr, listed
    plain = subprocess.run(["tar", "--create", "/etc/hostname"], capture_output=True).stdout
    done = subprocess.run([str(binary()), "cp", "-", f"{target.id}:a.tar"], input=plain, capture_output=True, env=env, timeout=60)
    assert done.returncode == 0, done
    assert target.read("/home/user/a.tar") == plain


def test_a_recipe_needs_no_steps_and_its_unknown_keys_are_named(server, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('from = "base"\nstpes = []\n')
    ran = run_cli(server, "template", "build", "first-hour", "--file", str(recipe))
    assert ran.returncode == 1 and "stpes" in ran.stderr, ran
    recipe.write_text('from = "base"\n')
    ran = run_cli(server, "template", "build", "first-hour", "--file", str(recipe))
    try:
        assert ran.returncode == 0, ran
    finally:
        run_cli(server, "template", "rm", "first-hour")


# ---- N16, N17: what is told of an end ----


def test_a_sandbox_that_reached_its_timeout_says_so(server, make):
    box = make(timeout_seconds=1)
    wait_for(lambda: box.info()["state"] == "gone", "its end", 30)
    for args in (("exec", box.id, "--", "true"), ("logs", box.id), ("policy", "show", box.id), ("kill", box.id)):
        ran = run_cli(server, *args)
        assert ran.returncode == 1 and "is gone: reached its timeout at 20" in ran.stderr, (args, ran)
    ran = run_cli(server, "exec", "i" + "0" * 19, "--", "true")
    assert ran.returncode == 1 and "was not found" in ran.stderr, ran


def test_exit_codes_of_commands_that_never_ran(server, box):
    ran = run_cli(server, "exec", box.id, "--", "nosuchprogram")
    assert ran.returncode == 127 and "nosuchprogram" in ran.stderr, ran
    ran = run_cli(server, "exec", box.id, "--", "/etc/hostname")
    assert ran.returncode == 126, ran


def test_a_command_that_was_killed_for_memory_says_so(server, make):
    box = make(limits={"memory_mib": 64})
    eat = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    for command in (["python3", "-c", eat], ["sh", "-c", f"python3 -c '{eat}'; exit $?"]):
        ran = run_cli(server, "exec", box.id, "--", *command)
        assert ran.returncode == 137, ran
        assert "killed: out of memory (limit 64 MiB)" in ran.stderr, ran
    ran = run_cli(server, "exec", box.id, "--", "sh", "-c", "kill -9 $$")
    assert ran.returncode == 137 and "memory" not in ran.stderr, ran


def test_completions_end_with_their_reader():
    shell = f"{binary()} completions bash | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert "panicked" not in done.stderr and not done.stderr, done


# ---- N18 to N20, and what was looked for and not there ----


def test_doctor_looks_at_the_server_that_runs(server):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    ran = subprocess.run([str(binary()), "doctor", "--json"], capture_output=True, text=True, timeout=120, env=env)
    checks = {check["name"]: check for check in json.loads(ran.stdout)["host"]}
    assert str(server.pid) in checks["server"]["found"], checks["server"]
    assert str(server.state) in checks["state directory"]["found"], checks["state directory"]


def test_every_metric_says_what_it_is(server, box):
    status, _, body = server.request("GET", "/metrics")
    text = body.decode()
    assert status == 200
    told = set(re.findall(r"^# HELP (\S+)", text, re.M))
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    assert set(typed) <= told, set(typed) - told
    assert "summary" not in typed.values(), typed
    assert typed["sandkeep_http_request_seconds"] == "histogram"
    for name in ("sandkeep_memory_bytes", "sandkeep_storage_bytes", "sandkeep_audit_records", "sandkeep_audit_healthy"):
        assert re.search(rf"^{name}(\{{[^}}]*\}})? [0-9.e+]+$", text, re.M), name


def test_a_command_without_dashes_is_told_where_they_go(server, box):
    ran = run_cli(server, "exec", box.id, "make", "test")
    assert ran.returncode == 2 and "sandkeep exec SANDBOX -- COMMAND" in ran.stderr, ran


def test_many_templates_are_removed_at_once(server, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('from = "base"\n')
    for name in ("hour-a", "hour-b"):
        assert run_cli(server, "template", "build", name, "--file", str(recipe)).returncode == 0
    ran = run_cli(server, "template", "rm", "hour-a", "hour-none", "hour-b")
    assert ran.returncode == 1 and "hour-none" in ran.stderr, ran
    assert ran.stdout.split() == ["hour-a", "hour-b"]
    assert not [one for one in server.json("GET", "/v1/templates")["templates"] if one["name"].startswith("hour-")]


def test_a_paused_sandbox_is_ended_at_its_limit(server, make):
    box, other = make(paused_limit_seconds=1), make()
    for one in (box, other):
        post(one, "pause", memory=False)
    wait_for(lambda: box.info()["state"] == "gone", "the end of a sandbox that was paused for too long", 40)
    assert "paused for longer" in box.info()["gone"]["message"]
    assert other.info()["state"] == "paused"

"""`sandkeep verify`, as users run it: its output, its exit codes, what it leaves behind, and that it notices weakenings.

It starts a server of its own, so none of the other tests' is used.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from sandkeep_server import binary

# Only a hang runs into this.
LIMIT = 540
# Attacks that are quick, one or more of each class but for those that fill something.
QUICK = ["escape-mounts", "escape-host-files", "egress-direct", "egress-dns-tunnel", "credentials-elsewhere", "neighbours-reach", "server-key"]


@pytest.fixture
def state(tmp_path):
    """Where an operator's state would be; the base template comes from SANDKEEP_BASE_CACHE."""
    return tmp_path / "operator"


def command(state, *words):
    kernel = ["--microvm-kernel", os.environ["SANDKEEP_TEST_MICROVM"]] if "SANDKEEP_TEST_MICROVM" in os.environ else []
    runsc = ["--runsc", os.environ["SANDKEEP_TEST_RUNSC"]] if "SANDKEEP_TEST_RUNSC" in os.environ else []
    return [str(binary()), "verify", "--state", str(state), *kernel, *runsc, *words]


def environment():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SANDKEEP_", "E2B_"))}
    if "SANDKEEP_BASE_CACHE" in os.environ:
        env["SANDKEEP_BASE_CACHE"] = os.environ["SANDKEEP_BASE_CACHE"]
    return env


def verify(state, *words):
    return subprocess.run(command(state, *words), env=environment(), capture_output=True, text=True, timeout=LIMIT)


def only(names):
    return [word for name in names for word in ("--only", name)]


def marks_on_the_host():
    """What verify makes and must take away: directories, mounts, processes, cgroups of its trees."""
    found = [str(path) for path in Path("/var/tmp").glob("sandkeep-verify*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "sandkeep-verify." in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"sandkeep-verify." in words:
            found.append(f"{process}: {words!r}")
    return found


def cgroup_trees(directory):
    """The names of the trees of a server whose state is there, as the server makes them."""
    names = []
    for ward in ("ward-container", "ward-gvisor", "ward-microvm"):
        hashed = 0xCBF29CE484222325
        for byte in str(directory / ward).encode():
            hashed = ((hashed ^ byte) * 0x100000001B3) % (1 << 64)
        names.append(f"sandkeep.{hashed:016x}")
    return names


def assert_clean(state, work=None):
    assert list(state.parent.glob("sandkeep-verify.*")) == []
    assert not marks_on_the_host()
    if work:
        names = set(cgroup_trees(work / "state"))
        left = [path for path in Path("/sys/fs/cgroup").rglob("sandkeep.*") if path.name in names]
        assert not left, left


def test_list_names_every_attack_and_runs_none(state):
    ran = verify(state, "--list", "--json")
    assert ran.returncode == 0, ran
    listed = json.loads(ran.stdout)
    sources = " ".join(item["source"] for item in listed) + " "
    for number in range(1, 19):
        assert re.search(rf"SandboxEscapeBench {number}\b", sources), number
    for number in range(1, 16):
        assert re.search(rf"finding {number}\b", sources), number
    assert len({item["id"] for item in listed}) == len(listed) > 60
    text = verify(state, "--list").stdout
    assert all(item["id"] in text for item in listed)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not list(state.parent.iterdir())


def test_usage_errors_end_with_2_and_say_why(state):
    ran = verify(state, "--only", "no-such-attack")
    assert ran.returncode == 2 and "--list" in ran.stderr, ran
    assert verify(state, "--level", "process").returncode == 2
    setpriv = shutil.which("setpriv")
    assert setpriv, "util-linux is installed wherever tests run"
    ran = subprocess.run([setpriv, "--reuid=65534", "--clear-groups", *command(state)], env=environment(), capture_output=True, text=True)
    assert ran.returncode == 2 and "root" in ran.stderr and "sudo" in ran.stderr, ran


def test_table_json_junit_and_exit_code_say_the_same(state, tmp_path):
    junit = tmp_path / "verify.xml"
    ran = verify(state, "--level", "container", *only(QUICK), "--json", "--junit", str(junit))
    assert ran.returncode == 0, (ran.stdout[-4000:], ran.stderr[-4000:])
    told = json.loads(ran.stdout)
    rows = {row["id"]: row for row in told["results"]}
    assert sorted(rows) == sorted(QUICK)
    assert told["complete"] and told["summary"] == {"held": len(QUICK), "broken": 0, "untested": 0}
    assert all(row["outcome"] == "held" and row["detail"] and row["level"] == "container" for row in rows.values()), rows
    # Progress is told beside it, a line for each.
    assert all(name in ran.stderr for name in QUICK)
    suite = xml.parse(junit).getroot().find("testsuite")
    assert suite.get("name") == "container" and int(suite.get("tests")) == len(QUICK)
    assert suite.get("failures") == "0" and suite.get("skipped") == "0"
    assert_clean(state)

    ran = verify(state, "--level", "container", "--only", "escape-mounts")
    assert ran.returncode == 0, ran
    assert "1 held, 0 broken, 0 cannot be tested here." in ran.stdout
    assert "mount something" in ran.stdout and "Escape to the host" in ran.stdout
    assert "\x1b" not in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines()) <= 80


@pytest.mark.parametrize("level", ["gvisor", "microvm"])
def test_stronger_levels_hold_or_say_why_not(state, level):
    names = ["escape-host-files", "escape-own-kernel", "egress-direct"]
    ran = verify(state, "--level", level, *only(names), "--json")
    rows = json.loads(ran.stdout)["results"]
    assert sorted(row["id"] for row in rows) == sorted(names)
    for row in rows:
        assert row["outcome"] in ("held", "untested"), row
        assert row["detail"]
    # A level that is not there is no breach, and no proof either.
    assert ran.returncode == (0 if any(row["outcome"] == "held" for row in rows) else 2), ran
    assert_clean(state)


def test_self_test_notices_every_weakening_it_makes(state):
    """One attack for each kind of weakening."""
    names = [
        "kernel-confined", "escape-mounts", "escape-handles", "escape-host-services", "escape-host-files", "escape-host-processes",
        "egress-direct", "credentials-nowhere", "credentials-elsewhere", "exhaust-processes", "neighbours-reach", "neighbours-inodes",
        "escape-dirty-cow", "exhaust-terminals", "server-pool-setuid",
        # These said "held" without the filter: another wall stood behind it, and half of the attack had the filter.
        "kernel-namespaces", "exhaust-kernel-aio",
    ]  # fmt: skip
    ran = verify(state, "--self-test", "--level", "container", *only(names), "--json")
    told = json.loads(ran.stdout)
    assert told["complete"], ran
    missed = [row for row in told["weakenings"] if row["noticed"] != "noticed"]
    assert not missed, missed
    assert ran.returncode == 0
    made = {row["weakness"] for row in told["weakenings"]}
    assert made == {
        "seccomp-off", "all-capabilities", "host-root", "open-moat", "no-cgroup", "host-mount", "host-proc", "shared-node",
        "limits-lifted", "open-policy", "secret-inside", "no-edge", "same-sandbox", "planted", "free-terminals", "suid-pool",
    }  # fmt: skip
    assert told["not_covered"] == []
    assert_clean(state)


@pytest.mark.skipif("SANDKEEP_TEST_GVISOR" not in os.environ, reason="needs gVisor")
def test_self_test_notices_what_it_can_weaken_in_a_kernel_of_its_own_and_names_the_rest(state):
    """Inotify instances of gVisor's kernel are nobody else's: what counts is what they cost the host."""
    names = ["exhaust-host-inotify", "exhaust-memory-sockets", "escape-own-kernel", "escape-packet-sockets"]
    ran = verify(state, "--self-test", "--level", "gvisor", *only(names), "--json")
    told = json.loads(ran.stdout)
    assert {row["id"]: row["noticed"] for row in told["weakenings"]} == dict.fromkeys(names[:3], "noticed"), told
    (rest,) = told["not_covered"]
    assert rest["id"] == names[3] and rest["levels"] == ["gvisor"] and "kernel of its own" in rest["why"], rest
    assert ran.returncode == 0
    assert_clean(state)


def test_a_normal_server_has_no_weak_mode(state):
    """Weakenings are made from outside: no flag, setting or word of the API is about them."""
    text = subprocess.run([str(binary()), "serve", "--help"], capture_output=True, text=True).stdout.lower()
    for word in ("weak", "self-test", "selftest", "unconfined"):
        assert word not in text, word
    settings = state.parent / "weak.toml"
    settings.write_text("weaken = \"seccomp\"\n")
    ran = subprocess.run(
        [str(binary()), "serve", "--config", str(settings), "--state", str(state)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode != 0 and "weaken" in ran.stderr, ran


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_half_way_it_leaves_nothing(state, number):
    process = subprocess.Popen(
        command(state, "--level", "container"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    work = None
    try:
        for line in process.stderr:
            if work is None:
                work = next(state.parent.glob("sandkeep-verify.*"), None)
            if "escape-block-device" in line:
                break
        assert work is not None and process.poll() is None
        process.send_signal(number)
        out, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, out
    assert "Stopped before the end." in out
    assert_clean(state, work)


def test_killed_hard_the_next_run_takes_away_what_is_left(state):
    process = subprocess.Popen(command(state, "--level", "container"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "escape-block-device" in line:
            break
    work = next(state.parent.glob("sandkeep-verify.*"))
    process.kill()
    process.wait()
    # All that ran ends with it.
    end = time.monotonic() + 60
    while time.monotonic() < end and [mark for mark in marks_on_the_host() if mark.startswith("/proc")]:
        time.sleep(0.1)
    assert not marks_on_the_host()
    ran = verify(state, "--level", "container", "--only", "server-key")
    assert ran.returncode == 0, ran
    assert_clean(state, work)

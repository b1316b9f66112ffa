"""Which runsc a server takes, and what it says about it."""

import json
import os
import shutil
import subprocess

import pytest
from boxkit import Box
from sandkeep_server import Refused, binary
from servers import in_place_of

RUNSC = os.environ.get("SANDKEEP_TEST_RUNSC") or shutil.which("runsc")
OLDEST = os.environ.get("SANDKEEP_TEST_RUNSC_OLDEST")

pytestmark = pytest.mark.skipif(
    RUNSC is None and "SANDKEEP_TEST_GVISOR" not in os.environ,
    reason="runsc is not installed; script/test installs it",
)


def version(program):
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0].removeprefix("runsc version ")


def looked_at(levels):
    level = next(level for level in levels if level["level"] == "gvisor")
    return level["usable"], next(check for check in level["checks"] if check["name"] == "runsc")


def test_a_runsc_without_a_version_is_named(server, tmp_path):
    """A plain `go install` makes one; images of two such builds could not be told apart."""
    program = tmp_path / "runsc"
    program.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exec echo "runsc version VERSION_MISSING"\nexec {RUNSC} "$@"\n')
    program.chmod(0o755)
    words = [str(binary()), "doctor", "--json", "--state", str(server.state)]
    told = subprocess.run(words, env={**os.environ, "SANDKEEP_RUNSC": str(program)}, capture_output=True, text=True, timeout=120)
    usable, check = looked_at(json.loads(told.stdout)["levels"])
    assert not usable and "VERSION_MISSING" in check["found"] and str(program) in check["found"], check
    with in_place_of(server, "--pool-size", "0", "--runsc", str(program)) as own:
        with pytest.raises(Refused) as refused:
            Box(own, isolation="gvisor")
        assert "VERSION_MISSING" in str(refused.value), refused.value


def test_sudo_works_where_doctor_names_no_fault(server):
    _, check = looked_at(server.json("GET", "/v1/host")["levels"])
    assert version(RUNSC) in check["found"], check
    with Box(server, isolation="gvisor") as box:
        became = box.exec("sudo -n id -u")
        if "fix" in check:
            assert "sudo does not work" in check["found"] and not became.ok, (check, became)
        else:
            assert became.out == "0\n", became


@pytest.mark.skipif(OLDEST is None or RUNSC is None or version(OLDEST) == version(RUNSC), reason="there is one release of runsc here")
def test_runsc_is_replaced_below_a_running_sandbox(server):
    """Its memory is not written by a program of another release: the sandbox would be lost."""
    with in_place_of(server, "--pool-size", "0", "--runsc", OLDEST) as own:
        box = Box(own, isolation="gvisor")
        own.stop()
        own.extra[-1] = RUNSC
        own.start()
        rest = own.json("POST", box.path + "/pause", {}, timeout=120)["pause"]
        assert rest["mode"] == "ram" and "it runs on runsc" in rest["why"], rest
        own.json("POST", box.path + "/resume", {})
        assert box.exec("echo $(echo well)").out == "well\n"
        box.kill()

"""Templates built from recipes: steps in a box, kept with what they started."""

import hashlib
import io
import json
import os
import secrets
import sqlite3
import subprocess
import tarfile

import pytest
from boxkit import Box, wait_for
from sandkeep_server import Refused, binary
from servers import in_place_of

PORT = 8099
# Tells what only this process knows, and what a fresh one would.
SERVE = f"""
import http.server, os, secrets, uuid
BORN = uuid.uuid4().hex
class Tell(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        words = [BORN, str(os.getpid()), os.environ.get("MODE", "-"), os.environ.get("LATER", "-"), os.getcwd(), secrets.token_hex(16)]
        self.wfile.write(" ".join(words).encode())
    def log_message(self, *_):
        pass
print("about to serve", flush=True)
http.server.HTTPServer(("127.0.0.1", {PORT}), Tell).serve_forever()
"""
ASK = ["curl", "-sS", "--max-time", "60", f"http://127.0.0.1:{PORT}/"]


def packed(**files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def send(server, name, archive):
    key = hashlib.sha256(archive).hexdigest()
    status, _, body = server.request(
        "PUT", f"/v1/templates/{name}/files/{key}", archive, headers={"Content-Type": "application/octet-stream"}
    )
    assert status == 204, body
    return key


class Build:
    def __init__(self, server, name, **recipe):
        self.server, self.name = server, name
        begun = server.json("POST", f"/v1/templates/{name}/builds", recipe)
        self.path = f"/v1/templates/{name}/builds/{begun['id']}"

    def now(self):
        return self.server.json("GET", self.path)

    def ended(self, limit=180.0):
        return wait_for(lambda: (now := self.now())["ended_at"] and now, "the build ends", limit)

    def ready(self):
        ended = self.ended()
        assert ended["status"] == "ready", (ended, self.log())
        return self.server.json("GET", f"/v1/templates/{self.name}")

    def log(self):
        """All lines; the stream ends with the build."""
        _, _, body = self.server.request("GET", self.path + "/log", timeout=180)
        data = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        lines = [json.loads(line) for line in data]
        assert "status" in lines[-1], lines[-1]
        return [line["message"] for line in lines[:-1]]


@pytest.fixture
def name(server):
    name = "test-" + secrets.token_hex(4)
    yield name
    server.request("DELETE", f"/v1/templates/{name}")


def of(server, name, **request):
    return Box(server, template=name, **request)


def test_steps_files_and_settings_reach_the_boxes(server, name):
    archive = packed(app__main=b"print('hello')\n", app__sub__data=b"deep", top=b"one file")
    key = send(server, name, archive)
    steps = [
        {"env": {"APP": "/srv/app", "MODE": "built"}},
        {"run": "id -un > /home/user/who; touch /opt/by-root", "user": "root"},
        {"workdir": "/srv/app"},
        {"copy": "app", "to": ".", "files": key},
        {"copy": "top", "to": "/opt/", "mode": "0755", "user": "root", "files": key},
        {"env": {"PATH": "$APP/bin:$PATH"}},
        {"run": "pwd > /home/user/where; echo $MODE > /home/user/mode; cat main sub/data > /home/user/all"},
        {"user": "robot"},
        {"run": "id -un > /tmp/robot; cp /tmp/robot ~/robot"},
    ]
    made = Build(server, name, steps=steps, limits={"memory_mib": 256}).ready()
    built = made["built"]
    assert built["from"] == "base" and built["user"] == "robot" and built["workdir"] == "/srv/app"
    assert built["steps"][1].startswith("RUN id -un") and "MODE" in built["env"] and "/srv" not in str(built["env"])
    with of(server, name, env={"MODE": "asked", "MORE": "1"}) as box:
        said = box.exec("id -un; pwd; echo $MODE $MORE $APP; cat /home/user/who /home/user/where /home/user/mode").out
        assert said.split() == ["robot", "/srv/app", "asked", "1", "/srv/app", "root", "/srv/app", "built"]
        assert box.exec(["cat", "/home/user/all"]).out == "print('hello')\ndeep"
        assert box.exec("stat -c '%a %U' /opt/top /srv/app/main /home/robot/robot").out.split("\n")[:2] == [
            "755 root",
            "644 user",
        ]
        assert box.info()["limits"]["memory_mib"] == 256
        # Settings outlive the template.
        assert server.request("DELETE", f"/v1/templates/{name}")[0] == 204
        assert box.exec("id -un; echo $APP").out.split() == ["robot", "/srv/app"]
        server.json("POST", box.path + "/pause", {"memory": False})
        server.json("POST", box.path + "/resume", {})
        assert box.exec("id -un; echo $APP").out.split() == ["robot", "/srv/app"]


def test_a_changed_last_step_runs_alone(server, name):
    first = {"run": "head -c 16 /dev/urandom | base64 > /home/user/once"}
    Build(server, name, steps=[first, {"run": "echo 1 > /home/user/last"}]).ready()
    with of(server, name) as box:
        once = box.read("/home/user/once")
    again = Build(server, name, steps=[first, {"run": "echo 2 > /home/user/last"}])
    again.ready()
    log = again.log()
    assert any("[1/2] CACHED RUN head" in line for line in log), log
    assert any("[2/2] RUN echo 2" in line for line in log), log
    with of(server, name) as box:
        assert box.read("/home/user/once") == once
        assert box.read("/home/user/last") == b"2\n"
    Build(server, name, steps=[first], no_cache=True).ready()
    with of(server, name) as box:
        assert box.read("/home/user/once") != once
        assert not box.exec("test -e /home/user/last").ok
    kept = server.json("GET", f"/v1/templates/{name}/log")["lines"]
    assert any("RUN head" in line["message"] for line in kept)


def test_a_failing_step_is_named_with_what_it_said_and_the_old_template_stays(server, name):
    Build(server, name, steps=[{"run": "echo old > /home/user/v"}]).ready()
    bad = [{"run": "echo new > /home/user/v"}, {"run": "echo it is broken >&2; exit 3"}]
    build = Build(server, name, steps=bad)
    ended = build.ended()
    assert ended["status"] == "failed" and ended["error"]["step"] == "2", ended
    assert "exit status 3" in ended["error"]["message"] and "it is broken" in ended["error"]["message"]
    with of(server, name) as box:
        assert box.read("/home/user/v") == b"old\n"
    # Nothing of the build is left to be seen.
    assert server.json("GET", "/v1/sandboxes?template=" + name)["sandboxes"] == []
    nobody = Build(server, name, steps=[{"run": "true", "user": "nobody-here"}]).ended()
    assert "invalid username: 'nobody-here'" in nobody["error"]["message"]


def test_what_can_not_be_built_is_refused_in_words(server, name):
    for recipe, field in [
        ({"steps": [{"run": ""}]}, "steps[0].run"),
        ({"steps": [{"copy": "../x", "to": "/", "files": "0" * 64}]}, "steps[0].copy"),
        ({"ready": {"port": 1}}, "ready"),
        ({"isolation": ["strong"]}, "isolation[0]"),
        ({"network": {"profile": "none-such"}}, "network.profile"),
    ]:
        with pytest.raises(Refused) as refused:
            server.json("POST", f"/v1/templates/{name}/builds", recipe)
        assert refused.value.status == 400 and refused.value.error["field"] == field, refused.value.error
    gone = Build(server, name, **{"from": "none-such"}).ended()
    assert gone["error"]["step"] == "base" and "base" in gone["error"]["hint"]
    missing = Build(server, name, steps=[{"copy": "a", "to": "/a", "files": "0" * 64}]).ended()
    assert missing["error"]["step"] == "1" and "were not sent" in missing["error"]["message"]
    with pytest.raises(Refused) as refused:
        server.json("PUT", f"/v1/templates/{name}/files/{'0' * 64}", {})
    assert "SHA-256" in refused.value.error["message"]


def test_one_build_of_a_name_at_a_time_and_it_can_be_cancelled(server, name):
    build = Build(server, name, steps=[{"run": "echo begun; sleep 600"}])
    wait_for(lambda: build.now()["lines"] > 2, "the step runs")
    with pytest.raises(Refused) as refused:
        Build(server, name)
    assert refused.value.status == 409
    server.json("DELETE", build.path)
    assert build.ended()["status"] == "cancelled"
    assert name not in {t["name"] for t in server.json("GET", "/v1/templates")["templates"]}
    Build(server, name, steps=[{"run": "true"}]).ready()


def test_a_build_reaches_nothing_that_it_was_not_given(server, name):
    step = {"run": "curl -sS --max-time 30 http://example.org/ || true"}
    build = Build(server, name, steps=[step])
    build.ready()
    assert any("refused example.org" in line for line in build.log()), build.log()


def test_what_never_gets_ready_fails_the_build(server, name):
    build = Build(server, name, start="echo trying; sleep 600", ready={"port": PORT, "timeout_seconds": 2})
    ended = build.ended()
    assert ended["error"]["step"] == "finalize" and f"port {PORT}" in ended["error"]["message"], ended
    assert "trying" in build.log()
    died = Build(server, name, start="echo no such thing; exit 7", ready={"command": "false", "timeout_seconds": 60})
    assert "exit status 7" in died.ended()["error"]["message"]
    assert name not in {t["name"] for t in server.json("GET", "/v1/templates")["templates"]}


def test_a_server_killed_in_the_middle_leaves_the_old_template_and_nothing_else(server, name):
    Build(server, name, steps=[{"run": "echo old > /home/user/v"}]).ready()
    build = Build(server, name, steps=[{"run": "echo new > /home/user/v"}, {"run": "echo there; sleep 600"}])
    # building, step 1, step 2, there
    wait_for(lambda: build.now()["lines"] >= 4, "the second step runs")
    server.kill_hard()
    server.start()
    with pytest.raises(Refused) as refused:
        build.now()
    assert refused.value.status == 404
    with of(server, name) as box:
        assert box.read("/home/user/v") == b"old\n"
    disks = server.state / "pool" / "disks"

    def nothing_more():
        known = {box["id"] for box in server.json("GET", "/v1/sandboxes")["sandboxes"]}
        others = {disk.name for disk in disks.iterdir()} - known
        return len(others) == server.json("GET", "/v1/host")["pooled"]

    wait_for(nothing_more, "only boxes and the pool have disks")
    # What was done before is not done again.
    again = Build(server, name, steps=[{"run": "echo new > /home/user/v"}])
    again.ready()
    assert any("CACHED" in line for line in again.log())


RECIPE = {
    "steps": [
        {"env": {"MODE": "template"}},
        {"workdir": "/srv/app"},
        {"copy": "serve.py", "to": "/srv/app/serve.py"},
    ],
    "start": "exec python3 /srv/app/serve.py",
    "ready": {"port": PORT, "timeout_seconds": 60},
    "limits": {"memory_mib": 384},
}


def warmed(server, name, **more):
    key = send(server, name, packed(**{"serve.py": SERVE.encode()}))
    steps = [{**step, "files": key} if "copy" in step else step for step in RECIPE["steps"]]
    return Build(server, name, **{**RECIPE, "steps": steps, **more})


def told(box):
    ran = box.exec(ASK)
    assert ran.ok, ran
    born, pid, mode, later, cwd, fresh = ran.out.split()
    assert (mode, later, cwd) == ("template", "-", "/srv/app"), ran
    return born, fresh


@pytest.fixture(scope="module")
def warm(server):
    name = "warm-" + secrets.token_hex(4)
    warmed(server, name, isolation=["gvisor"]).ready()
    yield name
    server.request("DELETE", f"/v1/templates/{name}")


def test_a_warmed_template_gives_boxes_whose_processes_run_already(server, warm):
    (level,) = server.json("GET", f"/v1/templates/{warm}")["built"]["levels"]
    assert level["isolation"] == "gvisor" and level["warm"] and level["memory_bytes"] > 1 << 20, level
    with (
        of(server, warm, isolation="gvisor", env={"LATER": "1"}, limits={"disk_mib": 512}) as one,
        of(server, warm, isolation="gvisor") as two,
    ):
        (born, first), (also, second) = told(one), told(two)
        assert born == also, "both go on with the process that was started when the template was built"
        assert first != second, "but not with its randomness"
        ids = [box.exec("cat /etc/machine-id; hostname; cat /proc/sys/kernel/random/uuid").out.split() for box in (one, two)]
        assert not set(ids[0]) & set(ids[1]), ids
        assert one.made["access_token"] != two.made["access_token"]
        assert one.exec("echo $LATER $MODE").out.split() == ["1", "template"]
        assert one.info()["limits"]["disk_mib"] == 512 and one.info()["limits"]["memory_mib"] == 384
        assert abs(float(one.exec(["date", "+%s"]).out) - float(two.exec(["date", "+%s"]).out)) < 60
    # Other memory than it was made with: started anew, and nothing is dropped.
    with of(server, warm, isolation="gvisor", limits={"memory_mib": 512}) as box:
        assert told(box)[0] != born
        assert box.info()["limits"]["memory_mib"] == 512
        assert int(box.root("awk '/MemTotal/ {print $2}' /proc/meminfo").out) == 512 * 1024
    # At a level it was not warmed for the command is started at create.
    with of(server, warm) as box:
        assert box.made["isolation"] == "container" and told(box)[0] != born


def test_the_container_level_is_warm_where_it_has_an_engine_and_else_starts_at_create(server, name):
    made = warmed(server, name).ready()
    (level,) = made["built"]["levels"]
    assert level["isolation"] == "container"
    with of(server, name) as one, of(server, name) as two:
        same = told(one)[0] == told(two)[0]
        assert same == level["warm"], "a restore goes on with one process, a cold start has its own"
        assert told(one)[1] != told(two)[1]
        assert one.exec(["cat", "/etc/machine-id"]).out != two.exec(["cat", "/etc/machine-id"]).out
        # A pause that reaches the disk needs the same engine.
        depth = server.json("POST", two.path + "/pause", {})["pause"]["mode"]
        assert level["warm"] == (depth == "disk"), level
    if not level["warm"]:
        assert "runs at create" in level["why"]


def test_memory_that_is_damaged_is_made_again(server, warm):
    with of(server, warm, isolation="gvisor") as box:
        before = told(box)[0]
    images = list((server.state / "pool").glob("points/*/memory/*"))
    assert images, "the memory of the template is in the pool"
    for image in images:
        with image.open("r+b") as file:
            file.seek(max(0, image.stat().st_size // 2))
            file.write(b"damage")
    with of(server, warm, isolation="gvisor") as box:
        assert told(box)[0] != before, "it starts cold"

    def again():
        with of(server, warm, isolation="gvisor") as box:
            born = told(box)[0]
        with of(server, warm, isolation="gvisor") as box:
            return told(box)[0] == born

    wait_for(again, "it is warm again", 120)


def test_memory_of_another_engine_is_not_used_and_made_again(server, warm):
    with of(server, warm, isolation="gvisor") as box:
        before = told(box)[0]
    server.stop()
    ledger = sqlite3.connect(server.state / "ledger.db")
    with ledger:
        other = json.dumps({"name": "runsc", "build": "of another day"})
        changed = ledger.execute("UPDATE points SET engine = ? WHERE kind = 'template' AND engine IS NOT NULL", [other])
        assert changed.rowcount >= 1
    ledger.close()
    server.start()
    with of(server, warm, isolation="gvisor") as box:
        assert told(box)[0] != before, "it starts cold, or from new memory"

    def warm_again():
        (level,) = server.json("GET", f"/v1/templates/{warm}")["built"]["levels"]
        return level["warm"] and level["engine"]

    assert "another day" not in wait_for(warm_again, "it is warm again", 120)
    with of(server, warm, isolation="gvisor") as one, of(server, warm, isolation="gvisor") as two:
        assert told(one)[0] == told(two)[0]


def test_a_template_is_deleted_while_boxes_of_it_run(server, name):
    warmed(server, name, isolation=["gvisor"]).ready()
    with of(server, name, isolation="gvisor") as box:
        before = told(box)[0]
        assert server.request("DELETE", f"/v1/templates/{name}")[0] == 204
        assert told(box)[0] == before
        server.json("POST", box.path + "/pause", {})
        server.json("POST", box.path + "/resume", {})
        assert told(box)[0] == before
        with pytest.raises(Refused) as refused:
            of(server, name, isolation="gvisor")
        assert refused.value.status == 404


def test_the_pool_holds_restored_boxes(server, warm):
    flags = ["--pool-size", "1", "--pool-template", warm, "--pool-isolation", "gvisor"]
    with in_place_of(server, *flags) as own:
        wait_for(lambda: own.json("GET", "/v1/host")["pooled"] == 1, "one is ready", 120)
        with of(own, warm, isolation="gvisor", env={"LATER": "1"}, metadata={"k": "v"}) as pooled:
            born = told(pooled)[0]
            assert pooled.exec("echo $LATER $MODE").out.split() == ["1", "template"]
            assert pooled.info()["metadata"] == {"k": "v"} and pooled.info()["limits"]["memory_mib"] == 384
            assert pooled.made["created_at"] < pooled.made["started_at"], "it waited in the pool"
            with of(own, warm, isolation="gvisor") as other:
                assert told(other)[0] == born


def test_the_command_line_builds_and_shows(server, name, tmp_path):
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "recipe.toml").write_text(
        f"""
        from = "base"
        isolation = "gvisor"
        start = "exec python3 /srv/serve.py"
        ready = {{ port = {PORT} }}
        env = {{ MODE = "template" }}
        [[steps]]
        copy = "serve.py"
        to = "/srv/serve.py"
        user = "root"
        [[steps]]
        run = "echo from the step"
        """
    )

    def cli(*args):
        env = {**os.environ, **server.cli_env()}
        return subprocess.run([str(binary()), "template", *args], capture_output=True, timeout=180, env=env, text=True)

    made = cli("build", name, "--file", str(tmp_path / "recipe.toml"))
    assert made.returncode == 0, made.stderr
    assert "warm on gvisor" in made.stdout and "from the step" in made.stderr, made
    listed = next(line for line in cli("ls").stdout.splitlines() if line.startswith(name))
    assert "gvisor" in listed and "serve.py" in listed, listed
    seen = json.loads(cli("inspect", name).stdout)
    assert seen["built"]["levels"][0]["warm"] is True
    assert "from the step" in cli("logs", name).stderr
    assert cli("cancel", name).returncode == 1
    (tmp_path / "recipe.toml").write_text('[[steps]]\nrun = "echo words; exit 9"\n')
    failed = cli("build", name, "--file", str(tmp_path / "recipe.toml"))
    assert failed.returncode == 1 and "step 1" in failed.stderr and "exit status 9" in failed.stderr, failed

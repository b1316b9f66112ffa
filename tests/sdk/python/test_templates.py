"""Templates built through the official SDK."""

import secrets

import e2b
import pytest
from e2b import BuildException, wait_for_port, wait_for_timeout
from flavour import IS_OLD, Proxy, wait_for

SERVE = """
import http.server, uuid
BORN = uuid.uuid4().hex.encode()
class Tell(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(BORN)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("0.0.0.0", 8088), Tell).serve_forever()
"""


@pytest.fixture
def templates(sdk):
    return Proxy(e2b.AsyncTemplate) if sdk.is_async else e2b.Template


@pytest.fixture
def name(server):
    name = "sdk-" + secrets.token_hex(4)
    yield name
    server.request("DELETE", f"/templates/{name}")


def test_a_template_is_built_and_used(templates, make, name, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "serve.py").write_text(SERVE)
    (tmp_path / "app" / "notes").mkdir()
    (tmp_path / "app" / "notes" / "one").write_text("first")
    recipe = (
        templates(file_context_path=str(tmp_path))
        .from_template("base")
        .run_cmd("echo ran as $(id -un) > /home/user/ran")
        .set_envs({"MODE": "built"})
        .copy("app", "/home/user/app")
        .copy("app/*.py", "/opt/", user="root", mode=0o755)
        .set_workdir("/home/user/app")
        .run_cmd(["cat notes/one > ../one", "echo $MODE > ../mode"])
        .set_start_cmd("python3 serve.py", wait_for_port(8088))
    )
    lines = []
    info = templates.build(recipe, name, cpu_count=1, memory_mb=512, on_build_logs=lines.append)
    assert info.template_id == name and info.name == name
    assert any("ran as" in line.message for line in lines), lines
    assert templates.exists(name) is True
    box = make(template=name)
    read = box.commands.run("cat ../ran ../one; echo; cat ../mode; stat -c %a /opt/serve.py; pwd; echo $MODE").stdout
    assert read.split() == ["ran", "as", "user", "first", "built", "755", "/home/user/app", "built"]
    assert len(box.commands.run("curl -sS --max-time 30 http://127.0.0.1:8088/").stdout) == 32
    assert box.get_info().memory_mb == 512


def test_a_failure_is_an_exception_with_what_went_wrong(templates, name):
    broken = templates().from_template("base").run_cmd("echo some words; exit 5")
    with pytest.raises(BuildException, match="exit status 5"):
        templates.build(broken, name)
    nobody = templates().from_template("base").run_cmd("whoami", user="root123")
    with pytest.raises(
        BuildException,
        match="failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
    ):
        templates.build(nobody, name)
    never = templates().from_template("base").set_start_cmd("exit 3", wait_for_port(9))
    with pytest.raises(BuildException, match="exit status 3"):
        templates.build(never, name)
    assert templates.exists(name) is False


def test_images_are_the_ones_that_are_here(templates, name):
    # The image of whoever names none: what the server comes with.
    templates.build(templates().from_base_image().set_start_cmd("sleep 1000", wait_for_timeout(1000)), name)
    with pytest.raises(BuildException, match="sandkeep template import python-3-12"):
        templates.build(templates().from_image("registry.example/python:3.12"), name + "-x")


def test_a_build_in_the_background_and_the_cache(templates, name):
    def begin():
        recipe = templates().from_template("base").run_cmd("head -c 8 /dev/urandom | base64 > /home/user/once")
        info = templates.build_in_background(recipe, name)

        def ready():
            status = templates.get_build_status(info)
            assert status.status.value != "error", status.reason
            return status.status.value == "ready" and status

        return wait_for(ready, "it is built", 120)

    assert not any("CACHED" in line.message for line in begin().log_entries)
    assert any("CACHED" in line.message for line in begin().log_entries)


def test_tags_are_names_of_builds(templates, make, name, sdk):
    def recipe(text):
        return templates().from_template("base").run_cmd(f"echo {text} > /home/user/v")

    first = templates.build(recipe("one"), name, tags=["default", "v1.0"])
    tagged = templates.assign_tags(f"{name}:v1.0", ["stable"])
    assert tagged.build_id == first.build_id and tagged.tags == ["stable"]
    templates.build(recipe("two"), name)
    assert make(template=name).files.read("/home/user/v") == "two\n"
    assert make(template=f"{name}:stable").files.read("/home/user/v") == "one\n"
    assert {tag.tag for tag in templates.get_tags(name)} == {"default", "v1.0", "stable"}
    templates.remove_tags(name, "stable")
    with pytest.raises(e2b.SandboxException, match="tag 'stable' does not exist"):
        make(template=f"{name}:stable")


def test_what_the_generated_client_can_parse(templates, name):
    """The SDK's classes do not call these, but tools made with the client in it do; it fails on
    every field that lacks."""
    from e2b.api.client.api.tags import get_templates_template_id_tags
    from e2b.api.client.api.templates import (
        get_templates,
        get_templates_template_id,
        get_templates_template_id_builds_build_id_logs,
        get_v2_templates,
        patch_templates_template_id,
        patch_v_2_templates_template_id,
    )
    from e2b.api.client.models import TemplateUpdateRequest
    from e2b.api.client_sync import get_api_client
    from e2b.connection_config import ConnectionConfig

    client = get_api_client(ConnectionConfig())
    built = templates.build(templates().from_template("base").run_cmd("echo some words"), name)
    for call in (get_templates, get_v2_templates):
        listed = call.sync_detailed(client=client).parsed
        assert {"base", name} <= {one.template_id for one in listed}
    whole = get_templates_template_id.sync_detailed(name, client=client).parsed
    assert str(whole.builds[0].build_id) == built.build_id
    logs = get_templates_template_id_builds_build_id_logs.sync_detailed(name, built.build_id, client=client).parsed
    assert any("some words" in line.message for line in logs.logs)
    for call in (patch_templates_template_id, patch_v_2_templates_template_id):
        answer = call.sync_detailed(name, client=client, body=TemplateUpdateRequest(public=True))
        assert answer.status_code == 200
    assert answer.parsed.names == [name]
    assert get_templates_template_id.sync_detailed(name, client=client).parsed.public is True
    assert get_templates_template_id_tags.sync_detailed(name, client=client).parsed[0].tag == "default"
    if IS_OLD:
        from e2b.api.client.api.templates import post_templates, post_v2_templates
        from e2b.api.client.models import TemplateBuildRequest, TemplateBuildRequestV2

        asked = post_v2_templates.sync_detailed(client=client, body=TemplateBuildRequestV2(alias=name, memory_mb=512))
        assert asked.parsed.template_id == name and asked.parsed.memory_mb == 512
        body = TemplateBuildRequest(alias=name, dockerfile="FROM e2bdev/base")
        asked = post_templates.sync_detailed(client=client, body=body)
        assert asked.status_code == 202 and asked.parsed.aliases == [name]
    else:
        from e2b.api.client.api.tags import (
            get_templates_template_id_tags_count,
            get_templates_template_id_tags_exists,
            get_templates_template_id_tags_groups,
            get_templates_template_id_tags_tag_assignments,
        )
        from e2b.api.client.api.templates import get_default_templates

        assert [one.template_id for one in get_default_templates.sync_detailed(client=client).parsed] == ["base"]
        assert get_templates_template_id_tags_count.sync_detailed(name, client=client).parsed.total == 1
        assert get_templates_template_id_tags_exists.sync_detailed(name, client=client, tag="default").parsed.exists
        groups = get_templates_template_id_tags_groups.sync_detailed(name, client=client).parsed
        assert str(groups.tags[0].assignments[0].build_id) == built.build_id
        one = get_templates_template_id_tags_tag_assignments.sync_detailed(name, "default", client=client).parsed
        assert len(one.data) == 1

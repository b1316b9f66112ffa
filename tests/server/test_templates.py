"""Templates of a server that runs: imported, listed and removed through it."""

import http.client
import io
import json
import os
import secrets
import subprocess
import tarfile

import pytest
from sandkeep_server import Refused, binary


def archive(size=1000, mode="w:gz"):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:
        for name, content in (("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"), ("data", os.urandom(size))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def names(server):
    return {template["name"] for template in server.json("GET", "/v1/templates")["templates"]}


@pytest.fixture
def name(server):
    name = "test-" + secrets.token_hex(4)
    yield name
    server.request("DELETE", f"/v1/templates/{name}")


def put(server, name, body, **options):
    return server.request("POST", f"/v1/templates/{name}", body, headers={"Content-Type": "application/octet-stream"}, **options)


@pytest.fixture
def cli(server):
    def cli(*args, env=None, **options):
        env = {**os.environ, **(server.cli_env() if env is None else env)}
        return subprocess.run([str(binary()), "template", *args], capture_output=True, timeout=120, env=env, **options)

    return cli


def test_an_archive_becomes_a_template(server, name):
    status, _, body = put(server, name, archive())
    made = json.loads(body)
    assert status == 201 and made["name"] == name and made["size_bytes"] > 1000
    assert server.json("GET", f"/v1/templates/{name}")["name"] == name
    again, _, body = put(server, name, archive())
    assert again == 409 and "template rm" in json.loads(body)["error"]["hint"]
    assert server.request("DELETE", f"/v1/templates/{name}")[0] == 204
    assert name not in names(server)
    assert server.request("DELETE", f"/v1/templates/{name}")[0] == 404


@pytest.mark.parametrize("body", [b"", b"no archive at all", archive()[:-400], archive(mode="w")[:1000]])
def test_what_is_no_whole_archive_leaves_nothing(server, name, body):
    status, _, answer = put(server, name, body)
    assert status == 400, answer
    assert name not in names(server)


def test_a_refusal_is_heard_though_much_is_being_sent(server):
    status, _, answer = put(server, "base", archive(size=8 << 20))
    assert status == 409, answer


def test_an_upload_that_breaks_off_leaves_nothing(server, name):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", f"/v1/templates/{name}")
    connection.putheader("X-API-Key", server.key)
    connection.putheader("Content-Length", str(1 << 20))
    connection.endheaders()
    connection.send(archive()[:500])
    connection.close()
    assert name not in names(server)
    # Its place is free again.
    assert put(server, name, archive())[0] == 201


def test_names_and_keys_are_checked(server):
    assert put(server, "..%2fx", archive())[0] == 400
    status, _, _ = server.request("POST", "/v1/templates/x", b"", headers={"X-API-Key": "e2b_wrong"})
    assert status == 401


def test_the_servers_own_template_stays(server):
    with pytest.raises(Refused, match="409"):
        server.json("DELETE", "/v1/templates/base")
    assert "base" in names(server)


def test_the_command_line_asks_the_server_that_runs(server, cli, name, tmp_path):
    file = tmp_path / "root.tar.gz"
    file.write_bytes(archive(100_000))
    made = cli("import", name, str(file))
    assert made.returncode == 0, made.stderr
    assert f"by the server at {server.url}" in made.stdout.decode()
    assert name in cli("ls").stdout.decode()
    again = cli("import", name, str(file))
    assert again.returncode == 1 and b"already exists" in again.stderr
    assert cli("rm", name).returncode == 0
    made = cli("import", "--json", name, "-", input=file.read_bytes())
    assert json.loads(made.stdout)["name"] == name
    assert b"error:" in cli("import", "test-none", str(tmp_path / "none")).stderr


def test_looking_for_a_server_made_a_storage(cli, tmp_path):
    """`template build` made a pool where it only had to look whether anybody serves it."""
    recipe, state = tmp_path / "recipe.toml", tmp_path / "state"
    recipe.write_text('from = "base"\n')
    for words in (["build", "test-none", "--file", str(recipe)], ["logs", "test-none"], ["inspect", "test-none"]):
        ran = cli(*words, "--state", str(state))
        assert ran.returncode == 1 and b"needs a server that runs" in ran.stderr, ran.stderr
        assert not state.exists()


def test_the_server_is_found_by_its_state_directory(server, cli, name, tmp_path):
    file = tmp_path / "root.tar"
    file.write_bytes(archive(mode="w"))
    # The address of another server must not win over the directory that was named.
    env = {"SANDKEEP_URL": "http://127.0.0.1:9", "SANDKEEP_API_KEY": server.key}
    made = cli("import", name, str(file), "--state", str(server.state), env=env)
    assert made.returncode == 0, made.stderr
    assert server.url in made.stdout.decode()
    listed = cli("ls", "--json", "--state", str(server.state), env=env)
    assert name in [template["name"] for template in json.loads(listed.stdout)]

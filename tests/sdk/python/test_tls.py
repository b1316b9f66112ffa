"""TLS of the server's own: with `E2B_DOMAIN`, `E2B_API_KEY` and what to trust, and nothing else, an
unmodified SDK does everything."""

import os
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request

import pytest
from named import names_lead_here
from sandkeep_server import REPO, Server

DOMAIN = "boxes.sandkeep-test.example"
ELSEWHERE = "198.18.99.1"

EXAMPLE = """
    import os, time, urllib.request
    from e2b import Sandbox, Template

    box = Sandbox.create(timeout=300)
    try:
        assert box.commands.run("echo hello from $(hostname)").stdout.startswith("hello from ")
        box.files.write("/home/user/data.txt", "kept")
        assert box.files.read("/home/user/data.txt") == "kept"
        get = lambda url: urllib.request.urlopen(url, timeout=30).read()
        assert get(box.download_url("/home/user/data.txt")) == b"kept"
        box.commands.run("python3 -m http.server 8000", background=True)
        for _ in range(100):
            try:
                assert b"data.txt" in get("https://" + box.get_host(8000) + "/")
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("the port was not reached")
    finally:
        box.kill()
    open("file.txt", "w").write("sent")
    template = Template().from_template("base").copy("file.txt", "/home/user/").run_cmd("grep sent /home/user/file.txt")
    Template.build(template, "over-tls", cpu_count=1, memory_mb=512)
"""

JS_EXAMPLE = """
    import { Sandbox } from '%s'
    const box = await Sandbox.create({ timeoutMs: 300_000 })
    try {
      const result = await box.commands.run('python3 -c "print(6*7)"')
      if (result.stdout !== '42\\n') throw new Error(result.stdout)
      await box.files.write('/home/user/a.txt', 'kept')
      const answer = await fetch(await box.downloadUrl('/home/user/a.txt'))
      if ((await answer.text()) !== 'kept') throw new Error('not kept')
    } finally {
      await box.kill()
    }
"""


@pytest.fixture(scope="module")
def encrypted(server):
    """In place of the server of the whole run, where names below its domain lead to it."""
    server.stop()
    try:
        with names_lead_here(DOMAIN):
            # Who dials this one comes from it, too: from no loopback address.
            subprocess.run(["ip", "address", "add", f"{ELSEWHERE}/32", "dev", "lo"], check=True)
            own = Server("--pool-size", "1", "--tls-self-signed", DOMAIN, state=server.state)
            own.listens_on = "0.0.0.0"
            try:
                yield own.start()
                own.end_boxes()
            finally:
                own.stop()
    finally:
        server.start()


@pytest.fixture
def environment(encrypted):
    """Nothing of the client's but what the greeting says."""
    trusted = str(encrypted.state / "tls" / DOMAIN / "ca.pem")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "SANDKEEP_"))},
        "E2B_DOMAIN": f"{DOMAIN}:{encrypted.port}",
        "E2B_API_KEY": encrypted.key,
        "SSL_CERT_FILE": trusted,
        "NODE_EXTRA_CA_CERTS": trusted,
    }


def run(words, environment, directory):
    ran = subprocess.run(words, env=environment, cwd=directory, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_domain_alone_is_enough_for_python(environment, encrypted, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(textwrap.dedent(EXAMPLE))
    run([sys.executable, str(script)], environment, tmp_path)
    encrypted.json("DELETE", "/v1/templates/over-tls")


def test_the_domain_alone_is_enough_for_javascript(environment, tmp_path):
    sdk = REPO / "tests/sdk/js/node_modules/e2b/dist/index.mjs"
    script = tmp_path / "example.mjs"
    script.write_text(textwrap.dedent(JS_EXAMPLE) % sdk)
    run(["node", str(script)], environment, tmp_path)


def test_both_versions_of_http_are_spoken(environment, encrypted):
    url = f"https://api.{DOMAIN}:{encrypted.port}/v1/health"
    for flag, version in (("--http2", "2"), ("--http1.1", "1.1")):
        ran = subprocess.run(
            ["curl", "-sS", flag, "--cacert", environment["SSL_CERT_FILE"], "-o", "/dev/null", "-w", "%{http_version} %{http_code}", url],
            capture_output=True, text=True, timeout=30,
        )
        assert ran.stdout == f"{version} 200", ran


def test_plain_http_from_elsewhere_is_told_to_encrypt(encrypted):
    """The key must not travel where others listen."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{ELSEWHERE}:{encrypted.port}/v1/health", timeout=10)
    assert refused.value.code == 400 and "https://" in refused.value.read().decode()
    assert encrypted.json("GET", "/v1/sandboxes") is not None, "from here it is answered"

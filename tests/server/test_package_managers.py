"""Package managers in boxes under `package-registries`: what this host reaches its boxes reach, and nothing else.

The registries are those of this machine; their names stand in no file, the profile finds them.
"""

import socket

import pytest
from boxkit import Box
from servers import in_place_of


def addresses(host: str, port: int) -> list[str]:
    try:
        return [found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return []


@pytest.fixture(scope="module")
def registries(server):
    """The rules of the profile on this host."""
    profiles = {p["name"]: p["policy"] for p in server.json("GET", "/v1/profiles")["profiles"]}
    rules = profiles["package-registries"]["allow"]
    assert rules, "no package client of this host is configured or installed"
    return rules


@pytest.fixture(scope="module")
def mirrored(server, registries):
    """A server that may reach the registries also where they are mirrors in a private network."""
    ranges = {f"{a}/{128 if ':' in a else 32}" for rule in registries for a in addresses(rule["to"], rule["ports"][0])}
    assert ranges, "this host knows the address of none of its registries"
    with in_place_of(server, "--pool-size", "0", "--allow-private", ",".join(sorted(ranges))) as own:
        yield own


@pytest.fixture(scope="module")
def box(mirrored):
    with Box(mirrored, network={"profile": "package-registries"}, timeout_seconds=1800) as box:
        yield box


def run(box, words, user="root"):
    ran = box.exec(["sh", "-c", words], user=user, http_timeout=600, timeout_ms=600_000)
    assert ran.ok, (ran, box.server.json("GET", f"{box.path}/network/denials"))
    return ran


def test_apt_get_update_and_install(box):
    run(box, "apt-get -q -o Acquire::Retries=3 update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends tree")
    assert "tree v" in run(box, "tree --version").out


def test_pip_install(box):
    run(box, "pip install --quiet --no-input iniconfig", user="user")
    assert run(box, "python3 -c 'import iniconfig; print(iniconfig.__name__)'", user="user").out == "iniconfig\n"


def test_pip_install_in_a_virtual_environment(box):
    run(box, "python3 -m venv /tmp/v && /tmp/v/bin/pip install --quiet --no-input iniconfig && /tmp/v/bin/python -c 'import iniconfig'", user="user")


def test_npm_install(box):
    run(box, "mkdir -p /tmp/n && cd /tmp/n && npm install --no-audit --loglevel=error left-pad", user="user")
    assert run(box, "cd /tmp/n && node -p 'require(\"left-pad\")(\"x\", 3)'", user="user").out == "  x\n"


def test_everything_else_is_refused_at_once(box):
    """Not by waiting: whatever hangs runs into the limit and is seen by its exit code."""
    for url in ("http://192.0.2.1/", "https://192.0.2.1/", "http://example.org/", "https://example.org/", "ftp://192.0.2.1/"):
        ran = box.exec(["curl", "-sS", "--max-time", "60", url])
        assert ran.code not in (0, 28, None), (url, ran)
    ran = box.exec(["sh", "-c", "echo x > /dev/udp/192.0.2.1/443"])
    denials = box.server.json("GET", f"{box.path}/network/denials")["denials"]
    assert {"192.0.2.1", "example.org"} <= {d["host"] for d in denials}, (ran, denials)

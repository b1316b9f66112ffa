"""`git clone` in boxes, from a server of ours, over HTTP and HTTPS; by name, and by path."""

import os
import subprocess

import pytest


@pytest.fixture(scope="module")
def repository(world):
    """Three megabytes at /team/repo.git, and the same at /other/repo.git."""
    work = world.directory / "work"
    work.mkdir()

    def git(*words, cwd=work):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
        subprocess.run(["git", *who, *words], cwd=cwd, check=True, capture_output=True, env=env)

    git("init", "-q", "-b", "main")
    (work / "read.me").write_text("cloned\n")
    (work / "large").write_bytes(os.urandom(3 << 20))
    git("add", ".")
    git("commit", "-qm", "one")
    for place in ("team", "other"):
        served = world.directory / place / "repo.git"
        git("clone", "-q", "--bare", str(work), str(served))
        git("update-server-info", cwd=served)


def clone(box, url, *options):
    ran = box.exec(["sh", "-c", f"rm -rf /tmp/r; git {' '.join(options)} clone -q {url} /tmp/r && cat /tmp/r/read.me"], http_timeout=300)
    assert ran.code is not None, ran
    return ran


def test_git_clone_by_name(make_walled, repository):
    box = make_walled(network={"allow": ["good.test"]})
    assert clone(box, "http://good.test/team/repo.git").out == "cloned\n"
    # Passed on unseen: the certificate is the server's own, which this box has no reason to trust.
    assert clone(box, "https://good.test/team/repo.git", "-c", "http.sslVerify=false").out == "cloned\n"
    for url in ("http://other.test/team/repo.git", "https://other.test/team/repo.git", "git://good.test/repo.git", "ssh://evil.test/repo.git"):
        assert not clone(box, url).ok, url


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_git_clone_by_path(make_walled, repository, world, scheme):
    """One team of a code host. Inside TLS, too: the box trusts the authority made for it."""
    rule = {"to": "good.test", "http": [{"methods": ["GET"], "path": "/team/*"}]}
    box = make_walled(network={"allow": [rule]})
    ran = clone(box, f"{scheme}://good.test/team/repo.git")
    assert ran.out == "cloned\n", ran
    before = len(world.calls)
    ran = clone(box, f"{scheme}://good.test/other/repo.git")
    assert not ran.ok and "403" in ran.err, ran
    assert not [call for call in world.calls[before:] if "/other/" in (call.path or "")]

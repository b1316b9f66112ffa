"""Docker in a machine: its packages from the registries of this host, its images from a file.

Takes minutes where machines are emulated, so it runs when it is asked for:

    DOCKER_INSIDE=1 script/test server -- tests/server/test_docker_inside.py
"""

import os

import pytest
from boxkit import Box, wait_for
from test_package_managers import mirrored, registries, run  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif("DOCKER_INSIDE" not in os.environ, reason="takes minutes; set DOCKER_INSIDE=1")

LARGE = {"memory_mib": 1024, "cpu_millis": 2000, "disk_mib": 4096, "pids": 2048}


def test_docker_runs_containers_in_a_machine(mirrored):  # noqa: F811
    wish = {"isolation": "microvm", "limits": LARGE, "timeout_seconds": 3600, "http_timeout": 600}
    with Box(mirrored, network={"profile": "package-registries"}, **wish) as box:
        install = "DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends docker.io iptables"
        for words in ("apt-get -q -o Acquire::Retries=3 update", install):
            ran = box.exec(["sh", "-c", words], user="root", http_timeout=1800, timeout_ms=1_800_000)
            assert ran.ok, ran
        assert box.root("nohup dockerd >/var/log/dockerd 2>&1 &").ok
        wait_for(lambda: box.root("docker info").ok, "dockerd answers", 300)
        # The image is made of what is here: a shell and its libraries.
        run(box, "tar -ch /bin/dash /bin/cat /bin/hostname $(ldd /bin/dash /bin/cat /bin/hostname | grep -o '/lib[^ ]*' | sort -u) 2>/dev/null | docker import - tiny")
        driver = run(box, "docker info --format '{{.Driver}}'").out
        assert driver == "overlay2\n", driver
        said = run(box, "docker run --rm --memory 64m tiny /bin/dash -c 'echo inside; hostname; cat /proc/1/comm'").out.split()
        assert said[0] == "inside" and said[1] != box.id and said[2] == "dash", said
        # A bridge, addresses and a way out through the moat, for containers too.
        run(box, "docker run -d --name web tiny /bin/dash -c 'while :; do read x; done </dev/zero'")
        assert run(box, "docker inspect -f '{{.NetworkSettings.IPAddress}}' web").out.startswith("172.17."), "it has an address"
        run(box, "docker rm -f web")

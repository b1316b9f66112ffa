"""The machine of the server is no destination, whatever a policy or the operator opens."""

from __future__ import annotations

import http.server
import threading

import pytest
from boxkit import wait_for
from servers import boxes_of, in_namespace, in_place_of
from test_refused_at_the_syn import KIT, LEVELS
from world import RESOLVER, inside, ip

PUBLIC, PUBLIC6 = "8.8.4.99", "2606:4700::99"


class Internal(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"host-internal service")


@pytest.fixture(scope="module")
def wide(server, world):
    """A server whose operator opened everything, on a machine with a public address and a service on every address."""

    def add():
        ip("address", "add", f"{PUBLIC}/32", "dev", "lo")
        ip("-6", "address", "add", f"{PUBLIC6}/128", "dev", "lo", "nodad")

    inside(world.here, add)
    service = inside(world.here, lambda: http.server.ThreadingHTTPServer(("0.0.0.0", 8099), Internal))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    flags = ["--dns", f"{RESOLVER}:53", "--allow-private", "0.0.0.0/0,::/0"]
    try:
        with in_place_of(server, "--pool-size", "0", *flags, where=in_namespace(world.here)) as own:
            yield own
    finally:
        service.shutdown()
        service.server_close()


@pytest.mark.parametrize("level", LEVELS)
def test_open_reaches_the_hosts_own_public_address(wide, world, level):
    limits = {"limits": {"memory_mib": 384, "cpu_millis": 1000}} if level == "microvm" else {}
    with boxes_of(wide) as make:
        box = make(isolation=level, network={"profile": "open"}, http_timeout=300, timeout_seconds=600, **limits)
        for address in (PUBLIC, "198.18.0.1", "127.0.0.1", "198.18.0.3"):
            ran = box.exec(["curl", "-sS", "--max-time", "30", f"http://{address}:8099/"])
            assert ran.code not in (0, 28) and "internal" not in ran.out, (address, ran)
        ran = box.exec(["curl", "-sS", "--max-time", "30", f"http://{PUBLIC}:{wide.port}/v1/health"])
        assert ran.code not in (0, 28), ran
        ran = box.python(KIT + f'\nprint(begin("{PUBLIC}", 8099), begin("{PUBLIC6}", 8099))')
        assert ran.out.split() == ["ECONNREFUSED"] * 2, ran
        # One the machine gets while the sandbox runs.
        inside(world.here, lambda: ip("address", "add", "8.8.6.6/32", "dev", "lo"))
        try:
            ran = box.exec(["curl", "-sS", "--max-time", "30", "http://8.8.6.6:8099/"])
            assert "internal" not in ran.out, ran
            begun = lambda: box.python(KIT + '\nprint(begin("8.8.6.6", 8099))').out.strip()  # noqa: E731
            wait_for(lambda: begun() == "ECONNREFUSED", "it is refused with the first packet")
        finally:
            inside(world.here, lambda: ip("address", "del", "8.8.6.6/32", "dev", "lo"))


def test_a_name_that_leads_to_the_host_is_not_told(wide, world):
    from world import Dns

    world.dns.records["home.test"] = [(Dns.A, PUBLIC)]
    with boxes_of(wide) as make:
        box = make(network={"allow": ["home.test", f"{PUBLIC}:8099"]})
        for host in ("home.test", PUBLIC):
            ran = box.exec(["curl", "-sS", "--max-time", "30", f"http://{host}:8099/"])
            assert ran.code not in (0, 28) and "internal" not in ran.out, ran


@pytest.mark.parametrize("network", [{"profile": "open"}, {"allow": ["168.63.129.16", "fd20:ce::254", "169.254.170.23"]}])
def test_platform_endpoints_whatever_is_opened(wide, world, network):
    addresses = ["168.63.129.16", "169.254.170.23", "169.254.42.42", "169.254.0.23", "100.100.100.200", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42", "64:ff9b::a83f:8110"]  # fmt: skip
    with boxes_of(wide) as make:
        box = make(network=network)
        ran = box.python(KIT + "".join(f'\nprint(begin("{address}", 80))' for address in addresses))
        assert ran.out.split() == ["ECONNREFUSED"] * len(addresses), ran
    assert not [address for address in addresses if world.capture.packets(address)]

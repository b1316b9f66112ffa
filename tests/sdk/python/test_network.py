"""The network options of the SDKs, as far as they need no outside."""

import time
import urllib.error
import urllib.request

import pytest
from e2b import SandboxException
from flavour import IS_OLD

ALL_TRAFFIC = "0.0.0.0/0"

# Connects, sends, and names what came of it.
TRY = """python3 -c '
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as s:
        s.sendall(b"x" * 64); print("got", s.recv(10))
except OSError as error:
    print(type(error).__name__)
' """
REFUSED = {"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"}


def attempt(box, host, port):
    return box.commands.run(f"{TRY} {host} {port}").stdout.strip()


def detail(server, box):
    return server.json("GET", f"/sandboxes/{box.sandbox_id}")


def test_no_internet_is_kept(server, make):
    box = make(allow_internet_access=False)
    assert attempt(box, "192.0.2.1", 443) in REFUSED
    assert attempt(box, "example.org", 443) == "gaierror"
    assert detail(server, box)["allowInternetAccess"] is False


def test_internet_is_open_when_asked_for(server, make):
    box = make(network={"allow_out": [ALL_TRAFFIC]})
    assert detail(server, box)["allowInternetAccess"] is True
    # What is private stays closed.
    assert attempt(box, "10.1.2.3", 443) in REFUSED
    assert attempt(box, "169.254.170.2", 443) in REFUSED


@pytest.mark.parametrize("wish", [{}, {"allow_internet_access": True}], ids=["left out", "true"])
def test_a_plain_create_reaches_the_same_whichever_generation_of_the_sdk_asks(server, make, wish):
    """SDKs up to 2.45 send `allow_internet_access: true` by themselves, later ones leave it out."""
    box = make(**wish)
    assert attempt(box, "192.0.2.1", 443) in REFUSED
    assert detail(server, box)["allowInternetAccess"] is False


def test_names_are_allowed_out_of_a_closed_box(server, make):
    box = make(network={"allow_out": ["*.example.org", "192.0.2.7"], "deny_out": [ALL_TRAFFIC]})
    shown = detail(server, box)["network"]
    assert shown == {"allowOut": ["*.example.org", "192.0.2.7"], "denyOut": [ALL_TRAFFIC], "allowPublicTraffic": True}
    assert attempt(box, "192.0.2.1", 443) in REFUSED
    assert attempt(box, "example.net", 443) == "gaierror"


def test_ports_of_a_box_can_be_closed(server, sdk, make):
    box = make(network={"allow_public_traffic": False})
    token = box.traffic_access_token
    assert token
    box.commands.run("cd /etc && python3 -m http.server 8123", background=True)
    to_port = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8123"}

    def status(headers):
        try:
            with urllib.request.urlopen(urllib.request.Request(server.url + "/hostname", headers={**to_port, **headers}), timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as refused:
            return refused.code

    with_token = {"E2B-Traffic-Access-Token": token}
    end = time.monotonic() + 60
    while status(with_token) != 200:
        assert time.monotonic() < end, "the program does not listen"
        time.sleep(0.05)
    assert status({}) == 403
    assert status({"E2B-Traffic-Access-Token": "guess"}) == 403
    again = sdk.Sandbox.connect(box.sandbox_id)
    assert again.traffic_access_token == token
    assert make().traffic_access_token is None


@pytest.mark.parametrize(
    "network",
    [
        {"allow_out": ["example.org"]},
        {"deny_out": ["example.org"]},
        {"allow_out": ["*.org"], "deny_out": [ALL_TRAFFIC]},
        {"mask_request_host": "not a host"},
    ],
)
def test_what_can_not_be_kept_is_refused(sdk, network):
    with pytest.raises(SandboxException):
        sdk.Sandbox.create(network=network)


@pytest.mark.skipif(IS_OLD, reason="2.45 cannot change the network of a box")
def test_the_network_of_a_running_box_is_replaced(server, make):
    box = make(allow_internet_access=False)
    box.update_network({"allow_out": ["example.org"], "deny_out": [ALL_TRAFFIC]})
    assert detail(server, box)["network"]["allowOut"] == ["example.org"]
    box.update_network({"deny_out": [ALL_TRAFFIC]})
    assert detail(server, box)["network"] == {"allowOut": [], "denyOut": [ALL_TRAFFIC], "allowPublicTraffic": True}
    with pytest.raises(SandboxException):
        box.update_network({"allow_out": ["example.org"]})

"""The certificate of the server itself: what is refused at once, and what is read again."""

import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from boxkit import Box, run_cli
from sandkeep_server import binary
from servers import in_place_of


def shown(port: int, trusted: Path) -> bytes:
    """The certificate that is shown now, checked against what is trusted."""
    context = ssl.create_default_context(cafile=str(trusted))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as stream:
            return stream.getpeercert(binary_form=True)


def certificate(directory: Path, name: str):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", directory / "key.new", "-out", directory / "cert.new"],
        check=True, capture_output=True,
    )
    for kind in ("key", "cert"):
        (directory / f"{kind}.new").rename(directory / f"{kind}.pem")


def test_a_renewed_certificate_is_shown_without_a_restart(server, tmp_path):
    certificate(tmp_path, "first")
    files = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with in_place_of(server, "--pool-size", "0", *files) as own:
        first = shown(own.port, tmp_path / "cert.pem")
        # What cannot be used changes nothing.
        whole = (tmp_path / "cert.pem").read_bytes()
        (tmp_path / "cert.pem").write_bytes(b"half a certif")
        time.sleep(3)
        (tmp_path / "trusted.pem").write_bytes(whole)
        assert shown(own.port, tmp_path / "trusted.pem") == first
        certificate(tmp_path, "second")
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                second = shown(own.port, tmp_path / "cert.pem")
                break
            except ssl.SSLError:
                time.sleep(0.3)
        else:
            raise AssertionError("the renewed certificate is not shown")
        assert second != first


def looks(url: str) -> str:
    """What the command line says of a server that it cannot talk to."""
    env = {**os.environ, "SANDKEEP_URL": url, "SANDKEEP_API_KEY": "e2b_00"}
    ran = subprocess.run([binary(), "ls"], env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and len(ran.stderr.strip().splitlines()) == 2, ran
    return ran.stderr


def test_a_link_with_a_token_is_https_and_a_failed_connection_says_why(server):
    with in_place_of(server, "--pool-size", "0", "--tls-self-signed", "boxes.localhost") as own:
        with Box(own) as box:
            # Asked over loopback, which a server with TLS answers in the clear, too.
            assert own.url.startswith("http://127.0.0.1")
            ran = run_cli(own, "url", box.id, "8000")
        link = f"https://8000-{box.id}.boxes.localhost:{own.port}/?sandkeep_token="
        assert ran.returncode == 0 and ran.stdout.startswith(link), ran
        said = looks(f"https://127.0.0.1:{own.port}")
        assert "certificate" in said and "not trusted" in said and "SSL_CERT_FILE" in said, said
        assert "no server answers" not in said, said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert "no server answers" in looks(f"https://127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--tls-cert", "/etc/hostname"], "tls_cert has no tls_key"),
        (["--tls-cert", "/etc/hostname", "--tls-key", "/etc/hostname"], "no certificate in it"),
        (["--tls-self-signed", "localhost"], "at least two names"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(flags, said, tmp_path):
    ran = subprocess.run(
        [binary(), "serve", "--state", str(tmp_path), "--listen", "127.0.0.1:0", *flags], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode != 0 and said in ran.stderr, ran

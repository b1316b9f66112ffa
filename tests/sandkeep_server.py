"""Starts the real server for tests, and ends it.

Nothing here knows what is inside the server: it is a process with flags, a port and a key.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
START_LIMIT = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def binary() -> Path:
    path = Path(os.environ.get("SANDKEEP_BIN", REPO / "target" / "release" / "sandkeep"))
    if not path.exists():
        raise RuntimeError(f"{path} is not there: build it with `cargo build --release`, or run `script/test`")
    return path


def state_dir() -> Path:
    path = Path(os.environ.get("SANDKEEP_TEST_STATE", REPO / ".cache" / "test-state"))
    if not (path / "pool").exists():
        raise RuntimeError(f"{path} holds no pool: `script/test` makes it, or `sandkeep init --state {path}`")
    return path


class Server:
    """One `sandkeep serve`, which can be ended in any way and started again on the same state."""

    def __init__(self, *extra: str, state: Path | None = None, env: dict[str, str] | None = None):
        self.state = state or state_dir()
        self.extra = list(extra)
        self.env = env or {}
        self.listens_on = "127.0.0.1"
        self.port = free_port()
        self.key = "e2b_" + secrets.token_hex(20)
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = self.state / "test-server.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, wait: bool = True) -> "Server":
        command = [str(binary()), "serve", "--listen", f"{self.listens_on}:{self.port}", "--state", str(self.state), *self.extra]
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SANDKEEP_", "E2B_"))},
            "SANDKEEP_API_KEY": self.key,
            **({"SANDKEEP_MICROVM_KERNEL": os.environ["SANDKEEP_TEST_MICROVM"]} if "SANDKEEP_TEST_MICROVM" in os.environ else {}),
            **({"SANDKEEP_RUNSC": os.environ["SANDKEEP_TEST_RUNSC"]} if "SANDKEEP_TEST_RUNSC" in os.environ else {}),
            **self.env,
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        # A run that breaks off leaves no server behind.
        atexit.register(self.kill_hard)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(self.url + "/v1/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"the server did not answer within {START_LIMIT:.0f} s:\n{self.log_tail()}")

    def log_tail(self, size: int = 6000) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_bytes()[-size:].decode(errors="replace")

    def kill_hard(self) -> None:
        """kill -9: no chance to clean up."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM, as systemd would."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill_hard()
                raise RuntimeError(f"the server did not stop on SIGTERM within 60 s:\n{self.log_tail()}") from None
        return self.process.returncode

    def end_boxes(self) -> None:
        with contextlib.suppress(OSError):
            for box in self.json("GET", "/v1/sandboxes")["sandboxes"]:
                with contextlib.suppress(Refused):
                    self.json("DELETE", f"/v1/sandboxes/{box['id']}")

    def e2b_env(self) -> dict[str, str]:
        return {"E2B_API_KEY": self.key, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def cli_env(self) -> dict[str, str]:
        return {"SANDKEEP_URL": self.url, "SANDKEEP_API_KEY": self.key}

    def request(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None, timeout: float = 60):
        """One request with the key; returns (status, headers, bytes)."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("X-API-Key", self.key)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.remove_header(name.capitalize())
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def json(self, method: str, path: str, body: object = None, **kwargs):
        status, _, data = self.request(method, path, body, **kwargs)
        value = json.loads(data) if data else None
        if status >= 400:
            raise Refused(status, value)
        return value


class Refused(Exception):
    """A typed refusal of the server."""

    def __init__(self, status: int, body: dict | None):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body or {}
        self.error = self.body.get("error", self.body)

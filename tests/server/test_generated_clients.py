"""Clients that generators make of the OpenAPI document: made without a warning, and they work."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent / "generated"


@pytest.fixture
def document(server, tmp_path):
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(server.json("GET", "/v1/openapi.json")))
    return path


def run(*words, cwd, env=None):
    ran = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **(env or {})},
        capture_output=True, text=True, timeout=300,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said[-8000:]
    return said


def test_a_client_of_openapi_python_client_drives_a_sandbox(server, document, tmp_path):
    tools = Path(os.environ["SANDKEEP_GENERATORS"]) / "bin"
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    said = run(
        tools / "openapi-python-client", "generate", "--path", document, "--output-path", tmp_path / "made",
        "--fail-on-warning", cwd=tmp_path, env=path,
    )
    assert "WARN" not in said.upper(), said
    driven = run(tools / "python", HERE / "drive.py", server.url, server.key, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "made")})
    assert driven == "driven\n"


def test_types_of_openapi_typescript_drive_a_sandbox(server, document, tmp_path):
    modules = HERE / "node_modules"
    (tmp_path / "node_modules").symlink_to(modules)
    for name in ("drive.ts", "package.json"):
        shutil.copy(HERE / name, tmp_path)
    said = run("node", modules / "openapi-typescript" / "bin" / "cli.js", document, "-o", "api.ts", "--default-non-nullable=false", cwd=tmp_path)
    assert "warn" not in said.lower(), said
    run(
        "node", modules / "typescript" / "bin" / "tsc", "--strict", "--target", "es2022", "--module", "nodenext",
        "--types", "node", "--skipLibCheck", "drive.ts", cwd=tmp_path,
    )
    assert run("node", "drive.js", server.url, server.key, cwd=tmp_path) == "driven\n"

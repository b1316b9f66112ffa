"""The OpenAPI document says what the server does: driven by schemathesis, which makes requests that
fit the document and such that do not, and looks for those on which the two disagree."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

from sandkeep_server import Refused
from servers import in_place_of

HERE = Path(__file__).resolve().parent
SECONDS = os.environ.get("SANDKEEP_OPENAPI_SECONDS", "90")
SEED = os.environ.get("SANDKEEP_OPENAPI_SEED", "7")
# A WebSocket and streams are no requests with one answer.
NO_REQUEST = r"(^/v1/events|^/v1/points/import|/export|/log|/logs)$"


def clear(server, before):
    """What the requests made is not for the tests that follow."""
    server.end_boxes()
    for kind, listed in everything(server).items():
        for name in listed - before[kind]:
            with contextlib.suppress(Refused):
                server.json("DELETE", f"/v1/{kind}/{name}" + ("?force=true" if kind == "secrets" else ""))


def everything(server):
    names = {kind: {one["name"] for one in server.json("GET", f"/v1/{kind}")[kind]} for kind in ("profiles", "secrets", "templates")}
    return {"points": {one["id"] for one in server.json("GET", "/v1/points")["points"]}, **names}


def test_no_invalid_request_is_accepted_and_no_valid_one_refused(server, tmp_path):
    tool = Path(os.environ["SANDKEEP_SCHEMATHESIS"])
    with in_place_of(server, "--pool-size", "2", "--max-boxes", "40") as own, contextlib.ExitStack() as cleaned:
        cleaned.callback(clear, own, everything(own))
        run = subprocess.run(
            [tool, "--no-color", "--config-file", HERE / "schemathesis.toml", "run", f"{own.url}/v1/openapi.json",
             "-H", f"X-API-Key: {own.key}", "--seed", SEED, "--max-time", SECONDS, "--phases", "examples,coverage,fuzzing,stateful",
             "--continue-on-failure", "--exclude-checks", "ignored_auth", "--exclude-path-regex", NO_REQUEST,
             "--exclude-operation-id", "exec_interactive", "--request-timeout", "120"],
            cwd=tmp_path, capture_output=True, text=True, timeout=1200,
        )
        assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
        # With a wrong address or key every check passes, too.
        made = re.search(r"(\d+) generated", run.stdout)
        assert made and int(made[1]) > 200, run.stdout[-3000:]

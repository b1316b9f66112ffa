"""Drives a sandbox with the client that openapi-python-client made: `drive.py URL KEY`."""

import io
import sys

from sandkeep_client import AuthenticatedClient
from sandkeep_client.api.exec_ import exec_
from sandkeep_client.api.files import files_read, files_write
from sandkeep_client.api.sandboxes import sandboxes_create, sandboxes_get, sandboxes_kill
from sandkeep_client.models import CreateRequest, ExecRequest
from sandkeep_client.types import File

url, key = sys.argv[1:]
client = AuthenticatedClient(base_url=url, token=key, timeout=60)
made = sandboxes_create.sync(client=client, body=CreateRequest(template="base"))
identity = made.id
try:
    for cmd in ("echo $((6 * 7))", ["echo", "42"]):
        ended = exec_.sync(identity, client=client, body=ExecRequest(cmd=cmd))
        assert (ended.exit_code, ended.stdout) == (0, "42\n"), ended
    data = bytes(range(256)) * 10
    files_write.sync(identity, client=client, path="/tmp/data", body=File(payload=io.BytesIO(data)))
    read = files_read.sync(identity, client=client, path="/tmp/data")
    assert read.payload.read() == data
finally:
    sandboxes_kill.sync_detailed(identity, client=client)
assert sandboxes_get.sync(identity, client=client).state == "gone"
print("driven")

"""Runs a command against a server of its own: `with_server.py COMMAND ARG…`.

The command finds the server in E2B_* and SANDKEEP_* variables.
"""

import os
import subprocess
import sys

from sandkeep_server import Server


def main() -> int:
    server = Server("--pool-size", "3").start()
    try:
        env = {**os.environ, **server.e2b_env(), **server.cli_env()}
        return subprocess.run(sys.argv[1:], env=env).returncode
    finally:
        server.end_boxes()
        server.stop()


if __name__ == "__main__":
    sys.exit(main())

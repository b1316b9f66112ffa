import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sandkeep_server import Server  # noqa: E402


@pytest.fixture(scope="session")
def server():
    """One server for the whole run; tests that end it start it again themselves."""
    if os.geteuid() != 0:
        pytest.exit("the tests make namespaces and mounts: run them as root (`sudo script/test`)", returncode=1)
    # SANDKEEP_TEST_ISOLATION=gvisor: as if the operator had made this level the default.
    level = os.environ.get("SANDKEEP_TEST_ISOLATION")
    server = Server("--pool-size", "3", *(["--isolation-default", level] if level else [])).start()
    yield server
    if server.process is None or server.process.poll() is not None:
        server.start()
    server.end_boxes()
    server.stop()


def pytest_terminal_summary(terminalreporter):
    """Why a test was tried again: what passes the second time is a bug to mend, too."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}", sep="-")
        terminalreporter.write_line(report.longreprtext)

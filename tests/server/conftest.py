import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from boxkit import Box  # noqa: E402


@pytest.fixture(scope="module")
def shared_box(server):
    """A box for tests that change nothing."""
    with Box(server, timeout_seconds=1800) as box:
        yield box


@pytest.fixture
def box(server):
    with Box(server) as box:
        yield box


@pytest.fixture
def make(server):
    made = []

    def make(**request):
        box = Box(server, **request)
        made.append(box)
        return box

    yield make
    for box in made:
        box.kill()


def pytest_collection_modifyitems(items):
    """What ends the server comes last, so that a fault there does not hide the rest."""
    items.sort(key=lambda item: "chaos" in str(item.path))

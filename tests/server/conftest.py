import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from boxkit import Box  # noqa: E402
from outside import Outside  # noqa: E402
from servers import boxes_of, in_namespace, in_place_of  # noqa: E402
from world import World  # noqa: E402


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
    with boxes_of(server) as make:
        yield make


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    outside = Outside(tmp_path_factory.mktemp("outside"))
    yield outside
    outside.close()


@pytest.fixture(scope="module")
def moated(server, outside):
    """A server that knows the outside, in place of the one of the whole run."""
    with in_place_of(server, "--pool-size", "0", *outside.flags(), where=outside.where()) as own:
        yield own


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def walled(server, world):
    """A server in the world, in place of the one of the whole run. So is the test itself."""
    with in_place_of(server, "--pool-size", "2", *world.flags(), where=in_namespace(world.here)) as own:
        yield own


@pytest.fixture
def make_walled(walled):
    with boxes_of(walled) as make:
        yield make


def pytest_collection_modifyitems(items):
    """What ends the server comes last, so that a fault there does not hide the rest."""
    items.sort(key=lambda item: "chaos" in str(item.path))

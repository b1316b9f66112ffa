import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from boxkit import Box  # noqa: E402
from outside import Outside  # noqa: E402
from sandkeep_server import Server  # noqa: E402
from world import World, enter, own_namespace  # noqa: E402


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


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    outside = Outside(tmp_path_factory.mktemp("outside"))
    yield outside
    outside.close()


@pytest.fixture(scope="module")
def moated(server, outside):
    """A server that knows the outside, in place of the one of the whole run."""
    server.stop()
    own = Server("--pool-size", "0", *outside.flags(), state=server.state).start()
    yield own
    if own.process is None or own.process.poll() is not None:
        own.start()
    own.end_boxes()
    own.stop()
    server.start()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def walled(server, world):
    """A server in the world, in place of the one of the whole run. So is the test itself."""
    server.stop()
    home = own_namespace()
    try:
        enter(world.here)
        own = Server("--pool-size", "2", *world.flags(), state=server.state).start()
        yield own
        if own.process is None or own.process.poll() is not None:
            own.start()
        own.end_boxes()
        own.stop()
    finally:
        enter(home)
        os.close(home)
        server.start()


@pytest.fixture
def make_walled(walled):
    made = []

    def make(**request):
        box = Box(walled, **request)
        made.append(box)
        return box

    yield make
    for box in made:
        box.kill()


def pytest_collection_modifyitems(items):
    """What ends the server comes last, so that a fault there does not hide the rest."""
    items.sort(key=lambda item: "chaos" in str(item.path))

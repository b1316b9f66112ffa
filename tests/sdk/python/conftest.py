import os

import pytest
from flavour import FLAVOURS


@pytest.fixture(scope="session", autouse=True)
def sdk_environment(server):
    os.environ.update(server.e2b_env())


@pytest.fixture(params=FLAVOURS, ids=lambda flavour: flavour.name)
def sdk(request):
    """The blocking or the asyncio side of the SDK, called the same way."""
    return request.param()


@pytest.fixture
def make(sdk):
    """Makes boxes and ends them after the test."""
    made = []

    def make(**options):
        options.setdefault("timeout", 120)
        box = sdk.Sandbox.create(**options)
        made.append(box)
        return box

    yield make
    for box in made:
        box.kill()


@pytest.fixture
def box(make):
    return make()

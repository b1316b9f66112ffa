"""Servers and boxes that a test has for a while."""

from __future__ import annotations

import contextlib
import os

from boxkit import Box
from sandkeep_server import Server
from world import enter, own_namespace


@contextlib.contextmanager
def in_namespace(namespace):
    """This process, and whoever it starts, in another network."""
    home = own_namespace()
    try:
        enter(namespace)
        yield
    finally:
        enter(home)
        os.close(home)


@contextlib.contextmanager
def in_place_of(server: Server, *flags: str, where=None):
    """A server with flags of its own on the same state, in place of the one of the whole run."""
    server.stop()
    try:
        with where or contextlib.nullcontext():
            own = Server(*flags, state=server.state).start()
            try:
                yield own
                if own.process is None or own.process.poll() is not None:
                    own.start()
                own.end_boxes()
            finally:
                own.stop()
    finally:
        server.start()


@contextlib.contextmanager
def boxes_of(server: Server):
    """Makes boxes that end with the test."""
    with contextlib.ExitStack() as made:
        yield lambda **request: made.enter_context(Box(server, **request))

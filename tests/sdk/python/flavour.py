"""One way to call the blocking and the asyncio SDK.

The asyncio objects run on a loop in a thread of their own; a proxy waits for each coroutine.
So every test is written once and drives both.
"""

import asyncio
import inspect
import os
import threading
import time
from importlib.metadata import version

import e2b

VERSION = tuple(int(part) for part in version("e2b").split(".")[:2])
# 2.45.1 is the older of the two generations we promise to serve.
IS_OLD = VERSION < (2, 50)

wanted = os.environ.get("SANDKEEP_E2B_VERSION")
if wanted and version("e2b") != wanted:
    raise RuntimeError(f"this run is for e2b {wanted}, but {version('e2b')} is installed")


class Blocking:
    name = "sync"
    is_async = False
    Sandbox = e2b.Sandbox

    def wrap(self, callback):
        return callback

    def items(self, paginator):
        return paginator.next_items()


class Loop:
    _shared = None

    @classmethod
    def shared(cls):
        if cls._shared is None:
            cls._shared = asyncio.new_event_loop()
            threading.Thread(target=cls._shared.run_forever, daemon=True).start()
        return cls._shared


def unwrap(value):
    return value._inner if isinstance(value, Proxy) else value


def run(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, Loop.shared()).result(180)


class Proxy:
    """An asyncio object whose coroutines are waited for."""

    def __init__(self, inner):
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name):
        return proxied(getattr(self._inner, name))

    def __call__(self, *args, **kwargs):
        async def call():
            # Called inside the loop: some SDK methods make tasks before they return.
            result = self._inner(*[unwrap(a) for a in args], **{k: unwrap(v) for k, v in kwargs.items()})
            return await result if inspect.isawaitable(result) else result

        return proxied(run(call()))

    def __repr__(self):
        return f"Proxy({self._inner!r})"


PLAIN = (str, bytes, bytearray, int, float, bool, type(None), list, dict, tuple, Exception)


def proxied(value):
    if isinstance(value, PLAIN) or not (
        callable(value) or type(value).__module__.startswith("e2b.sandbox_async")
    ):
        return value
    return Proxy(value)


class Async:
    name = "async"
    is_async = True

    def __init__(self):
        self.Sandbox = Proxy(e2b.AsyncSandbox)

    def wrap(self, callback):
        return callback


FLAVOURS = [Blocking, Async]


def wait_for(condition, what, limit=60.0):
    """Waits until `condition` gives something true, and returns it."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {limit:.0f} s: {what}")

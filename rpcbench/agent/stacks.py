"""What the threads of this process do, read from their stacks: the call that each runs, the future it waits for.

Nothing is written down for it while threads work; it costs something only when somebody looks.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple

from rpcbench.agent.serve import serve
from rpcbench.agent.sites import sites
from rpcbench.words.futures import Future

_MOST = 12


class Doing(NamedTuple):
    """One thread. `serving`: the agent whose call it runs, the caller and the number; `places`: innermost first."""

    thread: int
    name: str
    serving: tuple[object, int, int] | None
    future: Future[Any] | None
    places: tuple[str, ...]


def threads() -> list[Doing]:
    """All threads of this process as they are now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [_doing(ident, names.get(ident, str(ident)), frame) for ident, frame in _frames().items()]


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each thread.

    Python lists threads under a lock of its own, which whoever begins or ends one waits for, and lets nobody run
    meanwhile. So no garbage collection may come between: it runs Python code, which lets others run.
    """
    with _listing:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


_listing = threading.Lock()


def _doing(ident: int, name: str, innermost: FrameType) -> Doing:
    future: Future[Any] | None = None
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_code is Future.wait.__code__ and future is None:
            future = frame.f_locals["self"]
        if frame.f_code is serve.__code__:
            held = frame.f_locals
            return Doing(ident, name, (held["agent"], held["source"], held["message"].call), future, _places(innermost))
        frame = frame.f_back
    return Doing(ident, name, None, future, _places(innermost))


def _places(frame: FrameType) -> tuple[str, ...]:
    return tuple(str(site) for site, _ in zip(sites(frame), range(_MOST), strict=False))

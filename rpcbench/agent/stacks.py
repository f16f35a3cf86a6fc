"""What the threads of this process do, read from their stacks: the call that each runs, the future it waits for.

Nothing is written down for it while threads work; it costs something only when somebody looks.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from rpcbench.agent.serve import serve
from rpcbench.agent.sites import sites
from rpcbench.base.futures import Future

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
    return [_doing(ident, names.get(ident, str(ident)), stack) for ident, stack in _stacks().items()]


def _stacks() -> dict[int, list[FrameType]]:
    """The frames of each thread, innermost first.

    Python lists threads under a lock of its own, which whoever begins or ends one waits for, and lets nobody run
    meanwhile; and it makes a frame's object when that is first asked for, of what must not have ended by then. So no
    garbage collection may come between: it runs Python code, which lets others run.
    """
    with _listing:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {ident: list(_outwards(frame)) for ident, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


_listing = threading.Lock()


def _doing(ident: int, name: str, stack: list[FrameType]) -> Doing:
    future: Future[Any] | None = None
    for frame in stack:
        if frame.f_code is Future.wait.__code__ and future is None:
            future = frame.f_locals["self"]
        if frame.f_code is serve.__code__:
            held = frame.f_locals
            return Doing(ident, name, (held["agent"], held["source"], held["message"].call), future, _places(stack[0]))
    return Doing(ident, name, None, future, _places(stack[0]))


def _places(frame: FrameType) -> tuple[str, ...]:
    return tuple(str(site) for site, _ in zip(sites(frame), range(_MOST), strict=False))

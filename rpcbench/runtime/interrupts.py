"""`with uninterrupted:` holds Ctrl-C back while the main thread does what must be done whole or not at all.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: between a number given to a message and
the message sent, or in the middle of a write. In the block it is kept, and raised at its end. Rules
- The block waits for nobody. Should it be stuck all the same, a second Ctrl-C, a second later, ends it.
- It costs two microseconds on the main thread; other threads never get the exception, and pass.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]  # `signal`'s take ten times as long,
from _signal import signal as _signal_  # as they make enums
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

_PATIENCE = 1.0
_SIGINT, _SIG_IGN = int(signal.SIGINT), int(signal.SIG_IGN)


class _Uninterrupted:
    """Only the main thread ever changes it, and while the handler is ours nothing interrupts that."""

    def __init__(self) -> None:
        self.main: int | None = None  # the thread that Ctrl-C can interrupt, but for blocks
        self.depth = 0  # of blocks that it is in
        self._before: Any = None
        self._keeps = self._keep  # bound once
        self._kept: tuple[int, FrameType | None] | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        if get_ident() != self.main:
            return
        if not self.depth:
            before = _getsignal(_SIGINT)
            if before is None or before == _SIG_IGN:
                return  # no handler of Python's, so nothing would raise
            self._before, self._kept = before, None  # first: from then on a Ctrl-C may be kept
            _signal_(_SIGINT, self._keeps)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.depth and get_ident() == self.main:
            self.depth -= 1
            if not self.depth:
                _signal_(_SIGINT, self._before)
                if self._kept is not None:
                    _handle(self._before, *self._kept)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._kept is None:
            self._kept, self._since = (number, frame), time.monotonic()
        elif time.monotonic() - self._since > _PATIENCE:
            self._kept = None
            _handle(self._before, number, frame)


def _handle(handler: Callable[[int, FrameType | None], Any] | int, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.raise_signal(signal.SIGINT)


def on_main_thread() -> bool:
    """Whether this is that thread."""
    return get_ident() == uninterrupted.main


def interruptible() -> bool:
    """Whether Ctrl-C may be raised on this thread now."""
    held = uninterrupted
    return not held.depth and get_ident() == held.main


def _look() -> None:
    uninterrupted.main = threading.main_thread().ident


uninterrupted = _Uninterrupted()
_look()
os.register_at_fork(after_in_child=_look)  # whichever thread forks is the child's main thread

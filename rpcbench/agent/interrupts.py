"""`with uninterrupted:` holds Ctrl-C back while the main thread does what must be done whole or not at all.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: between a number given to a message and
the message sent, or in the middle of a write. In the block it is kept, and raised at its end. Rules
- The block waits for nobody. Should it be stuck all the same, a second Ctrl-C, a second later, ends it.
- It costs two microseconds on the main thread; other threads never get the exception, and pass.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` adds enums to it, and takes ten times as long
import os
import signal
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

_PATIENCE = 1.0


class _Uninterrupted:
    """Only the main thread ever changes it, and while the handler is ours nothing interrupts that."""

    def __init__(self) -> None:
        self._depth = 0
        self._before: Any = None
        self._kept: tuple[int, FrameType | None] | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if self._depth == 0:
            before = _signal.getsignal(signal.SIGINT)
            if before is None or before == signal.SIG_IGN:
                return  # no handler of Python's: nothing raises
            _signal.signal(signal.SIGINT, self._keep)
            self._before, self._kept = before, None
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth == 0 or get_ident() != _main:
            return
        self._depth -= 1
        if self._depth == 0:
            _signal.signal(signal.SIGINT, self._before)
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
    """Whether Ctrl-C can interrupt this thread."""
    return get_ident() == _main


def _look() -> None:
    global _main
    _main = threading.main_thread().ident


_main: int | None
_look()
os.register_at_fork(after_in_child=_look)  # whichever thread forks is the child's main thread


uninterrupted = _Uninterrupted()

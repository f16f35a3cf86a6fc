"""Two calls at the same time, for checks of answers that need a lock.

The first call stands still before one of its lines, and the second call runs whole; then the first one goes on. This is
tried before each line of the first call. So an answer without a lock fails each time, not by chance. If the second call
waits for a lock that the first one holds, the first one goes on after `TURN` seconds. On a machine so busy that the
second call needs longer, a missing lock may go unseen; a right answer is never refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

from checks import NotYet, require, trying

PATIENCE = 3.0  # only a wrong answer needs it
TOGETHER = "Two calls came at the same time, on two threads"  # for messages
TURN = 0.05  # seconds in which the second call ends, if it does not wait for a lock
Call = Callable[[], object]


def interleaved(kind: type[Any], calls: Callable[[], tuple[Call, Call]]) -> Iterator[None]:
    """Make two calls of methods of `kind` for each line of the first one, and yield after each pair.

    `calls()` prepares a pair. Raises the NotYet of a call that fails or does not end.
    """
    files = {value.__code__.co_filename for value in vars(kind).values() if isinstance(value, FunctionType)}
    reached, line = True, 0
    while reached:
        first, second = calls()
        reached = _pair(first, second, files, line)
        yield
        line += 1


def _pair(first: Call, second: Call, files: set[str], line: int) -> bool:
    """Make both calls. Returns whether the first one reached that line: the number of lines it ran before."""
    stands, go_on, passed = threading.Event(), threading.Event(), 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            if passed == line:
                stands.set()
                go_on.wait()
            passed += 1
        return trace

    def traced() -> None:
        sys.settrace(trace)
        try:
            first()
        finally:
            sys.settrace(None)

    one = _Caller(traced, stands)
    stands.wait()
    two = _Caller(second)
    two.thread.join(TURN)
    go_on.set()
    for caller in (one, two):
        caller.thread.join(PATIENCE)
        require(not caller.thread.is_alive(), f"{TOGETHER}, and one of them does not end.")
        if caller.hint is not None:
            raise caller.hint
    return passed > line


class _Caller:
    """A call on a thread of its own."""

    def __init__(self, call: Call, stands: threading.Event | None = None) -> None:
        self.hint: NotYet | None = None
        self._call, self._stands = call, stands
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with trying(f"{TOGETHER}. One of them"):
                self._call()
        except NotYet as hint:
            self.hint = hint
        finally:
            if self._stands is not None:
                self._stands.set()  # it has ended before that line

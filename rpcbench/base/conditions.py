"""Waiting for what other threads bring about, in a way that Ctrl-C cannot break.

`threading.Condition` and `Event` take a lock in Python code: a KeyboardInterrupt between two of its bytecodes leaves it
locked for ever, and then whoever tells of a change hangs. Here nobody holds a lock. Guarantees
- `tell` and `set` never block, whatever became of those who wait; finalizers and signal handlers may call them, too.
- No change is missed: who waits looks only after it has asked to be woken.
- No Ctrl-C is missed: a signal that comes just before the main thread begins to wait does not wake it, so that looks up
  now and then.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

_GLANCE_SECONDS = 0.1


def acquired(bell: threading.Lock, timeout: float | None = None) -> bool:
    """As `bell.acquire`, for a wait that Ctrl-C ends whenever it comes. timeout: seconds; None: as long as it takes."""
    if threading.current_thread() is not threading.main_thread():
        return bell.acquire(timeout=-1 if timeout is None else timeout)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not bell.acquire(timeout=max(0.0, min(_GLANCE_SECONDS, deadline - time.monotonic()))):
        if deadline <= time.monotonic():
            return False
    return True


class Changes:
    """Wakes those who wait for something to become true. What that is needs a lock of its own, if any."""

    def __init__(self) -> None:
        self._bells: list[threading.Lock] = []  # of those who wait, each held until it rings

    def tell(self) -> None:
        """All who wait look again."""
        for bell in self._bells[:]:
            with contextlib.suppress(RuntimeError):  # it has rung already
                bell.release()

    def wait_for(self, reached: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `reached()`, and no longer than `timeout` seconds; whether it was. Ctrl-C ends the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            bell = threading.Lock()
            bell.acquire()
            self._bells.append(bell)
            try:
                if reached():
                    return True
                if not acquired(bell, None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return reached()
            finally:
                self._bells.remove(bell)


class Listeners:
    """Those who want to be called after each change, on whatever thread makes it."""

    def __init__(self) -> None:
        self._wakes: dict[object, Callable[[], None]] = {}

    def add(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call the result to stop."""
        key = object()
        self._wakes[key] = wake

        def stop() -> None:
            self._wakes.pop(key, None)

        return stop

    def tell(self) -> None:
        for wake in list(self._wakes.values()):
            wake()


class Flag:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._changes = Changes()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._changes.tell()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set, and no longer than `timeout` seconds; whether it is."""
        return self._set or self._changes.wait_for(self.is_set, timeout)

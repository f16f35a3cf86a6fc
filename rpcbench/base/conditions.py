"""Conditions and events that Ctrl-C cannot leave locked.

`threading.Condition` and `Event` take a lock in Python code: a KeyboardInterrupt between two of its bytecodes leaves
the lock held for ever, and then the thread that notifies hangs. No thread here holds a lock. Guarantees
- `notify_all` and `set` never block, in any state of the waiting threads. Finalizers and signal handlers may call
  them, too.
- No change is missed: a thread registers its lock before it tests its condition.
- No Ctrl-C is missed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

# A signal that arrives just before the main thread begins to wait does not wake it, so that thread wakes up this often.
_GLANCE_SECONDS = 0.1


def acquire_lock(wakeup: threading.Lock, timeout: float | None = None) -> bool:
    """Acquire `wakeup` in at most `timeout` seconds (None: no limit), in a wait that Ctrl-C ends at any time."""
    if threading.current_thread() is not threading.main_thread():
        return wakeup.acquire(timeout=-1 if timeout is None else timeout)  # Ctrl-C reaches only the main thread
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not wakeup.acquire(timeout=max(0.0, min(_GLANCE_SECONDS, deadline - time.monotonic()))):
        if deadline <= time.monotonic():
            return False
    return True


def time_left(deadline: float, late: str) -> float:
    """Return the seconds until a deadline, by time.monotonic; TimeoutError with the text `late` past it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError(late)
    return left


class Condition:
    """A condition variable without a lock; the state that the waiting threads test may have a lock of its own."""

    def __init__(self) -> None:
        self._wakeups: list[threading.Lock] = []  # one for each waiting thread: a held lock, released to wake it

    def notify_all(self) -> None:
        """Wake all waiting threads, which test their conditions again."""
        for wakeup in self._wakeups[:]:  # a copy: the list operations are atomic, so no lock is needed
            with contextlib.suppress(RuntimeError):  # another `notify_all` has released it already
                wakeup.release()

    def wait_for(self, reached: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `reached()`, for at most `timeout` seconds; return whether it was. Ctrl-C ends the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            wakeup = threading.Lock()
            wakeup.acquire()
            self._wakeups.append(wakeup)  # before the test, so that a change between test and wait wakes this thread
            try:
                if reached():
                    return True
                if not acquire_lock(wakeup, None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return reached()
            finally:
                self._wakeups.remove(wakeup)


class Listeners:
    """Callbacks that are called after each change, on the thread that makes it."""

    def __init__(self) -> None:
        self._wakes: dict[object, Callable[[], None]] = {}

    def add_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Register a callback; the returned function removes it."""
        key = object()  # the same callback may be registered twice
        self._wakes[key] = wake

        def remove_callback() -> None:
            self._wakes.pop(key, None)

        return remove_callback

    def notify_listeners(self) -> None:
        for wake in list(self._wakes.values()):
            wake()


class Event:
    """An event, with the methods of `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._changes = Condition()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._changes.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most `timeout` seconds; return whether it is."""
        return self._set or self._changes.wait_for(self.is_set, timeout)

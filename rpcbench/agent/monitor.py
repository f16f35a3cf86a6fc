"""Gives read locks that calls have left free for `LONG` seconds to another thread of the pool, see `receiver`.

One thread looks at them every `LONG` seconds while calls come, so it finds one after twice that at most. It sleeps once
none has come for a while, and only the first call after that wakes it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

LONG = 0.002
_QUIET_LOOKS = 10
"""So many looks at nothing new before the thread sleeps."""


class ReadLock(Protocol):
    """What a thread that runs a call has left free."""

    def release_to_pool(self) -> None:
        """Let another thread have it, if it is still free."""


class Monitor:
    """`spawn` runs a job on another thread."""

    def __init__(self, spawn: Callable[[Callable[[], object]], None]) -> None:
        self._spawn = spawn
        self._since: dict[ReadLock, float] = {}  # those that are free, and since when
        self._lock = threading.Lock()
        self._bell = threading.Lock()  # free when the thread is to look again
        self._bell.acquire()
        self._begun = self._looks = self._closed = False  # under the lock
        self._busy = False  # one was left free since the last look

    def start(self) -> None:
        """Before the first lock is released. RuntimeError where no thread can be started."""
        with self._lock:
            if not self._begun and not self._closed:
                self._spawn(self._watch)
                self._begun = self._looks = True

    def released(self, lock: ReadLock) -> None:
        """It is free from now on."""
        self._since[lock] = time.monotonic()
        self._busy = True
        if not self._looks:
            self._look()

    def acquired(self, lock: ReadLock) -> None:
        """It is not any more."""
        self._since.pop(lock, None)

    def _look(self) -> None:
        """Let the thread go on."""
        with self._lock:
            if self._begun and not self._looks:
                self._looks = True
                self._bell.release()

    def _watch(self) -> None:
        quiet = 0
        while not self._closed:
            time.sleep(LONG)
            late = time.monotonic() - LONG
            for lock, since in self._since.copy().items():
                if since <= late:
                    _release(lock)
            quiet = 0 if self._busy or self._since else quiet + 1
            self._busy = False
            if quiet >= _QUIET_LOOKS and self._rests():
                self._bell.acquire()
                quiet = 0

    def _rests(self) -> bool:
        """Whether the thread sleeps now until one is left free."""
        with self._lock:
            self._looks = self._closed
        if self._busy or self._since:  # just now, by one that has seen the thread look
            self._look()
        return not self._closed

    def close(self) -> None:
        """Nothing is given away any more."""
        with self._lock:
            self._closed = True
        self._look()


def _release(lock: ReadLock) -> None:
    """One that cannot be given away, as no thread can be started, say, must not end the watch over the others."""
    try:
        lock.release_to_pool()
    except Exception:  # noqa: BLE001  (told like the end of a thread)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

"""Has connections handed over whose token lies on the table for `LONG` seconds, see `reading`.

It sleeps as long as tokens come back in time, however many: the next one puts the alarm off.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rpcbench.agent.alarm import Alarm, alarm

LONG = 0.002
_SOON = LONG / 4


class Token(Protocol):
    """What lies on the table."""

    def hand_over(self) -> None:
        """Let another thread have it, if it still lies there."""


class Monitor:
    """`spawn` runs a job on another thread."""

    def __init__(self, spawn: Callable[[Callable[[], object]], None]) -> None:
        self._spawn = spawn
        self._since: dict[Token, float] = {}  # which lie on the table, and since when
        self._lock = threading.Lock()
        self._alarm: Alarm | None = None
        self._at = 0.0  # when it rings; 0 for never
        self._closed = False

    def laid(self, token: Token) -> None:
        """It lies on the table from now on."""
        now = time.monotonic()
        with self._lock:
            alone = not self._since
            self._since[token] = now
            if alone and self._at < now + _SOON and not self._closed:  # else it is for one that has lain for longer
                self._set(now + LONG, now)

    def taken(self, token: Token) -> None:
        """It does not any more."""
        self._since.pop(token, None)

    def rest(self) -> None:
        """This thread is about to sleep, or has other work than calls: what need not ring would only wake another."""
        if self._at and not self._since:
            with self._lock:
                if self._alarm is not None and self._at and not self._since and not self._closed:
                    self._at = 0.0
                    self._alarm.clear()

    def _set(self, at: float, now: float) -> None:
        """Under the lock. It may ring before any token has lain for long, and is set again then."""
        if self._alarm is None:
            self._alarm = self._begin()
        self._at = at
        self._alarm.set(max(_SOON, at - now))

    def _begin(self) -> Alarm:
        bell = alarm()
        try:
            self._spawn(partial(self._watch, bell))
        except BaseException:
            bell.close()
            raise
        return bell

    def _watch(self, bell: Alarm) -> None:
        while not self._closed:
            bell.wait()
            late = time.monotonic() - LONG
            for token, since in self._since.copy().items():
                if since <= late:
                    _hand_over(token)
            with self._lock:
                self._at = 0.0
                left = self._since.copy()
                if left and not self._closed:
                    self._set(min(left.values()) + LONG, time.monotonic())
        bell.close()

    def close(self) -> None:
        """Nothing is handed over any more."""
        with self._lock:
            self._closed = True
            if self._alarm is not None:
                self._alarm.set(0.0)


def _hand_over(token: Token) -> None:
    """One that cannot be, as no thread can be started, say, must not end the watch over the others."""
    try:
        token.hand_over()
    except Exception:  # noqa: BLE001  (told like the end of a thread)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

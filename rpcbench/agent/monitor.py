"""Has connections handed over whose token lies on the table for `LONG` seconds, see `reading`.

It sleeps as long as tokens come back in time, whatever many: each that is put there alone puts the alarm off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rpcbench.agent.alarm import Alarm, alarm

LONG = 0.002
_SOON = LONG / 8


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
        self._closed = False

    def laid(self, token: Token) -> None:
        """It lies on the table from now on."""
        with self._lock:
            alone = not self._since
            self._since[token] = time.monotonic()
            if alone and not self._closed:  # else the alarm is set for one that has lain there for longer
                (self._alarm or self._begin()).set(LONG)

    def taken(self, token: Token) -> None:
        """It does not any more."""
        self._since.pop(token, None)

    def _begin(self) -> Alarm:
        self._alarm = bell = alarm()
        self._spawn(partial(self._watch, bell))
        return bell

    def _watch(self, bell: Alarm) -> None:
        while not self._closed:
            bell.wait()
            late = time.monotonic() - LONG
            for token, since in self._since.copy().items():
                if since <= late:
                    token.hand_over()
            with self._lock:
                left = self._since.copy()
                if left:
                    bell.set(max(_SOON, min(left.values()) + LONG - time.monotonic()))
        bell.close()

    def close(self) -> None:
        """Nothing is handed over any more."""
        with self._lock:
            self._closed = True
            if self._alarm is not None:
                self._alarm.set(0.0)

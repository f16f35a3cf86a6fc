"""A link that holds what comes in until somebody lets it go on, and a clock that stands still meanwhile.

A message is held where it arrives. There its bytes are its own, whatever its sender does to a tensor by then; its
sender's errors are what they always are; the call that it answers is known by name; and who dies while it is held is
mourned as after any last words. To the protocol a held message is one that takes long, and a dropped one is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rpcbench.transport.base import Link
from rpcbench.wire.messages import Message


class Waiting(NamedTuple):
    """A message that is held, and since when (monotonic seconds)."""

    source: int
    seq: int
    message: Message
    since: float


class Holding(Link):
    """Holds the messages that `means(source, message)`. `told` is called when there are more of them."""

    lossy = True

    def __init__(self, means: Callable[[int, Message], bool], told: Callable[[], object]) -> None:
        super().__init__()
        self._means = means
        self._told = told
        self._lock = threading.Lock()
        self._held: dict[int, Waiting] = {}
        self._count = 0
        self._over = False

    @property
    def held(self) -> dict[int, Waiting]:
        """By their numbers here, in the order of arrival."""
        with self._lock:
            return dict(self._held)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        if not self._means(source, message):
            super().incoming(source, seq, message)
            return
        with self._lock:
            if not self._over:
                self._held[self._count] = Waiting(source, seq, message, time.monotonic())
                self._count += 1
                message = None
        if message is None:
            self._told()
        else:
            super().incoming(source, seq, message)

    def deliver(self, key: int) -> bool:
        """Let one go on; what follows from it has been done when this returns. False if it is not held any more."""
        waiting = self._take(key)
        if waiting is not None:
            super().incoming(waiting.source, waiting.seq, waiting.message)
        return waiting is not None

    def drop(self, key: int) -> bool:
        """Lose one. False if it is not held any more."""
        return self._take(key) is not None

    def let_go(self, source: int | None = None) -> None:
        """Let all go on that is held, in order; or all of one member. Without one, nothing is held any more."""
        with self._lock:
            self._over = source is None
            going = {key: one for key, one in self._held.items() if source in (None, one.source)}
            self._held = {key: one for key, one in self._held.items() if key not in going}
        for waiting in going.values():
            super().incoming(waiting.source, waiting.seq, waiting.message)

    def _take(self, key: int) -> Waiting | None:
        with self._lock:
            return self._held.pop(key, None)


class Clock:
    """Counts the seconds of another one, except for those in which it stood still."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._behind = 0.0
        self._stands: float | None = None

    def __call__(self) -> float:
        stands = self._stands
        return self._source() - self._behind if stands is None else stands

    def stop(self) -> None:
        """Harmless while it stands."""
        self._stands = self()

    def put_on(self, seconds: float) -> None:
        """While it stands: so many seconds have passed."""
        assert self._stands is not None, "a clock that runs is not put on by hand"
        self._stands += seconds

    def go(self) -> None:
        """Go on from where it stands. Harmless while it runs."""
        if self._stands is not None:
            self._behind = self._source() - self._stands
            self._stands = None

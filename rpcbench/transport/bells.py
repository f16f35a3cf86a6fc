"""A bell that one process rings and another one hears, with nothing said: wakes who waits at it, and nobody else.

Guarantees
- A ring is heard once, whether before or after somebody waits; several may be heard as one.
- A bell that is closed is not rung: its descriptor may stand for another file then.
- Who is woken gets a core of its own, if one is free. What a socket wakes gets that of who writes, which works on.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable


class Bell:
    """The end that rings; `descriptor` came from whoever hears it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Harmless once it is closed."""
        with self._lock:
            if self._descriptor >= 0:
                _ring(self._descriptor)

    def forked(self) -> None:
        """In a forked child: a thread that was about to ring is not here."""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Ear:
    """The end that hears. Who waits there has its `turn`: of two, one would hear what is for the other."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.closed = False
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def wait_while(self, waiting: Callable[[], bool], seconds: float) -> None:
        """Wait until that ends, or nothing has rung for so many seconds; not at all where somebody else waits."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            while waiting() and not self.closed and self._poll.poll(seconds * 1000):
                self.heard()
        finally:
            self.turn.release()

    def heard(self) -> None:
        """What has rung until now has been heard."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def ring(self) -> None:
        """As its bell does, from this process. Harmless once it is closed."""
        with self._lock:
            if not self.closed:
                _ring(self.descriptor)

    def forked(self) -> None:
        """In a forked child: a thread that waited, or rang, is not here."""
        self.turn, self._lock = threading.Lock(), threading.Lock()

    def close(self) -> None:
        """Once nobody waits at it."""
        with self.turn, self._lock:
            if not self.closed:
                self.closed = True
                os.close(self.descriptor)


def _ring(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):  # rung 2**64 times, and will be heard
        os.eventfd_write(descriptor, 1)

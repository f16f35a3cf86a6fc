"""A bell that one process rings and another one hears, with nothing said: wakes who waits at it, and nobody else.

Guarantees
- A ring is heard once, whether before or after somebody waits; several may be heard as one.
- A bell that is closed is not rung: its descriptor may stand for another file then.
- Who is woken gets a core of its own, if one is free. What a socket wakes gets that of who writes, which works on.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Bell:
    """The end that rings; `descriptor` came from whoever hears it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Harmless once it is closed."""
        with self._lock:
            if self._descriptor >= 0:
                with contextlib.suppress(BlockingIOError):  # rung 2**64 times, and will be heard
                    os.eventfd_write(self._descriptor, 1)

    def forked(self) -> None:
        """In a forked child: a thread that was about to ring is not here."""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Ear:
    """The end that hears."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.closed = False

    def heard(self) -> None:
        """What has rung until now has been heard."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Once nobody waits at it."""
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)

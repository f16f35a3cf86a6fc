"""Memory of this process for what it receives: buffers come back when nothing refers to them, and are used again."""

from __future__ import annotations

import contextlib
import mmap
import threading

from rpcbench.transport.arena import SIZE, Arena, Loans

SMALL = 256 << 10
"""Smaller buffers are made by malloc, which is as quick there."""


class Reused:
    """From any thread. Where memory is short, or cannot be advised here, buffers are used once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._arena: Arena | None = None
        self._loans: Loans | None = None

    def room(self, size: int) -> memoryview | bytearray:
        """A buffer of `size` bytes that nobody else has, whatever is in it."""
        if size >= SMALL:
            self._make()
            self._take_back()
            place = self._arena.take(size) if self._arena is not None else None
            if place is not None and self._loans is not None:
                return self._loans.lend(place, size)
        return bytearray(size)

    def _make(self) -> None:
        """A mapping, at the first large buffer: most processes never need one."""
        with self._lock:
            if self._tried:
                return
            self._tried = True
            with contextlib.suppress(AttributeError, OSError):  # Windows has no advice; a limit may be in the way
                memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._arena, self._loans = Arena(memory, mmap.MADV_DONTNEED), Loans(memory)
                memory.madvise(mmap.MADV_HUGEPAGE)

    def _take_back(self) -> None:
        if self._arena is not None and self._loans is not None:
            for place in self._loans.over():
                self._arena.give_back(place)

    def tidy(self) -> None:
        """Give back to the system what has not been needed for some time."""
        self._take_back()
        if self._arena is not None:
            self._arena.tidy()

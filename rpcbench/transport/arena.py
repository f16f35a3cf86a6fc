"""Memory that is used again: pieces of one large mapping, of which only what has been touched is there.

The first touch of fresh memory costs more than copying into it. So large buffers are pieces of an `Arena`, the lowest
that fits first, which is likely to be warm.

Guarantees
- A piece is taken by one at a time, and whoever finds none that fits does without.
- What nobody has needed from one `tidy` to the next goes back to the system.
- A `Loan` notices the end of a buffer whatever has been made of it: tensors, arrays, views of views.
"""

from __future__ import annotations

import bisect
import mmap
import queue
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SIZE = 1 << 30
Bytes = NDArray[np.uint8]


def _pages(size: int) -> int:
    """The size of a piece for so many bytes."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class Arena:
    """Which pieces of a mapping are free. `forget`: the advice that gives a piece back to the system."""

    def __init__(self, memory: mmap.mmap, forget: int) -> None:
        self.memory = memory
        self._forget = forget
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]
        self._taken: dict[int, int] = {}  # start → stop
        self._needed = 0  # up to where pieces were taken since the last `tidy`
        self._touched = 0  # nothing has been put beyond

    def take(self, size: int) -> int | None:
        """Where `size` bytes are free, which are the caller's from now on; None where there are not so many."""
        size = _pages(size)
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                    self._taken[start] = start + size
                    self._needed = max(self._needed, start + size)
                    self._touched = max(self._touched, start + size)
                    return start
        return None

    def give_back(self, start: int) -> None:
        """KeyError where no piece begins there."""
        with self._lock:
            self._insert(start, self._taken.pop(start))

    def _insert(self, start: int, stop: int) -> None:
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def tidy(self) -> None:
        """Give the system what was not needed since the last time."""
        idle = self._set_aside()
        for start, stop in idle:
            self.memory.madvise(self._forget, start, stop - start)
        with self._lock:
            for start, stop in idle:
                self._insert(start, stop)

    def _set_aside(self) -> list[tuple[int, int]]:
        """Free pieces with something in them that nobody has needed: not to be taken until they are empty."""
        with self._lock:
            idle, kept = [], []
            for start, stop in self._free:
                first, last = max(start, self._needed), min(stop, self._touched)
                if first < last:
                    idle.append((first, last))
                    kept += [(a, b) for a, b in ((start, first), (last, stop)) if a < b]
                else:
                    kept.append((start, stop))
            self._free = kept
            self._touched = max(self._needed, max(self._taken.values(), default=0))
            self._needed = 0
            return idle


class Loan(weakref.ref[Bytes]):
    """Puts itself into a queue when its piece is used no more."""

    __slots__ = ("start", "stop")

    start: int
    stop: int


class Loans:
    """Pieces of a mapping that are in use here, as buffers that nobody else has."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._loans: dict[int, Loan] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._over: queue.SimpleQueue[Loan] = queue.SimpleQueue()
        self.none_over: Callable[[], bool] = self._over.empty  # whether `over` would tell of none

    def lend(self, start: int, size: int) -> memoryview:
        """The bytes from `start` on. ValueError for what is no part of the mapping, or in use, and at the end."""
        if not 0 <= start <= start + size <= len(self.memory) or start in self._loans:
            raise ValueError(f"{size} bytes at {start} are not there, or in use")
        piece: Bytes = np.ndarray(size, np.uint8, self.memory, start)  # not a memoryview: a view of it outlives it
        loan = Loan(piece, self._over.put)
        loan.start, loan.stop = start, start + _pages(size)
        with self._lock:
            if self._ended:
                raise ValueError("the connection has ended")
            self._loans[start] = loan
        return piece.data

    def over(self) -> list[int]:
        """Where pieces begin that are used no more; each is told once."""
        starts = []
        while not self._over.empty():
            try:
                start = self._over.get_nowait().start
            except queue.Empty:  # another thread has it
                break
            del self._loans[start]
            starts.append(start)
        return starts

    def forget_rest(self) -> None:
        """Give the system what lies between the pieces that are in use. None is lent any more."""
        with self._lock:
            self._ended = True
            used = sorted((loan.start, loan.stop) for loan in list(self._loans.values()))
        ends = [0, *(stop for _, stop in used)]
        for start, stop in zip(ends, [*(start for start, _ in used), len(self.memory)], strict=True):
            if start < stop:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)

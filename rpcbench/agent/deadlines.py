"""Deadlines of calls: cheap to set and to take back, found when due to within a twentieth of a second.

Calls that end in time, nearly all, leave nothing behind; so the table is as large as the calls in flight.
"""

from __future__ import annotations

import heapq
import threading

_TICK = 0.05


class Deadlines:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[int, set[int]] = {}
        self._ticks: list[int] = []
        self._tick_of: dict[int, int] = {}

    def set(self, call: int, at: float) -> bool:
        """True if this is now the earliest deadline, so that whoever sleeps until the next one must wake."""
        tick = int(at / _TICK) + 1
        with self._lock:
            self._tick_of[call] = tick
            calls = self._due.get(tick)
            if calls is not None:
                calls.add(call)
                return False
            self._due[tick] = {call}
            heapq.heappush(self._ticks, tick)
            return self._ticks[0] == tick

    def clear(self, call: int) -> None:
        """The call has ended. Harmless if it has no deadline."""
        with self._lock:
            tick = self._tick_of.pop(call, None)
            if tick is not None:
                self._due[tick].discard(call)

    def pop_due(self, now: float) -> tuple[list[int], float | None]:
        """Calls whose deadline has passed, and seconds until there is something to look at again."""
        due: list[int] = []
        with self._lock:
            while self._ticks and (self._ticks[0] * _TICK <= now or not self._due[self._ticks[0]]):
                for call in self._due.pop(heapq.heappop(self._ticks)):
                    del self._tick_of[call]
                    due.append(call)
            return due, (self._ticks[0] * _TICK - now if self._ticks else None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._tick_of)

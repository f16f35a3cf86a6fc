"""Deadlines of calls: cheap to set and to take back, found when due to within a twentieth of a second.

Calls that end in time, nearly all, leave nothing behind; so the table is as large as the calls in flight. It has no
lock: each step on the table is one of Python's, and `pop_due` looks only after it has asked to be told of what comes.
It looks at a copy: to list the items of the table itself takes many steps, as the garbage collector may run between.
"""

from __future__ import annotations

import math

_TICK = 0.05


class Deadlines:
    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._next = math.inf  # who sets an earlier one is told so

    def set(self, call: int, at: float) -> bool:
        """True if this is now the earliest deadline, so that whoever sleeps until the next one must wake."""
        self._at[call] = at
        if at >= self._next:
            return False
        self._next = at
        return True

    def clear(self, call: int) -> None:
        """The call has ended. Harmless if it has no deadline."""
        self._at.pop(call, None)

    def pop_due(self, now: float) -> tuple[list[int], float | None]:
        """Calls whose deadline has passed, and seconds until there is something to look at again."""
        self._next = math.inf
        known = self._at.copy().items()
        due = [call for call, at in known if at <= now and self._at.pop(call, None) is not None]
        first = min((at for _, at in known if at > now), default=None)
        if first is None:
            return due, None
        self._next = first
        return due, (int(first / _TICK) + 1) * _TICK - now

    def __len__(self) -> int:
        return len(self._at)

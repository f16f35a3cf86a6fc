"""Each message once, whatever its order: the numbers seen from one sender.

Numbers count up without gaps, so all below `floor` have been seen, and only what came early is kept.
"""

from __future__ import annotations


class Window:
    def __init__(self) -> None:
        self.floor = 0
        self._early: set[int] = set()

    def first_time(self, number: int) -> bool:
        """True once for each number."""
        if number == self.floor and not self._early:
            self.floor += 1
            return True
        if number < self.floor or number in self._early:
            return False
        self._early.add(number)
        while self.floor in self._early:
            self._early.remove(self.floor)
            self.floor += 1
        return True

    def awaits(self, number: int) -> bool:
        """Whether it is the next one, and none has come early."""
        return number == self.floor and not self._early

    def early(self, most: int) -> tuple[int, ...]:
        """The first numbers seen beyond a gap."""
        return tuple(sorted(self._early)[:most])

    def __len__(self) -> int:
        return len(self._early)

"""Each message once, whatever its order: the numbers seen from one sender.

Numbers count up without gaps, so all below `floor` have been seen, and only what came early is kept.
"""

from __future__ import annotations


class Window:
    def __init__(self) -> None:
        self.floor = 0
        self.ahead: set[int] = set()  # what has come early

    def first_time(self, number: int) -> bool:
        """True once for each number."""
        if number == self.floor and not self.ahead:
            self.floor += 1
            return True
        if number < self.floor or number in self.ahead:
            return False
        self.ahead.add(number)
        while self.floor in self.ahead:
            self.ahead.remove(self.floor)
            self.floor += 1
        return True

    def early(self, most: int) -> tuple[int, ...]:
        """The first numbers seen beyond a gap."""
        return tuple(sorted(self.ahead)[:most])

    def __len__(self) -> int:
        return len(self.ahead)

"""What was numbered 0, 1, 2, … where it was said, put back into that order, whatever order it arrives in; each once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class InTurn(Generic[T]):
    """`passed`: how many items have been given out, and so the number of the next one."""

    def __init__(self) -> None:
        self.passed = 0
        self._early: dict[int, T] = {}

    def add(self, number: int, item: T) -> Iterator[T]:
        """The items that this one makes ready: none, one, or it and those that waited for it."""
        self._early[number] = item
        while self.passed in self._early:
            self.passed += 1
            yield self._early.pop(self.passed - 1)

"""A small world of ranks, each on a thread, for checks: an answer is tried on all ranks at once.

Ranks send messages, or meet in collectives. The first error of any rank ends all others at once, and so does a wait
that no rank can end any more; nothing waits for a clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from checks import NotYet, require, shown, trying

T = TypeVar("T")


class World:
    """`size` ranks; counts the messages and the numbers that each one sends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = [0] * size  # numbers
        self.messages = [0] * size
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._meetings: list[dict[int, tuple[str, Any]]] = []
        self._met = [0] * size  # meetings that each rank has entered
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}  # rank → what it waits for, in a test and in words
        self._ended: set[int] = set()
        self._over: NotYet | None = None
        self._changed = threading.Condition()

    def run(self, part: Callable[[int], T], where: str = "The function") -> list[T]:
        """The results of `part(rank)`, each on a thread of its own. Raises the first NotYet of any of them."""
        results: dict[int, T] = {}

        def one(rank: int) -> None:
            try:
                with trying(f"{where} on rank {rank} of {self.size}"):
                    results[rank] = part(rank)
            except NotYet as hint:
                self._end(hint)
            finally:
                with self._changed:
                    self._ended.add(rank)
                    self._look()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._over is not None:
            raise self._over
        return [results[rank] for rank in range(self.size)]

    # -- messages
    def send(self, rank: int, to: int, tensor: torch.Tensor) -> None:
        require(isinstance(tensor, torch.Tensor), f"Rank {rank} of {self.size} sends {shown(tensor)}, not a tensor.")
        with self._changed:
            self.sent[rank] += tensor.numel()
            self.messages[rank] += 1
            self._mail.setdefault((rank, to), deque()).append(tensor.clone())
            self._look()

    def receive(self, rank: int, source: int) -> torch.Tensor:
        """The next message from `source`."""
        with self._changed:
            mail = self._mail.setdefault((source, rank), deque())
            self._wait(rank, lambda: bool(mail), f"for a message from rank {source}")
            return mail.popleft()

    def shift(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Sends to the next rank of a ring, and returns what comes from the rank before."""

        def shift(tensor: torch.Tensor) -> torch.Tensor:
            self.send(rank, (rank + 1) % self.size, tensor)
            return self.receive(rank, (rank - 1) % self.size)

        return shift

    def exchange(self, rank: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Sends to a partner, and returns what the partner sends."""

        def exchange(partner: int, tensor: torch.Tensor) -> torch.Tensor:
            require(partner in range(self.size) and partner != rank,
                    f"Rank {rank} of {self.size} names {shown(partner)} as its partner.")  # fmt: skip
            self.send(rank, partner, tensor)
            return self.receive(rank, partner)

        return exchange

    # -- collectives
    def meet(self, rank: int, call: str, value: Any) -> list[Any]:
        """Waits until all ranks have made the same call; the value of each rank, by rank."""
        with self._changed:
            number = self._met[rank]
            self._met[rank] += 1
            if number == len(self._meetings):
                self._meetings.append({})
            meeting = self._meetings[number]
            meeting[rank] = (call, value)
            self._look()
            self._wait(rank, lambda: len(meeting) == self.size, f"in its call {number + 1}, {call},")
            calls = [meeting[other][0] for other in range(self.size)]
            other = next((other for other in range(self.size) if calls[other] != calls[0]), 0)
            require(not other, f"{self.size} ranks: call {number + 1} of rank 0 is {calls[0]}, that of rank {other} is "
                    f"{calls[other]}. In a collective all ranks make the same call.")  # fmt: skip
            return [meeting[other][1] for other in range(self.size)]

    # -- waits; all with the lock held
    def _wait(self, rank: int, there: Callable[[], bool], words: str) -> None:
        self._waits[rank] = (there, words)
        self._look()
        while not there() and self._over is None:
            self._changed.wait()
        del self._waits[rank]
        if not there():
            raise NotYet("another rank has ended the world")  # `run` raises the first hint, not this one

    def _look(self) -> None:
        """Wake those whose wait is over; end the world if nobody's ever will be."""
        stuck = [rank for rank, (there, _) in self._waits.items() if not there()]
        if stuck and len(stuck) + len(self._ended) == self.size and self._over is None:
            rank = min(stuck)
            others = "others have returned already" if self._ended else "the others wait, too"
            self._over = NotYet(f"{self.size} ranks: rank {rank} waits {self._waits[rank][1]} for ever; {others}.")
        self._changed.notify_all()

    def _end(self, hint: NotYet) -> None:
        with self._changed:
            if self._over is None:
                self._over = hint
            self._changed.notify_all()

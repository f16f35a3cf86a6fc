"""Ranks as threads, for checks: an answer is tried on all ranks at once.

`Ranks(size).run(part)` runs `part(rank)` on each rank. Ranks send messages, or meet in collectives; what they send is
counted. A rank that fails stops; the others go on until each has returned or waits for what no rank can send any more.
Nothing waits for a clock, and the error that is raised, that of the lowest rank, does not depend on the threads' order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from checks import NotYet, require, shown, trying

T = TypeVar("T")
AllReduce = Callable[..., None]
OPS = ("sum", "max")


class Ranks:
    """Ranks, for one run. `calls[rank]`: of each message or collective its name, and how many numbers it had."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[list[tuple[str, int]]] = [[] for _ in range(size)]
        self._mail: dict[tuple[int, int], deque[Tensor]] = {}
        self._meetings: list[dict[int, tuple[str, Any]]] = []
        self._met = [0] * size  # meetings that each rank has entered
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}  # rank → what it waits for, in a test and in words
        self._returned: set[int] = set()
        self._failed: dict[int, NotYet] = {}
        self._over = False  # no rank can go on
        self._changed = threading.Condition()

    def run(self, part: Callable[[int], T], what: str = "The function") -> list[T]:
        """Return the results of `part(rank)`, by rank. Raises the NotYet of the lowest rank that fails."""
        results: dict[int, T] = {}

        def one(rank: int) -> None:
            try:
                with trying(f"{what} on rank {rank} of {self.size}"):
                    results[rank] = part(rank)
            except NotYet as hint:
                if not self._over:
                    self._failed[rank] = hint
            finally:
                with self._changed:
                    self._returned.add(rank)
                    self._look()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[min(self._failed)]
        return [results[rank] for rank in range(self.size)]

    # -- counts
    def count(self, rank: int, name: str, numbers: int) -> None:
        self.calls[rank].append((name, numbers))

    @property
    def messages(self) -> list[int]:
        """Of each rank: how many messages it has sent, or collectives it has called."""
        return [len(calls) for calls in self.calls]

    @property
    def sent(self) -> list[int]:
        """Of each rank: how many numbers these had."""
        return [sum(numbers for _, numbers in calls) for calls in self.calls]

    # -- messages
    def send(self, rank: int, to: int, tensor: Tensor) -> None:
        require(isinstance(tensor, Tensor), f"Rank {rank} of {self.size} sends {shown(tensor)}, not a tensor.")
        with self._changed:
            self.count(rank, "send", tensor.numel())
            self._mail.setdefault((rank, to), deque()).append(tensor.detach().clone())
            self._look()

    def receive(self, rank: int, source: int) -> Tensor:
        """The next message from `source`."""
        with self._changed:
            mail = self._mail.setdefault((source, rank), deque())
            self._wait(rank, lambda: bool(mail), f"for a message from rank {source}")
            return mail.popleft()

    def shift(self, rank: int) -> Callable[[Tensor], Tensor]:
        """Sends to the next rank of a ring, and returns what comes from the rank before."""

        def shift(tensor: Tensor) -> Tensor:
            self.send(rank, (rank + 1) % self.size, tensor)
            return self.receive(rank, (rank - 1) % self.size)

        return shift

    def exchange(self, rank: int) -> Callable[[int, Tensor], Tensor]:
        """Sends to a partner, and returns what the partner sends."""

        def exchange(partner: int, tensor: Tensor) -> Tensor:
            require(partner in range(self.size) and partner != rank,
                    f"Rank {rank} of {self.size} names {shown(partner)} as its partner.")  # fmt: skip
            self.send(rank, partner, tensor)
            return self.receive(rank, partner)

        return exchange

    # -- collectives
    def meet(self, rank: int, call: str, value: Any) -> list[Any]:
        """Waits until all ranks have made the same call; the value of each rank, by rank. It is not counted."""
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

    def all_reduce(self, rank: int) -> AllReduce:
        """`all_reduce(tensor)` or `all_reduce(tensor, "max")` of this rank, in place; it returns nothing."""

        def all_reduce(tensor: Tensor, op: str = "sum") -> None:
            require(op in OPS, f'`all_reduce` knows "sum" and "max", not {shown(op)}.')
            parts = torch.stack(self._gathered(rank, "all_reduce", tensor, "" if op == "sum" else f" ({op})"))
            with torch.no_grad():
                tensor.copy_(parts.amax(0) if op == "max" else parts.sum(0))

        return all_reduce

    def reduce_scatter(self, rank: int) -> Callable[[Tensor], Tensor]:
        """`reduce_scatter(whole)` is this rank's shard of the sum."""

        def reduce_scatter(whole: Tensor) -> Tensor:
            parts = self._gathered(rank, "reduce_scatter", whole)
            require(whole.ndim == 1 and len(whole) % self.size == 0, f"`reduce_scatter` cuts a vector into {self.size} "
                    f"equal shards; it was given the shape {tuple(whole.shape)}.")  # fmt: skip
            return torch.stack(parts).sum(0).chunk(self.size)[rank].clone()

        return reduce_scatter

    def all_gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        """`all_gather(shard)` is the shards of all ranks as one vector."""

        def all_gather(shard: Tensor) -> Tensor:
            parts = self._gathered(rank, "all_gather", shard)
            require(shard.ndim == 1, f"`all_gather` takes a vector, not the shape {tuple(shard.shape)}.")
            return torch.cat(parts)

        return all_gather

    def _gathered(self, rank: int, name: str, tensor: Tensor, how: str = "") -> list[Tensor]:
        """Meet with tensors that are alike, and count."""
        require(isinstance(tensor, Tensor), f"`{name}` takes a tensor, not {shown(tensor)}.")
        self.count(rank, name, tensor.numel())
        kind = str(tensor.dtype).removeprefix("torch.")
        call = f"{name}{how} of {kind} with shape {tuple(tensor.shape)}"
        return self.meet(rank, call, tensor.detach().clone())

    # -- waits; all with the lock held
    def _wait(self, rank: int, there: Callable[[], bool], words: str) -> None:
        self._waits[rank] = (there, words)
        self._look()
        while not there() and not self._over:
            self._changed.wait()
        del self._waits[rank]
        if not there():
            raise NotYet("the run is over")  # `run` raises another rank's hint, not this one

    def _look(self) -> None:
        """Wake those whose wait is over; end the run if nobody's ever will be."""
        stuck = [rank for rank, (there, _) in self._waits.items() if not there()]
        if stuck and len(stuck) + len(self._returned) == self.size and not self._over:
            self._over = True
            if not self._failed:
                rank = min(stuck)
                others = "others have returned already" if self._returned else "the others wait, too"
                words = f"waits {self._waits[rank][1]} for ever; {others}."
                self._failed[rank] = NotYet(f"{self.size} ranks: rank {rank} {words}")
        self._changed.notify_all()

"""Ranks as threads, for checks whose answers call collectives: `ranks.run(part)` runs `part(rank)` on all at once.

The collectives are those of the lessons: `all_reduce(tensor)` adds up in place and returns nothing,
`reduce_scatter(whole)` returns this rank's shard of the sum, `all_gather(shard)` returns all shards as one. A rank that
returns early, or calls something else than the others, ends the run at once with a hint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks import NotYet, on_threads, require, shown

PATIENCE = 20.0


class Ranks:
    """So many ranks. `calls[rank]`: of each collective that it called the name, and how many numbers it brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[list[tuple[str, int]]] = [[] for _ in range(size)]
        self._changed = threading.Condition()
        self._brought: dict[int, tuple[str, Tensor]] = {}
        self._met: list[list[tuple[str, Tensor]]] = []
        self._left: set[int] = set()

    def run(self, part: Callable[[int], Any]) -> list[Any]:
        """Return what `part(rank)` returned, by rank."""
        found: list[Any] = [None] * self.size
        with self._changed:
            self._left.clear()
            self._brought.clear()

        def one(rank: int) -> None:
            found[rank] = part(rank)
            self._leave(rank)

        on_threads(self.size, one, failed=lambda: self._leave(-1))
        return found

    def all_reduce(self, rank: int) -> Callable[[Tensor], None]:
        def all_reduce(tensor: Tensor) -> None:
            parts = self._meet(rank, "all_reduce", tensor)
            with torch.no_grad():
                tensor.copy_(torch.stack(parts).sum(0))

        return all_reduce

    def reduce_scatter(self, rank: int) -> Callable[[Tensor], Tensor]:
        def reduce_scatter(whole: Tensor) -> Tensor:
            parts = self._meet(rank, "reduce_scatter", whole)
            require(whole.ndim == 1 and len(whole) % self.size == 0, f"`reduce_scatter` cuts a vector into {self.size} "
                    f"equal shards; it was given the shape {tuple(whole.shape)}.")  # fmt: skip
            return torch.stack(parts).sum(0).chunk(self.size)[rank].clone()

        return reduce_scatter

    def all_gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_gather(shard: Tensor) -> Tensor:
            parts = self._meet(rank, "all_gather", shard)
            require(shard.ndim == 1, f"`all_gather` takes a vector, not the shape {tuple(shard.shape)}.")
            return torch.cat(parts)

        return all_gather

    def _meet(self, rank: int, name: str, tensor: Tensor) -> list[Tensor]:
        require(isinstance(tensor, Tensor), f"`{name}` takes a tensor, not {shown(tensor)}.")
        self.calls[rank].append((name, tensor.numel()))
        with self._changed:
            meeting = len(self._met)
            self._brought[rank] = name, tensor.detach().clone()
            if len(self._brought) == self.size:
                self._met.append([self._brought[each] for each in range(self.size)])
                self._brought.clear()
                self._changed.notify_all()
            while len(self._met) <= meeting:
                waits = not self._left and self._changed.wait(PATIENCE)
                if not waits and len(self._met) <= meeting:
                    raise NotYet(f"Rank {rank} waits in `{name}` for a rank that does not come: all ranks make the "
                                 "same calls, equally often.")  # fmt: skip
        met = self._met[meeting]
        told = [f"{each}({', '.join(map(str, part.shape))})" for each, part in met]
        require(len(set(told)) == 1, f"The ranks do not call the same: {', '.join(told)}.")
        return [part for _, part in met]

    def _leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

"""Ranks as threads, for checks: they meet in `all_reduce`, which counts what each of them sends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks import NotYet, on_threads, require, returned, shown, trying

PATIENCE = 20.0
AllReduce = Callable[..., None]
OPS = ("sum", "max")


class Ranks:
    """So many ranks, each on a thread of its own; `calls` and `numbers` count what each has added up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = [0] * size
        self.numbers = [0] * size
        self._parts: list[tuple[Tensor, str]] = [(torch.empty(0), "")] * size
        self._meeting = threading.Barrier(size, timeout=PATIENCE)
        self._one_ended = False

    def all_reduce(self, rank: int) -> AllReduce:
        """`all_reduce(tensor)` or `all_reduce(tensor, "max")` of this rank, in place."""

        def all_reduce(tensor: Tensor, op: str = "sum") -> None:
            require(isinstance(tensor, Tensor), f"`all_reduce` takes a tensor, not {shown(tensor)}.")
            require(op in OPS, f'`all_reduce` knows "sum" and "max", not {shown(op)}.')
            self.calls[rank] += 1
            self.numbers[rank] += tensor.numel()
            self._parts[rank] = (tensor.detach().clone(), op)
            try:
                if self._one_ended:
                    self._meeting.abort()
                self._meeting.wait()
                parts = list(self._parts)
                self._meeting.wait()
            except threading.BrokenBarrierError:
                raise NotYet("A rank waits for the others in vain: all call `all_reduce` equally often.") from None
            alike = {(part.shape, part.dtype, op) for part, op in parts}
            require(len(alike) == 1, "The ranks called `all_reduce` with tensors that are not alike.")
            stacked = torch.stack([part for part, _ in parts])
            with torch.no_grad():
                tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))

        return all_reduce

    def run(self, part: Callable[[int, AllReduce], Any], what: str = "The function") -> list[Any]:
        """What `part(rank, all_reduce)` returns on each rank; the first that fails ends the others."""
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            with trying(what):
                found[rank] = returned(part(rank, self.all_reduce(rank)))
            self._one_ended = True
            if self._meeting.n_waiting:  # for a rank that will not come
                self._meeting.abort()

        on_threads(self.size, one, failed=self._meeting.abort)
        return found

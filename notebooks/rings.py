"""The ring all-reduce, for lesson 20: its two halves and the whole, on any ring; slow lines; pictures; what it costs.

`shift(tensor)` sends a tensor to the next rank of the ring, and returns the one that the rank before has sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from draw import Cell, Drawing, tables

import rpcbench.distributed as dist

Shift = Callable[[torch.Tensor], torch.Tensor]


def reduce_scatter(x: torch.Tensor, rank: int, size: int, shift: Shift) -> torch.Tensor:
    """The sum over the ranks of chunk `rank` of the vector `x`, whose length `size` divides."""
    sums = [chunk.clone() for chunk in x.chunk(size)]
    for step in range(size - 1):
        sums[(rank - step - 2) % size] += shift(sums[(rank - step - 1) % size])
    return sums[rank]


def all_gather(chunk: torch.Tensor, rank: int, size: int, shift: Shift) -> torch.Tensor:
    """The chunks of all ranks, which have the same length, one behind the other."""
    chunks = {rank: chunk}
    for step in range(size - 1):
        chunks[(rank - step - 1) % size] = shift(chunks[(rank - step) % size])
    return torch.cat([chunks[number] for number in range(size)])


def all_reduce(x: torch.Tensor, rank: int, size: int, shift: Shift) -> torch.Tensor:
    """The sum over the ranks of tensors of any one shape."""
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    total = all_gather(reduce_scatter(padded, rank, size, shift), rank, size, shift)
    return total[: len(flat)].reshape(x.shape)


def through_root(x: torch.Tensor, rank: int, size: int, line: SlowLine) -> torch.Tensor:
    """The sum over the ranks, which rank 0 makes."""
    total = x.clone()
    if rank == 0:
        part = torch.empty_like(x)
        for source in range(1, size):
            line.recv(part, source)
            total += part
        for to in range(1, size):
            line.send(total, to)
    else:
        dist.send(x, 0)  # the line of rank 0 is the one that is busy
        dist.recv(total, 0)
    return total


class SlowLine:
    """What connects a rank with the others: it carries one message at a time, in each direction, and each takes
    `alpha + bytes / beta`."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta

    def send(self, tensor: torch.Tensor, to: int) -> None:
        dist.send(tensor, to)
        self._rest(tensor)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        dist.recv(tensor, source)
        self._rest(tensor)

    def shift(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send to the next rank of a ring; return what comes from the rank before."""
        rank, size = dist.get_rank(), dist.get_world_size()
        came = torch.empty_like(tensor)
        sending = dist.isend(tensor, (rank + 1) % size)
        dist.recv(came, (rank - 1) % size)
        sending.wait()
        self._rest(tensor)
        return came

    def _rest(self, tensor: torch.Tensor) -> None:
        time.sleep(self.alpha + tensor.nbytes / self.beta)


# -- how it goes on
def first_half(size: int) -> Drawing:
    """Of which ranks each chunk of each rank is the sum, after each step of the reduce-scatter."""
    has = [[{rank} for _ in range(size)] for rank in range(size)]
    parts = {"before": _table(has, set())}
    for step in range(size - 1):
        sent = {rank: has[rank][(rank - step - 1) % size] for rank in range(size)}
        came = {(rank, (rank - step - 2) % size) for rank in range(size)}
        has = [
            [has[rank][chunk] | sent[(rank - 1) % size] if (rank, chunk) in came else has[rank][chunk]
             for chunk in range(size)]
            for rank in range(size)
        ]  # fmt: skip
        parts[f"after step {step}"] = _table(has, came)
    return _drawn(parts, "Reduce-scatter: which ranks are in each sum", size)


def second_half(size: int) -> Drawing:
    """Which whole sums each rank has, after each step of the all-gather."""
    has = [{rank} for rank in range(size)]
    parts = {"before": _wholes(has, set())}
    for step in range(size - 1):
        came = {(rank, (rank - step - 1) % size) for rank in range(size)}
        has = [has[rank] | {(rank - step - 1) % size} for rank in range(size)]
        parts[f"after step {step}"] = _wholes(has, came)
    return _drawn(parts, "All-gather: which whole sums each rank has", size)


def _drawn(parts: dict[str, list[list[Cell]]], title: str, size: int) -> Drawing:
    ranks, chunks = ([f"{word} {number}" for number in range(size)] for word in ("rank", "chunk"))
    return tables(parts, ranks, title, 78, 2, chunks)


def _table(has: list[list[set[int]]], came: set[tuple[int, int]]) -> list[list[Cell]]:
    """A block for each chunk. Grey: as it was; blue: a sum; orange: it grew in this step; green: it is whole."""

    def cell(rank: int, chunk: int) -> Cell:
        ranks = has[rank][chunk]
        whole, grew, alone = len(ranks) == len(has), (rank, chunk) in came, len(ranks) == 1
        return "+".join(map(str, sorted(ranks))), "green" if whole else "orange" if grew else "dim" if alone else "blue"

    return [[cell(rank, chunk) for chunk in range(len(has))] for rank in range(len(has))]


def _wholes(has: list[set[int]], came: set[tuple[int, int]]) -> list[list[Cell]]:
    """A block for each whole sum. Green: the rank has it; orange: it came in this step."""
    size = len(has)
    return [
        [(f"sum {chunk}", "orange" if (rank, chunk) in came else "green") if chunk in has[rank] else None
         for chunk in range(size)]
        for rank in range(size)
    ]  # fmt: skip


# -- what an all-reduce costs, by the model of lesson 03; `size` is bytes
def ring_time(size: float, ranks: int, alpha: float, beta: float) -> float:
    """2 (ranks - 1) steps, each with one of as many chunks as there are ranks."""
    return 2 * (ranks - 1) * (alpha + size / ranks / beta)


def root_time(size: float, ranks: int, alpha: float, beta: float) -> float:
    """Rank 0 receives from each of the others, one after another, and then sends to each."""
    return 2 * (ranks - 1) * (alpha + size / beta)


def tree_time(size: float, ranks: int, alpha: float, beta: float) -> float:
    """In each round half of the ranks that have sums send them; then the whole one goes back."""
    return 2 * math.ceil(math.log2(ranks)) * (alpha + size / beta)


def doubling_time(size: float, ranks: int, alpha: float, beta: float) -> float:
    """Recursive doubling: in each round all ranks exchange whole tensors, in pairs."""
    return math.ceil(math.log2(ranks)) * (alpha + size / beta)

"""Checks of lesson 04."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch

from checks import NotYet, on_threads, require, right, trying

PATIENCE = 20.0
Shift = Callable[[torch.Tensor], torch.Tensor]


class Ring:
    """Ranks as threads, in a ring of queues; counts the numbers that each one sends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = [0] * size
        self._lines: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(size)]

    def shift(self, rank: int) -> Shift:
        def shift(chunk: torch.Tensor) -> torch.Tensor:
            require(isinstance(chunk, torch.Tensor), "`shift` sends a tensor.")
            self.sent[rank] += chunk.numel()
            self._lines[(rank + 1) % self.size].put(chunk.clone())
            try:
                return self._lines[rank].get(timeout=PATIENCE)
            except queue.Empty:
                raise NotYet("A rank waits for its neighbour in vain: all call `shift` equally often.") from None

        return shift


def ring(answer: Callable[[torch.Tensor, int, int, Shift], Any]) -> None:
    """`answer(x, rank, size, shift)` adds up the `x` of all ranks, in place, and sends no more than it must."""
    for size in (2, 3, 4):
        numbers = torch.arange(1.0, 2 * size + 1)
        given = [numbers * 10**rank for rank in range(size)]
        before, total = [each.clone() for each in given], sum(given)
        line = Ring(size)
        _run(answer, line, given)
        same = all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
        require(
            not same, "The tensors are as they were. Replace the three dots; change `x` itself, as `x[:2] += ...` does."
        )
        whole = [int((each == total).sum()) for each in given]
        require(min(whole) == 2 * size, f"{size} ranks: of the {2 * size} numbers of rank {whole.index(min(whole))} "
                f"{min(whole)} are the sum over all ranks.")  # fmt: skip
        most = 2 * (size - 1) * 2
        require(
            max(line.sent) <= most,
            f"Right sums; but a rank of {size} has sent {max(line.sent)} numbers where {most} do.",
        )
    right("Each rank sends its tensor not even twice, however many there are.")


def _run(answer: Callable[..., Any], line: Ring, given: list[torch.Tensor]) -> None:
    def one(rank: int) -> None:
        with trying("The function"):
            answer(given[rank], rank, line.size, line.shift(rank))

    on_threads(line.size, one)


def average(answer: Callable[[torch.nn.Module, int, Callable[[torch.Tensor], Any]], Any]) -> None:
    """`answer(model, size, all_reduce)` gives each gradient its mean over the ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model.extra = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    model(torch.ones(1, 2)).sum().backward()
    weights = [each.detach().clone() for each in (model.weight, model.bias)]
    with trying("The function"):  # one other rank, with gradients three times ours
        answer(model, 2, lambda tensor: tensor.mul_(4.0))
    require(all(torch.equal(a, b) for a, b in zip(weights, (model.weight, model.bias), strict=True)),
            "The parameters have changed. It is the gradients that are to be averaged.")  # fmt: skip
    factors = {(each.grad[..., 0]).item() for each in (model.weight, model.bias)}
    require(factors != {1.0}, "The gradients are as they were. Replace the three dots.")
    require(factors != {4.0}, "Each gradient is the sum over the ranks. What is the mean?")
    require(factors == {2.0}, "Not each gradient is the mean over the ranks: ours is 1, that of the other rank is 3.")
    right("That is what DistributedDataParallel does, while the backward pass still runs.")

"""Checks of lesson 04."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from checks import dots_left, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.ranks import Ranks

Tensor = torch.Tensor
Numbers = list[list[int]]
NAMES = ("broadcast", "scatter", "gather", "reduce", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@exercise(
    "How many broadcasts does it take until everybody has everything? Who takes part in each of them?",
    "Begin with a place for each rank, `places = [torch.empty_like(mine) for _ in range(size)]`, and put `mine` into "
    "your own.",
)
def gathered(answer: Callable[[Tensor, int, int, Callable[[Tensor, int], None]], list[Tensor]]) -> None:
    """`answer(mine, rank, size, broadcast)` is the tensors of all ranks, as a list."""
    for size, kind, shape in (
        (2, torch.float, (2,)), (3, torch.int64, (2,)), (4, torch.double, (2,)), (3, torch.float, (2, 3)),
        (2, torch.float, ()), (1, torch.double, (1,)), (8, torch.float, (1,)),
    ):  # fmt: skip
        numbers = torch.arange(1, math.prod(shape) + 1, dtype=kind).reshape(shape)
        given = [10 * rank + numbers for rank in range(size)]
        before = [each.clone() for each in given]
        ranks = Ranks(size)
        found = ranks.run(
            lambda rank, of=given, ranks=ranks: returned(answer(of[rank], rank, ranks.size, _broadcast(ranks, rank)))
        )
        for rank, (mine, own) in enumerate(zip(given, before, strict=True)):
            require(torch.equal(mine, own), f"{size} ranks: `mine` of rank {rank} has changed: it was {own.tolist()}. "
                    "A broadcast fills the tensor that it is given.")  # fmt: skip
        wanted = [each.tolist() for each in before]
        for rank, places in enumerate(found):
            told = f"{size} ranks: rank {rank} returns {_values(places)}"
            places = read(places, [Tensor], f"{told}; a list of tensors is wanted")
            require(len(places) == size, f"{told}, of length {len(places)}; each rank has one place in the list.")
            shapes = {tuple(each.shape) for each in places}
            require(shapes == {shape}, f"{told}, of shape {' and '.join(map(str, shapes))}; `mine` has shape {shape}.")
            alike = size > 1 and len({each.data_ptr() for each in places}) == 1
            one = " All places are one tensor, and each broadcast fills it anew." if alike else ""
            require(_values(places) == wanted, f"{told}; the tensors of all ranks are {wanted}.{one}")
            made = {each.dtype for each in places}
            require(made == {kind}, f"{told}, of {' and '.join(sorted(map(str, made)))}; `mine` is of {kind}.")
    right("As many broadcasts as ranks; torch's all_gather takes a better way.")


def _broadcast(ranks: Ranks, rank: int) -> Callable[[Tensor, int], None]:
    def broadcast(tensor: Tensor, source: int) -> None:
        require(isinstance(tensor, Tensor), f"`broadcast` takes a tensor, not {shown(tensor)}.")
        require(source in range(ranks.size), f"{ranks.size} ranks: `broadcast` from rank {shown(source)}.")
        parts = ranks.meet(rank, f"broadcast from rank {source}", tensor.clone())
        require(tensor.shape == parts[source].shape, f"`broadcast` from rank {source}: its tensor has shape "
                f"{tuple(parts[source].shape)}, and yours {tuple(tensor.shape)}.")  # fmt: skip
        tensor.copy_(parts[source])

    return broadcast


@exercise(
    "Which chunk of your tensor does rank 2 need? Which chunks do you need, and from whom?",
    "Begin with `came = all_to_all(list(x.chunk(size)))`: the list has one chunk from each rank. What is to be done "
    "with them?",
)
def scattered(answer: Callable[[Tensor, int, int, Callable[[list[Tensor]], list[Tensor]]], Tensor]) -> None:
    """`answer(x, rank, size, all_to_all)` is the sum over the ranks of chunk `rank`."""
    for size, each, kind in ((2, 1, torch.float), (3, 2, torch.int64), (4, 3, torch.double), (1, 2, torch.float)):
        given = [torch.arange(1, size * each + 1, dtype=kind) + 64 * 5**rank for rank in range(size)]
        before = [tensor.clone() for tensor in given]
        ranks = Ranks(size)
        found = ranks.run(
            lambda rank, of=given, ranks=ranks: returned(answer(of[rank], rank, ranks.size, _all_to_all(ranks, rank)))
        )
        total = torch.stack(before).sum(0)
        for rank, part in enumerate(found):
            told = f"{size} ranks, {size * each} numbers each: rank {rank} returns {_values(part)}"
            wanted = total[rank * each : (rank + 1) * each]
            require(isinstance(part, Tensor), f"{told}; a tensor is wanted.")
            require(part.shape != total.shape or size == 1, f"{told}; one chunk is wanted, not {size}.")
            require(part.dim(), f"{told}, one number without a dimension; a chunk of length {each} is wanted. The sum "
                    "is over the ranks only, not along the chunk.")  # fmt: skip
            require(part.dtype == kind, f"{told}, of {part.dtype}; `x` is of {kind}.")
            require(torch.equal(part, wanted), f"{told}; the sum of chunk {rank} over the ranks is {_values(wanted)}.")
            require(torch.equal(given[rank], before[rank]), f"{size} ranks: `x` of rank {rank} has changed.")
        most, enough = max(ranks.sent), (size - 1) * each
        require(most <= enough, f"{size} ranks: right; but a rank has sent {most} numbers to others where {enough} do.")
    right("Every rank has added up one chunk: all together, the sum was made by all at once.")


def _all_to_all(ranks: Ranks, rank: int) -> Callable[[list[Tensor]], list[Tensor]]:
    def all_to_all(pieces: list[Tensor]) -> list[Tensor]:
        require(isinstance(pieces, list | tuple) and all(isinstance(each, Tensor) for each in pieces),
                f"`all_to_all` takes a list of tensors, not {shown(pieces)}.")  # fmt: skip
        require(len(pieces) == ranks.size,
                f"{ranks.size} ranks: `all_to_all` takes a tensor for each rank, and got {len(pieces)}.")  # fmt: skip
        numbers = sum(piece.numel() for to, piece in enumerate(pieces) if to != rank)
        ranks.count(rank, "all_to_all", numbers)
        parts = ranks.meet(rank, "all_to_all", [piece.clone() for piece in pieces])
        return [parts[source][rank] for source in range(ranks.size)]

    return all_to_all


@exercise(
    "What does `all_reduce` leave in a gradient, and by what must that be divided? Which parameters have none?",
    "Begin with `for parameter in model.parameters():` and leave out those whose `grad` is None.",
)
def average(answer: Callable[[torch.nn.Module, int, Callable[[Tensor], None]], None]) -> None:
    """`answer(model, size, all_reduce)` gives each gradient its mean over the ranks."""
    for size, total in ((2, 5.0), (3, 12.0), (4, 3.0)):  # the sum over all ranks is so many times the gradient here
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.rand(1, 2))
        model.extra = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        model.unused = torch.nn.Parameter(torch.ones(1))
        model.layer = torch.nn.Module()
        model.layer.bias = torch.nn.Parameter(torch.rand(1))  # behind those without a gradient
        model.zero = torch.nn.Parameter(torch.rand(1))
        model.zero.grad = torch.zeros(1)  # on this rank
        torch.nn.functional.linear(torch.tensor([[1.0, 3.0]]), model.weight, model.layer.bias).sum().backward()
        before = {"weight": torch.tensor([[1.0, 3.0]]), "bias": torch.ones(1)}
        weights = [each.detach().clone() for each in model.parameters()]
        reduced: list[Tensor] = []

        def all_reduce(tensor: Tensor, total: float = total, reduced: list[Tensor] = reduced) -> None:
            require(isinstance(tensor, Tensor), f"`all_reduce` takes a tensor, not {shown(tensor)}.")
            reduced.append(tensor)
            with torch.no_grad():
                tensor.mul_(total)

        with trying("The function"):
            answer(model, size, all_reduce)
        asked = f"{size} ranks; each gradient begins with 1 here, and with {total:g} in the sum over the ranks"
        require(all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)),
                "The parameters have changed. It is the gradients that are to be averaged.")  # fmt: skip
        grads = {"weight": model.weight.grad, "bias": model.layer.bias.grad}
        lost = [name for name, grad in grads.items() if grad is None]
        require(not lost, f"The gradient of {' and '.join(lost)} is gone.")
        factors = {name: grad.flatten()[0].item() for name, grad in grads.items()}
        require(set(factors.values()) != {1.0} or reduced, f"The gradients are as they were.{dots_left()}")
        untouched = set(factors.values()) == {1.0} and total != size
        require(not untouched, f"{asked}: `all_reduce` was called, and the gradients are as they were. It adds up in "
                "place: it must get the gradient itself, no copy.")  # fmt: skip
        require(set(factors.values()) != {total}, f"{asked}: you leave the sum. What is the mean?")
        whole = set(factors.values()) == {total // size} and total % size
        require(not whole, f"{asked}: you leave {total // size:g}, a whole number. `//` drops the rest; the mean is "
                f"{total / size:g}.")  # fmt: skip
        for name, factor in factors.items():
            require(factor == total / size, f"{asked}: the gradient of {name} is {factor:g}; the mean is "
                    f"{total / size:g}.")  # fmt: skip
        for name, grad in grads.items():
            wanted = before[name] * total / size
            require(torch.allclose(grad, wanted), f"{size} ranks; the gradient of {name} is {_values(before[name])} "
                    f"here, and {total:g} times that in the sum over the ranks: you leave {_values(grad)}; the mean is "
                    f"{_values(wanted)}.")  # fmt: skip
        made = [name for name in ("extra", "unused") if getattr(model, name).grad is not None]
        require(not made, f"There was no gradient of {' and '.join(made)}, and there is one now. Leave these out.")
        missing = sum(tensor.numel() for tensor in reduced) < 4
        require(not missing, f"{size} ranks; a gradient that is zero on this rank was not reduced. It may be another "
                "one on other ranks, and they wait.")  # fmt: skip
    right("That is what DistributedDataParallel does, while the backward pass still runs.")


@exercise(
    "Look first at how many ranks have numbers before, and how many have numbers after. What is left to tell apart?",
    "Begin with what each collective would leave: `sums = [sum(numbers) for numbers in zip(*before)]`, everything in "
    "one list, and chunk r of a list; then compare `after` with each.",
)
def which(answer: Callable[[Numbers, Numbers], str]) -> None:
    """`answer(before, after)` is the name of the collective."""
    for name, before, after in _cases():
        given = [list(row) for row in before], [list(row) for row in after]
        with trying("The function"):
            found = returned(answer(*given))
        known = " ".join(NAMES)
        require(found in NAMES, f"{shown(found)} is none of the eight names: {known}.")
        require(found == name, f"Before, the ranks have {before}, and after, {after}. That is {name}; you say "
                f"{shown(found)}.")  # fmt: skip
        require(given == (before, after), "The lists that the function was given have changed.")
    right("All eight, with any number of ranks and any root.")


def _cases() -> Iterator[tuple[str, Numbers, Numbers]]:
    for size, length, sign in (
        (2, 2, 1), (3, 3, 1), (2, 4, 1), (4, 4, 1), (3, 6, 1), (3, 6, -1), (3, 2, 1), (2, 1, 1), (8, 8, 1),
    ):  # fmt: skip
        fresh = itertools.count(1)
        before = [[sign**rank * (1 + rank) ** 3 * 100 + next(fresh) for _ in range(length)] for rank in range(size)]
        everything = [number for row in before for number in row]
        sums = [sum(numbers) for numbers in zip(*before, strict=True)]
        ranks = range(size)
        for root in (size - 1, 0, 1):
            only = [before[root] if rank == root else [] for rank in ranks]
            yield "broadcast", before, [before[root] for _ in ranks]
            if length % size == 0:
                yield "scatter", only, [_chunk(before[root], rank, size) for rank in ranks]
            yield "gather", before, [everything if rank == root else [] for rank in ranks]
            yield "reduce", before, [sums if rank == root else [] for rank in ranks]
        yield "all_gather", before, [everything for _ in ranks]
        yield "all_reduce", before, [sums for _ in ranks]
        if length % size == 0:
            yield "reduce_scatter", before, [_chunk(sums, rank, size) for rank in ranks]
            crossed = [[number for row in before for number in _chunk(row, rank, size)] for rank in ranks]
            yield "all_to_all", before, crossed


def _chunk(numbers: Sequence[int], rank: int, size: int) -> list[int]:
    each = len(numbers) // size
    return list(numbers[rank * each : (rank + 1) * each])


def _values(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_values(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value

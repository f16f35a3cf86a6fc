"""Checks of lesson 28."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checks import NotYet, exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

Part = tuple[Tensor, Tensor, Tensor]
EXACT = 1e-12


# -- two parts of one attention
def part_of(scores: Tensor, values: Tensor) -> Part:
    """What queries read from some of the keys, by the whole softmax over these."""
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ values / total, largest, total


@exercise(
    "`total` counts exp(score - largest). Two totals can be added only if both count from the same largest score.",
    "Begin with `largest = torch.maximum(a[1], b[1])`, then correct each total by `(its largest - the new "
    "one).exp().nan_to_num()`. The corrected totals are the weights with which the two outs are averaged.",
)
def merge(answer: Callable[[Part, Part], Any]) -> None:
    """`answer(a, b)` is the part that belongs to the keys of both."""
    made = torch.Generator().manual_seed(28)
    for queries, width, first, second, spread in ((3, 4, 5, 3, 2.0), (2, 3, 1, 6, 3.0), (4, 1, 4, 4, 400.0)):
        scores = spread * torch.randn(queries, first + second, generator=made, dtype=torch.double)
        values = torch.randn(first + second, width, generator=made, dtype=torch.double)
        parts = [part_of(scores[:, keys], values[keys]) for keys in (slice(first), slice(first, None))]
        case = f"{first} and {second} keys"
        if spread > 100:
            case += " with scores of several hundred"
        _merged(answer, parts, part_of(scores, values), case)
    scores = torch.randn(2, 4, generator=made, dtype=torch.double)
    part = part_of(scores, torch.randn(4, 3, generator=made, dtype=torch.double))
    nothing = torch.zeros(2, 3).double(), torch.full((2, 1), -math.inf).double(), torch.zeros(2, 1).double()
    _merged(answer, [part, nothing], part, "4 keys, and a part with none")
    _merged(answer, [nothing, part], part, "a part with no keys, and 4 keys")
    _merged(answer, [nothing, nothing], nothing, "two parts with no keys")
    _merged(answer, *_some_see_none(made), "a query that sees keys of both, others of one or of none")
    right("So parts of a row may lie anywhere, and come in any order.")


def _some_see_none(made: torch.Generator) -> tuple[list[Part], Part]:
    """Query 0 sees keys of the second part alone, query 1 of the first, query 2 of both, and query 3 of none."""
    scores = torch.randn(4, 6, generator=made, dtype=torch.double)
    values = torch.randn(6, 2, generator=made, dtype=torch.double)
    parts = [part_of(scores[:, keys], values[keys]) for keys in (slice(4), slice(4, None))]
    merged = part_of(scores, values)
    for tensor, first, second, empty in zip(merged, *parts, (0.0, -math.inf, 0.0), strict=True):
        tensor[0], tensor[1], tensor[3] = second[0], first[1], empty
        first[0] = first[3] = second[1] = second[3] = empty
    return parts, merged


def _merged(answer: Callable[[Part, Part], Any], parts: list[Part], wanted: Part, case: str) -> None:
    given = [tuple(each.clone() for each in part) for part in parts]
    with trying():
        found = returned(answer(*given))  # type: ignore[arg-type]
    three = isinstance(found, tuple | list) and len(found) == 3 and all(isinstance(each, Tensor) for each in found)
    require(three, f"It should return three tensors, (out, largest, total), not {shown(found)}.")
    kept = all(torch.equal(a, b) for one, two in zip(given, parts, strict=True) for a, b in zip(one, two, strict=True))
    require(kept, "The parts that were given have changed. Make new tensors.")
    for name, tensor, right_one in zip(("out", "largest", "total"), found, wanted, strict=True):
        require(tensor.dtype == right_one.dtype, f"{case}: {name} should be of {right_one.dtype}, as in the parts, "
                f"and is of {tensor.dtype}.")  # fmt: skip
        require(tensor.shape == right_one.shape, f"{case}: {name} should have the shape {tuple(right_one.shape)}, and "
                f"has {tuple(tensor.shape)}.")  # fmt: skip
    out, largest, total = found
    require(torch.equal(largest, wanted[1]), f"{case}: `largest` should be the larger one of the two, for each query.")
    lost = "-inf - -inf is nan, not a number" if not wanted[2].any() else "nan is not a number"
    require(not total.isnan().any(), f"{case}: total has nan; {lost}.")
    if not _near(total, wanted[2]):
        require(not _near(total, parts[0][2] + parts[1][2]), f"{case}: the two totals are added up as they are. One "
                "counts from one largest score, the other from another.")  # fmt: skip
        raise NotYet(f"{case}: `total` should be {_numbers(wanted[2])}, and is {_numbers(total)}.")
    if not _near(out, wanted[0]):
        require(not out.isnan().any(), f"{case}: out has nan, not a number.")
        require(not _near(out, (parts[0][0] + parts[1][0]) / 2), f"{case}: out is the mean of both outs. The part with "
                "more weight counts more.")  # fmt: skip
        require(not _near(out, parts[0][0] + parts[1][0]), f"{case}: out is the sum of both outs, with weights that "
                                                           f"add "
                "up to 2.")  # fmt: skip
        raise NotYet(f"{case}: `largest` and `total` are right, and out is not. Each out is divided by its own total "
                     "already.")  # fmt: skip


def _near(found: Tensor, wanted: Tensor) -> bool:
    return bool(torch.allclose(found.double(), wanted, rtol=EXACT, atol=EXACT))


def _numbers(tensor: Tensor) -> str:
    return ", ".join(f"{number:.4g}" for number in tensor.flatten().tolist())


# -- the ring
@exercise(
    "After each pass a rank has what the rank before it had. Follow one slice, as 0, in the picture.",
    "In step s rank r has slice (r - s) % size. Its queries see all of a slice with a smaller number.",
)
def timetable(answer: Callable[[int, int], Any]) -> None:
    """`answer(rank, size)` is for each step the slice that is there, and how much of it the queries see."""
    for size in (4, 3, 2, 5, 1):
        for rank in range(size):
            with trying():
                found = returned(answer(rank, size))
            case = f"rank {rank} of {size}"
            require(isinstance(found, list), f"A list is wanted, with a pair for each step, not {shown(found)}.")
            pairs = all(isinstance(each, tuple) and len(each) == 2 for each in found)
            require(pairs, f'{case}: each step is a pair (slice, sees), as (0, "some"), not {shown(found)}.')
            words = {sees for _, sees in found} - {"all", "some", "none"}
            require(not words, f'{case}: it sees "all", "some" or "none" of a slice, not {shown(words)}.')
            require(len(found) == size, f"{case}: the ring has {size} steps, and the list has {len(found)}.")
            slices, wanted = [number for number, _ in found], [(rank - step) % size for step in range(size)]
            if slices != wanted:
                raise NotYet(_wrong_slices(slices, wanted, rank, size, case))
            for step, (number, sees) in enumerate(found):
                require(
                    sees == _sees(rank, number),
                    f"{case}, step {step}: its queries stand in slice {rank}; of slice {number} they do not see "
                    f"{sees!r}.",
                )
    right("Rank 0 computes in one step of all; the last rank in each.")


def _sees(rank: int, number: int) -> str:
    return "some" if number == rank else "all" if number < rank else "none"


def _wrong_slices(slices: list[Any], wanted: list[int], rank: int, size: int, case: str) -> str:
    if slices[:1] != [rank]:
        return f"{case}: in step 0 it has its own slice, {rank}, not {shown(slices[0])}."
    if slices == [(rank + step) % size for step in range(size)]:
        return f"{case}: {slices} would be right if slices came from the next rank. They come from the one before."
    if slices == [rank - step for step in range(size)]:
        return f"{case}: {slices}: there is no slice with a number below 0."
    return f"{case}: the slices come in the order {wanted}, not {shown(slices)}."


# -- the time of a ring
PLACES = [
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 1, 6, 7], [2, 3, 4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    [[5, 0], [1, 2], [3, 4], [6, 7]],
    [[2, 5], [3, 4], [0, 1]],  # now one rank is the slowest, now another
    [[2, 5, 7], [0, 1, 3], [4, 6, 8]],
    [[0, 1, 2, 3, 4]],
    [[0, 1, 2, 3], [4], [5, 6]],  # some have more than others
    [[6], [0, 5, 1], [4, 2, 3, 7]],
]


@exercise(
    "In a step each rank counts the pairs of one of its queries and one of the keys that are there, with the key not "
    "ahead of the query. All wait for the rank with most pairs.",
    "Two loops: for each step, for each rank, `keys = places[(rank - step) % size]`. Take the maximum over the "
    "ranks, then "
    "the sum over the steps.",
)
def ring_time(answer: Callable[[Sequence[Sequence[int]]], Any]) -> None:
    """`answer(places)` is the time of the ring in pairs: the slowest rank of each step, added up."""
    for places in PLACES:
        with trying():
            found = returned(answer(given := [list(each) for each in places]))
        require(given == places, f"With the places {shown(places)}: the lists have changed; leave them as they were.")
        require(isinstance(found, int | float), f"A number is wanted, not {shown(found)}.")
        work = pairs_by_step(places)
        wanted = sum(max(step) for step in work)
        if found != wanted:
            raise NotYet(_wrong_time(found, wanted, work, places))
    right("A ring is as slow as its slowest rank, in each step anew.")


def pairs_by_step(places: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each step, for each rank: the pairs of a query and a key that it may see."""
    size = len(places)
    return [
        [sum(key <= query for query in places[rank] for key in places[(rank - step) % size]) for rank in range(size)]
        for step in range(size)
    ]


def _wrong_time(found: float, wanted: int, work: list[list[int]], places: Sequence[Sequence[int]]) -> str:
    case, size = f"With the places {shown(places)}", len(places)
    if found == sum(map(sum, work)):
        return f"{case}: {found} is the work of all ranks together. They work at the same time."
    if found == sum(map(sum, work)) / size:
        return f"{case}: {found:g} is the mean over the ranks. All wait for the one with most work."
    if found == max(map(sum, zip(*work, strict=True))):
        return f"{case}: {found} is the most that one rank has in all steps together. But they meet after each step."
    if found == sum(len(each) ** 2 for each in places):
        return f"{case}: {found} counts all pairs; a query sees no key that is ahead of it."
    if found == sum(max(step) for step in work[1:]):
        return f"{case}: {found} leaves out step 0, with the rank's own keys."
    if found == sum(
        max(sum(key < query for query in places[rank] for key in places[(rank - step) % size]) for rank in range(size))
        for step in range(size)
    ):
        return f"{case}: {found} leaves out that each query sees its own place."
    return f"{case}: the steps take {[max(step) for step in work]}, together {wanted}, not {shown(found)}."


# -- zig-zag
@exercise(
    "Cut the row into 2 · size chunks. The work of a chunk grows with its number. Which two have the same work "
    "together "
    "on each rank?",
    "Chunk r from the front and chunk r from the back: numbers r and 2 · size - 1 - r.",
)
def zigzag(answer: Callable[[int, int, int], Any]) -> None:
    """`answer(rank, size, length)` is the list of the places of a rank."""
    for size, length in ((2, 8), (4, 16), (3, 12), (1, 4), (4, 8), (3, 30)):
        wide = length // (2 * size)
        dealt: list[int] = []
        for rank in range(size):
            with trying():
                found = returned(answer(rank, size, length))
            case = f"rank {rank} of {size}, a row of {length}"
            plain = isinstance(found, list) and all(isinstance(each, int) for each in found)
            require(plain, f"{case}: a list of numbers is wanted, not {shown(found)}.")
            require(len(found) == 2 * wide, f"{case}: each rank has {2 * wide} places; this one has {len(found)}.")
            require(all(0 <= each < length for each in found), f"{case}: {shown(found)} has places that are not there.")
            both = (rank, 2 * size - 1 - rank)
            wanted = [place for chunk in both for place in range(chunk * wide, (chunk + 1) * wide)]
            require(sorted(found) != wanted or found == wanted, f"{case}: the right places; list them in rising order.")
            require(found == wanted, f"{case}: with chunks of {wide} it has the chunks {both[0]} and {both[1]}, so "
                                     f"other "
                    f"places than {shown(found)}.")  # fmt: skip
            dealt += found
        require(sorted(dealt) == list(range(length)), f"Of {length} places {shown(sorted(dealt))} are dealt.")
    right("A rank with an early chunk has a late one too, so all have the same work in each step.")

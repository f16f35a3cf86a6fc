"""Checks of lesson 28."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checks import NotYet, differ, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.flights import Flights, Seen
from checks.on_ranks import Run, run_on_ranks

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
    found = read(found, (Tensor,) * 3, "It should return three tensors, (out, largest, total)")
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
        raise NotYet(f"{case}: `total` should be {differ(wanted[2], total, ', and is ')}.")
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


# -- the ring
@exercise(
    "After each pass a rank has what the rank before it had. Follow one slice, as 0, in the picture.",
    "In step s a rank has the slice of the rank that stands s places before it in the ring; before 0 comes the last. "
    "Its queries see all of a slice with a smaller number.",
)
def timetable(answer: Callable[[int, int], Any]) -> None:
    """`answer(rank, size)` is for each step the slice that is there, and how much of it the queries see."""
    for size in (4, 3, 2, 5, 1):
        for rank in range(size):
            with trying():
                found = returned(answer(rank, size))
            case = f"rank {rank} of {size}"
            found = read(found, [object], "A list is wanted, with a pair for each step")
            told = f'{case}: each step is a pair (slice, sees), as (0, "some")'
            found = [read(each, (int, str), told) for each in found]
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
        found = read(found, float, "A number is wanted")
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


# -- attention round a ring of workers
RANKS, SLICE, WIDTH = 4, 6, 8
LATE = 2.0  # seconds by which rank 0 comes late: keys that nobody waited for are not there yet


@exercise(
    "A rank that sees only its own slice must still pass on the keys of the others. Which slice does a rank have in "
    "step s, and may its queries see it? And no softmax over one block is the softmax over all.",
    "Begin with `there = torch.stack([key, value])`. In each step but the last, `isend` it to the next rank and "
    "`irecv` into `torch.empty_like(there)`; then compute with `there`, wait for both, and go on with what has come.",
)
def on_ranks(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """`answer(query, key, value)` runs on each worker, with its slice: causal attention over the whole row."""
    made = torch.Generator().manual_seed(28)
    row = torch.randn(3, RANKS * SLICE, WIDTH, generator=made, dtype=torch.double)
    given = [tuple(each.clone() for each in part.unbind()) for part in row.chunk(RANKS, 1)]
    ran = run_on_ranks(read_here, answer, given)
    for rank, (_, seen) in enumerate(ran.values):
        require(not (why := seen.why_wrong()), f"Rank {rank} {why}")
    _read([returned(found) for found, _ in ran.values], row)
    _messages_of_a_ring(ran)
    for rank, (_, seen) in enumerate(ran.values):
        _computes_meanwhile(rank, seen)
    right("No rank had more than two slices of the row at once, and all have read the whole row.")


def read_here(answer: Callable[[Tensor, Tensor, Tensor], Any], *slices: Tensor) -> tuple[Any, Seen]:
    """On a worker: what the answer returns, and what happened to its messages."""
    if dist.get_rank() == 0:
        time.sleep(LATE)
    with Flights() as flights:
        found = answer(*slices)
    return found, flights.seen()


def _computes_meanwhile(rank: int, seen: Seen) -> None:
    """In each step whose slice its queries see: rank r those of the steps 0 to r."""
    for step, meanwhile in enumerate(seen.meanwhile[: rank + 1]):
        require(meanwhile, f"Right; but in step {step} rank {rank} computes nothing while the messages are under way. "
                "It begins them after it has computed, or waits for them before.")  # fmt: skip


def _read(found: list[Any], row: Tensor) -> None:
    """Each rank has returned what its queries read. A slip is named if it explains the results of all ranks."""
    wanted = _attention(row, _before(RANKS * SLICE))
    for rank, each in enumerate(found):
        told = f"Rank {rank}"
        require(isinstance(each, Tensor), f"{told} returns {shown(each)}, not a tensor.")
        require(each.shape != wanted.shape, f"{told} returns the whole row; its own {SLICE} places are wanted.")
        require(each.shape == (SLICE, WIDTH), f"{told} returns {list(each.shape)}; {[SLICE, WIDTH]} is wanted.")
    whole = torch.cat(found)
    slip = next((f" It is as if {name}" for name, other in _slips(row).items() if torch.allclose(whole, other)), "")
    for rank, (each, right_one) in enumerate(zip(found, wanted.chunk(RANKS), strict=True)):
        close = torch.allclose(each, right_one, atol=EXACT, rtol=EXACT)
        told = f"Rank {rank} does not return what its queries read of the whole row."
        require(close, f"{told}{slip or ' Which slice is here in each step?'}")


def _slips(row: Tensor) -> dict[str, Tensor]:
    """What all ranks return after a mistake."""
    place = torch.arange(RANKS * SLICE)
    owner, causal = place // SLICE, _before(RANKS * SLICE)
    mine, theirs = owner[:, None], owner
    own, late, local = mine == theirs, mine >= theirs, place[:, None] % SLICE >= place % SLICE
    steps = (mine - theirs) % RANKS  # after which a slice is here
    uncorrected = "sums that count from different largest scores had been added up without a correction."
    return {
        "its queries had seen places that lie ahead of them, in all slices.": _attention(row, place[:, None] >= 0),
        "its queries had seen all of their own slice, also what lies ahead.": _attention(row, late),
        "its queries had seen their own slice only.": _attention(row, causal & own),
        "the mask of its own slice had been used for all slices.": _attention(row, late & local),
        "all slices had been seen, also those that lie ahead.": _attention(row, ~own | causal),
        "slices that lie ahead had been seen, and those before not.":
            _attention(row, (mine < theirs) | (causal & own)),
        "the numbers of the slices were counted the other way round.":
            _attention(row, ((mine + steps) % RANKS <= mine) & ((steps > 0) | local)),
        "softmaxes over single slices had been averaged. Their totals are not alike.": _mean_of_blocks(row),
        "softmaxes over single slices had been added up.": _mean_of_blocks(row) * (mine + 1),
        **{uncorrected + " " * number: _uncorrected(row, *which) for number, which in enumerate(UNCORRECTED)},
    }  # fmt: skip


UNCORRECTED = [(True, True), (True, False), (False, True)]  # whether `read`, and `total`, is left as it was


def _uncorrected(row: Tensor, read_too: bool, total_too: bool) -> Tensor:
    """Sums that are not multiplied by exp(old largest - new largest) when a larger score has come."""
    queries, keys, values = (part.chunk(RANKS) for part in row)
    results = []
    for rank in range(RANKS):
        largest = torch.full((SLICE, 1), -math.inf, dtype=row.dtype)
        read, total = torch.zeros_like(queries[rank]), torch.zeros_like(largest)
        for other in range(rank, -1, -1):
            scores = queries[rank] @ keys[other].T / math.sqrt(WIDTH)
            scores = scores.masked_fill(~_before(SLICE), -math.inf) if other == rank else scores
            new = torch.maximum(largest, scores.amax(1, keepdim=True))
            shrink, weights = (largest - new).exp(), (scores - new).exp()
            read = read * (1 if read_too else shrink) + weights @ values[other]
            total = total * (1 if total_too else shrink) + weights.sum(1, keepdim=True)
            largest = new
        results.append(read / total)
    return torch.cat(results)


def _before(length: int) -> Tensor:
    """(queries, keys): whether a query sees a key."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def _attention(row: Tensor, sees: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*row, attn_mask=sees)


def _mean_of_blocks(row: Tensor) -> Tensor:
    """For each query the mean of the softmaxes over its slices."""
    means = []
    for rank, queries in enumerate(row[0].chunk(RANKS)):
        reads = []
        for owner in range(rank + 1):
            keys, values = (each.chunk(RANKS)[owner] for each in row[1:])
            reads.append(torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=owner == rank,
            ))  # fmt: skip
        means.append(torch.stack(reads).mean(0))
    return torch.cat(means)


def _messages_of_a_ring(ran: Run) -> None:
    """n - 1 messages with keys and values, all to the next rank."""
    each = 2 * SLICE * WIDTH * 8
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        others = sorted({call.op for call in calls} - {"send"})
        require(not others, f"{told} calls {', '.join(others)}. Then it has all keys at once; use messages only.")
        astray = sorted({str(call.to) for call in calls if call.to != (rank + 1) % RANKS})
        require(not astray, f"{told} sends to rank {' and '.join(astray)}, too; its next rank is {(rank + 1) % RANKS}.")
        sizes = [call.size for call in calls]
        require(sizes == [each] * (RANKS - 1), f"{told} sends {len(sizes)} messages of {sum(sizes)} bytes in all; "
                f"{RANKS - 1} are enough, each with the keys and values of a slice, {each} bytes.")  # fmt: skip


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
            found = read(found, [int], f"{case}: a list of numbers is wanted")
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


# -- on paper
LEAST = 16 * 2 * (1024 / 4096) * 400e12 / 50e9
SLIPS = {
    "In zig-zag order a rank computes half of each block that comes to it, so slices must be twice as long; and both "
    "keys and values are sent.": LEAST / 2,
    "Four heads share keys and values, so less is sent.": LEAST * 4,
    "That is the slice of one GPU.": LEAST / 16,
    "In practice a GPU computes 400 TFLOP/s, not its peak.": LEAST * 989 / 400,
    "The ring passes the links between the hosts, not only those within.": LEAST / 9,
    "A number in bfloat16 has two bytes, and a multiplication with its addition is two operations.": LEAST * 2,
}


@exercise(
    "For slices of L tokens: the operations of half a block, and the bytes of its keys and values. Both are equal.",
    "Begin with `computing = 4 * L**2 * 4096 / 2 / 400e12` and `sending = 2 * L * 1024 * 2 / 50e9`; solve for L, and "
    "mind how many slices a row has.",
)
def least_row(answer: float) -> None:
    """`answer` is the tokens of the shortest row with hidden messages, within 1 %."""
    tokens = read(answer, float, "A number of tokens is wanted")
    share = tokens / LEAST
    told = f"With rows of {tokens:.6g} tokens a block computes for {share:.3g} times as long as it is sent"
    require(abs(share - 1) <= 0.01, f"{told}; both should take equally long." + name_slip(tokens, SLIPS, 0.005))
    right("16 slices of 4,000 tokens. Within one host, at 450 GB/s, a ninth of that is enough.")

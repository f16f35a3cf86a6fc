"""Checks of lesson 06. Bytes may be off by a thousandth; the plan runs on the workers, where a trace counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import redistribution
import torch
from redistribution import PLACEMENTS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from checks import differ, dots_left, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks

COLLECTIVES = ("nothing", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")
HAVE = {
    "Shard(0)": "each rank has some rows",
    "Shard(1)": "each rank has some columns",
    "Replicate": "each rank has the whole",
    "Partial": "each rank has a summand",
}
WANT = {
    "Shard(0)": "wants its rows",
    "Shard(1)": "wants its columns",
    "Replicate": "wants the whole",
    "Partial": "wants a summand, whichever, if only the sum is right",
}


@exercise(
    "For each pair write down what a rank has and what it wants. Can it make that alone? Must something be added up? "
    "Does it want the whole, or a piece?",
    "Begin with the pairs that need nothing: the same placement twice, all changes of Replicate, and all changes to "
    "Partial. Four kinds are left, and each has a collective of its own.",
)
def which(answer: Callable[[str, str], Any]) -> None:
    """`answer(before, after)` is the collective of a change, for all pairs of placements."""
    for before, after in itertools.product(PLACEMENTS, repeat=2):
        with trying("The function"):
            found = returned(answer(before, after))
        require(found in COLLECTIVES, f"{before} to {after}: the answer is one of {', '.join(COLLECTIVES)}, not "
                f"{shown(found)}.")  # fmt: skip
        wanted = redistribution.collective(before, after)
        require(found == wanted, f"{before} to {after}: {HAVE[before]}, and {WANT[after]}. "
                f"{_why_not(before, found, wanted)}")  # fmt: skip
    right("Four collectives, and many changes that need nothing.")


def _why_not(before: str, found: str, wanted: str) -> str:
    if found == "nothing":
        return "No rank can make that of its own numbers."
    if wanted == "nothing":
        return "Each rank can make that of its own numbers."
    adds = found in ("all_reduce", "reduce_scatter")
    if adds != (before == "Partial"):
        return "There are no summands to add up." if adds else f"Here summands are added up, and {found} adds nothing."
    if found in ("all_reduce", "all_gather"):
        return f"{found} brings a rank more than it wants."
    return f"{found} brings a rank a piece of that only."


SIZES = [(1200.0, 4), (1000.0, 2), (2.0**20, 8), (700.0, 7), (5.0, 1)]


@exercise(
    "Of a tensor of S bytes a piece has S/n. In an all_gather, how many bytes must come to a rank? In an all_to_all, "
    "how large is the part of its piece that a rank keeps?",
    "Begin with `once = size * (ranks - 1) / ranks`, which is that of an all_gather. An all_reduce is two collectives; "
    "in an all_to_all a rank sends parts of its piece, not of the whole.",
)
def sent(answer: Callable[[str, float, int], float]) -> None:
    """`answer(collective, size, ranks)` is the bytes that each rank sends."""
    for (size, ranks), name in itertools.product(SIZES, COLLECTIVES):
        asked = f"{name}, {size:g} bytes, {ranks} rank{'s' * (ranks > 1)}"
        with trying("The function"):
            found = returned(answer(name, size, ranks))
        found = read(found, float, f"{asked}: a number of bytes is wanted")
        wanted = redistribution.sent(name, size, ranks)
        slip = name_slip(found, _slips_of_bytes(name, size, ranks))
        told = f"{asked}: a rank sends {differ(wanted, found, ' bytes, not ', 6)}.{slip}"
        require(math.isclose(found, wanted, rel_tol=1e-3), told)
    right("So an all_gather costs n times as much as an all_to_all, and an all_reduce twice as much as either half.")


def _slips_of_bytes(name: str, size: float, ranks: int) -> dict[str, float]:
    """Return the results of natural mistakes."""
    wanted, once = redistribution.sent(name, size, ranks), size * (ranks - 1) / ranks
    special: dict[str, dict[str, float]] = {
        "all_gather": {
            "That is its piece once; each other rank needs it.": size / ranks,
            "That is right if `size` is the bytes of a piece, or for all ranks together.": once * ranks,
        },
        "all_reduce": {
            "That is one half of an all_reduce: a reduce_scatter or an all_gather.": once,
            "So much is sent if each rank sends its whole summand to each other rank.": size * (ranks - 1),
        },
        "all_to_all": {
            "That is an all_gather, in which a rank sends its whole piece to all; or all ranks together.": once,
            "A rank keeps a part of its piece for itself.": size / ranks,
        },
        "reduce_scatter": {"That is an all_reduce; its second half is left out here.": 2 * once},
        "nothing": {},
    }
    return special[name] | {
        "Yours are those of all ranks together.": wanted * ranks,
        "A rank sends nothing to itself.": wanted * ranks / max(ranks - 1, 1),
    }


@exercise(
    "What shapes have the two matrices that a rank multiplies, do they fit, and what is the result? Try it with two "
    "ranks on paper.",
    "Begin with both cut along what is added up: `Shard(1)` with `Shard(0)`. In all other products that are right, at "
    "least one of the two is whole.",
)
def product(answer: Callable[[str, str], str | None]) -> None:
    """`answer(left, right)` is the placement of the product, or None."""
    for left, other in itertools.product(PLACEMENTS, repeat=2):
        with trying("The function"):
            found: Any = answer(left, other)
        require(found is None or found in PLACEMENTS, f"{left} times {other}: the answer is one of "
                f"{', '.join(PLACEMENTS)}, or None, not {shown(found)}.")  # fmt: skip
        wanted = redistribution.product(left, other)
        require(found == wanted, f"{left} times {other}: {_what_comes(left, other)}, so it is {wanted}, not {found}."
                + dots_left())  # fmt: skip
    right("Six products of sixteen need nothing. torch brings all others to one of these six.")


def _what_comes(left: str, other: str) -> str:
    """Return what the ranks have after such a product."""
    if (left, other) == ("Shard(1)", "Shard(0)"):
        return "each rank has the products for its part of what is added up, so a summand"
    if "Partial" in (left, other):
        if "Replicate" in (left, other):
            return "each rank multiplies its summand with the whole, and the sum of these is the product of the sum"
        if left == other:
            return "the summand of each rank should be multiplied with those of all ranks"
    if left == "Shard(1)" or other == "Shard(0)":
        return "the columns of the one do not fit the rows of the other"
    if left == other == "Replicate":
        return "each rank computes all of it"
    if left == "Shard(0)" and other == "Shard(1)":
        return "each rank makes one block, and no rank makes the blocks of its rows with the columns of other ranks"
    if "Partial" in (left, other):
        return "each rank multiplies with its own summand, and its part of the result needs the sum"
    return "each rank computes its rows" if left == "Shard(0)" else "each rank computes its columns"


RANKS = 4
SHAPES = {"up": (8, 32), "up_bias": (32,), "down": (32, 8), "down_bias": (8,)}
Plan = Mapping[str, Any]


@exercise(
    "The function between the matrices must see sums that are complete. Which cut of `up` gives complete numbers, and "
    "which cut of `down` takes them as they are?",
    "Begin with `up`, cut by columns: then each rank has some hidden numbers, complete. `down_bias` is added to the "
    "result, which each rank has as a whole.",
)
def plan(answer: Callable[[], Plan]) -> None:
    """`answer()` is the placements of a network's weights: one all-reduce, and nothing else."""
    ran = run_on_ranks(compute_by_plan, answer, [()] * RANKS)
    for rank, (given, told, whole, same) in enumerate(ran.values):
        returned(given)
        require(not told, told)
        require(not whole, f"Rank {rank} has all of {' and '.join(whole)}. Each of the two matrices is to be cut.")
        require(same, f"It runs, but on rank {rank} the result differs from that of one process.")
    _one_all_reduce(ran)
    right("One all-reduce, at the end: the hidden numbers never leave their rank.")


def compute_by_plan(answer: Callable[[], Plan]) -> tuple[bool | None, str, list[str], bool]:
    """On a worker: None without a plan, what is wrong with its form, matrices that are whole, is the result right?"""
    placements = answer()
    if placements is None or (told := _misread(placements)):
        return (None, "", [], False) if placements is None else (True, told, [], False)
    torch.manual_seed(6)
    x, weights = torch.randn(4, 8), {name: torch.randn(shape) for name, shape in SHAPES.items()}
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = [name for name in ("up", "down") if placements[name].is_replicate()]

    def place(tensor: Tensor, placement: Placement) -> DTensor:  # sends nothing: each rank takes its own part
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    found: Any = _network(
        place(x, Replicate()), {name: place(each, placements[name]) for name, each in weights.items()}
    )
    found = found.redistribute(placements=[Replicate()]).to_local()
    return True, "", whole, torch.allclose(found, _network(x, weights), atol=1e-4)


def _misread(placements: Any) -> str:
    """Return what is wrong with the form of a plan."""
    if not isinstance(placements, Mapping):
        return f"A plan is a dict of names and placements, not a {type(placements).__name__}."
    if missing := [name for name in SHAPES if name not in placements]:
        return f"The plan has no placement of {' and '.join(missing)}."
    for name, shape in SHAPES.items():
        placement = placements[name]
        if not isinstance(placement, Shard | Replicate):
            return f"{name}: Replicate() or Shard(dimension) is wanted, not {shown(placement)}."
        if isinstance(placement, Shard) and placement.dim not in range(-len(shape), len(shape)):
            return f"{name} has no dimension {placement.dim}: it has {len(shape)}, counted from 0."
    return ""


def _network(x: Any, weights: Mapping[str, Any]) -> Any:
    hidden = torch.relu(x @ weights["up"] + weights["up_bias"])
    return hidden @ weights["down"] + weights["down_bias"]


def _one_all_reduce(ran: Run) -> None:
    for rank in range(RANKS):
        ops = ran.ops(rank)
        calls = " and ".join(f"{count} {op}" for op, count in sorted(ops.items())) or "nothing"
        told = f"Right result; but in the trace rank {rank} calls {calls}, and one all_reduce is enough."
        require(ops == {"all_reduce": 1}, told)


NEEDS = {
    "by numbers": (
        "all_reduce",
        "each rank has its part of the sum over D, so the scores are Partial; the softmax of a sum is not the sum of "
        "softmaxes, and with `v` as it is cut each rank needs all scores",
    ),
    "by heads": ("nothing", "queries, keys, scores and values of a head are all on one rank"),
    "by tokens": (
        "all_gather",
        "a rank has the queries and the keys of its own tokens, and each query meets the keys of all tokens",
    ),
}


@exercise(
    "Write the scores in the notation for each layout: over what is added up, and is that cut? Then look at what the "
    "softmax needs, and at the product with `v`.",
    "In one layout the dimension over which the scores are added up is cut, so they are Partial. In another one `q` "
    "and `k` are both cut by tokens: the fourth case of a product.",
)
def needs(answer: dict[str, str]) -> None:
    """`answer` has for each layout the collective that attention needs."""
    require(answer is not ..., "Nothing is said so far. Replace the three dots.")
    require(isinstance(answer, Mapping), f"A dict is wanted, with a collective for each layout, not {shown(answer)}.")
    missing = [name for name in NEEDS if answer.get(name, ...) is ...]
    require(len(missing) < len(NEEDS), f"Nothing is said of {', '.join(missing)}. Replace the three dots.")
    require(not missing, f"Nothing is said of {', '.join(missing)}.")
    for name, (wanted, why) in NEEDS.items():
        found = answer[name]
        require(found in COLLECTIVES, f"{name}: one of {', '.join(COLLECTIVES)} is wanted, not {shown(found)}.")
        require(found == wanted, f"{name}: {found} is not what is needed. Here {why}.")
    right("Heads are free; that is why tensor parallel cuts attention by heads.")

"""Checks of lesson 31."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from checks import NotYet, exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

MESHES = [(8, 2, 2), (24, 2, 3), (24, 3, 2), (128, 2, 2), (12, 1, 4), (12, 4, 1), (6, 1, 1), (16, 4, 2)]  # rows, dp, tp


@exercise(
    "First find the place of the rank in the mesh: of rank 1 in a mesh of 2 by 2 it is dp 0, tp 1.",
    "`d, t = divmod(rank, tp)`; the piece of `tp` begins at row t * rows / tp, and this rank has a part of it.",
)
def rows_held(answer: Callable[[int, int, int, int], list[int]]) -> None:
    """`answer(rows, dp, tp, rank)` is the rows that a rank holds: cut over tp first, then over dp."""
    for rows, dp, tp in MESHES:
        for rank in range(dp * tp):
            case = f"{rows} rows, dp={dp}, tp={tp}: rank {rank}"
            with trying(case):
                found = returned(answer(rows, dp, tp, rank))
            require(type(found) is list, f"{case} should get a list, not {shown(found)}.")
            plain = all(isinstance(row, Integral) for row in found)
            require(plain, f"{case} should get a list of whole numbers, not {shown(found)}.")
            each = rows // (dp * tp)
            begin = rank % tp * (rows // tp) + rank // tp * each
            wanted = [*range(begin, begin + each)]
            if found != wanted:
                raise NotYet(_rows_hint(found, case, rank, each, wanted, tp))
    right("A piece of a piece: so a rank's rows do not follow those of the rank before.")


def _rows_hint(found: list[Any], case: str, rank: int, each: int, wanted: list[int], tp: int) -> str:
    if found == [*range(rank * each, (rank + 1) * each)]:
        return (
            f"{case} holds {wanted}, not {found}. The ranks do not hold the rows in the order of their numbers. Two "
            f"slips lead to that: FSDP cuts first, or ranks are counted along dp first. Tensor parallel cuts first, "
            f"and rank {rank} is dp {rank // tp}, tp {rank % tp}."
        )
    if len(found) != each:
        return f"{case} holds {each} rows, not {len(found)}: {shown(found)}."
    return f"{case} holds {shown(wanted)}, not {shown(found)}."


MODELS = [  # (numbers, whether tensor parallel cuts them) of each parameter; dp; tp
    ([(1000, True)], 1, 1),
    ([(1024, False), (4096, True)], 2, 2),
    ([(64, False), (64, True)], 4, 2),
    ([(96, False), (960, True), (96, False)], 2, 4),
]


@exercise(
    "How many bytes belong to each number that is learned? Then: which parameters are cut by dp * tp, and which by dp?",
    "4 for the number, 4 for its gradient, 8 for Adam; add up the pairs, each divided by its own number of pieces.",
)
def bytes_held(answer: Callable[[list[tuple[int, bool]], int, int], Any]) -> None:
    """`answer(parameters, dp, tp)` is what a rank holds of parameters, gradients and the state of Adam."""
    for parameters, dp, tp in MODELS:
        with trying():
            found = returned(answer(list(parameters), dp, tp))
        require(isinstance(found, int | float), f"It should return a number, not {shown(found)}.")
        cut, whole = (sum(count for count, by_tp in parameters if by_tp is kind) for kind in (True, False))
        wanted = 16 * (cut / (dp * tp) + whole / dp)
        if found != wanted:
            raise NotYet(_bytes_hint(float(found), cut, whole, dp, tp, f"{parameters}, dp={dp}, tp={tp}"))
    right("As the panel says.")


def _bytes_hint(found: float, cut: int, whole: int, dp: int, tp: int, case: str) -> str:
    piece = cut / (dp * tp) + whole / dp
    if found in (4 * piece, 8 * piece, 12 * piece):
        return f"{case}: a rank also holds a gradient for each number, and two numbers of Adam. All have four bytes."
    if found == 16 * (cut + whole) / (dp * tp):
        return f"{case}: what tensor parallel does not cut is cut by FSDP alone."
    if found == 16 * (cut / (dp * tp) + whole):
        return f"{case}: FSDP cuts the others, too."
    return f"{case}: a rank holds {16 * piece:g} bytes, not {found:g}."


@exercise(
    "In the list of `mine` look at the sites of the all-gathers: which groups appear once, and which twice?",
    "Each block counts 1 or 2, by `keep`; the model itself counts 1.",
)
def gathers(answer: Callable[[int, bool], Any]) -> None:
    """`answer(blocks, keep)` counts the all-gathers of parameters in a step of FSDP."""
    for blocks in (7, 2, 1):
        for keep in (False, True):
            with trying():
                found = returned(answer(blocks, keep))
            wanted = blocks * (1 if keep else 2) + 1
            case = f"{blocks} block{'s' if blocks > 1 else ''}, {'kept' if keep else 'not kept'}"
            require(found != wanted - 1, f"{case}: not {found}. The model itself has parameters outside of its blocks.")
            require(found != wanted + 1, f"{case}: not {found}. The model itself stays whole until its backward.")
            require(
                type(found) is int and found == wanted,
                f"{case}: not {shown(found)}. Count in the timeline: which groups are gathered, and when?",
            )
    right("Memory, or twice the traffic: you choose.")


STEPS = [  # numbers, sums, tokens, width, dp, tp
    (4800, 12, 256, 32, 2, 2),
    (4800, 6, 10, 16, 4, 3),
    (9600, 6, 100, 8, 1, 8),
    (9600, 6, 100, 8, 8, 1),
]


@exercise(
    "Along dp each rank gathers the part of the model that tensor parallel has left it: numbers / tp.",
    "Along tp: sums * 2 (tp - 1) / tp * tokens * width * 4 bytes. Along dp 3 (dp - 1) / dp of what is gathered.",
)
def sent(answer: Callable[..., tuple[float, float]]) -> None:
    """`answer(numbers, sums, tokens, width, dp, tp)` is the bytes that a rank sends along dp, and along tp."""
    for numbers, sums, tokens, width, dp, tp in STEPS:
        with trying():
            found = returned(answer(numbers, sums, tokens, width, dp, tp))
        require(isinstance(found, tuple) and len(found) == 2, f"A pair is wanted, not {shown(found)}.")
        along_tp = sums * 2 * (tp - 1) / tp * tokens * width * 4
        along_dp = 3 * (dp - 1) / dp * numbers / tp * 4
        case = f"{numbers} parameters, {sums} sums of {tokens} vectors of {width}, dp={dp}, tp={tp}"
        for number in found:
            require(isinstance(number, int | float), f"{case}: two numbers are wanted, not {shown(found)}.")
        turned = along_dp != along_tp and found == (along_tp, along_dp)
        require(not turned, f"{case}: these are the two numbers, and the one along dp comes first: not {shown(found)}.")
        for name, number, wanted in zip(("dp", "tp"), found, (along_dp, along_tp), strict=True):
            require(
                abs(number - wanted) < 1e-6 * max(1, wanted),
                f"{case}: along {name} a rank sends {wanted:g} bytes, not {number:g}.",
            )
    right("The batch makes the traffic along tp, the model that along dp.")

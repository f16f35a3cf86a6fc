"""Checks of lesson 31."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from tiny_transformer import TinyTransformer, batch, loss_of, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from checks import NotYet, differ, dots_left, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import run_on_ranks

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
            found = read(found, [int], f"{case} should get a list of whole numbers")
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
        found = read(found, float, "It should return a number")
        cut, whole = (sum(count for count, by_tp in parameters if by_tp is kind) for kind in (True, False))
        wanted = 16 * (cut / (dp * tp) + whole / dp)
        if found != wanted:
            raise NotYet(_bytes_hint(found, cut, whole, dp, tp, f"{parameters}, dp={dp}, tp={tp}"))
    right("As the panel says.")


def _bytes_hint(found: float, cut: int, whole: int, dp: int, tp: int, case: str) -> str:
    piece = cut / (dp * tp) + whole / dp
    if found in (4 * piece, 8 * piece, 12 * piece):
        return f"{case}: a rank also holds a gradient for each number, and two numbers of Adam. All have four bytes."
    if found == 16 * (cut + whole) / (dp * tp):
        return f"{case}: what tensor parallel does not cut is cut by FSDP alone."
    if found == 16 * (cut / (dp * tp) + whole):
        return f"{case}: FSDP cuts the others, too."
    return f"{case}: a rank holds {differ(16 * piece, found, ' bytes, not ', 6)}."


@exercise(
    "In the list of `mine` look at the sites of the all-gathers: which groups appear once, and which twice?",
    "Each block counts 1 or 2, by `keep`; the model itself counts 1.",
)
def gathers(answer: Callable[[int, bool], Any]) -> None:
    """`answer(blocks, keep)` counts the all-gathers of parameters in a step of FSDP."""
    for blocks in (7, 2, 1):
        for keep in (False, True):
            with trying():
                found = read(answer(blocks, keep), int, "A whole number is wanted")
            wanted = blocks * (1 if keep else 2) + 1
            case = f"{blocks} block{'s' if blocks > 1 else ''}, {'kept' if keep else 'not kept'}"
            require(found != wanted - 1, f"{case}: not {found}. The model itself has parameters outside of its blocks.")
            require(found != wanted + 1, f"{case}: not {found}. The model itself stays whole until its backward.")
            require(
                found == wanted,
                f"{case}: not {found}. Count in the timeline: which groups are gathered, and when?",
            )
    right("Memory, or twice the traffic: you choose.")


STEPS = [  # numbers, sums, tokens, width, dp, tp
    (4800, 12, 256, 32, 2, 2),
    (4800, 6, 10, 16, 4, 3),
    (9600, 6, 100, 8, 1, 8),
    (9600, 6, 100, 8, 8, 1),
]


# -- a step on the workers
RANKS, ROWS = 4, 8
CUT = ("attention.query", "attention.key", "attention.value", "attention.out", "feed.up", "feed.down")


@exercise(
    "First the computation is cut, then the storage. Which ranks have the same rows of the batch, and over which ranks "
    "is the loss averaged?",
    "Begin with `mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))`. `rows_here(inputs, mesh['dp'])` "
    "of `recipes.py` has this rank's rows.",
)
def on_ranks(answer: Callable[[TinyTransformer, Tensor, Tensor], Any]) -> None:
    """`answer(model, inputs, targets)` runs on each worker: a forward and backward on two by two ranks."""
    ran = run_on_ranks(step_here, answer, [()] * RANKS)
    alone, (inputs, targets) = make_model(), batch(step=0, rows=ROWS)
    loss = loss_of(alone(inputs), targets)
    loss.backward()
    for rank, seen in enumerate(ran.values):
        require(seen["numbers"] != {name: each.numel() for name, each in alone.named_parameters()},
                f"Rank {rank} has the whole model: nothing was cut.{dots_left()}")  # fmt: skip
        require(None not in seen["gradients"].values(), f"Rank {rank}: there are no gradients. Has backward run?")
        _pieces(rank, seen["numbers"], alone)
        require(seen["groups"], f"Rank {rank}: the blocks are no groups of their own, so FSDP gathers the whole model "
                "at once. How much would then be held?")  # fmt: skip
        rows = seen["rows"]
        require(rows == [ROWS // 2], f"Rank {rank} has computed with {' and '.join(map(str, rows)) or 'no'} rows of "
                f"{ROWS}. Along `dp` two ranks share them; along `tp` two ranks have the same.")  # fmt: skip
        half = seen["half"]
        require(half in (None, rank // 2), f"Rank {rank} has computed with the rows of dp {half}; in the mesh of the "
                f"exercise it is dp {rank // 2}, tp {rank % 2}. Ranks along `tp`, the last name, are neighbours."
                )  # fmt: skip
        gradients = seen["gradients"]
        wrong = next((name for name, one in alone.named_parameters() if not _is_near(gradients[name], one.grad)), "")
        require(not wrong, f"Rank {rank}: the gradient of {wrong} is not that of one process. Which ranks have the "
                "same rows, and over which is a gradient averaged?")  # fmt: skip
        found = read(seen["loss"], float, f"Rank {rank}: the loss is wanted, a number")
        require(abs(found - loss.item()) < 1e-5, f"Right gradients; but rank {rank} returns "
                f"{differ(loss.item(), found, ' as the loss of all rows is wanted, not ')}.")  # fmt: skip
    right("Two cuts of the model, one of the batch, and the gradients of one process.")


def step_here(answer: Callable[[TinyTransformer, Tensor, Tensor], Any]) -> dict[str, Any]:
    """On a worker: what the answer returns, and the pieces, rows and gradients of the model after it."""
    model, (inputs, targets), seen = make_model(), batch(step=0, rows=ROWS), []
    halves = inputs.chunk(2)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    loss = answer(model, inputs, targets)
    parameters = dict(model.named_parameters())
    numbers = {name: _local(each).numel() for name, each in parameters.items()}
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers are no fault here
    gradients = {name: _whole(each.grad) for name, each in parameters.items()}
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    return {
        "loss": _whole(loss), "rows": [len(each) for each in seen], "numbers": numbers, "gradients": gradients,
        "half": next((number for number, half in enumerate(halves) if seen and torch.equal(seen[0], half)), None),
        "groups": all(isinstance(block, FSDPModule) for block in model.blocks.values()),
    }  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_near(found: Tensor | None, wanted: Tensor | None) -> bool:
    assert wanted is not None
    return found is not None and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def _pieces(rank: int, numbers: dict[str, int], alone: nn.Module) -> None:
    """The matrices of the blocks are cut in four, all else in two."""
    sizes = {name: each.numel() for name, each in alone.named_parameters()}
    for name, size in sizes.items():
        cut = any(f".{matrix}.weight" in name for matrix in CUT)
        share = numbers[name] / size
        told = f"Rank {rank} has {numbers[name]} of the {size} numbers of {name}"
        if cut:
            require(share <= 1 / 4, f"{told}. Tensor parallel cuts it in two, and FSDP each half again.")
        require(share < 1, f"{told}. FSDP should cut it over `dp`: no block has it, so the model itself takes it.")
        if not cut and "norm" in name:
            require(share >= 1 / 2, f"{told}. FSDP cuts over the two ranks of `dp`, not over all four.")


@exercise(
    "Along dp each rank gathers the part of the model that tensor parallel has left it: numbers / tp.",
    "Along tp: sums * 2 (tp - 1) / tp * tokens * width * 4 bytes. Along dp 3 (dp - 1) / dp of what is gathered.",
)
def sent(answer: Callable[..., tuple[float, float]]) -> None:
    """`answer(numbers, sums, tokens, width, dp, tp)` is the bytes that a rank sends along dp, and along tp."""
    for numbers, sums, tokens, width, dp, tp in STEPS:
        with trying():
            found = returned(answer(numbers, sums, tokens, width, dp, tp))
        found = read(found, (float, float), "A pair of numbers is wanted")
        along_tp = sums * 2 * (tp - 1) / tp * tokens * width * 4
        along_dp = 3 * (dp - 1) / dp * numbers / tp * 4
        case = f"{numbers} parameters, {sums} sums of {tokens} vectors of {width}, dp={dp}, tp={tp}"
        turned = along_dp != along_tp and found == (along_tp, along_dp)
        require(not turned, f"{case}: these are the two numbers, and the one along dp comes first: not {shown(found)}.")
        for name, number, wanted in zip(("dp", "tp"), found, (along_dp, along_tp), strict=True):
            slip = name_slip(number, _sent_slips(wanted, name, dp, tp), 1e-6) if wanted else ""
            require(
                abs(number - wanted) < 1e-6 * max(1, wanted),
                f"{case}: along {name} a rank sends {differ(wanted, number, ' bytes, not ', 6)}.{slip}",
            )
    right("The batch makes the traffic along tp, the model that along dp.")


def _sent_slips(wanted: float, name: str, dp: int, tp: int) -> dict[str, float]:
    """What comes out after a mistake, along a dimension."""
    both = {"Those are numbers; each has four bytes.": wanted / 4}
    if name == "tp":
        return {**both, "An all-reduce sends twice (n - 1) / n of its tensor.": wanted / 2}
    return {
        **both,
        "That is the whole model; tensor parallel has left a rank a part of it.": wanted * tp,
        "A parameter travels three times: it is gathered twice, and its gradient is added up once.": wanted * 2 / 3,
        "What is gathered is dp pieces, not one.": wanted / dp,
    }

"""Checks of lesson 35. Bytes and seconds are not kept here: each check asks a simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import llama
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rpcbench
from checks import DOTS, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

Program = Callable[[DeviceMesh], Callable[[], None]]
NEAR = 0.01  # what is left out may be this share of the bytes: the optimizer counts its steps
GIB = 2**30


# -- states
WORLDS = [(256, 4), (512, 32)]  # width of a model of two matrices, ranks


def make_two_matrices(width: int, mesh: DeviceMesh) -> Callable[[], None]:
    matrices = [nn.Linear(width, width, bias=False) for _ in range(2)]
    model = fully_shard(nn.Sequential(*matrices), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(8, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def play_moments(program: Program, ranks: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Play a rank; yield the phase of each change of memory in its step, and the bytes by category before it."""
    log = rpcbench.simulate(program, {"dp": ranks}, ranks=[0]).logs[0]
    now = dict(log.before)
    for change in log.memory:
        yield change.part.phase, dict(now)
        now[change.category] += change.bytes


@functools.cache
def play_states(width: int, ranks: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and states of a rank when its optimizer begins."""
    moments = play_moments(partial(make_two_matrices, width), ranks)
    now = next(now for phase, now in moments if phase == "optimizer")
    return now["parameters"], now["gradients"], now["optimizer"]


ADAMW = " AdamW keeps two numbers for each parameter, in float32 as well, and FSDP has cut them as it cuts parameters."


@exercise(
    "A number in float32 has 4 bytes. How many numbers has a rank for each parameter of its piece, and what for?",
    "Parameters and gradients are 4 * parameters / ranks each. AdamW keeps a mean and a mean of squares.",
)
def states(answer: Callable[[int, int], tuple[float, float, float]]) -> None:
    """`answer(parameters, ranks)` is the bytes that a rank of FSDP has of parameters, gradients and states of AdamW."""
    for width, ranks in WORLDS:
        parameters = 2 * width * width
        case = f"{parameters:,} parameters on {ranks} ranks"
        with trying(case):
            found: Any = returned(answer(parameters, ranks))
        told = f"{case}: three numbers are wanted, of parameters, gradients and optimizer"
        found = read(found, (float,) * 3, told)
        for name, mine, played in zip(("parameters", "gradients", "optimizer"), found, play_states(width, ranks)):
            require(
                abs(mine - played) <= NEAR * played,
                f"{case}: when the optimizer begins, a simulated rank has {played:,} bytes of {name}; "
                f"you say {mine:,.0f}.{ADAMW if name == 'optimizer' else ''}",
            )
    right("Together 16 bytes for each parameter, divided by the ranks.")


# -- kept
SMALL = [(512, 256, 512), (1024, 256, 1024), (512, 512, 1024)]  # tokens, width, hidden


@functools.cache
def play_kept(tokens: int, width: int, hidden: int) -> int:
    """Bytes of activations by which a model of two layers needs more than one of a single layer."""
    one, two = (
        max(now["activations"] for _, now in play_moments(partial(llama.make_step, sizes, length=tokens), 4))
        for sizes in (llama.Sizes(layers, width, hidden, heads=4, kv_heads=2, words=64) for layers in (1, 2))
    )
    return two - one


PARTS = {"width": "norms and attention", "hidden": "the feed-forward network"}


def _grow(kept: Callable[[int, int, int], float]) -> tuple[float, float]:
    """Bytes of a token for each number of the width, and for each hidden unit; SMALL begins with one width, twice."""
    (tokens, width, hidden), other, _ = SMALL
    one, two = kept(*SMALL[0]) / tokens, kept(*other) / other[0]
    each = (two - one) / (other[2] - hidden)
    return (one - each * hidden) / width, each


def _find_part(answer: Callable[[int, int, int], float]) -> str:
    """Which rows of the table an answer has wrong, if only some are."""
    try:
        found = _grow(answer)
    except Exception:  # noqa: BLE001  (it may be no formula)
        return ""
    wrong = {
        name: "few" if mine < played else "many"
        for name, mine, played in zip(PARTS, found, _grow(play_kept), strict=True)
        if abs(mine - played) > NEAR * played
    }
    if len(wrong) != 1:
        return ""
    ((name, many),) = wrong.items()
    return (
        f" Your bytes that grow with `{name}` are too {many}, the others are right: look at {PARTS[name]} in the table."
    )


@exercise(
    "Go through the table: numbers of a token times bytes of a number, and how often. Then add up.",
    "A norm keeps 4 + 2 + 2 bytes for each of its `width` numbers, and there are two norms.",
)
def kept(answer: Callable[[int, int, int], float]) -> None:
    """`answer(tokens, width, hidden)` is the bytes that a layer keeps for backward."""
    for sizes in SMALL:
        tokens, width, hidden = sizes
        case = f"{tokens} tokens, width {width}, hidden {hidden}"
        with trying(case):
            found: Any = returned(answer(*sizes))
        found = read(found, float, f"{case}: a number is wanted")
        played = play_kept(*sizes)
        require(
            abs(found - played) <= NEAR * played,
            f"{case}: in a simulation a layer more keeps {played:,} bytes, {played / tokens:,.0f} for each token; you "
            f"say {found:,.0f}, which are {found / tokens:,.0f} for each token.{_find_part(answer)}",
        )
    right("The simulated layer keeps a few bytes more: one number for each head, and one for each norm.")


# -- choice
GPUS, ROWS, PER_HOST = 256, 64, 8
NAMES = ("dp", "tp", "rows", "recompute")


def estimate(dp: int, tp: int, rows: int, recompute: bool) -> tuple[float, float]:
    """The bytes and the seconds of a layout; what the notebook has played is not played again."""
    return llama.estimate(llama.LLAMA_70B, {"dp": dp, "tp": tp}, rows=rows, recompute=recompute)


def require_layout(found: Any) -> None:
    """Require a layout that can be played, with the batch and the GPUs that are given."""
    require(found is not ..., f"Nothing is written down so far. {DOTS}")
    named = type(found) is dict and set(found) == set(NAMES)
    require(named, f"A dict with {', '.join(NAMES)} is wanted, not {shown(found)}.")
    *sizes, recompute = (found[name] for name in NAMES)
    dp, tp, rows = read(sizes, (int, int, int), "dp, tp and rows are whole numbers")
    require(min(dp, tp, rows) > 0, f"dp, tp and rows are one or more, not {shown(sizes)}.")
    require(type(recompute) is bool, f"recompute is True or False, not {shown(recompute)}.")
    require(dp * tp == GPUS, f"dp {dp} · tp {tp} are {dp * tp} GPUs, and there are {GPUS}.")
    require(
        tp <= PER_HOST,
        f"With tp {tp} a group lies on {tp // PER_HOST} hosts, so each layer waits for the links between them.",
    )
    require(
        dp * rows == ROWS,
        f"dp {dp} · rows {rows} are a batch of {dp * rows} rows, and it has {ROWS}. A rank along dp reads whole rows.",
    )


@exercise(
    "A batch of 64 rows: which dp are possible, and which tp follows from each? Then think of what the layers keep.",
    "Without recomputation nothing fits. With it two layouts do; tensor parallel over fewer ranks waits less.",
)
def choice(answer: dict[str, Any]) -> None:
    """`answer` is the fastest layout that fits, of those with 64 rows."""
    require_layout(answer)
    size, seconds = estimate(**answer)
    room = rpcbench.hardware("h100").memory_bytes
    require(
        size <= room,
        f"It does not fit: {size / GIB:.0f} of {room / GIB:.0f} GiB. A step would take {seconds:.2f} s.",
    )
    for dp in (ROWS, ROWS // 2):
        other = {"dp": dp, "tp": GPUS // dp, "rows": ROWS // dp, "recompute": True}
        faster = estimate(**other)[1]
        require(
            seconds <= faster,
            f"It fits, with {size / GIB:.0f} GiB, and a step takes {seconds:.2f} s. Another one takes {faster:.2f} s.",
        )
    right(f"It needs {size / GIB:.0f} GiB, and a step takes {seconds:.2f} s.")

"""Checks of lesson 05. Counts must be exact; other numbers may be off by a thousandth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import roofline

from checks import differ, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

MODELS = [  # layers, width, hidden, vocabulary, rows, length
    (1, 8, 24, 10, 1, 1),  # hidden is not four times the width, so each part has another number
    (1, 8, 24, 10, 1, 5),
    (3, 8, 32, 10, 1, 5),
    (2, 8, 24, 100, 4, 5),
    (12, 768, 3072, 50257, 8, 1024),
]


@exercise(
    "Count forward for one token: the weights that multiply its vector, then its attention. What does backward add?",
    "Begin with `weights = layers * (4 * width * width + 2 * width * hidden) + width * vocabulary`. A weight costs a "
    "token two operations; attention costs it 4 · length · width in each layer.",
)
def step_flops(answer: Callable[..., int]) -> None:
    """`answer(layers, width, hidden, vocabulary, rows, length)` is the number of operations, exactly."""
    for model in MODELS:
        layers, width, hidden, vocabulary, rows, length = model
        asked = (f"{layers} layers, width {width}, hidden {hidden}, vocabulary {vocabulary}, {rows} rows of {length} "
                 "tokens")  # fmt: skip
        with trying("The function"):
            found = returned(answer(*model))
        found = read(found, float, f"{asked}: a number of operations is wanted")
        wanted = roofline.step_flops(*model)
        require(found == wanted, f"{asked}: the step has {differ(wanted, found, '; you say ', 6)} operations."
                + name_slip(found, _slips_of_count(*model), within=1e-9))  # fmt: skip
    right("Six operations for each weight and token, and attention, which grows with the row.")


def _slips_of_count(layers: int, width: int, hidden: int, vocabulary: int, rows: int, length: int) -> dict[str, float]:
    """Return the results of natural mistakes, without those that change nothing in this model."""
    tokens = rows * length
    whole = roofline.step_flops(layers, width, hidden, vocabulary, rows, length)
    head, attention = 6 * tokens * width * vocabulary, 12 * tokens * layers * length * width
    narrow = 6 * tokens * layers * width * hidden
    slips = {
        "Yours are those of forward alone.": whole / 3,
        "Backward counts as much as forward in yours, or forward is missing.": whole * 2 / 3,
        "A multiplication and an addition are two operations, and yours counts one.": whole / 2,
        "Attention is missing: this is 6ND.": whole - attention,
        "A token reads its own row, not the rows beside it.": whole + attention * (rows - 1),
        "The table of vectors is counted; a token only copies a row of it.": whole + head,
        "The head is missing.": whole - head,
        "The four matrices of attention are missing.": whole - 24 * tokens * layers * width * width,
        "The network of a layer has two matrices, and yours counts one.": whole - narrow,
        "Attention has two products, and a token reads its whole row: yours has half of that.": whole - attention / 2,
        "Attention has a backward, too: two operations for one of forward.": whole - attention * 2 / 3,
        "These are the operations of one row.": whole / rows,
        "These are the operations of one token.": whole / tokens,
    }
    return {said: number for said, number in slips.items() if number != whole}


PRODUCTS = [(64, 64, 64, 4), (1, 4096, 4096, 4), (8, 100, 30, 4), (7, 5, 3, 8), (512, 1024, 4096, 2)]


@exercise(
    "Two numbers are divided. How many multiplications does one entry of the result need, and how many entries are "
    "read or written?",
    "Begin with `flops = 2 * m * k * n`; three matrices are moved, of m · k, k · n and m · n numbers.",
)
def intensity(answer: Callable[[int, int, int, int], float]) -> None:
    """`answer(m, k, n, number_bytes)` is operations per byte of (m, k) @ (k, n)."""
    for product in PRODUCTS:
        m, k, n, size = product
        asked = f"({m}, {k}) @ ({k}, {n}) with {size} bytes for each number"
        with trying("The function"):
            found = returned(answer(*product))
        found = read(found, float, f"{asked}: a number of operations per byte is wanted")
        wanted = roofline.intensity(*product)
        flops, numbers = 2 * m * k * n, m * k + k * n + m * n
        slips = {
            "Yours are bytes per operation.": 1 / wanted,
            "A multiplication and an addition are two operations, and yours counts one.": wanted / 2,
            "The result is written, too.": flops / (size * (m * k + k * n)),
            "Yours are operations for each number, not for each byte.": flops / numbers,
            "Yours takes 4 bytes for each number.": flops / (4 * numbers),
            "Yours moves the weights alone.": flops / (size * k * n),
        }
        require(_near(found, wanted), f"{asked}: {differ(wanted, found, ' operations per byte; you say ', 6)}."
                + name_slip(found, slips))  # fmt: skip
    right("A large product reads each number once and uses it often; with a single row, it uses each weight once.")


OPERATORS = [  # name, flops, bytes, peak, bandwidth
    ("an addition", 1e6, 12e6, 1e11, 1e10),
    ("a product", 2e9, 1.2e7, 1e11, 1e10),
    ("a product on a GPU", 1e12, 1e9, 1e15, 3e12),
    ("a copy", 0.0, 8e6, 1e11, 1e10),
    ("a small product", 4e6, 1e6, 1e11, 1e10),
]


@exercise(
    "How long would the operations take alone, and how long the bytes? A machine does both at the same time.",
    "Begin with `computing = flops / peak` and `moving = moved / bandwidth`. The longer one decides, and names the "
    "bound.",
)
def bound_time(answer: Callable[[float, float, float, float], tuple[float, str]]) -> None:
    """`answer(flops, moved, peak, bandwidth)` is the least time, and its bound."""
    for what, flops, moved, peak, bandwidth in OPERATORS:
        asked = f"{what[0].upper()}{what[1:]} of {flops:g} operations and {moved:g} bytes, on a machine with {peak:g} "
        asked += f"FLOP/s and {bandwidth:g} bytes/s"
        with trying("The function"):
            found = returned(answer(flops, moved, peak, bandwidth))
        seconds, bound = read(found, (float, str), f"{asked}: (seconds, bound) is wanted")
        wanted, why = roofline.bound_time(flops, moved, peak, bandwidth)
        computing, moving = flops / peak, moved / bandwidth
        slips = {
            "One after the other is not needed: a machine computes while it moves other bytes.": computing + moving,
            "The shorter time hides behind the longer one, not the other way round.": min(computing, moving),
            "That is a rate, in operations per second.": flops / wanted,
            "That is a part of the peak.": wanted / (computing or 1),
        }
        require(_near(seconds, wanted), f"{asked}: it takes {differ(wanted, seconds, ' s; you say ', 6)} s."
                + name_slip(seconds, slips))  # fmt: skip
        require(bound in (roofline.COMPUTE, roofline.MEMORY),
                f"{asked}: the bound is {roofline.COMPUTE!r} or {roofline.MEMORY!r}, not {bound!r}.")  # fmt: skip
        require(bound == why, f"{asked}: its operations take {computing:g} s and its bytes {moving:g} s, so it is {why}"
                f", not {bound}.")  # fmt: skip
    right("A roof with two slopes: bandwidth on the left, the peak on the right.")


RUNS = [  # name, parameters, layers, width, length, tokens per second, peak
    ("one weight", 1.0, 0, 1, 1, 1.0, 24.0),
    ("a model without attention", 1e9, 0, 2048, 1024, 10_000.0, 312e12),
    ("a model with long rows", 1e9, 24, 2048, 32768, 2_000.0, 312e12),
    ("Llama 3 8B on A100", 8.03e9, 32, 4096, 8192, 2904.0, 312e12),
]


@exercise(
    "How many operations has a token in forward and backward? How many of its tokens come in a second?",
    "Begin with `for_a_token = 6 * parameters + 12 * layers * length * width`.",
)
def utilization(answer: Callable[..., float]) -> None:
    """`answer(parameters, layers, width, length, tokens_per_second, peak)` is the MFU, from 0 to 1."""
    for what, *run in RUNS:
        parameters, layers, width, length, tokens, peak = run
        asked = f"{what[0].upper()}{what[1:]}, {tokens:g} tokens/s"
        with trying("The function"):
            found = returned(answer(*run))
        found = read(found, float, f"{asked}: a share of the peak is wanted")
        wanted = roofline.utilization(*run)  # type: ignore[arg-type]
        weights, attention = (each * tokens / peak for each in (parameters, layers * length * width))
        slips = {
            "That is in per cent; a share from 0 to 1 is wanted.": 100 * wanted,
            "Yours has forward alone.": wanted / 3,
            "Attention is missing.": 6 * weights,
            "Recomputation is work of the machine, not of the model.": 8 * weights + 16 * attention,
            "Recomputation is work of the machine, not of the model; attention counts once more in yours, too.":
                8 * weights + 12 * attention,
            "Attention has a backward, too.": 6 * weights + 4 * attention,
            "That is how many times slower than the peak.": 1 / wanted,
            "The operations of a token grow with the length, not with its square.": 6 * weights
                + 12 * attention * float(length),
        }  # fmt: skip
        require(_near(found, wanted), f"{asked}: the MFU is {differ(wanted, found, '; you say ', 5)}."
                + name_slip(found, slips))  # fmt: skip
    right("The last one is a published run of Llama 3 8B: 57 % of the peak of an A100.")


LAYERS = [  # inputs, outputs, bytes of a number, peak, bandwidth
    (4096, 4096, 2, 312e12, 2039e9),
    (4096, 14336, 2, 989.4e12, 3350e9),
    (1024, 1024, 4, 50e9, 10e9),
    (64, 64, 2, 989.4e12, 3350e9),
    (8192, 8192, 1, 989.4e12, 3350e9),
    (256, 512, 2, 312e12, 2039e9),
]


@exercise(
    "Write the intensity with T tokens, set it equal to peak / bandwidth, and solve for T.",
    "Begin with `ridge = number_bytes * peak / bandwidth`. T tokens need 2·T·i·o at least ridge · (T·i + i·o + T·o); "
    "bring the terms with T to one side. If what T is multiplied by is not above 0, no number is enough.",
)
def least_tokens(answer: Callable[..., int | None]) -> None:
    """`answer(inputs, outputs, number_bytes, peak, bandwidth)` is the least whole number, or None."""
    for layer in LAYERS:
        inputs, outputs, size, peak, bandwidth = layer
        asked = f"{inputs} inputs, {outputs} outputs, {size} bytes, {peak / 1e12:g} TFLOP/s, {bandwidth / 1e9:g} GB/s"
        with trying("The function"):
            found: Any = answer(*layer)
        wanted = roofline.least_tokens(*layer)
        if wanted is None:
            most = roofline.intensity(2**40, inputs, outputs, size)
            require(found is None, f"{asked}: with ever more tokens the intensity comes to {most:.4g}, below the ridge "
                    f"at {peak / bandwidth:.4g}; you say {shown(found)}.")  # fmt: skip
            continue
        found = read(found, int, f"{asked}: a whole number of tokens is wanted")
        slips = {
            "Yours has the weights alone; inputs and outputs are moved, too.": math.ceil(size * peak / bandwidth / 2),
            "At yours it is still memory-bound.": wanted - 1,
            "It is compute-bound with one token fewer.": wanted + 1,
        }
        require(found == wanted, f"{asked}: {differ(wanted, found, ' tokens; you say ', 6)}."
                + name_slip(found, slips, off=0.99))  # fmt: skip
    right("So GPUs want hundreds of tokens at once, and a narrow layer never keeps their cores busy.")


def _near(mine: float, wanted: float) -> bool:
    return math.isclose(mine, wanted, rel_tol=1e-3)

"""Costs of operators on a machine, for lesson 05: floating-point operations, bytes of memory, and the roofline of both.

`flops` are floating-point operations, `moved` the bytes that an operator reads from memory and writes to it, `peak`
floating-point operations per second, `bandwidth` bytes per second.

The lesson asks for `step_flops`, `intensity`, `bound_time`, `utilization` and `least_tokens`: here are its answers.
Read them after yours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from draw import Drawing, curves

COMPUTE, MEMORY = "compute-bound", "memory-bound"
Places = Sequence[tuple[float, float]]
"""Pairs (floating-point operations per byte, floating-point operations per second)."""


def step_flops(layers: int, width: int, hidden: int, vocabulary: int, rows: int, length: int) -> int:
    """The operations of a training step of a transformer, without recomputation: those of its products."""
    weights = layers * (4 * width * width + 2 * width * hidden) + width * vocabulary
    attention = layers * 4 * length * width  # for a token: its query with all keys, its weights with all values
    return 3 * rows * length * (2 * weights + attention)


def intensity(m: int, k: int, n: int, number_bytes: int) -> float:
    """Operations for each byte of a product (m, k) @ (k, n), where each matrix is read or written once."""
    return 2 * m * k * n / (number_bytes * (m * k + k * n + m * n))


def bound_time(flops: float, moved: float, peak: float, bandwidth: float) -> tuple[float, str]:
    """The least seconds of an operator, and its bound."""
    computing, moving = flops / peak, moved / bandwidth
    return max(computing, moving), COMPUTE if computing >= moving else MEMORY


def utilization(
    parameters: float, layers: int, width: int, length: int, tokens_per_second: float, peak: float
) -> float:
    """MFU: the share of the peak that the model's operations are, without recomputation."""
    return (6 * parameters + 12 * layers * length * width) * tokens_per_second / peak


def least_tokens(inputs: int, outputs: int, number_bytes: int, peak: float, bandwidth: float) -> int | None:
    """With how many tokens a linear layer becomes compute-bound; None: with no number of them."""
    ridge = peak / bandwidth * number_bytes  # operations for each number
    gain = 2 * inputs * outputs - ridge * (inputs + outputs)
    return math.ceil(ridge * inputs * outputs / gain) if gain > 0 else None


def picture(peak: float, bandwidth: float, places: Mapping[str, Places], title: str) -> Drawing:
    """The roof of a machine, and the operators beneath it as dots."""
    ridge = peak / bandwidth
    all_x = [x for kind in places.values() for x, _ in kind]
    low, high = min(*all_x, ridge / 10), max(*all_x, ridge * 10)
    roof = [(x, min(peak, x * bandwidth) / 1e9) for x in (low, ridge, high)]
    dots = {name: [(x, rate / 1e9) for x, rate in kind] for name, kind in places.items()}
    return curves({"roof": roof, **dots}, "FLOPs per byte", "GFLOP/s", title, log=True, points=[*dots])

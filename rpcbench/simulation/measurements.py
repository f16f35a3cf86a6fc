"""Measures the speed of this process and its links: matrix products, attention, memory, collectives.

Guarantees
- Every rank of the group runs each measurement at the same time as the others, as they do in a training step: so
  ranks that share cores and memory are measured sharing them.
- The time of an operator is the mean of many, after a warm-up: with more ranks than cores, the best one would be that
  of a rank alone. The time of a collective is the median of some. Of an operator that takes seconds, as products in
  bfloat16 on CPUs without instructions for it, two or three runs are enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as c10d
from torch.nn.functional import scaled_dot_product_attention

from rpcbench.simulation.costs import formula_seconds
from rpcbench.simulation.hardware import Curve, Efficiency, Hardware, LinkSpeed

_WIDTHS = (32, 64, 128, 256, 512, 1024)  # of square matrix products
_TOKENS = (64, 128, 256, 512)  # of attention: 4 heads of 64
_BYTES = tuple(1 << power for power in range(12, 27, 2))  # of tensors that are added
_MESSAGES = tuple(1 << power for power in range(10, 25, 2))  # bytes of collectives
_SECONDS = 0.3  # for one measurement
_FEWEST = 15  # runs of one
_LONGEST = 2.0  # seconds after which fewer are enough, and after which a warm-up ends
_COLD_BYTES = 1 << 27  # of operands, which are more than a cache holds
_MOST_PAIRS = 256
_Pair = tuple[torch.Tensor, torch.Tensor]
_KINDS: Mapping[str, Callable[[torch.Tensor, int], object]] = {
    "all_reduce": lambda tensor, n: c10d.all_reduce(tensor),
    "all_gather": lambda tensor, n: c10d.all_gather([*tensor.new_empty(n, len(tensor))], tensor),
    "reduce_scatter": lambda tensor, n: c10d.reduce_scatter(tensor.new_empty(len(tensor) // n), [*tensor.chunk(n)]),
    "broadcast": lambda tensor, n: c10d.broadcast(tensor, 0),
}


Times = list[tuple[float, float]]
"""(size, seconds), sizes ascending."""


class RankMeasurements(NamedTuple):
    """The measurements of one rank."""

    matmul: dict[str, Times]  # by type of the numbers; sizes are floating-point operations
    attention: Times
    memory: Times  # sizes are bytes read and written
    collectives: dict[str, Times]  # by kind; sizes are bytes of the rank's tensor


def measure_rank(types: Sequence[str] = ("float32", "bfloat16")) -> RankMeasurements:
    """Measure this rank. All ranks of the default group call it at the same time."""
    matmul = {name: [_measure_product(width, getattr(torch, name)) for width in _WIDTHS] for name in types}
    attention = [_measure_attention(tokens) for tokens in _TOKENS]
    memory = [_measure_addition(size) for size in _BYTES]
    ranks = c10d.get_world_size()
    collectives = {
        kind: [(float(size), _collective_seconds(run, size, ranks)) for size in _MESSAGES]
        for kind, run in _KINDS.items() if ranks > 1
    }  # fmt: skip
    return RankMeasurements(matmul, attention, memory, collectives)


def _measure_product(width: int, dtype: torch.dtype) -> tuple[float, float]:
    pairs = _make_pairs(4 * width**2, lambda: torch.ones(width, width, dtype=dtype))
    return 2.0 * width**3, _mean_seconds(lambda a, b: a @ b, pairs)


def _measure_attention(tokens: int) -> tuple[float, float]:
    pairs = _make_pairs(4 * 4 * tokens * 64, lambda: torch.ones(1, 4, tokens, 64))
    seconds = _mean_seconds(lambda query, key: scaled_dot_product_attention(query, key, key), pairs)
    return 4.0 * 4 * tokens**2 * 64, seconds


def _measure_addition(size: int) -> tuple[float, float]:
    pairs = _make_pairs(size, lambda: torch.ones(size // 4))
    return 3.0 * size, _mean_seconds(lambda a, b: torch.add(a, b, out=a), pairs)


def _make_pairs(size: int, make: Callable[[], torch.Tensor]) -> list[_Pair]:
    """Return pairs of operands, more than a cache holds: in a training step an operand was last used long ago."""
    return [(make(), make()) for _ in range(max(1, min(_MOST_PAIRS, _COLD_BYTES // (2 * size))))]


def _collective_seconds(run: Callable[[torch.Tensor, int], object], size: int, ranks: int) -> float:
    tensor = torch.ones(-(-size // 4 // ranks) * ranks)
    run(tensor, ranks)
    times = []
    for _ in range(_FEWEST):
        c10d.barrier()
        began = time.perf_counter()
        run(tensor, ranks)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]  # the median: the best one may have left before others came


def _mean_seconds(run: Callable[[torch.Tensor, torch.Tensor], object], pairs: Sequence[_Pair]) -> float:
    """Return the seconds of a run, in a time in which all ranks run the same; a result lives until the next round."""
    results: list[object] = []
    began = time.perf_counter()
    while len(results) < len(pairs) and time.perf_counter() - began < _LONGEST:
        results.append(run(*pairs[len(results)]))
    c10d.barrier()
    runs, began, passed = 0, time.perf_counter(), 0.0
    while passed < _SECONDS or (runs < _FEWEST and passed < _LONGEST):
        place = runs % len(results)
        results[place] = run(*pairs[place])
        runs += 1
        passed = time.perf_counter() - began
    return passed / runs


# -- a description from measurements
def describe_machine(name: str, measured: Sequence[RankMeasurements], memory_bytes: float) -> Hardware:
    """Return the description of a machine from its ranks' measurements, all made at the same time.

    Launches and latencies are in the times of small operators and messages, so they are 0 in the description.
    """
    flops = {dtype: _rates([each.matmul[dtype] for each in measured])[0] for dtype in measured[0].matmul}
    _, matmul = _rates([each.matmul["float32"] for each in measured])
    fused, attention = _rates([each.attention for each in measured])
    bandwidth, memory = _rates([each.memory for each in measured])
    scaled = tuple((size, share * fused / flops["float32"]) for size, share in attention)
    link, reached, factors = _describe_link([each.collectives for each in measured])
    return Hardware(
        name, flops, bandwidth, memory_bytes, 0.0, link, link, len(measured),
        Efficiency(matmul, scaled, memory, reached), has_streams=False, collective_factors=factors,
        source=f"measured on {len(measured)} ranks",
    )  # fmt: skip


def _average(measured: Sequence[Times]) -> Times:
    """Return the mean times of all ranks, by size."""
    return [(each[0][0], math.fsum(seconds for _, seconds in each) / len(each)) for each in zip(*measured, strict=True)]


def _rates(measured: Sequence[Times]) -> tuple[float, Curve]:
    """Return the best rate, and the share of it that each size reaches."""
    points = [(size, size / seconds) for size, seconds in _average(measured)]
    best = max(rate for _, rate in points)
    return best, tuple((size, rate / best) for size, rate in points)


def _describe_link(measured: Sequence[Mapping[str, Times]]) -> tuple[LinkSpeed, Curve, dict[str, float]]:
    """Return the link by which the formula of an all-reduce gives the times measured, and the factors by which the
    times of other kinds differ from their formulas."""
    ranks = len(measured)
    if ranks < 2:
        return LinkSpeed(math.inf, 0.0), ((1.0, 1.0),), {}
    times = {kind: _average([each[kind] for each in measured]) for kind in measured[0]}
    points = [(size, formula_seconds("all_reduce", size, ranks, 1.0, 0.0) / took) for size, took in times["all_reduce"]]
    best = max(rate for _, rate in points)
    factors = {}
    for kind, values in times.items():
        shares = [
            took / formula_seconds(kind, size, ranks, 1 / rate, 0.0)
            for (size, took), (_, rate) in zip(values, points, strict=True)
        ]
        factors[kind] = sorted(shares)[len(shares) // 2]
    return LinkSpeed(best, 0.0), tuple((size, rate / best) for size, rate in points), factors

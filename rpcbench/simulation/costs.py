"""The seconds of an operator and of a collective on a given hardware.

Rules
- An operator takes the longer of two times: its floating-point operations at the reached share of the peak, its bytes
  at the reached share of the memory's bandwidth (a roofline).
- A collective takes the formula of its algorithm over the slowest link that its group crosses. A group with k ranks on
  each of several hosts has k links between hosts, and no more than the link within one.
- An all-reduce takes the faster one of ring and tree, as libraries choose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rpcbench.simulation.hardware import Hardware, LinkSpeed, read_curve
from rpcbench.simulation.rank_log import Collective, Kernel

COMPUTE_BOUND, MEMORY_BOUND = "compute", "memory-bound"


class KernelTime(NamedTuple):
    """The time of an operator, and which side of the roofline it is on."""

    seconds: float
    bound: str  # COMPUTE_BOUND or MEMORY_BOUND


def kernel_time(kernel: Kernel, hardware: Hardware) -> KernelTime:
    """Return the time of an operator."""
    efficiency = hardware.efficiency
    memory = kernel.bytes / (hardware.memory_bandwidth * read_curve(efficiency.memory, max(kernel.bytes, 1)))
    if not kernel.flops:
        return KernelTime(memory, MEMORY_BOUND)
    reached = efficiency.attention if kernel.kind == "attention" else efficiency.matmul
    compute = kernel.flops / (hardware.peak_flops(kernel.dtype) * read_curve(reached, kernel.flops))
    return KernelTime(max(compute, memory), COMPUTE_BOUND if compute >= memory else MEMORY_BOUND)


def link_of_group(ranks: Sequence[int], hardware: Hardware) -> LinkSpeed:
    """Return the slowest link that a group's ring crosses."""
    hosts = Counter(rank // hardware.ranks_per_host for rank in ranks)
    if len(hosts) <= 1:
        return hardware.within
    shared = min(hosts.values()) * hardware.between.bandwidth
    return LinkSpeed(min(hardware.within.bandwidth, shared), hardware.between.latency)


Formula = Callable[[float, int, float, float], float]
"""(bytes of this rank's tensors, ranks, seconds per byte, latency): the seconds of a collective."""


def _ring_or_tree(size: float, n: int, beta: float, alpha: float) -> float:
    ring = 2 * (n - 1) / n * size * beta + 2 * (n - 1) * alpha
    tree = 2 * size * beta + 2 * math.ceil(math.log2(n)) * alpha
    return min(ring, tree)


_FORMULAS: dict[str, Formula] = {
    "all_reduce": _ring_or_tree,
    "all_gather": lambda size, n, beta, alpha: (n - 1) * (size * beta + alpha),
    "reduce_scatter": lambda size, n, beta, alpha: (n - 1) * (size / n * beta + alpha),
    "all_to_all": lambda size, n, beta, alpha: (n - 1) / n * size * beta + alpha,
    "broadcast": lambda size, n, beta, alpha: size * beta + math.ceil(math.log2(n)) * alpha,
    "reduce": lambda size, n, beta, alpha: size * beta + math.ceil(math.log2(n)) * alpha,
    "gather": lambda size, n, beta, alpha: (n - 1) * size * beta + alpha,
    "scatter": lambda size, n, beta, alpha: (n - 1) * size * beta + alpha,
    "barrier": lambda size, n, beta, alpha: 2 * math.ceil(math.log2(n)) * alpha,
    "monitored_barrier": lambda size, n, beta, alpha: 2 * math.ceil(math.log2(n)) * alpha,
}


def collective_seconds(collective: Collective, rank: int, hardware: Hardware) -> float:
    """Return the seconds of a collective from the arrival of its last rank, or of a transfer of `rank`."""
    ranks = collective.ranks if collective.peer is None else (rank, collective.peer)
    if len(ranks) < 2:
        return 0.0
    link = link_of_group(ranks, hardware)
    beta = 1 / (link.bandwidth * read_curve(hardware.efficiency.link, max(collective.bytes, 1)))
    if collective.peer is not None:
        return link.latency + collective.bytes * beta
    factor = hardware.collective_factors.get(collective.kind, 1.0)
    return factor * formula_seconds(collective.kind, collective.bytes, len(ranks), beta, link.latency)


def formula_seconds(kind: str, size: float, ranks: int, beta: float, alpha: float) -> float:
    """Return the seconds of a collective by its algorithm's formula: `size` bytes of each rank's tensors, `beta`
    seconds per byte, `alpha` seconds of a message."""
    return _FORMULAS[kind](size, ranks, beta, alpha)

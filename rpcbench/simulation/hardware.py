"""Descriptions of accelerators and of the links between them, as `rpcbench.simulate` uses them.

Guarantees
- A description is plain data: change one by `dataclasses.replace`, save it as JSON.
- Peaks and bandwidths are the vendor's, for dense numbers; `efficiency` says which share of them programs reach. Where
  that share comes from is in `source`.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpcbench.base.errors import suggest_nearest
from rpcbench.base.files import replace_file

Curve = tuple[tuple[float, float], ...]
"""Points (size, rate), sizes ascending; the rate between two of them is interpolated over the size's logarithm."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link of one rank, in one direction.

    Args:
        bandwidth: Bytes per second.
        latency: Seconds of a message without content.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a peak that programs reach, from 0 to 1.

    Args:
        matmul: Of the peak of a matrix product, by its floating-point operations.
        attention: The same for fused attention.
        memory: Of the memory's bandwidth, by the bytes of an operator.
        link: Of a link's bandwidth, by the bytes of a message.
        contention: Seconds that an operator loses for each second of a collective beside it.
        spread: Standard deviation of the speeds of equal ranks.
    """

    matmul: Curve = ((1e9, 0.1), (1e11, 0.63), (1e12, 0.7))
    attention: Curve = ((1e9, 0.05), (1e11, 0.3), (1e12, 0.35))
    memory: Curve = ((1e5, 0.2), (1e7, 0.75), (1e9, 0.85))
    link: Curve = ((1e4, 0.1), (1e6, 0.4), (1e8, 0.8))
    contention: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator, and the world of many.

    Args:
        name: For reports.
        flops: Floating-point operations per second, by the type of the numbers: "bfloat16".
        memory_bandwidth: Bytes per second.
        memory_bytes: Of one rank.
        launch_seconds: Time in which the program issues one operator.
        within: The link between two ranks of a host.
        between: The link of a rank to other hosts.
        ranks_per_host: Neighbouring ranks that share a host.
        efficiency: See `Efficiency`.
        has_streams: Whether operators run beside the program. False: a CPU, on which the program runs them itself.
        collective_factors: How much longer than by its formula a kind of collective takes; 1 by default.
        source: Where the figures come from.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    launch_seconds: float
    within: LinkSpeed
    between: LinkSpeed
    ranks_per_host: int = 8
    efficiency: Efficiency = field(default_factory=Efficiency)
    has_streams: bool = True
    collective_factors: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def peak_flops(self, dtype: str) -> float:
        """Return the peak for a type of numbers. KeyError, with the types that there are, for one it does not have."""
        if dtype not in self.flops:
            raise KeyError(f"{self.name} has no peak for {dtype}: it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def save(self, path: str | Path) -> None:
        """Write the description to a JSON file; `load_hardware` reads it."""
        with replace_file(Path(path)) as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=1).encode())


def load_hardware(path: str | Path) -> Hardware:
    """Read a description that `Hardware.save` has written."""
    fields: dict[str, Any] = json.loads(Path(path).read_text())
    efficiency: dict[str, Any] = {
        name: tuple(map(tuple, value)) if isinstance(value, list) else value
        for name, value in fields["efficiency"].items()
    }
    return Hardware(
        **fields | {
            "within": LinkSpeed(**fields["within"]), "between": LinkSpeed(**fields["between"]),
            "efficiency": Efficiency(**efficiency),
        }
    )  # fmt: skip


def read_curve(curve: Curve, size: float) -> float:
    """Return the rate at a size; that of the nearest end beyond the curve."""
    sizes = [point[0] for point in curve]
    place = bisect.bisect_right(sizes, size)
    if place in (0, len(curve)):
        return curve[min(place, len(curve) - 1)][1]
    (small, low), (large, high) = curve[place - 1 : place + 1]
    share = math.log(size / small) / math.log(large / small)
    return low + (high - low) * share


_GB, _GIB, _TERA = 1e9, 2.0**30, 1e12


def _nvidia(name: str, tensor: float, single: float, bandwidth: float, memory: float, within: float, source: str,
            between: float = 50 * _GB, matmul: float = 0.7, attention: float = 0.35) -> Hardware:  # fmt: skip
    peaks = {"bfloat16": tensor * _TERA, "float16": tensor * _TERA, "float32": single * _TERA}
    near, far = LinkSpeed(within * _GB, 4e-6), LinkSpeed(between, 10e-6)
    shares = Efficiency(_rise_to(matmul), _rise_to(attention), contention=_CONTENTION, spread=_SPREAD)
    return Hardware(name, peaks, bandwidth * _GB, memory * _GIB, 6e-6, near, far, efficiency=shares, source=source)


_CONTENTION = 0.19
"""On A100 and H100, by arXiv 2507.03114: 18.9 % on average."""
_SPREAD = 0.015
"""GPUs of one model differ by 8 % in a cluster (arXiv 2208.11035); read as 5.4 standard deviations."""


def _rise_to(share: float) -> Curve:
    """Return a curve that reaches a share of the peak where an operator is large."""
    return (1e9, 0.15 * share), (1e11, 0.9 * share), (1e12, share)


_HOPPER = (
    "dense, TF32 for float32; 400 Gb/s per GPU between hosts; matrix products reach 0.7 of the peak, as a power limit "
    "of 700 W lets them; FlashAttention 2 reaches 0.35 (abstract of FlashAttention 3)"
)
_AMPERE = "dense, TF32 for float32; FlashAttention 2 reaches 0.5 to 0.6 of the peak (its paper)"
HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        _nvidia("h100", 989.4, 494.7, 3350, 79.6, 450, f"NVIDIA H100 SXM data sheet, {_HOPPER}"),
        _nvidia("h200", 989.4, 494.7, 4800, 140.4, 450, f"NVIDIA H200 SXM data sheet, {_HOPPER}"),
        _nvidia("a100", 312.0, 156.0, 2039, 79.3, 300, f"NVIDIA A100 80 GB SXM data sheet, {_AMPERE}; 200 Gb/s per "
                "GPU between hosts; matrix products reach 0.7, fitted to a run of Llama 2 13B (docs/simulation.md)",
                25 * _GB, attention=0.55),
        _nvidia("l40s", 362.0, 183.0, 864, 44.5, 32, f"NVIDIA L40S data sheet, {_AMPERE}; PCIe within a host, 200 "
                "Gb/s per GPU between hosts", 25 * _GB, attention=0.55),
    )
}  # fmt: skip
"""The descriptions that have a name."""


def hardware(name: str) -> Hardware:
    """Return a description by its name, for `rpcbench.simulate`.

    Args:
        name: "h100", "h200", "a100" (80 GB) or "l40s".

    Raises:
        ValueError: There is no description of that name.

    >>> rpcbench.hardware("a100").flops["bfloat16"]
    312000000000000.0
    """
    if name not in HARDWARE:
        raise ValueError(f"there is no hardware {name!r}: {suggest_nearest(name, HARDWARE)}")
    return HARDWARE[name]

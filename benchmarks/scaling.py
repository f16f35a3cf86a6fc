"""How cost grows with the size of a thing: payload, workers, RRefs alive, calls in flight.

Each series has curves, and says for each what growth is fair: none (exponent 0) or linear (1). The exponent is that of
the upper half of the range, where fixed costs no longer hide it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.report import Point, curves
from benchmarks.workloads import larger, same
from rpcbench.base.errors import RpcError
from rpcbench.launch.cluster import Cluster
from rpcbench.runtime import current

FLAT, LINEAR = 0.0, 1.0
_BYTES = (1, 1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28, 1 << 30)
_TOLERANCE = 0.2
_SECONDS = 0.5
_FEWEST = 3
_GONE_SECONDS = 60.0

Measured = Iterator[tuple[str, int, float]]
"""(curve, size, seconds)"""


class Series(NamedTuple):
    """What grows, the sizes, and the exponent that is fair for each curve."""

    name: str
    sizes: tuple[int, ...]
    fair: dict[str, float]
    measure: Callable[[tuple[int, ...]], Measured]


class Curve(NamedTuple):
    """Seconds by size."""

    series: str
    name: str
    points: list[Point]
    fair: float

    @property
    def exponent(self) -> float:
        """Of seconds ~ size ** exponent, fitted to the upper half of the sizes on a logarithmic scale."""
        sizes = [size for size, _ in self.points]
        middle = math.sqrt(sizes[0] * sizes[-1])
        upper = [(math.log(size), math.log(seconds)) for size, seconds in self.points if size >= middle]
        x0, y0 = (fmean(values) for values in zip(*upper, strict=True))
        spread = sum((x - x0) ** 2 for x, _ in upper)
        return sum((x - x0) * (y - y0) for x, y in upper) / spread if spread else 0.0

    @property
    def is_fair(self) -> bool:
        return self.exponent <= self.fair + _TOLERANCE


def payloads(sizes: tuple[int, ...]) -> Measured:
    with Cluster(1) as cluster:
        for size in sizes:
            tensor = torch.ones(size, dtype=torch.uint8)
            yield "echo", size, _typical(partial(cluster.rpc_sync, "worker1", same, (tensor,)))


def workers(sizes: tuple[int, ...]) -> Measured:
    with Cluster(1):
        pass  # from here on the starter is warm
    for size in sizes:
        begin = perf_counter()
        with Cluster(size) as cluster:
            yield "start", size, perf_counter() - begin
            yield "a call to each", size, _typical(partial(_call_each, cluster))
            begin = perf_counter()
        yield "stop", size, perf_counter() - begin


def rrefs(sizes: tuple[int, ...]) -> Measured:
    with Cluster(1) as cluster:
        for size in sizes:
            begin = perf_counter()
            held = [cluster.remote("worker1", larger, (number, 0)) for number in range(size)]
            held[-1].to_here()
            yield "make, per RRef", size, (perf_counter() - begin) / size
            yield "one more beside them", size, _typical(partial(_make_one, cluster))
            begin = perf_counter()
            held.clear()
            _await_none(cluster)
            yield "let go, per RRef", size, (perf_counter() - begin) / size


def outstanding(sizes: tuple[int, ...]) -> Measured:
    with Cluster(1) as cluster:
        for size in sizes:
            yield "per call", size, _typical(partial(_call_many, cluster, size)) / size


def _make_one(cluster: Cluster) -> int:
    value: int = cluster.remote("worker1", larger, (1, 0)).to_here()
    return value


def _call_each(cluster: Cluster) -> None:
    for future in [cluster.rpc_async(name, larger, (1, 2)) for name in cluster.workers]:
        future.wait()


def _call_many(cluster: Cluster, count: int) -> None:
    for future in [cluster.rpc_async("worker1", larger, (number, 0)) for number in range(count)]:
        future.wait()


def _await_none(cluster: Cluster) -> None:
    """Until the worker owns none; what still says goodbye is on its way, and nothing announces the last one."""
    deadline = time.monotonic() + _GONE_SECONDS
    while owned := cluster.rpc_sync("worker1", _owned):
        if time.monotonic() > deadline:
            raise RpcError(f"{owned} RRefs have not gone within {_GONE_SECONDS:g} s")
        time.sleep(0.001)


def _owned() -> int:
    return current.current_agent().machine.read_node(lambda node: len(node.rrefs.owned))


def _typical(run: Callable[[], object]) -> float:
    """The median of some runs, after one that does not count."""
    run()
    times: list[float] = []
    end = perf_counter() + _SECONDS
    while (begin := perf_counter()) < end or len(times) < _FEWEST:
        run()
        times.append(perf_counter() - begin)
    return median(times)


def all_series(quick: bool) -> list[Series]:
    """What is measured; `quick` leaves the large sizes out."""
    cut = 3 if quick else None
    starts = dict.fromkeys(("start", "a call to each", "stop"), LINEAR)
    handles = dict.fromkeys(("make, per RRef", "one more beside them", "let go, per RRef"), FLAT)
    return [
        Series("bytes", _BYTES[:cut], {"echo": LINEAR}, payloads),
        Series("workers", (1, 2, 4, 8, 16, 32)[:cut], starts, workers),
        Series("RRefs", (10, 100, 1000, 10_000, 100_000)[:cut], handles, rrefs),
        Series("calls in flight", (1, 10, 100, 1000, 10_000)[:cut], {"per call": FLAT}, outstanding),
    ]


def run(series: Series) -> list[Curve]:
    """Measure all curves of a series."""
    found: dict[str, list[Point]] = {name: [] for name in series.fair}
    for name, size, seconds in series.measure(series.sizes):
        found[name].append((size, seconds))
    return [Curve(series.name, name, points, series.fair[name]) for name, points in found.items()]


def as_table(found: list[Curve]) -> Table:
    """One line a curve: cost at both ends, and its exponent."""
    table = Table(
        title="cost against size", caption="Exponent: of the upper half of the range; 0 is flat, 1 is linear."
    )
    for heading in ("grows", "cost", "from", "to", "exponent", "fair"):
        table.add_column(heading, justify="left" if heading in ("grows", "cost") else "right")
    for curve in found:
        ends = [f"{seconds * 1e6:,.1f} µs at {size:,.0f}" for size, seconds in (curve.points[0], curve.points[-1])]
        fair = f"{'✓' if curve.is_fair else '✗'} {curve.fair:g}"
        table.add_row(curve.series, curve.name, *ends, f"{curve.exponent:.2f}", fair)
    return table


def as_values(found: list[Curve]) -> list[dict[str, object]]:
    """All points, in seconds, with the exponents."""
    return [{**curve._asdict(), "exponent": curve.exponent} for curve in found]


def as_plot(found: list[Curve]) -> str:
    """The curves of one series, as SVG."""
    return curves("cost against size", found[0].series, "seconds", {curve.name: curve.points for curve in found})

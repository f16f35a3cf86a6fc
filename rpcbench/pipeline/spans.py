"""When workers ran their ops, and how long they were idle: one definition for measured and for simulated steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rpcbench.pipeline.ops import Op


@dataclass(frozen=True, slots=True)
class Span:
    """When a worker ran an op: `begin` to `end`."""

    worker: int
    op: Op
    begin: float
    end: float


def idle_share(spans: Iterable[Span], workers: int) -> float:
    """The share of the workers' time, between the first op and the last, in which none ran."""
    return idle_between([(span.begin, span.end) for span in spans], workers)


def idle_between(ops: Collection[tuple[float, float]], workers: int) -> float:
    """1 - (time in ops) / (workers * (end of the last op - begin of the first)); 0 where nothing took time.

    `ops`: begin and end of each. One definition for measured and for simulated steps. The optimizer is no op, so it
    does not count.
    """
    if not ops:
        return 0.0
    lasted = max(end for _, end in ops) - min(begin for begin, _ in ops)
    busy = sum(end - begin for begin, end in ops)
    return 1 - busy / (workers * lasted) if lasted else 0.0

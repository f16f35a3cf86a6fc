"""Schedules against reality: idle shares as measured, beside those of the simulator, for stages of a fixed cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

import torch

from benchmarks.pipeline_sides import FixedCost, cost, loss
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, schedule, simulate, split
from rpcbench.pipeline.ops import Ops, needed_results, result_of_op
from rpcbench.pipeline.schedules import schedule_names
from rpcbench.pipeline.simulate import Span

SCHEDULES = schedule_names()
TOLERANCE = 0.03
"""So far may the measured share be from the simulated one."""


class Plan(NamedTuple):
    """`steps` that count of each schedule; each forward takes so many `seconds`."""

    workers: int = 4
    microbatches: int = 8
    seconds: float = 0.02
    steps: int = 3


QUICK = Plan(steps=1, seconds=0.002)


class Idle(NamedTuple):
    """Idle shares of one schedule, 0 to 1.

    `lag`: seconds from the end of an op to the begin of another worker's that waited for it, on average; `explained` is
    the simulator's share if all transfers take so long. So what a busy machine does can be told from what we do.
    """

    schedule: str
    simulated: float
    measured: float
    lag: float = 0.0
    explained: float = 0.0

    @property
    def ok(self) -> bool:
        return abs(self.measured - self.simulated) <= TOLERANCE

    @property
    def is_explained(self) -> bool:
        return abs(self.measured - self.explained) <= TOLERANCE


def measure(plan: Plan) -> Iterator[Idle]:
    """All schedules, each as soon as it is known."""
    with Cluster(plan.workers) as cluster:
        for name in SCHEDULES:
            yield idle(name, cluster.workers, plan)


def idle(name: str, workers: list[str], plan: Plan) -> Idle:
    """One schedule, on these workers: the median of some steps, after one that does not count."""
    count = schedule(name, len(workers), plan.microbatches).stages
    stages = [FixedCost(plan.seconds) for _ in range(count)]
    pipe = Pipeline(split(stages, workers, balance=[1] * len(stages)), name, plan.microbatches, loss)
    x = torch.zeros(plan.microbatches, 4)
    found = []
    for _ in range(1 + plan.steps):
        with pipe.batch(x, x) as batch:
            found.append((batch.result.idle, lag(pipe.ops, batch.result.timeline.spans)))
    measured, late = sorted(found[1:])[plan.steps // 2]
    explained = simulate(pipe.ops, cost, late / plan.seconds).idle
    return Idle(name, simulate(pipe.ops, cost).idle, measured, late, explained)


def lag(ops: Ops, spans: Iterable[Span]) -> float:
    """Seconds, on average, from the end of an op to the begin of one on another worker that waited for that and for
    nothing else; 0 where none did."""
    at = {span.op: span for span in spans}
    ended = {result_of_op(op): span for op, span in at.items()}
    late = []
    for own in ops:
        for before, op in zip([None, *own], own, strict=False):
            others = [ended[need] for need in needed_results(op, 1 + max(span.op.stage for span in at.values()))]
            came = max((span.end for span in others if span.worker != at[op].worker), default=None)
            if came is not None and (before is None or came > at[before].end):
                late.append(at[op].begin - came)
    return fmean(late) if late else 0.0

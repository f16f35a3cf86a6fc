"""The comparison: rounds of batches in random order, one side running while the other stands still."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from rpcbench.bench import startup
from rpcbench.bench.pair import Pair, pairs
from rpcbench.bench.workloads import WORKLOADS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `budget`: seconds of one batch; `starts`: numbers of workers to start, `repeats` times."""

    seed: int
    rounds: int = 10
    budget: float = 0.3
    starts: tuple[int, ...] = (2, 4)
    repeats: int = 2

    @staticmethod
    def quick(seed: int) -> Plan:
        """Enough to see that everything runs, too little to trust the figures."""
        return Plan(seed, rounds=2, budget=0.1, starts=(2,), repeats=1)


@dataclass(slots=True)
class Samples:
    """Seconds of one workload on one side, batch by batch in the order of measuring."""

    batches: list[list[float]] = field(default_factory=list)

    @property
    def _all(self) -> list[float]:
        return [seconds for batch in self.batches for seconds in batch]

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def p50(self) -> float:
        return median(self._all)

    @property
    def p10(self) -> float:
        return quantiles(self._all, n=10, method="inclusive")[0] if self.count > 1 else self.p50


Figures = dict[str, dict[str, Samples]]
"""{title of the workload: {name of the side: samples}}"""


def compare(sides: dict[str, str], plan: Plan) -> Figures:
    """Measure every workload on each side (its name and RPC module); raises BenchError where one cannot do it."""
    order = random.Random(plan.seed)
    starts = [f"start of {count} workers{warmth}" for count in plan.starts for warmth in ("", ", warm")]
    figures: Figures = {title: {name: Samples() for name in sides} for title in (*WORKLOADS, *starts)}
    with pairs(sides) as frozen:
        batches = [(number, title) for number in range(plan.rounds) for title in _shuffled(order, WORKLOADS)]
        for number, title in _shown(batches, "calls"):
            for pair in _shuffled(order, frozen):
                figures[title][pair.name].batches.append(_batch(pair, title, number, plan))
        for count in _shown([count for _ in range(plan.repeats) for count in plan.starts], "starts"):
            for name in _shuffled(order, sides):
                cold, warm = startup.measure(sides[name], count)
                figures[f"start of {count} workers"][name].batches.append([cold])
                figures[f"start of {count} workers, warm"][name].batches.append([warm])
    return figures


def _batch(pair: Pair, title: str, number: int, plan: Plan) -> list[float]:
    pair.thaw()
    seconds = pair.ask(title, f"{plan.seed}/{number}/{title}", plan.budget)
    pair.freeze()
    return seconds


def _shuffled(order: random.Random, items: Iterable[T]) -> list[T]:
    items = list(items)
    return order.sample(items, len(items))


def _shown(items: list[T], what: str) -> Iterable[T]:
    return track(items, what, console=Console(stderr=True), transient=True)

"""The comparison: rounds of batches in random order, one side running while the other stands still."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from rpcbench.bench import startup
from rpcbench.bench.figures import Batch, Figures, Samples
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


def titles(plan: Plan) -> list[str]:
    """All rows that a run by this plan can have."""
    return [*WORKLOADS, *(title for count in plan.starts for title in startup.titles(count))]


def compare(sides: dict[str, str], plan: Plan, chosen: Collection[str]) -> Figures:
    """Measure the chosen rows on each side (its name and RPC module; ours comes first).

    BenchError where a side cannot do its work.
    """
    order = random.Random(plan.seed)
    figures: Figures = {title: {} for title in titles(plan) if title in chosen}
    for title, name, batch in (*_calls(sides, plan, order, chosen), *_starts(sides, plan, order, chosen)):
        main = WORKLOADS[title].quantile if title in WORKLOADS else 0.5
        figures[title].setdefault(name, Samples(main)).batches.append(batch)
    return figures


Measured = Iterator[tuple[str, str, Batch]]


def _calls(sides: dict[str, str], plan: Plan, order: random.Random, chosen: Collection[str]) -> Measured:
    work = [title for title in WORKLOADS if title in chosen]
    if not work:
        return
    with pairs(sides) as frozen:
        batches = [(number, title) for number in range(plan.rounds) for title in _shuffled(order, work)]
        for number, title in _shown(batches, "calls"):
            for pair in _shuffled(order, frozen[:1] if WORKLOADS[title].ours_only else frozen):
                yield title, pair.name, _batch(pair, title, number, plan)


def _starts(sides: dict[str, str], plan: Plan, order: random.Random, chosen: Collection[str]) -> Measured:
    counts = [count for count in plan.starts if any(title in chosen for title in startup.titles(count))]
    for count in _shown(counts * plan.repeats, "starts"):
        for name in _shuffled(order, sides):
            for title, seconds in zip(startup.titles(count), startup.measure(sides[name], count), strict=True):
                if title in chosen:
                    yield title, name, Batch([seconds])


def _batch(pair: Pair, title: str, number: int, plan: Plan) -> Batch:
    pair.thaw()
    batch = pair.ask(title, f"{plan.seed}/{number}/{title}", plan.budget)
    pair.freeze()
    return batch


def _shuffled(order: random.Random, items: Iterable[T]) -> list[T]:
    items = list(items)
    return order.sample(items, len(items))


def _shown(items: list[T], what: str) -> Iterable[T]:
    return track(items, what, console=Console(stderr=True), transient=True)

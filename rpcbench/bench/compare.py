"""The comparison: rounds of batches in random order, one side running while the other stands still."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from rpcbench.bench import startup
from rpcbench.bench.figures import Batch, Figures, Samples
from rpcbench.bench.pair import Pair, pairs
from rpcbench.bench.plan import Plan
from rpcbench.bench.workloads import WORKLOADS

T = TypeVar("T")


def compare(sides: dict[str, str], plan: Plan, chosen: Collection[str]) -> Figures:
    """Measure the chosen rows on each side (its name and RPC module; ours comes first).

    BenchError where a side cannot do its work.
    """
    order = random.Random(plan.seed)
    rows = plan.rows()
    figures: Figures = {title: {} for title in rows if title in chosen}
    for title, name, batch in chain(_calls(sides, plan, order, chosen), _worlds(sides, plan, order, chosen)):
        figures[title].setdefault(name, Samples(rows[title].quantile)).batches.append(batch)
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


def _worlds(sides: dict[str, str], plan: Plan, order: random.Random, chosen: Collection[str]) -> Measured:
    for scene in _shown(plan.scenes(chosen) * plan.repeats, "worlds"):
        for name in _shuffled(order, sides):
            for title, value in zip(scene.rows, startup.measure(sides[name], scene), strict=True):
                if title in chosen:
                    yield title, name, Batch([value])


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

"""The comparison: rounds of batches in random order; one side runs while the other side is stopped."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from benchmarks import rows as sides
from benchmarks import startup
from benchmarks.pairs import Pair, Side, obstacle, pairs, two_hosts
from benchmarks.rows import BARE, BOTH, HOSTS, OURS, PLAIN, Batch, Figures, Row, Samples, Workload
from benchmarks.startup import Scene
from benchmarks.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget`: seconds of one batch, `rounds` times; worlds are started `repeats` times, of up to `workers`."""

    seed: int
    rounds: int = 10
    budget: float = 0.3
    workers: int = 8
    repeats: int = 3

    @staticmethod
    def quick(seed: int) -> Plan:
        """Enough to see that everything runs, too little to trust the figures."""
        return Plan(seed, rounds=2, budget=0.1, workers=2, repeats=1)

    def rows(self) -> dict[str, Row]:
        """All rows, by title."""
        calls = {title: workload.row for title, workload in WORKLOADS.items()}
        return calls | {title: row for scene in startup.scenes(self.workers) for title, row in scene.rows.items()}

    def scenes(self, chosen: Collection[str]) -> list[Scene]:
        """Those that have a chosen row."""
        return [scene for scene in startup.scenes(self.workers) if not scene.rows.keys().isdisjoint(chosen)]


T = TypeVar("T")


def compare(apis: dict[str, str], plan: Plan, chosen: Collection[str]) -> Figures:
    """Measure the chosen rows on each side (its name and RPC module; ours comes first).

    BenchError where a side cannot do its work. What this machine cannot show is left out, which is said.
    """
    order = random.Random(plan.seed)
    rows = plan.rows()
    figures: Figures = {}
    for title, name, batch in chain(_calls(apis, plan, order, chosen), _worlds(apis, plan, order, chosen)):
        samples = figures.setdefault(title, {}).setdefault(name, Samples(rows[title].quantile))
        samples.batches.append(batch)
    return {title: figures[title] for title in rows if title in figures}


Measured = Iterator[tuple[str, str, Batch]]


def _calls(apis: dict[str, str], plan: Plan, order: random.Random, chosen: Collection[str]) -> Measured:
    work = [title for title in WORKLOADS if title in chosen]
    if not work:
        return
    ours = next(iter(apis))
    with _met(apis, {WORKLOADS[title].on for title in work}) as frozen:
        able = {title: _able(frozen, ours, WORKLOADS[title]) for title in work}
        batches = [(number, title) for number in range(plan.rounds) for title in _shuffled(order, work) if able[title]]
        for number, title in _shown(batches, "calls"):
            for pair in _shuffled(order, able[title]):
                name = pair.name if WORKLOADS[title].on == BOTH else ours
                yield title, name, _batch(pair, title, number, plan)


@contextlib.contextmanager
def _met(apis: dict[str, str], needed: set[str]) -> Iterator[list[Pair]]:
    """The pairs of all sides that are needed."""
    with contextlib.ExitStack() as stack:
        all_sides = [Side(name, api) for name, api in apis.items()]
        if BARE in needed:
            all_sides.append(Side(BARE, PLAIN))
        if far := needed & {HOSTS, PLAIN}:
            if problem := obstacle():
                Console(stderr=True).print(f"Not measured between hosts: {problem}.")
            else:
                places = stack.enter_context(two_hosts())
                far_apis = {HOSTS: next(iter(apis.values())), PLAIN: PLAIN}
                all_sides += [Side(kind, far_apis[kind], places) for kind in sorted(far)]
        yield stack.enter_context(pairs(all_sides))


def _able(frozen: list[Pair], ours: str, workload: Workload) -> list[Pair]:
    """The pairs that a workload is measured on."""
    on = workload.on
    if on == BOTH:
        both = [pair for pair in frozen if pair.name not in (HOSTS, PLAIN, BARE)]
        return [pair for pair in both if sides.does(pair.api, workload.needs)]
    return [pair for pair in frozen if pair.name == (ours if on == OURS else on)]


def _worlds(apis: dict[str, str], plan: Plan, order: random.Random, chosen: Collection[str]) -> Measured:
    able = [name for name, api in apis.items() if sides.does(api, sides.WORLDS)]
    for scene in _shown(plan.scenes(chosen) * plan.repeats, "worlds"):
        for name in _shuffled(order, able):
            for title, value in zip(scene.rows, startup.measure(apis[name], scene), strict=True):
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

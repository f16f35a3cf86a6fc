"""Checks of lesson 34."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checks import NotYet, exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

Layout = tuple[int, int, int]


def _layouts(workers: int, layers: int, heads: int, microbatches: int) -> list[Layout]:
    return [
        (dp, tp, workers // dp // tp)
        for dp in range(1, workers + 1)
        if workers % dp == 0 and microbatches % dp == 0
        for tp in range(1, workers // dp + 1)
        if workers // dp % tp == 0 and heads % tp == 0 and layers % (workers // dp // tp) == 0
    ]


JOBS = [
    (4, 4, 4, 8),
    (1, 2, 2, 1),
    (8, 4, 4, 8),
    (6, 6, 4, 12),
    (12, 12, 6, 8),
    (8, 8, 8, 2),
    (16, 32, 2, 64),
    (8, 6, 8, 8),  # four stages are fewer than the layers, and do not divide them
    (8, 8, 6, 8),  # the same with the heads
    (8, 8, 8, 6),  # and with the micro-batches
]


@exercise(
    "Two loops are enough: the third number follows from the product. Each number must divide something of its own.",
    "For dp and tp in range(1, workers + 1): if dp * tp divides workers, pp is workers // (dp * tp); test all three.",
)
def layouts(answer: Callable[[int, int, int, int], list[Layout]]) -> None:
    """`answer(workers, layers, heads, microbatches)` is all triples (dp, tp, pp) that are possible."""
    for job in JOBS:
        workers, layers, heads, microbatches = job
        case = f"{workers} workers, {layers} layers, {heads} heads, {microbatches} micro-batches"
        with trying(case):
            found = returned(answer(*job))
        require(type(found) is list, f"{case}: a list is wanted, not {shown(found)}.")
        for each in found:
            triple = isinstance(each, tuple) and len(each) == 3 and all(type(size) is int for size in each)
            require(triple, f"{case}: {shown(each)} is no triple (dp, tp, pp) of whole numbers.")
            dp, tp, pp = each
            require(dp * tp * pp == workers, f"{case}: {each} needs {dp * tp * pp:g} workers.")
            require(layers % pp == 0, f"{case}: in {each} the stages do not divide the layers.")
            require(heads % tp == 0, f"{case}: in {each} tensor parallel does not divide the heads.")
            require(microbatches % dp == 0, f"{case}: in {each} the replicas do not divide the micro-batches.")
        missing = [each for each in _layouts(*job) if each not in found]
        require(not missing, f"{case}: {shown(missing)} is missing; you have {shown(found)}.")
        require(len(set(found)) == len(found), f"{case}: a layout is there twice in {shown(found)}.")
    right("All that is possible. Memory and time choose among these.")


SIZES: list[tuple[float, float, Layout, int]] = [  # parameters, activations, layout, micro-batches
    (1000, 600, (1, 1, 1), 8),
    (1000, 600, (4, 1, 1), 8),
    (1000, 600, (1, 4, 1), 8),
    (1000, 600, (1, 1, 4), 8),
    (9600, 4800, (2, 2, 3), 12),
    (9600, 4800, (4, 1, 4), 8),  # two micro-batches on four stages
    (9600, 4800, (3, 4, 2), 3),  # one micro-batch on two stages
    (9600, 4800, (8, 1, 2), 16),  # 12 / 8 bytes of state
]


@exercise(
    "Three terms, each divided by tp * pp: parameters and gradients, the optimizer's state, activations.",
    "Only the state is divided by dp as well; a replica has microbatches // dp micro-batches, perhaps fewer than pp.",
)
def held(answer: Callable[..., float]) -> None:
    """`answer(parameters, activations, dp, tp, pp, microbatches)` is the bytes of the fullest worker."""
    for parameters, activations, layout, microbatches in SIZES:
        dp, tp, pp = layout
        case = (
            f"{parameters} parameters, {activations} bytes of activations, dp={dp}, tp={tp}, pp={pp}, "
            f"{microbatches} micro-batches"
        )
        with trying(case):
            found: Any = returned(answer(parameters, activations, dp, tp, pp, microbatches))
        require(isinstance(found, int | float), f"{case}: a number is wanted, not {shown(found)}.")
        under_way = min(pp, microbatches // dp)
        terms = (parameters * 4, parameters * 12 / dp, under_way * activations)
        wanted = sum(terms) / (tp * pp)
        told = " + ".join(f"{term / tp / pp:.6g}" for term in terms)
        require(
            abs(found - wanted) < 1e-6 * wanted,
            f"{case}: parameters and gradients, state, activations: {told} = {wanted:.6g} bytes, not {found:.6g}.",
        )
    right("Each cut helps another term.")


STEPS: list[tuple[Layout, int]] = [  # layout, micro-batches
    ((1, 1, 1), 8),
    ((4, 1, 1), 8),
    ((1, 1, 4), 8),
    ((1, 4, 1), 8),
    ((2, 2, 1), 8),
    ((2, 2, 3), 12),
    ((3, 2, 4), 24),
]
WORK, LAYERS, VECTOR, GRADIENT = 48.0, 12, 100.0, 5000.0


@exercise(
    "First write the time of one turn of a stage for a micro-batch: computing, and its share of the all-reduces.",
    "turn = work / (tp * pp) + layers / pp * 4 * all_reduce(vector, tp); a step has microbatches / dp + pp - 1 turns.",
)
def step_time(answer: Callable[..., float]) -> None:
    """`answer(dp, tp, pp, microbatches, work, layers, vector, gradient, all_reduce)` is the time of a step."""

    def all_reduce(size: float, ranks: int) -> float:
        require(isinstance(size, int | float) and size > 0, f"`all_reduce` takes bytes first, not {shown(size)}.")
        whole = isinstance(ranks, int | float) and ranks >= 1 and ranks == int(ranks)
        require(whole, f"`all_reduce` takes a number of ranks, not {shown(ranks)}.")
        return 2 * (ranks - 1) * (0.5 + size / ranks / 1000)

    for (dp, tp, pp), microbatches in STEPS:
        turns = microbatches // dp + pp - 1
        computing = turns * WORK / (tp * pp)
        summing = turns * LAYERS / pp * 4 * all_reduce(VECTOR, tp)
        replicas = all_reduce(GRADIENT / (tp * pp), dp)
        wanted = computing + summing + replicas
        case = f"dp={dp}, tp={tp}, pp={pp}, {microbatches} micro-batches"
        with trying(case):
            found: Any = returned(answer(dp, tp, pp, microbatches, WORK, LAYERS, VECTOR, GRADIENT, all_reduce))
        require(isinstance(found, int | float), f"{case}: a number is wanted, not {shown(found)}.")
        require(
            abs(found - wanted) < 1e-6 * wanted,
            f"{case}: computing with the bubble {computing:.6g}, tensor parallel {summing:.6g}, data parallel "
            f"{replicas:.6g}, together {wanted:.6g}; you say {found:.6g}.",
        )
    right("Bubble, vectors, gradients: each dimension has its own price.")


PLANS: list[tuple[int, int, int, int, int, float, float]] = [
    # workers, per host, layers, heads, micro-batches, weight of dp's cost, budget
    (64, 8, 32, 32, 256, 1.0, 1e9),
    (64, 8, 32, 32, 256, 9.0, 1e9),
    (64, 8, 32, 32, 256, 1.0, 100.0),
    (64, 8, 32, 32, 256, 1.0, 121.875),  # the best layout fills it
    (64, 4, 32, 32, 256, 1.0, 40.0),
    (16, 8, 32, 2, 16, 3.0, 1e9),
    (12, 4, 6, 4, 24, 2.0, 300.0),
    (8, 8, 3, 8, 8, 5.0, 1e9),
    (16, 8, 32, 32, 64, 1.0, 1.0),
    (24, 6, 12, 12, 24, 9.0, 1e9),  # four of the six workers of a host, so that a group lies on two hosts
]


@exercise(
    "List the layouts as in exercise 1; drop those whose tp does not divide per_host and those that do not fit; then "
    "take the fastest.",
    "Ask `time` and `held` for possible layouts alone; `min(..., key=time, default=None)` covers the empty list.",
)
def choose(answer: Callable[..., Layout | None]) -> None:
    """`answer(workers, per_host, layers, heads, microbatches, time, held, budget)` is the fastest layout that fits."""
    for first, (workers, per_host, layers, heads, microbatches, weight, budget) in enumerate(PLANS):
        everywhere = _layouts(workers, layers, heads, microbatches)
        possible = [each for each in everywhere if per_host % each[1] == 0]
        case = (
            f"{workers} workers, {per_host} on each host, {layers} layers, {heads} heads, {microbatches} micro-batches"
        )

        def known(
            layout: Layout,
            name: str,
            case: str = case,
            per_host: int = per_host,
            everywhere: list[Layout] = everywhere,
            possible: list[Layout] = possible,
        ) -> Layout:
            told = f"{case}: {name}({shown(layout)}) was asked, and that layout is not possible."
            if layout in everywhere:
                told += f" tp={layout[1]} does not divide the {per_host} workers of a host."
            require(layout in possible, told)
            return layout

        def time(layout: Layout, weight: float = weight, known: Any = known) -> float:
            dp, tp, pp = known(layout, "time")
            return weight * (dp - 1) / (tp * pp) + 2.5 * (tp - 1) ** 1.2 + 1.7 * (pp - 1) ** 1.1

        def size(layout: Layout, known: Any = known) -> float:
            dp, tp, pp = known(layout, "held")
            return 480 / (tp * pp) + 120 / (dp * tp * pp)

        fits = [each for each in possible if size(each) <= budget]
        wanted = min(fits, key=time, default=None)
        with trying(case):
            found = answer(workers, per_host, layers, heads, microbatches, time, size, budget)
        if not first:
            returned(found)
        if found != wanted:
            told = f"{found} takes {time(found):.4g} and holds {size(found):.4g}" if found in possible else shown(found)
            best = (
                f"{wanted}, which takes {time(wanted):.4g} and holds {size(wanted):.4g}"
                if wanted
                else "None: none fits"
            )
            raise NotYet(f"{case}, room for {budget:g}: the best is {best}; you say {told}.")
    right("This is what planners such as Alpa do, with finer cuts and better models of the machine.")

"""Checks of lesson 34."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks import NotYet, differ, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks

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
        told = f"{case}: triples (dp, tp, pp) of whole numbers are wanted"
        found = [read(each, (int, int, int), told) for each in read(found, {object}, f"{case}: a list is wanted")]
        for each in found:
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
        found = read(found, float, f"{case}: a number is wanted")
        under_way = min(pp, microbatches // dp)
        terms = (parameters * 4, parameters * 12 / dp, under_way * activations)
        wanted = sum(terms) / (tp * pp)
        told = " + ".join(f"{term / tp / pp:.6g}" for term in terms)
        require(
            abs(found - wanted) < 1e-6 * wanted,
            f"{case}: parameters and gradients, state, activations: {told} = "
            f"{differ(wanted, found, ' bytes, not ', 6)}.",
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
    "Begin with `turn = work / (tp * pp) + layers / pp * 4 * all_reduce(vector, tp)`. How many turns has a step, and "
    "what comes when they are over?",
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
        found = read(found, float, f"{case}: a number is wanted")
        require(
            abs(found - wanted) < 1e-6 * wanted,
            f"{case}: computing with the bubble {computing:.6g}, tensor parallel {summing:.6g}, data parallel "
            f"{replicas:.6g}, together {differ(wanted, found, '; you say ', 6)}.",
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


# -- one norm for three dimensions, on the workers
RANKS = 4
MESHES = [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4)]  # dp, pp, tp
Gradients = list[tuple[Tensor, bool]]


@exercise(
    "The square of the norm is a sum over all numbers of the model, each counted once. On how many ranks is the "
    "gradient of a piece, and on how many that of a whole parameter?",
    "Begin with `square = torch.zeros(())`, and add for each gradient its squares divided by the number of ranks that "
    "have the same numbers. Then one all-reduce over all ranks is enough.",
)
def on_ranks(answer: Callable[[Gradients, int, int, int], float]) -> None:
    """`answer(gradients, dp, pp, tp)` runs on each worker: the norm of the gradients of the whole model."""
    given = [([(gradients_of(rank, *mesh), mesh) for mesh in MESHES],) for rank in range(RANKS)]
    ran = run_on_ranks(each_mesh, answer, given)
    for number, mesh in enumerate(MESHES):
        for rank, norms in enumerate(ran.values):
            dp, pp, tp = mesh
            case = f"dp={dp}, pp={pp}, tp={tp}: rank {rank}"
            found = read(norms[number], float, f"{case}: a number is wanted")
            wanted = _norm(*mesh)
            why = _why_other_norm(found, rank, *mesh)
            require(math.isclose(found, wanted, rel_tol=1e-4), f"{case} returns {found:.5g}, and the norm is "
                    f"{wanted:.5g}.{why}")  # fmt: skip
    _numbers_only(ran)
    right("Each number of the model counts once, on whichever ranks it is: with this norm all ranks clip alike.")


def gradients_of(rank: int, dp: int, pp: int, tp: int) -> Gradients:
    """Of this rank: a piece of a matrix of its stage, and a vector that each rank of the stage has whole."""
    stage, place = rank // tp % pp, rank % tp
    matrix = torch.arange(1.0, 17).reshape(4, 4) * (1 + 2 * stage)
    return [(matrix.chunk(tp)[place].clone(), True), (torch.tensor([3.0, -20.0, 7.0 + stage]), False)]


def each_mesh(
    answer: Callable[[Gradients, int, int, int], Any], cases: list[tuple[Gradients, tuple[int, int, int]]]
) -> list[Any]:
    """On a worker: what the answer returns for each mesh."""
    try:
        return [answer(gradients, *mesh) for gradients, mesh in cases]
    except ValueError as error:
        require("Process group" not in str(error), "`dp`, `pp` and `tp` are numbers, the sizes of the mesh, and no "
                "process groups: the only group here is that of all ranks.")  # fmt: skip
        raise


def _square(gradients: Gradients, cut: float = 1.0, whole: float = 1.0) -> float:
    return sum(float(each.square().sum()) / (cut if is_cut else whole) for each, is_cut in gradients)


def _norms(gradients: Gradients, cut: float = 1.0, whole: float = 1.0) -> float:
    return sum(float(each.norm()) / (cut if is_cut else whole) for each, is_cut in gradients)


def _norm(dp: int, pp: int, tp: int) -> float:
    return math.sqrt(sum(_square(gradients_of(rank, dp, pp, tp), dp, dp * tp) for rank in range(RANKS)))


def _why_other_norm(found: float, rank: int, dp: int, pp: int, tp: int) -> str:
    every = [gradients_of(other, dp, pp, tp) for other in range(RANKS)]
    stage = [each for other, each in enumerate(every) if other // tp % pp == rank // tp % pp]
    squares = {
        "Vectors that are whole on each rank of `tp` are counted once for each.":
            sum(_square(each, dp, dp) for each in every),
        "All replicas along `dp` are counted.": sum(_square(each, 1, tp) for each in every),
        "All that any rank has is counted; some of it is the same on several ranks.": sum(map(_square, every)),
        "Only what this rank has is counted.": _square(every[rank]),
        "Only the stage of this rank is counted.": sum(_square(each, dp, dp * tp) for each in stage),
        "Pieces are divided by `tp` as well: they differ from rank to rank.":
            sum(_square(each, dp * tp, dp * tp) for each in every),
        "The norms of the ranks were added up. Squares can be added up, norms cannot.":
            sum(math.sqrt(_square(each, dp, dp * tp)) for each in every) ** 2,
        "The norms of the gradients were added up. Squares can be added up, norms cannot.":
            sum(_norms(each, dp, dp * tp) for each in every) ** 2,
        "The norms of the gradients were added up, and not their squares.":
            sum(_norms(each, math.sqrt(dp), math.sqrt(dp * tp)) for each in every) ** 2,
        "That is the square of the norm.": _norm(dp, pp, tp) ** 4,
    }  # fmt: skip
    near = [told for told, square in squares.items() if math.isclose(found, math.sqrt(square), rel_tol=1e-4)]
    return "".join(f" {told}" for told in near[:1])


def _numbers_only(ran: Run) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        largest = max((call.size for call in calls), default=0)
        require(largest <= 8, f"{told} sends {largest} bytes at once. A norm needs one number.")
        require(len(calls) <= 3 * len(MESHES), f"{told} makes {len(calls)} collectives for {len(MESHES)} norms; one "
                "for each, or one for each dimension, is enough.")  # fmt: skip


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
        if found is not None:
            found = read(found, (int, int, int), f"{case}: a triple (dp, tp, pp) or None is wanted")
        if found != wanted:
            told = f"{found} takes {time(found):.6g} and holds {size(found):.6g}" if found in possible else shown(found)
            best = (
                f"{wanted}, which takes {time(wanted):.6g} and holds {size(wanted):.6g}"
                if wanted
                else "None: none fits"
            )
            raise NotYet(f"{case}, room for {budget:g}: the best is {best}; you say {told}.")
    right("This is what planners such as Alpa do, with finer cuts and better models of the machine.")

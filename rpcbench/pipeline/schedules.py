"""Schedules: pure functions `(workers, microbatches, chunks) -> ops`, one list of ops per worker, run in that order.

With `chunks` stages per worker there are `workers * chunks` stages; which worker holds a stage is read off the lists.

Rules: a schedule only orders; it knows no time, no transfer and no worker names. Gradients of a stage's weights are
made in the order of the micro-batches, so every schedule adds them up in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.interleaved import bfs, interleaved
from rpcbench.pipeline.ops import Kind, Op, Ops, Schedule, check, check_chunks, run
from rpcbench.pipeline.zero_bubble import dualpipev, zb1p, zbv


def sequential(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """One micro-batch after the other, there and back: one worker computes at a time. For comparison.

    A stage hears nothing of the next micro-batch before its backward of this one; stage 0 begins the next one then.
    """
    check(workers, microbatches, chunks)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [
        [Op(s, kind, i) for i in range(microbatches) for kind in kinds for s in _passed(w, workers, chunks, kind)]
        for w in range(workers)
    ]


def _passed(worker: int, workers: int, chunks: int, kind: Kind) -> list[int]:
    """The worker's stages, in the order a micro-batch passes them in."""
    stages = [chunk * workers + worker for chunk in range(chunks)]
    return stages if kind is Kind.FORWARD else stages[::-1]


def gpipe(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """All forwards, then all backwards. Every stage keeps the activations of all micro-batches until its backwards."""
    check(workers, microbatches)
    check_chunks("gpipe", chunks, 1)
    everything = range(microbatches)
    return [run(w, Kind.FORWARD, everything) + run(w, Kind.BACKWARD, everything) for w in range(workers)]


def one_f_one_b(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """Forwards until the pipeline is full, then a backward after each forward. Idles as long as gpipe, keeps less:

    worker w holds the activations of at most `workers - w` micro-batches, however many there are.
    """
    check(workers, microbatches)
    check_chunks("1f1b", chunks, 1)
    return [_alternate(w, min(microbatches, workers - 1 - w), microbatches) for w in range(workers)]


def _alternate(stage: int, ahead: int, microbatches: int) -> list[Op]:
    """`ahead` forwards first, then forward and backward in turn, then the backwards that are left."""
    forwards = run(stage, Kind.FORWARD, range(microbatches))
    backwards = run(stage, Kind.BACKWARD, range(microbatches))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return forwards[:ahead] + [op for pair in pairs for op in pair] + backwards[microbatches - ahead :]


def asynchronous(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """An experiment: 1F1B in which a stage's weights change after each of its backwards, not at the end of the step.

    Each micro-batch is a batch of its own to the optimizers, and stages go on from weights that are not of one time: so
    it trains, but to other weights than the other schedules, which agree.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019.
    """
    check(workers, microbatches)
    check_chunks("async", chunks, 1)
    return [[each for op in own for each in _updated(op)] for own in one_f_one_b(workers, microbatches)]


def _updated(op: Op) -> list[Op]:
    return [op, Op(op.stage, Kind.UPDATE, op.microbatch)] if op.kind is Kind.BACKWARD else [op]


_NAMED: dict[str, Schedule] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "bfs": bfs,
    "zb1p": zb1p,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "async": asynchronous,
}

_ANY_CHUNKS = ("sequential", "interleaved", "bfs", "zb1p")


def chunks_for(schedule: str | Schedule, sizes: Sequence[int] | None, workers: int) -> int | None:
    """Stages for each worker where nobody says so: those of the split, if the schedule takes any number of them."""
    return len(sizes) // workers if sizes and schedule in _ANY_CHUNKS else None


def names() -> list[str]:
    """Of all schedules there are."""
    return list(_NAMED)


def named(name: str) -> Schedule:
    """The schedule of that name; PipelineError with the names there are if there is none."""
    if name not in _NAMED:
        raise PipelineError(f"unknown schedule {name!r}; there are {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]

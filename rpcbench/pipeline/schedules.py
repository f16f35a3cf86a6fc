"""Schedules: pure functions `(workers, microbatches, chunks) -> ops`, one list of ops per worker, run in that order.

With `chunks` stages per worker there are `workers * chunks` stages; the lists determine the worker of each stage.

Rules: a schedule is an order only, without times, transfers or worker names. Gradients of a stage's weights are
computed in the order of the micro-batches, so every schedule sums them in the same order.

Several stages per worker (`interleaved`, `bfs`), stage s on worker s modulo the number of workers: a micro-batch passes
each worker `chunks` times, in pieces `chunks` times as short, so the bubble is as many times shorter. More is sent, and
more is kept.

Zero bubble (`zb1p`, `zbv`, `dualpipev`): backwards in two halves. Only the gradient of the input is urgent; the
weights' gradients fill the gaps. zb1p and zbv are made by a simulation in which every op takes one unit of time: each
worker's rule chooses its next op among those that can begin. The same numbers give the same schedule.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, for the idea of zb1p and zbv; DeepSeek-AI, DualPipe, and Sea
AI Lab, its half in V shape, 2025.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import (
    Kind,
    Op,
    Ops,
    Schedule,
    check_chunks,
    check_schedule_size,
    needed_results,
    ops_of_stage,
)


def bfs(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Run breadth first: all micro-batches through one stage, then through the worker's next; backwards likewise.

    Few, long runs through each stage. Every stage keeps the activations of all micro-batches.
    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """
    check_schedule_size(workers, microbatches, chunks)
    everything = range(microbatches)
    return [
        [op for chunk in range(chunks) for op in ops_of_stage(chunk * workers + w, Kind.FORWARD, everything)]
        + [
            op
            for chunk in reversed(range(chunks))
            for op in ops_of_stage(chunk * workers + w, Kind.BACKWARD, everything)
        ]
        for w in range(workers)
    ]


def interleaved(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Interleave 1F1B over several stages per worker: rounds of `workers` micro-batches pass all of a worker's stages.
    If the micro-batches do not fill whole rounds, the last round has gaps.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021."""
    check_schedule_size(workers, microbatches, chunks)
    return interleave_rounds(workers, microbatches, chunks, Kind.BACKWARD, apart=2)


def interleave_rounds(workers: int, microbatches: int, chunks: int, backward: Kind, apart: int) -> Ops:
    """Return rounds of forwards and backwards; the warm-up is `apart` forwards longer than the next worker's."""
    count = -(-microbatches // workers) * workers * chunks  # of forwards, in whole rounds
    lists = []
    for w in range(workers):
        forwards = [_nth_op_of_worker(n, w, workers, chunks, Kind.FORWARD) for n in range(count)]
        backwards = [_nth_op_of_worker(n, w, workers, chunks, backward) for n in range(count)]
        # Length of the warm-up: `apart` for each worker after this one, and a round for each further stage here.
        ahead = min(count, (workers - 1 - w) * apart + (chunks - 1) * workers)
        turns = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
        lists.append(forwards[:ahead] + turns + backwards[count - ahead :])
    return [[op for op in own if op.microbatch < microbatches] for own in lists]  # without the last round's gaps


def _nth_op_of_worker(number: int, worker: int, workers: int, chunks: int, kind: Kind) -> Op:
    """Return a worker's n-th forward or backward: the chunks in turn, `workers` micro-batches each."""
    whole, left = divmod(number, workers * chunks)
    chunk, within = divmod(left, workers)
    if kind is not Kind.FORWARD:
        chunk = chunks - 1 - chunk
    return Op(chunk * workers + worker, kind, whole * workers + within)


_CanRun = Callable[[Op], bool]
"""Whether the needs of an op are met by now."""


def zb1p(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Run rounds as in interleaved 1F1B; a weight op where a worker would wait, or would keep too much: it keeps the
    activations of `workers` micro-batches at most for each of its stages, as 1F1B's first worker."""
    check_schedule_size(workers, microbatches, chunks)
    order = interleave_rounds(workers, microbatches, chunks, Kind.INPUT, apart=1)
    return _simulate_workers([_in_order(own, workers * chunks) for own in order], workers * chunks)


def zbv(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Give each worker two stages, in the shape of a V: the first worker has the first and the last stage. The worker
    that begins the forwards also begins the backwards, and all workers keep the same: the activations of twice as many
    micro-batches as there are workers, of stages that are half as long."""
    check_schedule_size(workers, microbatches)
    check_chunks("zbv", chunks, 2)
    last = 2 * workers - 1
    return _simulate_workers([_most_urgent((w, last - w), microbatches, 2 * workers) for w in range(workers)], last + 1)


def dualpipev(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Give each worker two stages, in the shape of a V; run a forward of one next to a backward of the other. The two
    directly follow each other, for workers that can overlap sending for one with computing the other."""
    check_schedule_size(workers, microbatches)
    check_chunks("dualpipev", chunks, 2)
    # The phases need at least these; ops of micro-batches that do not exist are removed afterwards.
    padded = max(microbatches, 2 * workers)
    lists = [list(_yield_dualpipev(w, workers, padded)) for w in range(workers)]
    return [[op for op in own if op.microbatch < microbatches] for own in lists]


class _WorkerState:
    """The ops that a worker has begun in the simulation, and its rule for the next one."""

    def __init__(self, next_op: Callable[[_WorkerState, _CanRun], Op | None]) -> None:
        self._next = next_op
        self.ops: list[Op] = []
        self.live = 0  # activations kept
        self.weights: deque[Op] = deque()  # weight ops that can run, the oldest first

    def begin_next_op(self, could: _CanRun) -> Op | None:
        op = self._next(self, could)
        if op is None:
            return None
        self.ops.append(op)
        if op.kind is Kind.FORWARD:
            self.live += 1
        elif op.kind is Kind.INPUT:
            self.weights.append(Op(op.stage, Kind.WEIGHT, op.microbatch))
        else:
            self.weights.popleft()
            self.live -= 1
        return op


def _in_order(order: list[Op], most: int) -> _WorkerState:
    """Return a worker for ops in order; if the next cannot run, or would keep more than `most`, it runs weights."""
    waiting = deque(order)

    def next_op(worker: _WorkerState, could: _CanRun) -> Op | None:
        if waiting and could(waiting[0]) and not (waiting[0].kind is Kind.FORWARD and worker.live >= most):
            return waiting.popleft()
        return worker.weights[0] if worker.weights else None

    return _WorkerState(next_op)


def _most_urgent(stages: tuple[int, int], microbatches: int, most: int) -> _WorkerState:
    """Return a worker for urgent ops: input gradients, of the earlier stage first; forwards, of the later; weights."""
    upcoming = {(kind, stage): 0 for kind in (Kind.INPUT, Kind.FORWARD) for stage in stages}
    early, late = sorted(stages)
    urgent = [(Kind.INPUT, early), (Kind.INPUT, late), (Kind.FORWARD, late), (Kind.FORWARD, early)]

    def next_op(worker: _WorkerState, could: _CanRun) -> Op | None:
        for kind, stage in urgent:
            op = Op(stage, kind, upcoming[kind, stage])
            full = kind is Kind.FORWARD and worker.live >= most
            if op.microbatch < microbatches and not full and could(op):
                upcoming[kind, stage] += 1
                return op
        return worker.weights[0] if worker.weights else None

    return _WorkerState(next_op)


def _simulate_workers(workers: list[_WorkerState], stages: int) -> Ops:
    """Simulate all workers, each op one unit of time, until no worker can begin an op; return their lists."""
    done: set[Op] = set()
    going = True
    while going:
        begun = [
            op
            for each in workers
            if (op := each.begin_next_op(lambda op: done.issuperset(needed_results(op, stages)))) is not None
        ]
        done.update(begun)  # after the round: results are there in the next unit of time
        going = bool(begun)
    return [worker.ops for worker in workers]


def _yield_dualpipev(w: int, workers: int, microbatches: int) -> Iterator[Op]:
    """Yield a worker's ops in eight phases; counters hold the next micro-batch of both its stages."""
    stages = (w, 2 * workers - 1 - w)
    forwards, backwards = [itertools.count(), itertools.count()], [itertools.count(), itertools.count()]
    weights = deque[Op]()

    def forward(chunk: int) -> Op:
        return Op(stages[chunk], Kind.FORWARD, next(forwards[chunk]))

    def backward(chunk: int) -> Op:
        return Op(stages[chunk], Kind.BACKWARD, next(backwards[chunk]))

    def half(chunk: int) -> Op:
        microbatch = next(backwards[chunk])
        weights.append(Op(stages[chunk], Kind.WEIGHT, microbatch))
        return Op(stages[chunk], Kind.INPUT, microbatch)

    before, behind = w + 1, workers - w - 1
    yield from (forward(0) for _ in range(2 * behind))  # 1: warm-up of the first stage
    yield from (forward(chunk) for _ in range(before) for chunk in (0, 1))  # 2: warm-up of both stages
    for _ in range(behind):  # 3: first backwards of the second stage; weights fill its gaps
        yield half(1)
        yield weights.popleft()
        yield forward(1)
    for _ in range(microbatches - 2 * workers + before):  # 4: the steady state, in pairs
        yield from (forward(0), backward(1), forward(1), backward(0))
    yield from (op for _ in range(behind) for op in (backward(1), forward(1), backward(0)))  # 5: last forwards
    late = before // 2  # from this turn on, both backwards postpone their weights
    for turn in range(before):  # 6: backwards of both stages
        yield half(1) if turn > late or (turn == late and w % 2) else backward(1)
        yield half(0) if turn >= late else backward(0)
    for _ in range(behind):  # 7: last backwards of the first stage
        if weights:
            yield weights.popleft()
        yield half(0)
    yield from weights  # 8: all weights that were postponed


def sequential(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """Run one micro-batch after the other, there and back: one worker computes at a time. For comparison. A stage gets
    nothing of the next micro-batch before its backward of this one; then stage 0 begins the next one."""
    check_schedule_size(workers, microbatches, chunks)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [
        [
            Op(s, kind, i)
            for i in range(microbatches)
            for kind in kinds
            for s in _stages_in_order(w, workers, chunks, kind)
        ]
        for w in range(workers)
    ]


def _stages_in_order(worker: int, workers: int, chunks: int, kind: Kind) -> list[int]:
    """Return the worker's stages, in the order in which a micro-batch passes them."""
    stages = [chunk * workers + worker for chunk in range(chunks)]
    return stages if kind is Kind.FORWARD else stages[::-1]


def gpipe(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """Run all forwards, then all backwards. Every stage keeps all micro-batches' activations until its backwards."""
    check_schedule_size(workers, microbatches)
    check_chunks("gpipe", chunks, 1)
    return bfs(workers, microbatches, 1)


def one_f_one_b(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """Run forwards until the pipeline is full (warm-up), then a backward after each forward. It idles as long as gpipe,
    but worker w keeps the activations of at most `workers - w` micro-batches, for any number of them."""
    check_schedule_size(workers, microbatches)
    check_chunks("1f1b", chunks, 1)
    return interleave_rounds(workers, microbatches, 1, Kind.BACKWARD, apart=1)


_NAMED: dict[str, Schedule] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "bfs": bfs,
    "zb1p": zb1p,
    "zbv": zbv,
    "dualpipev": dualpipev,
}

_ANY_CHUNKS = ("sequential", "interleaved", "bfs", "zb1p")  # schedules for any number of stages per worker


def chunks_for(schedule: str | Schedule, sizes: Sequence[int] | None, workers: int) -> int | None:
    """Return the default of stages per worker: that of the split, if the schedule allows any number."""
    return len(sizes) // workers if sizes and schedule in _ANY_CHUNKS else None


def schedule_names() -> list[str]:
    return list(_NAMED)


def named(name: str) -> Schedule:
    """Return the schedule of that name; PipelineError with all names if there is none."""
    if name not in _NAMED:
        raise PipelineError(f"unknown schedule {name!r}; there are {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]

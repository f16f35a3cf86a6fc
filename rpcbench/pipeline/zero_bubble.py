"""Schedules with backwards in two: only the gradient of the input is hurried, weights fill the gaps.

Made by playing them through on paper, where every op takes one unit of time: what a worker does next is what its rule
says, of what it could begin by then. The lists depend on nothing else, so the same numbers give the same schedule.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, for the idea of zb1p and zbv; DeepSeek-AI, DualPipe, and
Sea AI Lab, its half in V shape, 2025.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from rpcbench.pipeline.interleaved import in_rounds
from rpcbench.pipeline.ops import Kind, Op, Ops, check, check_chunks

_Could = Callable[[Op], bool]
"""Whether what an op needs is there by now."""


def zb1p(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Rounds as in interleaved 1F1B; weights where a worker would wait, or keeps too much.

    Each worker keeps the activations of `workers` micro-batches at most, for each of its stages: as 1F1B's first does.
    """
    check(workers, microbatches, chunks)
    order = in_rounds(workers, microbatches, chunks, Kind.INPUT, apart=1)
    return _played([_in_order(own, workers * chunks) for own in order], workers * chunks)


def zbv(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Two stages for each worker, in the shape of a V: the first worker has the first and the last stage.

    So the worker that begins a backward is the one that begins forwards, and all keep the same: the activations of
    twice as many micro-batches as there are workers, of stages that are half as long.
    """
    check(workers, microbatches)
    check_chunks("zbv", chunks, 2)
    last = 2 * workers - 1
    return _played([_hurried((w, last - w), microbatches, 2 * workers) for w in range(workers)], last + 1)


def dualpipev(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Two stages for each worker, in the shape of a V, a forward of one beside a backward of the other.

    The pairs come one right after the other, for workers that can hide the one's sending behind the other's computing.
    """
    check(workers, microbatches)
    check_chunks("dualpipev", chunks, 2)
    padded = max(microbatches, 2 * workers)
    lists = [list(_dualpipev(w, workers, padded)) for w in range(workers)]
    return [[op for op in own if op.microbatch < microbatches] for own in lists]


class _Worker:
    """What a worker has begun, and its rule for what is next."""

    def __init__(self, next_op: Callable[[_Worker, _Could], Op | None]) -> None:
        self._next = next_op
        self.ops: list[Op] = []
        self.live = 0
        self.weights: deque[Op] = deque()  # those that could be computed, the oldest first

    def take(self, could: _Could) -> Op | None:
        """What it begins now, if anything."""
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


def _in_order(order: list[Op], most: int) -> _Worker:
    """These one after the other; while the next cannot begin, or would keep more than `most` activations, weights."""
    waiting = deque(order)

    def next_op(worker: _Worker, could: _Could) -> Op | None:
        if waiting and could(waiting[0]) and not (waiting[0].kind is Kind.FORWARD and worker.live >= most):
            return waiting.popleft()
        return worker.weights[0] if worker.weights else None

    return _Worker(next_op)


def _hurried(stages: tuple[int, int], microbatches: int, most: int) -> _Worker:
    """Whatever others wait for most: an input's gradient, nearer to the beginning first; then a forward, nearer to the
    end first; then weights."""
    upcoming = {(kind, stage): 0 for kind in (Kind.INPUT, Kind.FORWARD) for stage in stages}
    early, late = sorted(stages)
    urgent = [(Kind.INPUT, early), (Kind.INPUT, late), (Kind.FORWARD, late), (Kind.FORWARD, early)]

    def next_op(worker: _Worker, could: _Could) -> Op | None:
        for kind, stage in urgent:
            op = Op(stage, kind, upcoming[kind, stage])
            full = kind is Kind.FORWARD and worker.live >= most
            if op.microbatch < microbatches and not full and could(op):
                upcoming[kind, stage] += 1
                return op
        return worker.weights[0] if worker.weights else None

    return _Worker(next_op)


def _played(workers: list[_Worker], stages: int) -> Ops:
    """All workers' ops, in units of time of which each op takes one, until nobody has anything to do."""
    done: set[Op] = set()
    going = True
    while going:
        begun = [op for worker in workers if (op := worker.take(lambda op: _could(op, done, stages))) is not None]
        done.update(begun)
        going = bool(begun)
    return [worker.ops for worker in workers]


def _could(op: Op, done: set[Op], stages: int) -> bool:
    if op.kind is Kind.FORWARD:
        return op.stage == 0 or Op(op.stage - 1, Kind.FORWARD, op.microbatch) in done
    after = op.stage + 1 == stages or Op(op.stage + 1, Kind.INPUT, op.microbatch) in done
    return after and Op(op.stage, Kind.FORWARD, op.microbatch) in done


def _dualpipev(w: int, workers: int, microbatches: int) -> Iterator[Op]:
    """A worker's ops in eight phases; each counts how far it is into the forwards and backwards of both its stages."""
    stages = (w, 2 * workers - 1 - w)
    forwards, backwards, weights = [0, 0], [0, 0], deque[Op]()

    def forward(chunk: int) -> Op:
        forwards[chunk] += 1
        return Op(stages[chunk], Kind.FORWARD, forwards[chunk] - 1)

    def backward(chunk: int) -> Op:
        backwards[chunk] += 1
        return Op(stages[chunk], Kind.BACKWARD, backwards[chunk] - 1)

    def half(chunk: int) -> Op:
        backwards[chunk] += 1
        weights.append(Op(stages[chunk], Kind.WEIGHT, backwards[chunk] - 1))
        return Op(stages[chunk], Kind.INPUT, backwards[chunk] - 1)

    before, behind = w + 1, workers - w - 1
    yield from (forward(0) for _ in range(2 * behind))
    yield from (forward(chunk) for _ in range(before) for chunk in (0, 1))
    for _ in range(behind):
        yield half(1)
        yield weights.popleft()
        yield forward(1)
    for _ in range(microbatches - 2 * workers + before):
        yield from (forward(0), backward(1), forward(1), backward(0))
    yield from (op for _ in range(behind) for op in (backward(1), forward(1), backward(0)))
    late = before // 2  # from here on both backwards leave their weights for later
    for turn in range(before):
        yield half(1) if turn > late or (turn == late and w % 2) else backward(1)
        yield half(0) if turn >= late else backward(0)
    for _ in range(behind):
        if weights:
            yield weights.popleft()
        yield half(0)
    yield from weights

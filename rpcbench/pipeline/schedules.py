"""Schedules: pure functions `(workers, microbatches, chunks) -> ops`, one list of ops per worker, run in that order.

With `chunks` stages per worker there are `workers * chunks` stages; which worker holds a stage is read off the lists.

Rules: a schedule only orders; it knows no time, no transfer and no worker names. Gradients of a stage's weights are
made in the order of the micro-batches, so every schedule adds them up in the same order.

Several stages per worker (`interleaved`, `bfs`), stage s on worker s modulo the number of workers: a micro-batch passes
each worker `chunks` times, in pieces `chunks` times as short, so the bubble is as many times shorter. More is sent, and
more is kept.

Zero bubble (`zb1p`, `zbv`, `dualpipev`): backwards in two. Only the gradient of the input is hurried, weights fill the
gaps. These are made by playing them through on paper, where every op takes one unit of time: what a worker does next is
what its rule says, of what it could begin by then. The lists depend on nothing else, so the same numbers give the same
schedule.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, for the idea of zb1p and zbv; DeepSeek-AI, DualPipe, and
Sea AI Lab, its half in V shape, 2025.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, Ops, Schedule, check, check_chunks, run


def bfs(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Breadth first: all micro-batches through one stage, then through the worker's next; backwards likewise.

    Few, long runs through each stage. Every stage keeps the activations of all micro-batches.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """
    check(workers, microbatches, chunks)
    everything = range(microbatches)
    return [
        [op for chunk in range(chunks) for op in run(chunk * workers + w, Kind.FORWARD, everything)]
        + [op for chunk in reversed(range(chunks)) for op in run(chunk * workers + w, Kind.BACKWARD, everything)]
        for w in range(workers)
    ]


def interleaved(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """1F1B over several stages per worker: rounds of `workers` micro-batches go through all of a worker's stages.

    Where the micro-batches make no whole rounds, the last round has gaps.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    """
    check(workers, microbatches, chunks)
    return in_rounds(workers, microbatches, chunks, Kind.BACKWARD, apart=2)


def in_rounds(workers: int, microbatches: int, chunks: int, backward: Kind, apart: int) -> Ops:
    """Forwards and backwards in turn, by rounds; a worker is `apart` forwards ahead of the next one when it begins with
    its backwards: the way there and back."""
    count = -(-microbatches // workers) * workers * chunks
    lists = []
    for w in range(workers):
        forwards = [_nth(n, w, workers, chunks, Kind.FORWARD) for n in range(count)]
        backwards = [_nth(n, w, workers, chunks, backward) for n in range(count)]
        ahead = min(count, (workers - 1 - w) * apart + (chunks - 1) * workers)
        turns = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
        lists.append(forwards[:ahead] + turns + backwards[count - ahead :])
    return [[op for op in own if op.microbatch < microbatches] for own in lists]


def _nth(number: int, worker: int, workers: int, chunks: int, kind: Kind) -> Op:
    """A worker's n-th forward, or backward: the chunks in turn, `workers` micro-batches each."""
    whole, left = divmod(number, workers * chunks)
    chunk, within = divmod(left, workers)
    if kind is not Kind.FORWARD:
        chunk = chunks - 1 - chunk
    return Op(chunk * workers + worker, kind, whole * workers + within)


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

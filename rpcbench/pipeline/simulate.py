"""A schedule checked and played through on paper: can it run, how long is each worker idle, how much does it keep?

    needs        1F0 ── after 0F0            the activation of the stage before
                 0B0 ── after 0F0 and 1B0    its own activation, and the gradient from the stage after (or 1I0)
                 0W0 ── after 0I0            the gradients within its own stage
                 0R0 ── after 0F0            the input that was kept

Each worker runs its list in order and waits where a need is not met. `validate` raises where the lists can never run to
their end; `simulate` adds durations and nothing else: transfers take no time, and the step ends when the last op ends.
Errors point at `ops[w][i]`: operation i of worker number w, both counted from 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rpcbench.pipeline.ops import Kind, Op, Ops
from rpcbench.words.errors import PipelineError

Cost = Callable[[Op], float]
"""Duration of an op, in any unit."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a worker ran an op: `begin` to `end`."""

    worker: int
    op: Op
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule played through. Times are in the unit of the cost; the step begins at 0.

    idle: share of `workers * makespan` in which no op ran, 0 to 1.
    peak_live: per worker, the most micro-batches whose activations one moment finds kept for a later backward,
        counted once for each stage that keeps them.
    """

    spans: tuple[Span, ...]
    makespan: float
    idle: float
    peak_live: tuple[int, ...]


def equal_stages(op: Op) -> float:
    """The usual cost on paper: every forward takes 1, every backward 2, each half of one 1."""
    return 2.0 if op.kind is Kind.BACKWARD else 1.0


def idle_share(spans: Iterable[Span], workers: int) -> float:
    """The share of the workers' time, between the first op and the last, in which none ran."""
    return idle_between([(span.begin, span.end) for span in spans], workers)


def idle_between(ops: Collection[tuple[float, float]], workers: int) -> float:
    """1 - (time in ops) / (workers * (end of the last op - begin of the first)); 0 where nothing took time.

    `ops`: begin and end of each. One definition for measured and for simulated steps. The optimizer is no op, so it
    does not count.
    """
    if not ops:
        return 0.0
    lasted = max(end for _, end in ops) - min(begin for begin, _ in ops)
    busy = sum(end - begin for begin, end in ops)
    return 1 - busy / (workers * lasted) if lasted else 0.0


def placement(ops: Ops) -> dict[int, int]:
    """The worker number of each stage; PipelineError if a stage runs on more than one."""
    home: dict[int, int] = {}
    for worker, index, op in _walk(ops):
        if home.setdefault(op.stage, worker) != worker:
            raise _fault(worker, index, op, f"stage {op.stage} runs on worker number {home[op.stage]} already")
    return home


def validate(ops: Ops, stages: int, microbatches: int, most_live: int | None = None) -> None:
    """Nothing, if each stage runs each micro-batch forward and backward once, on one worker, in an order that can run.

    A backward may be in two halves. PipelineError otherwise: an op out of range, twice, missing, a stage on two
    workers, a deadlock; or a worker that keeps more activations than `most_live` at once, as `peak_live` counts them.
    """
    seen: dict[Op, str] = {}
    for worker, index, op in _walk(ops):
        if op.stage >= stages or op.microbatch >= microbatches:
            raise _fault(worker, index, op, f"there are {stages} stages and {microbatches} micro-batches, both from 0")
        if op in seen:
            raise _fault(worker, index, op, f"{seen[op]} is the same operation")
        seen[op] = f"ops[{worker}][{index}]"
    _complete(seen, stages, microbatches)
    placement(ops)
    _recomputed_in_time(ops)
    for _ in _playable(ops, stages):
        pass
    if most_live is not None:
        _within(ops, most_live)


def _complete(seen: Mapping[Op, str], stages: int, microbatches: int) -> None:
    """A forward and a backward of each, whole or in halves."""
    for stage, number in itertools.product(range(stages), range(microbatches)):
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
        forward, whole, first, second = (Op(stage, kind, number) for kind in kinds)
        if forward not in seen:
            raise PipelineError(f"{forward} is missing: no worker runs it")
        halves = [half for half in (first, second) if half in seen]
        if whole in seen and halves:
            raise PipelineError(f"{seen[halves[0]]} = {halves[0]} is a part of {whole} at {seen[whole]}: run either")
        if whole not in seen and len(halves) < 2:
            missing = second if first in seen else first if second in seen else whole
            raise PipelineError(f"{missing} is missing: no worker runs it")


def _recomputed_in_time(ops: Ops) -> None:
    begun: set[Op] = set()
    for worker, index, op in _walk(ops):
        if op.kind is Kind.RECOMPUTE and _gives(Op(op.stage, Kind.BACKWARD, op.microbatch)) in begun:
            raise _fault(worker, index, op, "its backward comes before")
        begun.add(_gives(op))


def _within(ops: Ops, most: int) -> None:
    for worker, own in enumerate(ops):
        for index, live in enumerate(_live(own)):
            if live > most:
                why = f"it would keep the activations of {live} micro-batches, and {most} are allowed"
                raise _fault(worker, index, own[index], why)


def simulate(ops: Ops, cost: Cost = equal_stages) -> Simulation:
    """The ops played through, each as early as its worker and its needs allow. PipelineError at a deadlock."""
    clock = [0.0] * len(ops)
    ended: dict[Op, float] = {}
    spans: list[Span] = []
    stages = 1 + max((op.stage for _, _, op in _walk(ops)), default=0)
    for worker, op in _playable(ops, stages):
        begin = max([clock[worker], *(ended[need] for need in _needs(op, stages))])
        clock[worker] = ended[_gives(op)] = begin + cost(op)
        spans.append(Span(worker, op, begin, clock[worker]))
    return Simulation(tuple(spans), max(clock, default=0.0), idle_share(spans, len(ops)), tuple(map(_peak, ops)))


def _peak(own: list[Op]) -> int:
    return max(_live(own), default=0)


def _live(own: list[Op]) -> Iterator[int]:
    """How many activations are kept after each op: a forward keeps one, its backward, or its weights, let it go; one
    that is to be recomputed counts from then on."""
    later = {(op.stage, op.microbatch) for op in own if op.kind is Kind.RECOMPUTE}
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1, Kind.RECOMPUTE: 1}
    skipped = [op.kind is Kind.FORWARD and (op.stage, op.microbatch) in later for op in own]
    return itertools.accumulate(0 if skip else changes[op.kind] for op, skip in zip(own, skipped, strict=True))


def _needs(op: Op, stages: int) -> list[Op]:
    """What must have been given (`_gives`), by whatever worker, before `op` may begin."""
    if op.kind is Kind.FORWARD:
        return [Op(op.stage - 1, Kind.FORWARD, op.microbatch)] if op.stage else []
    if op.kind is Kind.WEIGHT:
        return [Op(op.stage, Kind.INPUT, op.microbatch)]
    if op.kind is Kind.RECOMPUTE:
        return [Op(op.stage, Kind.FORWARD, op.microbatch)]
    gradient = [Op(op.stage + 1, Kind.INPUT, op.microbatch)] if op.stage + 1 < stages else []
    return [Op(op.stage, Kind.FORWARD, op.microbatch), *gradient]


def _gives(op: Op) -> Op:
    """A whole backward gives what its first half would."""
    return Op(op.stage, Kind.INPUT, op.microbatch) if op.kind is Kind.BACKWARD else op


def _playable(ops: Ops, stages: int) -> Iterator[tuple[int, Op]]:
    """(worker, op) in an order in which all needs are met; PipelineError when none is left that can run."""
    done: set[Op] = set()
    at = [0] * len(ops)
    progress = True
    while progress:
        progress = False
        for worker, own in enumerate(ops):
            while at[worker] < len(own) and done.issuperset(_needs(own[at[worker]], stages)):
                op = own[at[worker]]
                yield worker, op
                done.add(_gives(op))
                at[worker] += 1
                progress = True
    if any(at[worker] < len(own) for worker, own in enumerate(ops)):
        raise _deadlock(ops, stages, at, done)


def _deadlock(ops: Ops, stages: int, at: list[int], done: set[Op]) -> PipelineError:
    place = {_gives(op): (f"ops[{worker}][{index}]", op) for worker, index, op in _walk(ops)}
    lines = []
    for worker, own in enumerate(ops):
        if at[worker] < len(own):
            op = own[at[worker]]
            wanted = next(need for need in _needs(op, stages) if need not in done)
            there, other = place.get(wanted, ("no place: nobody runs it", wanted))
            lines.append(f"ops[{worker}][{at[worker]}] = {op} waits for {other} at {there}")
    return PipelineError("this schedule never ends: " + "; ".join(lines))


def _walk(ops: Ops) -> Iterator[tuple[int, int, Op]]:
    return ((worker, index, op) for worker, own in enumerate(ops) for index, op in enumerate(own))


def _fault(worker: int, index: int, op: Op, why: str) -> PipelineError:
    return PipelineError(f"ops[{worker}][{index}] = {op} cannot be: {why}")

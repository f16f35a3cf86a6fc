"""A schedule checked and played through on paper: can it run, how long is each worker idle, how much does it keep?

    needs        1F0 ── after 0F0            the activation of the stage before
                 0B0 ── after 0F0 and 1B0    its own activation, and the gradient from the stage after

Each worker runs its list in order and waits where a need is not met. `validate` raises where the lists can never run to
their end; `simulate` adds durations and nothing else: transfers take no time, and the step ends when the last op ends.
Errors point at `ops[w][i]`: operation i of worker number w, both counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rpcbench.pipeline.schedules import Kind, Op, Ops
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
    """The usual cost on paper: every forward takes 1, every backward 2."""
    return 2.0 if op.kind is Kind.BACKWARD else 1.0


def idle_share(spans: Iterable[Span], workers: int) -> float:
    """1 - (time in ops) / (workers * (end of the last op - begin of the first)); 0 where nothing took time.

    One definition for measured and for simulated steps. The optimizer is no op, so it does not count.
    """
    spans = list(spans)
    if not spans:
        return 0.0
    lasted = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (workers * lasted) if lasted else 0.0


def placement(ops: Ops) -> dict[int, int]:
    """The worker number of each stage; PipelineError if a stage runs on more than one."""
    home: dict[int, int] = {}
    for worker, index, op in _walk(ops):
        if home.setdefault(op.stage, worker) != worker:
            raise _fault(worker, index, op, f"stage {op.stage} runs on worker number {home[op.stage]} already")
    return home


def validate(ops: Ops, stages: int, microbatches: int) -> None:
    """Nothing, if each stage runs each micro-batch forward and backward once, on one worker, in an order that can run.

    PipelineError otherwise: an op out of range, twice, missing, a stage on two workers, or a deadlock.
    """
    seen: dict[Op, str] = {}
    for worker, index, op in _walk(ops):
        if op.stage >= stages or op.microbatch >= microbatches:
            raise _fault(worker, index, op, f"there are {stages} stages and {microbatches} micro-batches, both from 0")
        if op in seen:
            raise _fault(worker, index, op, f"{seen[op]} is the same operation")
        seen[op] = f"ops[{worker}][{index}]"
    for op in _complete(stages, microbatches):
        if op not in seen:
            raise PipelineError(f"{op} is missing: no worker runs it")
    placement(ops)
    for _ in _playable(ops, stages):
        pass


def simulate(ops: Ops, cost: Cost = equal_stages) -> Simulation:
    """The ops played through, each as early as its worker and its needs allow. PipelineError at a deadlock."""
    clock = [0.0] * len(ops)
    ended: dict[Op, float] = {}
    spans: list[Span] = []
    stages = 1 + max((op.stage for _, _, op in _walk(ops)), default=0)
    for worker, op in _playable(ops, stages):
        begin = max([clock[worker], *(ended[need] for need in _needs(op, stages))])
        clock[worker] = ended[op] = begin + cost(op)
        spans.append(Span(worker, op, begin, ended[op]))
    return Simulation(tuple(spans), max(clock, default=0.0), idle_share(spans, len(ops)), tuple(map(_peak, ops)))


def _peak(own: list[Op]) -> int:
    """A forward keeps an activation, its backward lets it go."""
    live = highest = 0
    for op in own:
        live += 1 if op.kind is Kind.FORWARD else -1
        highest = max(highest, live)
    return highest


def _needs(op: Op, stages: int) -> list[Op]:
    """The ops that must have ended, on whatever worker, before `op` may begin."""
    if op.kind is Kind.FORWARD:
        return [Op(op.stage - 1, Kind.FORWARD, op.microbatch)] if op.stage else []
    gradient = [Op(op.stage + 1, Kind.BACKWARD, op.microbatch)] if op.stage + 1 < stages else []
    return [Op(op.stage, Kind.FORWARD, op.microbatch), *gradient]


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
                done.add(op)
                at[worker] += 1
                progress = True
    if any(at[worker] < len(own) for worker, own in enumerate(ops)):
        raise _deadlock(ops, stages, at, done)


def _deadlock(ops: Ops, stages: int, at: list[int], done: set[Op]) -> PipelineError:
    place = {op: f"ops[{worker}][{index}]" for worker, index, op in _walk(ops)}
    lines = []
    for worker, own in enumerate(ops):
        if at[worker] < len(own):
            op = own[at[worker]]
            wanted = next(need for need in _needs(op, stages) if need not in done)
            lines.append(f"{place[op]} = {op} waits for {wanted} at {place.get(wanted, 'no place: nobody runs it')}")
    return PipelineError("this schedule never ends: " + "; ".join(lines))


def _walk(ops: Ops) -> Iterator[tuple[int, int, Op]]:
    return ((worker, index, op) for worker, own in enumerate(ops) for index, op in enumerate(own))


def _complete(stages: int, microbatches: int) -> Iterator[Op]:
    return (Op(s, kind, m) for s in range(stages) for m in range(microbatches) for kind in Kind)


def _fault(worker: int, index: int, op: Op, why: str) -> PipelineError:
    return PipelineError(f"ops[{worker}][{index}] = {op} cannot be: {why}")

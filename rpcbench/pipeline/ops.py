"""The operations of schedules: one list of ops for each worker, its text, and the checks before anything is sent.

`ops[w][i]` is operation i of worker number w, both counted from 0. As text: one line per worker, one word per op,
`stage kind micro-batch`. 1F1B for two workers and three micro-batches is

    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

Rules
- A backward is one op, B, or two: I computes the gradient of the stage's input, which the stage before waits for, and W
  those of its weights, which are needed at the end of the step only.
- Where an R comes before the backward, the forward keeps its input only, and R computes the forward again.
- An A sums the gradients of a stage's replicas; no schedule has one, the pipeline itself adds them where there are
  replicas.
- A schedule is validated before anything is sent: it must be complete, be able to run to its end, and keep no more than
  is allowed.
"""

# Each worker runs its list in order, and waits where a need is not met:
#
#     needs        1F0    after 0F0            the activation of the stage before
#                  0B0    after 0F0 and 1B0    its own activation, and the gradient from the stage after (or 1I0)
#                  0W0    after 0I0            the gradients within its own stage
#                  0R0    after 0F0            the input that was kept

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

from rpcbench.base.errors import PipelineError, count_noun


class Kind(StrEnum):
    """The kind of computation; the value is its letter in text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # first half of a backward: the gradient of the input
    WEIGHT = "W"  # second half: the gradients of the weights
    RECOMPUTE = "R"
    ALL_REDUCE = "A"  # over the replicas; not in schedules


_WRITTEN = [kind for kind in Kind if kind is not Kind.ALL_REDUCE]  # kinds that a schedule may have
_OP = re.compile(rf"(\d+)([{''.join(_WRITTEN)}])(\d+)", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)
_TRANSFER = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of one stage on one micro-batch; `str(op)` is `0F3`: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def label(self) -> str:
        """Its name within its stage, as `F3`; an all-reduce has no micro-batch."""
        return str(self.kind) if self.kind is Kind.ALL_REDUCE else f"{self.kind}{self.microbatch}"

    @staticmethod
    def parse_op(word: str) -> Op:
        """Return the op written as `word`; PipelineError if it is not one."""
        match = _OP.fullmatch(word)
        if match is None:
            kinds = f"{', '.join(_WRITTEN[:-1])} or {_WRITTEN[-1]}"
            raise PipelineError(f"{word!r} is not an operation; write stage, {kinds}, micro-batch: 0F3")
        stage, kind, microbatch = match.groups()
        return Op(int(stage), Kind(kind), int(microbatch))


Ops = list[list[Op]]  # one list for each worker


class Schedule(Protocol):
    """The signature of a schedule; a user's own function of this signature is one, too."""

    def __call__(self, workers: int, microbatches: int, chunks: int = 1) -> Ops: ...


def format_ops(ops: Ops) -> str:
    """Return the ops as text. `parse(text(ops)) == ops`, unless the first or the last worker has no ops."""
    return "\n".join(" ".join(map(str, own)) for own in ops)


def parse_ops(written: str) -> Ops:
    """Return the ops of a text; empty lines around it are ignored. PipelineError for a word that is not an op."""
    return [_read_words(line.split()) for line in written.strip().splitlines()]


def _read_words(words: Iterable[str]) -> list[Op]:
    """Return the computations of words, which may also be torch's: it adds transfers, and pairs that overlap."""
    ops: list[Op] = []
    for word in words:
        if pair := _OVERLAP.fullmatch(word):
            ops += _read_words(pair[1].split(";"))
        elif not _TRANSFER.fullmatch(word):
            ops.append(Op.parse_op(word))
    return ops


def read_ops(made: Any) -> Ops:
    """Return a schedule's result as Ops: a text, lists of ops or words, or of torch's actions, where None is idle.
    PipelineError for any other value."""
    if isinstance(made, str):
        return parse_ops(made)
    if isinstance(made, list | tuple) and all(isinstance(own, list | tuple) for own in made):
        read = [[each for each in own if each is not None] for own in made]
        if all(isinstance(each, Op | str) or hasattr(each, "computation_type") for own in read for each in own):
            return [
                [op for each in own for op in ([each] if isinstance(each, Op) else _read_words([str(each)]))]
                for own in read
            ]
    raise PipelineError(f"a schedule is a list of operations for each worker, as [['0F0', '0B0'], …], not {made!r:.80}")


@lru_cache(maxsize=64)
def parse_plan(plan: str) -> tuple[Op, ...]:
    """Return one worker's ops of any kind from the text of its plan."""
    # Cached, because a plan is the same in each step. It was written by the pipeline, so it is not validated here.
    found = re.findall(r"(\d+)(\D)(\d+)", plan)
    return tuple(Op(int(stage), Kind(kind), int(microbatch)) for stage, kind, microbatch in found)


@lru_cache(maxsize=64)
def places_of_kind(plan: str, kind: Kind) -> frozenset[tuple[int, int]]:
    """Return stage and micro-batch of each op of this kind in a plan."""
    return frozenset((op.stage, op.microbatch) for op in parse_plan(plan) if op.kind is kind)


def ops_of_stage(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Op]:
    """Return one op of a stage for each of these micro-batches."""
    return [Op(stage, kind, microbatch) for microbatch in microbatches]


def check_schedule_size(workers: int, microbatches: int, chunks: int = 1) -> None:
    """Raise PipelineError for numbers from which no schedule can be made."""
    for what, number in (("workers", workers), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(number, int) or number < 1:
            raise PipelineError(f"{what} must be a whole number of at least 1, not {number!r}")


def check_chunks(name: str, chunks: int, wanted: int) -> None:
    """Raise PipelineError if the schedule needs another number of stages per worker."""
    if chunks != wanted:
        stages = "one stage" if wanted == 1 else f"{wanted} stages"
        raise PipelineError(f"schedule {name!r} gives each worker {stages}: chunks must be {wanted}, not {chunks!r}")


def find_placement(ops: Ops) -> dict[int, int]:
    """Return the worker number of each stage; PipelineError if a stage runs on more than one."""
    worker_of_stage: dict[int, int] = {}
    for worker, index, op in enumerate_ops(ops):
        if worker_of_stage.setdefault(op.stage, worker) != worker:
            raise _make_op_error(
                worker, index, op, f"stage {op.stage} runs on worker number {worker_of_stage[op.stage]} already"
            )
    return worker_of_stage


def validate_ops(ops: Ops, stages: int, microbatches: int, most_live: int | None = None) -> None:
    """Check that each stage runs each micro-batch forward and backward once, on one worker, in an order that can run.
    PipelineError for an op out of range, twice or missing, a stage on two workers, a deadlock, or a worker that keeps
    more activations than `most_live` at once, as `peak_activations` counts them."""
    seen: dict[Op, str] = {}  # op -> its place, for errors
    for worker, index, op in enumerate_ops(ops):
        if op.stage >= stages or op.microbatch >= microbatches:
            there = f"{count_noun(stages, 'stage')} and {count_noun(microbatches, 'micro-batch')}"
            raise _make_op_error(worker, index, op, f"the step has {there}, both from 0")
        if op.kind is Kind.ALL_REDUCE:
            raise _make_op_error(worker, index, op, "the pipeline itself adds up the gradients of replicas")
        if op in seen:
            raise _make_op_error(worker, index, op, f"{seen[op]} is the same operation")
        seen[op] = f"ops[{worker}][{index}]"
    _check_complete(seen, stages, microbatches)
    find_placement(ops)
    _recomputed_in_time(ops)
    for _ in iterate_runnable(ops, stages):  # raises at a deadlock
        pass
    if most_live is not None:
        _check_activations(ops, most_live)


def _check_complete(seen: Mapping[Op, str], stages: int, microbatches: int) -> None:
    """Check that each stage has a forward and a backward of each micro-batch, whole or in halves."""
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
    """Check that each recomputation comes before its backward."""
    begun: set[Op] = set()
    for worker, index, op in enumerate_ops(ops):
        if op.kind is Kind.RECOMPUTE and result_of_op(Op(op.stage, Kind.BACKWARD, op.microbatch)) in begun:
            raise _make_op_error(worker, index, op, "its backward comes before")
        begun.add(result_of_op(op))


def _check_activations(ops: Ops, most: int) -> None:
    """Check that no worker keeps more than `most` activations at once."""
    for worker, own in enumerate(ops):
        for index, kept in enumerate(live_activations(own)):
            if kept > most:
                why = f"it would keep the activations of {kept} micro-batches, and {most} are allowed"
                raise _make_op_error(worker, index, own[index], why)


def peak_activations(own: list[Op], activation: Callable[[int], float] = lambda stage: 1) -> float:
    """Return the most that a worker with this list keeps at once; by default each activation counts 1."""
    return max(live_activations(own, activation), default=0)


def live_activations(own: list[Op], activation: Callable[[int], float] = lambda stage: 1) -> Iterator[float]:
    """Yield the activations kept after each op: from the forward, or its recomputation, to the end of the backward."""
    later = {(op.stage, op.microbatch) for op in own if op.kind is Kind.RECOMPUTE}
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1, Kind.RECOMPUTE: 1}  # of the number of activations
    skipped = [op.kind is Kind.FORWARD and (op.stage, op.microbatch) in later for op in own]  # it keeps its input only
    pairs = zip(own, skipped, strict=True)
    kept = (0 if skip else changes.get(op.kind, 0) * activation(op.stage) for op, skip in pairs)
    return itertools.accumulate(kept)


def needed_results(op: Op, stages: int) -> list[Op]:
    """Return the results (`result_of_op`), of any worker, that must exist before `op` may begin."""
    if op.kind is Kind.FORWARD:
        return [Op(op.stage - 1, Kind.FORWARD, op.microbatch)] if op.stage else []
    if op.kind is Kind.WEIGHT:
        return [Op(op.stage, Kind.INPUT, op.microbatch)]
    if op.kind is Kind.RECOMPUTE:
        return [Op(op.stage, Kind.FORWARD, op.microbatch)]
    if op.kind is Kind.ALL_REDUCE:  # in each replica's list it comes after all that it needs
        return []
    gradient = [Op(op.stage + 1, Kind.INPUT, op.microbatch)] if op.stage + 1 < stages else []
    return [Op(op.stage, Kind.FORWARD, op.microbatch), *gradient]


def result_of_op(op: Op) -> Op:
    """Return the op whose result this op has made: that of a whole backward is that of its first half."""
    return Op(op.stage, Kind.INPUT, op.microbatch) if op.kind is Kind.BACKWARD else op


def iterate_runnable(ops: Ops, stages: int) -> Iterator[tuple[int, Op]]:
    """Yield (worker, op) in an order that meets all needs; PipelineError if no op can run and some are left."""
    done: set[Op] = set()
    at = [0] * len(ops)  # for each worker, the index of its next op
    progress = True
    while progress:
        progress = False
        for worker, own in enumerate(ops):
            while at[worker] < len(own) and done.issuperset(needed_results(own[at[worker]], stages)):
                op = own[at[worker]]
                yield worker, op
                done.add(result_of_op(op))
                at[worker] += 1
                progress = True
    if any(at[worker] < len(own) for worker, own in enumerate(ops)):
        raise _make_deadlock_error(ops, stages, at, done)


def _make_deadlock_error(ops: Ops, stages: int, at: list[int], done: set[Op]) -> PipelineError:
    """Return an error with the waiting op of each worker, and the place of the op that it waits for."""
    place = {result_of_op(op): (f"ops[{worker}][{index}]", op) for worker, index, op in enumerate_ops(ops)}
    lines = []
    for worker, own in enumerate(ops):
        if at[worker] < len(own):
            op = own[at[worker]]
            wanted = next(need for need in needed_results(op, stages) if need not in done)
            there, other = place.get(wanted, ("no place: no worker runs it", wanted))
            lines.append(f"ops[{worker}][{at[worker]}] = {op} waits for {other} at {there}")
    return PipelineError("this schedule never ends: " + "; ".join(lines))


def enumerate_ops(ops: Ops) -> Iterator[tuple[int, int, Op]]:
    """Yield worker, index and op of all lists."""
    return ((worker, index, op) for worker, own in enumerate(ops) for index, op in enumerate(own))


def _make_op_error(worker: int, index: int, op: Op, why: str) -> PipelineError:
    return PipelineError(f"ops[{worker}][{index}] = {op} cannot be: {why}")

"""A schedule made concrete: operations for each worker, checked before anything is sent; to look at, and to train with.

Guarantees
- All schedules of a pipeline have the same stages on the same workers.
- A batch with fewer samples than the pipeline has micro-batches gets a schedule with one micro-batch for each sample.
- Where there are replicas, each has the same order, for micro-batches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline import ops as _ops
from rpcbench.pipeline.ops import Kind, Ops, Schedule, placement, read, validate
from rpcbench.pipeline.placement import dealt, reducing
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import Cost, Each, Simulation, equal_stages, simulate


@dataclass(frozen=True)
class Orders:
    """Operations for each worker; `ideal` is their idle share if all stages take equally long, None where none is said.

    `homes[stage]` is the number of its worker among those of a replica; the lists of the `replicas` come one after the
    other.
    """

    ops: Ops
    microbatches: int
    homes: tuple[int, ...]
    ideal: float | None
    replicas: int = 1

    @property
    def updates(self) -> bool:
        """Whether optimizers step within a step of the pipeline, as its operations."""
        return any(op.kind is Kind.UPDATE for own in self.ops for op in own)

    @cached_property
    def plans(self) -> list[str]:
        """The operations as workers are told them, see `ops_in`."""
        return [" ".join(map(str, own)) for own in self.ops]

    @cached_property
    def forwards(self) -> Orders:
        """Only the forwards, for a run that does not train."""
        ops = [[op for op in own if op.kind is Kind.FORWARD] for own in self.ops]
        return Orders(ops, self.microbatches, self.homes, None, self.replicas)

    def replica(self, worker: int) -> int:
        """The one that a worker, by its number, belongs to."""
        return worker // (len(self.ops) // self.replicas)

    def has_last(self, worker: int) -> bool:
        """Whether the last stage is there."""
        return worker % (len(self.ops) // self.replicas) == self.homes[-1]


class ScheduleCache:
    """Orders by one schedule, for batches of any size. PipelineError where schedule and workers do not fit.

    `workers` and `microbatches` are those of one replica.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        workers: int,
        microbatches: int,
        chunks: int | None,
        recompute: Recompute,
        replicas: int = 1,
    ) -> None:
        self._schedule = maker(schedule)
        self._workers, self._chunks, self._recompute = workers, chunks, recompute
        self.microbatches, self._replicas = microbatches * replicas, replicas
        self._cached = lru_cache(maxsize=16)(self._make)
        self.whole = self._cached(self.microbatches)

    def fitting(self, samples: int) -> Orders:
        """For a batch of so many samples."""
        orders = self._cached(max(1, min(self.microbatches, samples)))
        if orders.homes != self.whole.homes:
            raise PipelineError(
                f"the schedule puts stages elsewhere for {counted(orders.microbatches, 'micro-batch')} than for "
                f"{self.microbatches}: give batches of at least {counted(self.microbatches, 'sample')}"
            )
        return orders

    def _make(self, microbatches: int) -> Orders:
        if self._replicas == 1:
            return self._row(microbatches, 0)
        counts = [len(range(replica, microbatches, self._replicas)) for replica in range(self._replicas)]
        rows = [self._row(max(1, count), replica) for replica, count in enumerate(counts)]
        ops: Ops = []
        for replica, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ops += [(dealt(own, replica, self._replicas) if count else []) + reducing(own) for own in row.ops]
        if any(row.homes != rows[0].homes for row in rows):
            raise PipelineError("the schedule puts stages elsewhere for one micro-batch more")
        return Orders(ops, microbatches, rows[0].homes, simulate(ops).idle, self._replicas)

    def _row(self, microbatches: int, replica: int) -> Orders:
        """Of one replica, its micro-batches counted from 0."""
        chunks = {} if self._chunks is None else {"chunks": self._chunks}
        made = read(self._schedule(self._workers, microbatches, **chunks))
        ops = with_recompute(made, self._wanted(replica), microbatches)
        stage_count = 1 + max((op.stage for own in ops for op in own), default=-1)
        validate(ops, stage_count, microbatches)
        if len(ops) != self._workers:
            raise PipelineError(
                f"the schedule has lists for {counted(len(ops), 'worker')}, the split names {self._workers}"
            )
        homes = placement(ops)
        return Orders(ops, microbatches, tuple(homes[stage] for stage in range(stage_count)), simulate(ops).idle)

    def _wanted(self, replica: int) -> Recompute:
        """What is to be recomputed, asked by the numbers that micro-batches have in the batch."""
        wanted = self._recompute
        if isinstance(wanted, str) or self._replicas == 1:
            return wanted
        return lambda stage, microbatch: wanted(stage, microbatch * self._replicas + replica)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What each worker does, in `ops`; it can run to its end. Printed it is text that `schedule` reads again.

    It is a schedule itself, for these numbers: `Pipeline(stages, schedule=plan, microbatches=plan.microbatches)`. A
    batch that has fewer samples than that does without the operations of the micro-batches that it lacks.
    """

    ops: Ops
    stages: int
    microbatches: int

    def __str__(self) -> str:
        return _ops.text(self.ops)

    __repr__ = __str__

    def __call__(self, workers: int, microbatches: int, chunks: int = 0) -> Ops:
        """The ops of so many micro-batches; PipelineError for more than it was made for, and for other workers.

        `chunks`: 0 for what it has.
        """
        mine = (len(self.ops), self.microbatches)
        if workers != mine[0] or microbatches > mine[1] or chunks * workers not in (0, self.stages):
            raise PipelineError(
                f"this schedule is for {mine[0]} workers with {counted(self.stages, 'stage')} and "
                f"{counted(mine[1], 'micro-batch')}, not for {counted(workers, 'worker')} and "
                f"{counted(microbatches, 'micro-batch')}"
            )
        return [[op for op in own if op.microbatch < microbatches] for own in self.ops]

    def check(self, most_live: int) -> None:
        """PipelineError, with the op, if a worker would keep more activations than `most_live` at once."""
        validate(self.ops, self.stages, self.microbatches, most_live)

    def simulate(self, cost: Cost = equal_stages, transfer: float = 0.0, activation: Each = 1.0) -> Simulation:
        """As `simulate` with these ops."""
        return simulate(self.ops, cost, transfer, activation)

    def _repr_html_(self) -> str:
        return self.simulate()._repr_html_()


def schedule(
    what: str | Schedule | Ops, workers: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Plan:
    """A plan from a schedule's name or function, for these numbers; or from a text or lists that have them already.

    The text has a line per worker and a word per op: stage, F, B, I, W, R or U, micro-batch. PipelineError where it is
    not all of the work, or can never end; it names the op.

    >>> from rpcbench.pipeline import schedule
    >>> print(schedule("1f1b", workers=2, microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    >>> schedule('''0F0 0B0
    ...             1B0 1F0''')
    Traceback (most recent call last):
    ...
    rpcbench.base.errors.PipelineError: this schedule never ends: ops[0][1] = 0B0 waits for 1B0 at ops[1][0]; ...
    """
    ops = _ops.read(_made(what, workers, microbatches, chunks))
    every = [op for own in ops for op in own]
    if not every:
        raise PipelineError("this schedule has no operation")
    stages, numbers = 1 + max(op.stage for op in every), 1 + max(op.microbatch for op in every)
    if (workers or len(ops), microbatches or numbers) != (len(ops), numbers):
        raise PipelineError(
            f"asked for {workers or 'any number of'} workers and {microbatches or 'any number of'} micro-batches, the "
            f"schedule has made one of {counted(len(ops), 'worker')} and {counted(numbers, 'micro-batch')}"
        )
    validate(ops, stages, numbers)
    return Plan(ops, stages, numbers)


def maker(what: str | Schedule) -> Schedule:
    """Of a schedule's name, function, plan or text. PipelineError for what is none of them."""
    if isinstance(what, str):
        return schedule(what) if is_text(what) else named(what)
    if not callable(what):
        raise PipelineError(f"a schedule is a name, as '1f1b', a function, or what schedule() makes, not {what!r}")
    return what


def _made(what: str | Schedule | Ops, workers: int | None, microbatches: int | None, chunks: int | None) -> Any:
    if isinstance(what, list) or (isinstance(what, str) and is_text(what)):
        if (workers, microbatches, chunks) != (None, None, None):
            raise PipelineError("operations that are written down are for numbers of their own: leave the others out")
        return what
    make = maker(what)
    if workers is None or microbatches is None:
        raise PipelineError("say for how many workers and micro-batches: schedule('1f1b', workers=4, microbatches=8)")
    return make(workers, microbatches, **({} if chunks is None else {"chunks": chunks}))


def is_text(what: str) -> bool:
    """A single word that has not the shape of an op is a name."""
    return len(what.split()) != 1 or (what.strip()[0].isdigit() and what.strip()[-1].isdigit())

"""Schedules for concrete numbers: the operations of each worker, validated before anything is sent, to print or to run.

Guarantees
- All schedules of a pipeline have the same stages on the same workers.
- A batch with fewer samples than the pipeline has micro-batches gets a schedule with one micro-batch for each sample.
- All replicas run the same order, each for micro-batches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.pipeline.ops import Kind, Ops, Schedule, find_placement, format_ops, parse_ops, read_ops, validate_ops
from rpcbench.pipeline.placement import all_reduce_ops, renumbered_ops
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import Cost, Each, Simulation, equal_stages, simulate


@dataclass(frozen=True)
class Orders:
    """The operations of all workers for one number of micro-batches."""

    ops: Ops  # the lists of the first replica, then those of the second, ...
    microbatches: int
    placement: tuple[int, ...]  # homes[stage]: the number of its worker within a replica
    ideal: float | None  # idle share if all stages take equally long; None for a run that does not train
    replicas: int = 1

    @cached_property
    def plan_texts(self) -> list[str]:
        """The operations as texts that workers read with `parse_plan`."""
        return [" ".join(map(str, own)) for own in self.ops]

    @cached_property
    def forward_orders(self) -> Orders:
        """The forwards only, for a run that does not train."""
        ops = [[op for op in own if op.kind is Kind.FORWARD] for own in self.ops]
        return Orders(ops, self.microbatches, self.placement, None, self.replicas)

    def replica_of_worker(self, worker: int) -> int:
        return worker // (len(self.ops) // self.replicas)

    def has_last_stage(self, worker: int) -> bool:
        return worker % (len(self.ops) // self.replicas) == self.placement[-1]


class ScheduleCache:
    """The orders of one schedule, for batches of any size. `workers` and `microbatches`: those of one replica.
    PipelineError where schedule and workers do not fit."""

    def __init__(
        self,
        schedule: str | Schedule,
        workers: int,
        microbatches: int,
        chunks: int | None,
        recompute: Recompute,
        replicas: int = 1,
    ) -> None:
        self._schedule = schedule_function(schedule)
        self._workers, self._chunks, self._recompute = workers, chunks, recompute
        self.microbatches, self._replicas = microbatches * replicas, replicas
        self._cached = lru_cache(maxsize=16)(self._make_orders)
        self.whole = self._cached(self.microbatches)  # at once, so that errors are raised early

    def orders_for_batch(self, samples: int) -> Orders:
        orders = self._cached(max(1, min(self.microbatches, samples)))
        # A user's schedule may place stages by the number of micro-batches, but modules stay on their workers.
        if orders.placement != self.whole.placement:
            raise PipelineError(
                f"the schedule puts stages on other workers for {count_noun(orders.microbatches, 'micro-batch')} than "
                f"for {self.microbatches}: give batches of at least {count_noun(self.microbatches, 'sample')}"
            )
        return orders

    def _make_orders(self, microbatches: int) -> Orders:
        if self._replicas == 1:
            return self._orders_of_replica(microbatches, 0)
        counts = [len(range(replica, microbatches, self._replicas)) for replica in range(self._replicas)]
        # A replica without micro-batches still takes part in the all-reduce, and needs an order that can be validated.
        rows = [self._orders_of_replica(max(1, count), replica) for replica, count in enumerate(counts)]
        ops: Ops = []
        for replica, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ops += [
                (renumbered_ops(own, replica, self._replicas) if count else []) + all_reduce_ops(own) for own in row.ops
            ]
        if any(row.placement != rows[0].placement for row in rows):
            raise PipelineError("the schedule puts stages on other workers if there is one micro-batch more")
        return Orders(ops, microbatches, rows[0].placement, simulate(ops).idle, self._replicas)

    def _orders_of_replica(self, microbatches: int, replica: int) -> Orders:
        """Return the orders of one replica, with its micro-batches counted from 0."""
        chunks = {} if self._chunks is None else {"chunks": self._chunks}
        made = read_ops(self._schedule(self._workers, microbatches, **chunks))
        ops = with_recompute(made, self._recompute_of_replica(replica), microbatches)
        stage_count = 1 + max((op.stage for own in ops for op in own), default=-1)
        validate_ops(ops, stage_count, microbatches)
        if len(ops) != self._workers:
            raise PipelineError(
                f"the schedule has lists for {count_noun(len(ops), 'worker')}, the split names {self._workers}"
            )
        worker_of_stage = find_placement(ops)
        return Orders(
            ops, microbatches, tuple(worker_of_stage[stage] for stage in range(stage_count)), simulate(ops).idle
        )

    def _recompute_of_replica(self, replica: int) -> Recompute:
        """Return the recompute option with micro-batch numbers of the batch converted from those of the replica."""
        wanted = self._recompute
        if isinstance(wanted, str) or self._replicas == 1:
            return wanted
        return lambda stage, microbatch: wanted(stage, microbatch * self._replicas + replica)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The operations of each worker in one step, validated. Printed, it is text that `schedule` reads again.

    It is a schedule, too, for these numbers: `Pipeline(stages, schedule=plan, microbatches=plan.microbatches)`. A batch
    with fewer samples leaves out the operations of the missing micro-batches.
    """

    ops: Ops
    stages: int
    microbatches: int

    def __str__(self) -> str:
        return format_ops(self.ops)

    __repr__ = __str__

    def __call__(self, workers: int, microbatches: int, chunks: int = 0) -> Ops:
        """Return the ops for these numbers; this makes a plan a schedule.

        Args:
            workers: must be the plan's number.
            microbatches: at most the plan's number.
            chunks: stages per worker; 0: the plan's number.

        Raises:
            PipelineError: for other numbers.
        """
        mine = (len(self.ops), self.microbatches)
        if workers != mine[0] or microbatches > mine[1] or chunks * workers not in (0, self.stages):
            raise PipelineError(
                f"this schedule is for {mine[0]} workers with {count_noun(self.stages, 'stage')} and "
                f"{count_noun(mine[1], 'micro-batch')}, not for {count_noun(workers, 'worker')} and "
                f"{count_noun(microbatches, 'micro-batch')}"
            )
        return [[op for op in own if op.microbatch < microbatches] for own in self.ops]

    def check(self, most_live: int) -> None:
        """Raise PipelineError, with the op, if a worker would keep more activations than `most_live` at once."""
        validate_ops(self.ops, self.stages, self.microbatches, most_live)

    def simulate(self, cost: Cost = equal_stages, transfer: float = 0.0, activation: Each = 1.0) -> Simulation:
        """Simulate these ops, as `simulate` does."""
        return simulate(self.ops, cost, transfer, activation)

    def _repr_html_(self) -> str:
        return self.simulate()._repr_html_()


def schedule(
    what: str | Schedule | Ops | Path,
    workers: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Plan:
    """Return a plan: of a schedule's name or function and numbers for it, or of a text or lists, which have their own.

    >>> from rpcbench.pipeline import schedule
    >>> print(schedule("1f1b", workers=2, microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    >>> schedule('''0F0 0B0
    ...             1B0 1F0''')
    Traceback (most recent call last):
    ...
    rpcbench.base.errors.PipelineError: this schedule never ends: ops[0][1] = 0B0 waits for 1B0 at ops[1][0]; ...

    Args:
        what: a name, a function, or operations. A text has a line per worker and a word per op: stage, F, B, I, W or
            R, micro-batch. Operations may be torch's: the path of a CSV of its schedules, or the lists of its
            `get_schedule_ops`, of which transfers are left out.
        workers: number of workers, for a name or function.
        microbatches: number of micro-batches, for a name or function.
        chunks: stages per worker; by default the schedule's own.

    Raises:
        PipelineError: where the schedule is incomplete or can never end; it names the op.
    """
    ops = read_ops(_make_ops(what, workers, microbatches, chunks))
    every = [op for own in ops for op in own]
    if not every:
        raise PipelineError("this schedule has no operation")
    stages, numbers = 1 + max(op.stage for op in every), 1 + max(op.microbatch for op in every)
    if (workers or len(ops), microbatches or numbers) != (len(ops), numbers):
        raise PipelineError(
            f"asked for {workers or 'any number of'} workers and {microbatches or 'any number of'} micro-batches, the "
            f"schedule has made one of {count_noun(len(ops), 'worker')} and {count_noun(numbers, 'micro-batch')}"
        )
    validate_ops(ops, stages, numbers)
    return Plan(ops, stages, numbers)


def schedule_function(what: str | Schedule) -> Schedule:
    """Return the schedule function of a name, function, plan or text. PipelineError for anything else."""
    if isinstance(what, str):
        return schedule(what) if is_ops_text(what) else named(what)
    if not callable(what):
        raise PipelineError(f"a schedule is a name, as '1f1b', a function, or a result of schedule(), not {what!r}")
    return what


def _make_ops(
    what: str | Schedule | Ops | Path, workers: int | None, microbatches: int | None, chunks: int | None
) -> Any:
    if isinstance(what, Path):
        what = parse_ops(what.read_text(encoding="utf-8").replace(",", " "))
    if isinstance(what, list) or (isinstance(what, str) and is_ops_text(what)):
        if (workers, microbatches, chunks) != (None, None, None):
            raise PipelineError("operations have numbers of their own: leave out workers, microbatches and chunks")
        return what
    make = schedule_function(what)
    if workers is None or microbatches is None:
        raise PipelineError("give numbers of workers and micro-batches: schedule('1f1b', workers=4, microbatches=8)")
    return make(workers, microbatches, **({} if chunks is None else {"chunks": chunks}))


def is_ops_text(what: str) -> bool:
    """Return whether this is operations as text. A single word that does not have the form of an op is a name."""
    return len(what.split()) != 1 or (what.strip()[0].isdigit() and what.strip()[-1].isdigit())

"""A schedule made concrete for one pipeline: operations for each worker, checked before anything is sent.

Guarantees
- Orders fit the stages: all those of a pipeline have the same stages on the same workers.
- A batch with fewer samples than the pipeline has micro-batches gets orders with one micro-batch for each sample.
- Where there are replicas, each has the same order, for micro-batches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline.layout import dealt, reducing
from rpcbench.pipeline.ops import Kind, Ops, Schedule, read
from rpcbench.pipeline.planned import maker
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.validate import placement, validate


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


class OrderBook:
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

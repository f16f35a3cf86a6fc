"""A schedule made concrete for one pipeline: operations for each worker, checked before anything is sent.

Guarantees
- Orders fit the stages: all those of a pipeline have the same stages on the same workers.
- A batch with fewer samples than the pipeline has micro-batches gets orders with one micro-batch for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rpcbench.pipeline.ops import Kind, Ops, Schedule
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.validate import placement, validate
from rpcbench.words.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Orders:
    """Operations for each worker; `ideal` is their idle share if all stages take equally long, None where none is said.

    `homes[stage]` is the number of its worker.
    """

    ops: Ops
    microbatches: int
    homes: tuple[int, ...]
    ideal: float | None

    @property
    def updates(self) -> bool:
        """Whether optimizers step within a step of the pipeline, as its operations."""
        return any(op.kind is Kind.UPDATE for own in self.ops for op in own)

    def forwards(self) -> Orders:
        """Only the forwards, for a run that does not train."""
        ops = [[op for op in own if op.kind is Kind.FORWARD] for own in self.ops]
        return Orders(ops, self.microbatches, self.homes, None)


class OrderBook:
    """Orders by one schedule, for batches of any size. PipelineError where schedule and workers do not fit."""

    def __init__(
        self, schedule: str | Schedule, workers: int, microbatches: int, chunks: int | None, recompute: Recompute
    ) -> None:
        self._schedule = named(schedule) if isinstance(schedule, str) else schedule
        self._workers, self._chunks, self._recompute = workers, chunks, recompute
        self.microbatches = microbatches
        self._cached = lru_cache(maxsize=16)(self._make)
        self.whole = self._cached(microbatches)

    def fitting(self, samples: int) -> Orders:
        """For a batch of so many samples."""
        orders = self._cached(max(1, min(self.microbatches, samples)))
        if orders.homes != self.whole.homes:
            raise PipelineError(
                f"the schedule puts stages elsewhere for {orders.microbatches} micro-batches than for "
                f"{self.microbatches}: give batches of at least {self.microbatches} samples"
            )
        return orders

    def _make(self, microbatches: int) -> Orders:
        chunks = {} if self._chunks is None else {"chunks": self._chunks}
        ops = with_recompute(self._schedule(self._workers, microbatches, **chunks), self._recompute, microbatches)
        stage_count = 1 + max((op.stage for own in ops for op in own), default=-1)
        validate(ops, stage_count, microbatches)
        if len(ops) != self._workers:
            raise PipelineError(f"the schedule has lists for {len(ops)} workers, the split names {self._workers}")
        homes = placement(ops)
        return Orders(ops, microbatches, tuple(homes[stage] for stage in range(stage_count)), simulate(ops).idle)

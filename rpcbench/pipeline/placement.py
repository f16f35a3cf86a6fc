"""The mesh of a data-parallel pipeline, as its driver sees it: the worker of each stage of each replica of the model.

    4 workers, replicas=2      stage 0     stage 1
    replica 0                  worker1     worker2      micro-batches 0, 2, 4, …     stage s of replica r has the
    replica 1                  worker3     worker4      micro-batches 1, 3, 5, …     number r * 2 + s

Guarantees
- A batch is cut into the same micro-batches, with the same numbers, as in a pipeline without replicas: losses, outputs,
  and random numbers of forwards are those of that pipeline.
- With one replica numbers are stages, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.pipeline.exchange import COMMIT_KINDS, DONE, REPLICA_KINDS, Slot
from rpcbench.pipeline.ops import Kind, Op

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """For one worker, the ids of the workers that it exchanges values with."""

    stages: Mapping[int, int]  # stage -> worker, within its replica
    replica_workers: tuple[int, ...]  # by replica, the workers that have its stages
    replica: int  # its own

    def sender_of(self, slot: Slot) -> int | None:
        """Return the worker that fills a slot of this one; None if no worker does."""
        if slot.kind == DONE:
            return None
        if slot.kind in COMMIT_KINDS:
            return slot.source
        return self.replica_workers[slot.source] if slot.kind in REPLICA_KINDS else self.stages[slot.source]

    def receiver_of(self, slot: Slot) -> int:
        """Return the worker that a value for this slot is sent to."""
        # In slots of the commit, `microbatch` is the id of the receiver; between replicas, it is its replica.
        if slot.kind in COMMIT_KINDS:
            return slot.microbatch
        return self.replica_workers[slot.microbatch] if slot.kind in REPLICA_KINDS else self.stages[slot.stage]


@dataclass(frozen=True, slots=True)
class WorkerMesh:
    """The mesh of `replicas` copies of a model of `stages` stages."""

    stages: int
    replicas: int = 1

    def stage_of(self, number: int) -> int:
        return number % self.stages

    def replica_of(self, number: int) -> int:
        return number // self.stages

    def replica_entries(self, stage: int, each: Mapping[int, T]) -> tuple[T, ...]:
        """Return the entries of all replicas of a stage, in their order, from a mapping by number."""
        return tuple(each[replica * self.stages + stage] for replica in range(self.replicas))

    def placement_for(self, id_: int, each: Mapping[int, int]) -> StagePlacement:
        """Return the placement for the worker with this id. `each`: number → id of its worker."""
        own = next(number for number, worker_id in each.items() if worker_id == id_)
        first = self.replica_of(own) * self.stages
        row = {stage: each[first + stage] for stage in range(self.stages)}
        return StagePlacement(row, self.replica_entries(self.stage_of(own), each), self.replica_of(own))

    def describe_stages(self, numbers: Iterable[int]) -> str:
        """Return a phrase such as "stages 0 and 1", or "stage 1 of replicas 0 and 1"."""
        if self.replicas == 1:
            return _format_numbers("stage", sorted(numbers))
        replicas: dict[tuple[int, ...], list[int]] = {}
        for replica in range(self.replicas):
            own = tuple(self.stage_of(number) for number in sorted(numbers) if self.replica_of(number) == replica)
            replicas.setdefault(own, []).append(replica)  # replicas with the same stages make one phrase
        return " and ".join(
            f"{_format_numbers('stage', own)} of {_format_numbers('replica', those)}"
            for own, those in replicas.items()
            if own
        )


def renumbered_ops(own: Sequence[Op], replica: int, replicas: int) -> list[Op]:
    """Return the ops of a worker, with the micro-batches of its replica renumbered as in the whole batch."""
    return [Op(op.stage, op.kind, op.microbatch * replicas + replica) for op in own]


def all_reduce_ops(own: Sequence[Op]) -> list[Op]:
    """Return the all-reduces of a worker after its ops."""
    # The same order in each replica, so that no two wait for each other.
    return [Op(stage, Kind.ALL_REDUCE, 0) for stage in sorted({op.stage for op in own})]


def check_replica_count(workers: Sequence[str], replicas: int) -> None:
    """Raise PipelineError if the workers cannot be divided evenly among the replicas."""
    if not isinstance(replicas, int) or replicas < 1:
        raise PipelineError(f"replicas must be a whole number of at least 1, not {replicas!r}")
    if len(workers) % replicas:
        raise PipelineError(
            f"{count_noun(len(workers), 'worker')} cannot hold {count_noun(replicas, 'replica')}: "
            "each needs as many workers as the others, so "
            "give a multiple of that"
        )


def _format_numbers(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    *most, last = numbers
    return f"{what}s {', '.join(map(str, most))} and {last}"

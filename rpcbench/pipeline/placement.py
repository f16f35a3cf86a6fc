"""Data parallel times pipeline, as its driver sees it: which worker has which stage of which replica of the model.

    4 workers, replicas=2      stage 0     stage 1
    replica 0                  worker1     worker2      micro-batches 0, 2, 4, …     stage s of replica r has the
    replica 1                  worker3     worker4      micro-batches 1, 3, 5, …     number r * 2 + s

Guarantees
- A batch is cut into the micro-batches that one pipeline with so many would have, and they keep their numbers: losses,
  outputs, and random numbers of forwards are those of that pipeline.
- With one replica numbers are stages, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline.exchange import AMONG_REPLICAS, DONE, IN_ACCORD, Slot
from rpcbench.pipeline.ops import Kind, Op

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Where others are, for one worker: ids of those that have the `stages` of its replica, by stage, and of those in
    its `column`, which have its own stages, one for each replica; its own is `replica`."""

    stages: Mapping[int, int]
    column: tuple[int, ...]
    replica: int

    def giver(self, slot: Slot) -> int | None:
        """Who fills a slot here; None where that is no worker."""
        if slot.kind == DONE:
            return None
        if slot.kind in IN_ACCORD:
            return slot.source
        return self.column[slot.source] if slot.kind in AMONG_REPLICAS else self.stages[slot.source]

    def taker(self, slot: Slot) -> int:
        """Who empties it."""
        if slot.kind in IN_ACCORD:
            return slot.microbatch
        return self.column[slot.microbatch] if slot.kind in AMONG_REPLICAS else self.stages[slot.stage]


@dataclass(frozen=True, slots=True)
class WorkerMesh:
    """Of a model of so many `stages`, each there `replicas` times."""

    stages: int
    replicas: int = 1

    def stage(self, number: int) -> int:
        return number % self.stages

    def replica(self, number: int) -> int:
        return number // self.stages

    def column(self, stage: int, each: Mapping[int, T]) -> tuple[T, ...]:
        """Of what is known by number, that of all replicas of a stage, in their order."""
        return tuple(each[replica * self.stages + stage] for replica in range(self.replicas))

    def homes(self, id_: int, each: Mapping[int, int]) -> StagePlacement:
        """For the worker with this id, where others are; `each`: number → id of its worker."""
        own = next(number for number, home in each.items() if home == id_)
        first = self.replica(own) * self.stages
        row = {stage: each[first + stage] for stage in range(self.stages)}
        return StagePlacement(row, self.column(self.stage(own), each), self.replica(own))

    def named(self, numbers: Iterable[int]) -> str:
        """As "stages 0 and 1", or "stage 1 of replicas 0 and 1"."""
        if self.replicas == 1:
            return _several("stage", sorted(numbers))
        replicas: dict[tuple[int, ...], list[int]] = {}
        for replica in range(self.replicas):
            own = tuple(self.stage(number) for number in sorted(numbers) if self.replica(number) == replica)
            replicas.setdefault(own, []).append(replica)
        return " and ".join(
            f"{_several('stage', own)} of {_several('replica', those)}" for own, those in replicas.items() if own
        )


def dealt(own: Sequence[Op], replica: int, replicas: int) -> list[Op]:
    """The ops of a worker, with the numbers that its replica's micro-batches have in the batch."""
    return [Op(op.stage, op.kind, op.microbatch * replicas + replica) for op in own]


def reducing(own: Sequence[Op]) -> list[Op]:
    """What a worker does for its stages after these ops, in the same order in each replica: so none waits in vain."""
    return [Op(stage, Kind.ALL_REDUCE, 0) for stage in sorted({op.stage for op in own})]


def check_count(workers: Sequence[str], replicas: int) -> None:
    """PipelineError where the workers cannot be shared out among so many replicas."""
    if not isinstance(replicas, int) or replicas < 1:
        raise PipelineError(f"replicas must be a whole number of at least 1, not {replicas!r}")
    if len(workers) % replicas:
        raise PipelineError(
            f"{counted(len(workers), 'worker')} cannot hold {counted(replicas, 'replica')}: "
            "each needs as many workers as the others, so "
            "give a multiple of that"
        )


def _several(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    *most, last = numbers
    return f"{what}s {', '.join(map(str, most))} and {last}"

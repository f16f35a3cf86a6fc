"""What replicas of a stage share, on the worker of one: gradients are added up over all, and buffers are kept equal.

    add ── gradients of micro-batches, as they are made     ready ── all replicas have made theirs, or the step is over
    total ── the same sums for all replicas, to the last bit, and with that the same statistics and buffers

Guarantees
- A parameter has a gradient on all replicas or on none: on all, if any micro-batch of the batch gives it one.
- Nobody begins an all-reduce that another replica of this step will not come to; waiting for them ends with the step.
- After one that broke, the replicas meet anew in the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rpcbench.distributed.events import CollectiveEvents, Part
from rpcbench.pipeline import gloo
from rpcbench.pipeline.batchnorm import Deferred
from rpcbench.pipeline.buckets import Bucket, buckets
from rpcbench.pipeline.exchange import Gradients
from rpcbench.pipeline.layout import Homes
from rpcbench.pipeline.slots import DONE, GROUP, READY, Slot, Slots
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import layout_of

Send = Callable[[Slot, tuple[Any, ...]], None]
_NOBODY = -1


class Column:
    """The workers that have this worker's stages of the pipeline `key`, one for each replica; and their group."""

    def __init__(self, agent: Agent, key: str, homes: Homes, slots: Slots, send: Send) -> None:
        self._agent, self._key, self._slots, self._send = agent, key, slots, send
        self.ids, self.rank = homes.column, homes.replica
        self.peers = [rank for rank in range(len(self.ids)) if rank != self.rank]
        self._told, self._names = agent.part(CollectiveEvents), tuple(agent.roster.name(id_) for id_ in self.ids)
        self._count = 0  # of what they have done together for a stage in a step
        self.since = _NOBODY  # the step in which the group was made, on all of them
        self._group: Any = None

    def ready(self, step: int, stage: int) -> int:
        """Wait until all have come so far; since when they have a group, or _NOBODY if not all have the same."""
        self._count = 0
        with self._enter(step, stage, "barrier"):
            found = {since for (since,) in self._exchange(Slot(step, READY, stage, 0, 0), (self.since,))}
        return self.since if found == {self.since} else _NOBODY

    def _exchange(self, slot: Slot, message: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Tell all others; what they tell."""
        for rank in self.peers:
            self._send(slot._replace(microbatch=rank, source=self.rank), message)
        return [self._slots.take(slot._replace(microbatch=self.rank, source=rank)) for rank in self.peers]

    def meet(self, step: int, agreed: int) -> None:
        """See to it that all have a group, as `ready` has told them."""
        if agreed != _NOBODY:
            return
        self.part()
        rounds = itertools.count()
        meeting = gloo.Meeting(lambda key, value: self._exchange(Slot(step, GROUP, next(rounds), 0, 0), (key, value)))
        host, slot = gloo.host_for(self._agent, self.ids), Slot(step, DONE, _NOBODY, 0, self.rank)
        gloo.make(meeting, self.rank, len(self.ids), host, lambda made: self._slots.put(slot, lambda: made))
        self._group, error = self._slots.take(slot)
        if error is not None:
            raise error
        self.since = step

    def part(self) -> None:
        """Forget the group, which may be broken."""
        self.since = _NOBODY
        if self._group is not None:
            groups, self._group = [self._group], None  # nothing else has it: who drops it last waits for it
            gloo.let_go(groups)

    def add_up(self, step: int, stage: int, flats: Sequence[torch.Tensor]) -> None:
        """Let each of these be the sum over all replicas."""
        self._together(step, stage, "all_reduce(SUM)", flats, lambda flat: self._group.allreduce([flat]))

    def copy_first(self, step: int, stage: int, flat: torch.Tensor) -> None:
        """Let this be what the first replica has."""
        self._together(step, stage, "broadcast(src=0)", [flat], lambda flat: self._group.broadcast(flat, 0))

    def _together(
        self, step: int, stage: int, op: str, flats: Sequence[torch.Tensor], begin: Callable[[torch.Tensor], Any]
    ) -> None:
        """Begin all, and wait until they are done, or the step is over. The error of one that failed."""
        slots = [Slot(step, DONE, stage, number, self.rank) for number in range(len(flats))]
        entered = [self._enter(step, stage, op, flat) for flat in flats]
        try:
            for slot, one, work in zip(slots, entered, [begin(flat) for flat in flats], strict=True):
                gloo.then(work, partial(self._done, slot, one))
            for slot in slots:
                (error,) = self._slots.take(slot)
                if error is not None:
                    raise error
        except BaseException:
            for one in entered:
                one.leave(failed=True)
            raise

    def _done(self, slot: Slot, entered: Part, error: BaseException | None) -> None:
        entered.leave(failed=error is not None)
        self._slots.put(slot, lambda: (error,))

    def _enter(self, step: int, stage: int, op: str, flat: torch.Tensor | None = None) -> Part:
        """What all replicas of a stage do next is under way here."""
        self._count += 1
        scope, group = f"{self._key}.{step}.{stage}", f"replicas of stage {stage}"
        shape, size = ("", 0) if flat is None else (layout_of(flat), flat.nbytes)
        return self._told.enter(Part(scope, self._count, group, op, self._names, shape, size))


class Shared:
    """One step on one worker. `column` None: there are no other replicas, and nothing is to be done."""

    def __init__(self, step: int, column: Column | None, norms: Deferred) -> None:
        self._step, self._column, self._norms = step, column, norms
        self._kept: dict[int, list[Bucket]] = {}

    def add(self, stage: int, params: Sequence[torch.Tensor], gradients: Gradients) -> bool:
        """Keep gradients of a stage's `params` until `total`. Where nothing is to be done: False."""
        if self._column is None:
            return False
        kept = self._buckets(stage, params)
        for param, gradient in zip(params, gradients, strict=True):
            if gradient is not None:
                next(bucket for bucket in kept if param in bucket.views).add(param, gradient)
        return True

    def _buckets(self, stage: int, params: Iterable[torch.Tensor]) -> list[Bucket]:
        if stage not in self._kept:
            self._kept[stage] = buckets(params)
        return self._kept[stage]

    def ready(self, stage: int) -> int:
        """Wait until all replicas have all gradients of the stage; give what is returned to `total`."""
        assert self._column is not None
        return self._column.ready(self._step, stage)

    def total(
        self, stage: int, module: nn.Module, params: Sequence[torch.Tensor], agreed: int
    ) -> tuple[Gradients, int]:
        """The stage's gradients of the whole batch, and the bytes that were added up."""
        column = self._column
        assert column is not None
        kept = self._buckets(stage, params)
        try:
            column.meet(self._step, agreed)
            column.add_up(self._step, stage, [bucket.flat for bucket in kept])
            self._share_statistics(column, stage, module)
            self._share_buffers(column, stage, module)
        except BaseException:
            column.part()
            raise
        del self._kept[stage]
        found = dict(leaf for bucket in kept for leaf in bucket.leaves())
        return [found.get(param) for param in params], sum(bucket.flat.nbytes for bucket in kept)

    def _share_statistics(self, column: Column, stage: int, module: nn.Module) -> None:
        """Those of batch norms that move once a step: each replica's own are put together on all of them."""
        told = self._norms.told(module, column.rank, len(column.ids))
        column.add_up(self._step, stage, told)
        self._norms.take(module, told)

    def _share_buffers(self, column: Column, stage: int, module: nn.Module) -> None:
        """All replicas get those of the first, as with DistributedDataParallel."""
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if buffers:
            flat = torch.cat([_as_bytes(buffer) for buffer in buffers])
            column.copy_first(self._step, stage, flat)
            for buffer, part in zip(buffers, torch.split(flat, [buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

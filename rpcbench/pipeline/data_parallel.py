"""What replicas of a stage share, on the worker of one: gradients are added up over all, and buffers are kept equal.

    add ── gradients of micro-batches, as they are made     ready ── all replicas have made theirs, or the step is over
    total ── the same sums for all replicas, to the last bit, and with that the same statistics and buffers

Guarantees
- A parameter has a gradient on all replicas or on none: on all, if any micro-batch of the batch gives it one.
- No replica begins an all-reduce that another replica of this step will not come to; waiting for them ends with the
  step. After one that broke, the replicas meet anew in the next step.
- Gradients go in buckets, each of one type and device, in one piece of memory. Those of complex numbers go as pairs of
  real ones.
- The process group is torch's gloo, beside whatever groups the user has. It needs no `init_process_group`, no port that
  is known beforehand, and no file: members tell each other their addresses over calls of this world, which only its
  members can make. It listens on loopback where all are on one host, else where the others find the worker.
- An operation ends in bounded time: a member that dies ends it for all at once, one that hangs after `SECONDS`.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import _distributed_c10d as c10d

from rpcbench.base.errors import ConnectionLostError, PipelineError
from rpcbench.distributed.events import CollectiveEvents, Part
from rpcbench.pipeline.batchnorm import Deferred
from rpcbench.pipeline.exchange import DONE, GROUP, READY, Gradients, Slot, Slots
from rpcbench.pipeline.placement import StagePlacement, WorkerMesh
from rpcbench.pipeline.split import Stage
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import layout_of
from rpcbench.transport import listeners

SECONDS = 120.0
"""So long may one all-reduce take, of 25 MB at most."""
Made = tuple[Any, Exception | None]
"""A group, or the error that its making has ended with."""
LOOPBACK = "127.0.0.1"


class Meeting(c10d.Store):
    """Where gloo's members leave their addresses, under a key of its own each, and look for those of all others.

    `exchange(key, value)` tells all others of one, and waits for what they tell.
    """

    def __init__(self, exchange: Callable[[str, bytes], Iterable[tuple[str, bytes]]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._known |= {key: value, **dict(self._exchange(key, value))}

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """They are there already."""


def make(store: Meeting, rank: int, size: int, host: str, done: Callable[[Made], None]) -> None:
    """Make a new group, when all its members are there; it listens at `host`. `done` gets it, or the error.

    All of it happens on a thread of its own: if a member leaves when others know where it was, these wait inside gloo
    for `SECONDS`, and nothing can end that.
    """

    def made() -> None:
        try:
            told: Made = (_group(store, rank, size, host), None)
        except Exception as error:  # noqa: BLE001  (raised by who waits for it)
            told = None, error
        done(told)

    threading.Thread(target=made, name="rpcbench gloo", daemon=True).start()


def _group(store: Meeting, rank: int, size: int, host: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._timeout = datetime.timedelta(seconds=SECONDS)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def host_for(agent: Agent, others: Sequence[int]) -> str:
    """Where this worker is to listen for these others. Loopback, unless one is on another host."""

    def near(node: Node) -> bool:
        members = node.members
        return all(members.members[other].host == members.me.host for other in others if other in members.members)

    if agent.machine.ask(near):
        return LOOPBACK
    remote: str = agent.machine.ask(lambda node: node.members.me.remote)
    return listeners.split_address(remote.partition("://")[2])[0]


def then(work: Any, done: Callable[[ConnectionLostError | None], None]) -> None:
    """Call `done` when the group's work is over, on a thread of gloo's, with the error that has ended it."""
    work.get_future().add_done_callback(lambda future: done(_error(future)))


def _error(future: Any) -> ConnectionLostError | None:
    try:
        future.value()
    except RuntimeError as error:
        return ConnectionLostError(f"gradients could not be added up over the replicas: {error}")
    return None


def let_go(groups: list[Any]) -> None:
    """Forget these groups, which nothing but this list has. Gloo waits for what they are still at, so that is for a
    thread of its own to wait for."""
    threading.Thread(target=groups.clear, name="rpcbench gloo", daemon=True).start()


BYTES = 25 * 2**20
"""At most in a bucket, unless one parameter has more."""
Leaves = list[tuple[torch.Tensor, torch.Tensor]]


class Bucket:
    """Of some parameters. `flat`: their gradients, then for each how many have one; sums of these are such, too."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        sizes = [_real(param).numel() for param in params]
        self.flat = torch.zeros(sum(sizes) + len(params), dtype=_real(params[0]).dtype, device=params[0].device)
        *parts, self._counts = torch.split(self.flat, [*sizes, len(params)])
        self.views = {param: _as(param, part) for param, part in zip(params, parts, strict=True)}
        self._places = {param: place for place, param in enumerate(params)}

    def add(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """PipelineError for one that has gaps."""
        if gradient.layout is not torch.strided:
            raise PipelineError(
                "sparse gradients cannot be added up over replicas: make the layer without sparse=True, or give "
                "split() no replicas"
            )
        self.views[param].add_(gradient)
        self._counts[self._places[param]] = 1

    def leaves(self) -> Leaves:
        """The gradients that are there, each in memory of its own."""
        there = self._counts.tolist()
        return [(param, self.views[param].clone()) for param, count in zip(self._params, there, strict=True) if count]


def buckets(params: Iterable[torch.Tensor]) -> list[Bucket]:
    """Buckets for all of these, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for param in params:
        own = kinds.setdefault((param.dtype, param.device), [[]])
        if own[-1] and sum(each.nbytes for each in own[-1]) + param.nbytes > BYTES:
            own.append([])
        own[-1].append(param)
    return [Bucket(each) for own in kinds.values() for each in own]


def _real(param: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(param.detach()) if param.is_complex() else param.detach()


def _as(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    shaped = part.view(_real(param).shape)
    return torch.view_as_complex(shaped) if param.is_complex() else shaped


Send = Callable[[Slot, tuple[Any, ...]], None]
_NOBODY = -1


class ReplicaGroup:
    """The workers that have this worker's stages of the pipeline `key`, one for each replica; and their group."""

    def __init__(self, agent: Agent, key: str, homes: StagePlacement, slots: Slots, send: Send) -> None:
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
        meeting = Meeting(lambda key, value: self._exchange(Slot(step, GROUP, next(rounds), 0, 0), (key, value)))
        host, slot = host_for(self._agent, self.ids), Slot(step, DONE, _NOBODY, 0, self.rank)
        make(meeting, self.rank, len(self.ids), host, lambda made: self._slots.put(slot, lambda: made))
        self._group, error = self._slots.take(slot)
        if error is not None:
            raise error
        self.since = step

    def part(self) -> None:
        """Forget the group, which may be broken."""
        self.since = _NOBODY
        if self._group is not None:
            groups, self._group = [self._group], None  # nothing else has it: who drops it last waits for it
            let_go(groups)

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
                then(work, partial(self._done, slot, one))
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


class GradientAllReduce:
    """One step on one worker. `column` None: there are no other replicas, and nothing is to be done."""

    def __init__(self, step: int, column: ReplicaGroup | None, norms: Deferred) -> None:
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

    def _share_statistics(self, column: ReplicaGroup, stage: int, module: nn.Module) -> None:
        """Those of batch norms that move once a step: each replica's own are put together on all of them."""
        told = self._norms.told(module, column.rank, len(column.ids))
        column.add_up(self._step, stage, told)
        self._norms.take(module, told)

    def _share_buffers(self, column: ReplicaGroup, stage: int, module: nn.Module) -> None:
        """All replicas get those of the first, as with DistributedDataParallel."""
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if buffers:
            flat = torch.cat([_as_bytes(buffer) for buffer in buffers])
            column.copy_first(self._step, stage, flat)
            for buffer, part in zip(buffers, torch.split(flat, [buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


_IN_CLEAR = (
    "{workers} are on different hosts, and have the same stage: their gradients are added up through gloo, which "
    "neither encrypts them nor proves who is there, unlike all else in this world. Let replicas of a stage be on one "
    "host, or the network between them be your own"
)


def replicated(row: Sequence[Stage], workers: Sequence[str], replicas: int) -> list[Stage]:
    """The stages of all replicas, by their numbers; `row` has those of the first, `workers` are all of them."""
    wide = len(workers) // replicas
    own = {worker: place for place, worker in enumerate(workers[:wide])}
    return [
        replace(stage, index=replica * len(row) + stage.index, worker=workers[replica * wide + own[stage.worker]])
        for replica in range(replicas)
        for stage in row
    ]


def warn_of_hosts(agent: Agent, stages: Sequence[Stage], layout: WorkerMesh) -> None:
    """UserWarning, at the line that makes the pipeline, where replicas of a stage are on several hosts."""
    members = {member.name: member for member in agent.machine.ask(lambda node: list(node.members.members.values()))}
    workers = {stage.index: stage.worker for stage in stages}
    for stage in range(layout.stages):
        column = layout.column(stage, workers)
        if len({members[worker].host for worker in column if worker in members}) > 1:
            warnings.warn(_IN_CLEAR.format(workers=" and ".join(column)), UserWarning, stacklevel=3)
            return

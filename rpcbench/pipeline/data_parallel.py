"""Data parallelism on one worker: gradients are summed over the replicas of a stage, and their buffers are kept equal.

    add ── gradients of micro-batches, as they are made     ready ── all replicas have theirs, or the step is over
    total ── the same sums on all replicas, to the last bit, and the same statistics and buffers

Guarantees
- A parameter has a gradient on all replicas or on none: on all, if any micro-batch of the batch gives it one.
- No replica begins an all-reduce that another replica of this step will not join; the wait for them ends with the step.
  After a failed one the replicas make a new group in the next step.
- The process group is torch's gloo, beside the user's groups. It needs no `init_process_group`, no fixed port and no
  file: members exchange their addresses by messages of this world, which only its members can send. It listens on
  loopback if all are on one host, else at the address that the others use for the worker.
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
from rpcbench.distributed.events import CollectiveEvents, CollectivePart
from rpcbench.pipeline.batchnorm import Deferred
from rpcbench.pipeline.exchange import DONE, GROUP, READY, Gradients, Slot, Slots
from rpcbench.pipeline.placement import StagePlacement, WorkerMesh
from rpcbench.pipeline.split import Stage
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import layout_of
from rpcbench.transport import listeners

SECONDS = 120.0
"""Timeout of one all-reduce, of 25 MB at most, in seconds."""
Made = tuple[Any, Exception | None]
"""A new group, or the error of its creation."""
LOOPBACK = "127.0.0.1"


class RendezvousStore(c10d.Store):
    """The rendezvous of gloo's members: each stores its address under its own key, and reads those of all others.
    `exchange(key, value)` sends one to all others, and returns theirs."""

    def __init__(self, exchange: Callable[[str, bytes], Iterable[tuple[str, bytes]]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._known: dict[str, bytes] = {}  # key → address

    def set(self, key: str, value: Any) -> None:
        self._known |= {key: value, **dict(self._exchange(key, value))}

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Return at once: `set` has waited for all."""


def start_group(store: RendezvousStore, rank: int, size: int, host: str, done: Callable[[Made], None]) -> None:
    """Make a new group when all its members have come; it listens at `host`. `done` gets the group or the error. A new
    thread does it: if a member leaves after the others have its address, they block inside gloo, which tries five times
    for `SECONDS` each."""

    def create_group() -> None:
        try:
            options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
            options._timeout = datetime.timedelta(seconds=SECONDS)
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            outcome: Made = (c10d.ProcessGroupGloo(store, rank, size, options), None)
        except Exception as error:  # noqa: BLE001  (raised by the thread that waits)
            outcome = None, error
        done(outcome)

    threading.Thread(target=create_group, name="rpcbench gloo", daemon=True).start()


def listen_host_for(agent: Agent, others: Sequence[int]) -> str:
    """Return the address that this worker listens at for these others: loopback, unless one is on another host."""

    def is_same_host(node: Node) -> bool:
        members = node.members
        return all(members.members[other].host == members.me.host for other in others if other in members.members)

    if agent.machine.read_node(is_same_host):
        return LOOPBACK
    remote: str = agent.machine.read_node(lambda node: node.members.me.remote)  # as other hosts reach this agent
    return listeners.split_address(remote.partition("://")[2])[0]


def free_groups(groups: list[Any]) -> None:
    """Free the groups of this list, which has their last references. A new thread waits for gloo's open work."""
    threading.Thread(target=groups.clear, name="rpcbench gloo", daemon=True).start()


BYTES = 25 * 2**20
"""Bytes in a bucket at most, unless one parameter has more."""
Leaves = list[tuple[torch.Tensor, torch.Tensor]]


class Bucket:
    """Gradients of parameters of one dtype and device: `flat` has all, then for each how many replicas have one."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        sizes = [_view_as_real(param).numel() for param in params]  # complex numbers as pairs of real ones
        self.flat = torch.zeros(sum(sizes) + len(params), dtype=_view_as_real(params[0]).dtype, device=params[0].device)
        *parts, self._counts = torch.split(self.flat, [*sizes, len(params)])  # the counts are summed, too
        self.views = {param: _view_as_param(param, part) for param, part in zip(params, parts, strict=True)}
        self._places = {param: place for place, param in enumerate(params)}  # parameter → its count

    def add_gradient(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add one gradient. Raises PipelineError for a sparse one."""
        if gradient.layout is not torch.strided:
            raise PipelineError(
                "sparse gradients cannot be added up over replicas: make the layer without sparse=True, or give "
                "split() no replicas"
            )
        self.views[param].add_(gradient)
        self._counts[self._places[param]] = 1  # of this replica, however many micro-batches

    def summed_leaves(self) -> Leaves:
        """Return the gradients that some replica has, each in memory of its own."""
        there = self._counts.tolist()
        return [(param, self.views[param].clone()) for param, count in zip(self._params, there, strict=True) if count]


def make_buckets(params: Iterable[torch.Tensor]) -> list[Bucket]:
    """Return buckets for these parameters, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}  # an inner list: one bucket
    for param in params:
        own = kinds.setdefault((param.dtype, param.device), [[]])
        if own[-1] and sum(each.nbytes for each in own[-1]) + param.nbytes > BYTES:  # this bucket is full
            own.append([])
        own[-1].append(param)
    return [Bucket(each) for own in kinds.values() for each in own]


def _view_as_real(param: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(param.detach()) if param.is_complex() else param.detach()


def _view_as_param(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    shaped = part.view(_view_as_real(param).shape)
    return torch.view_as_complex(shaped) if param.is_complex() else shaped


Send = Callable[[Slot, tuple[Any, ...]], None]
_NO_GROUP = -1  # no step: there is no group


class ReplicaGroup:
    """The workers with this worker's stages of the pipeline `key`, one for each replica, and their process group."""

    def __init__(self, agent: Agent, key: str, placement: StagePlacement, slots: Slots, send: Send) -> None:
        self._agent, self._key, self._slots, self._send = agent, key, slots, send
        self.ids, self.rank = placement.replica_workers, placement.replica  # replica → id of its worker; its own place
        self.peers = [rank for rank in range(len(self.ids)) if rank != self.rank]
        self._collective_events, self._names = (
            agent.part(CollectiveEvents),
            tuple(agent.links.members.member_name(id_) for id_ in self.ids),
        )
        self._count = 0  # operations for one stage in a step: the same on all replicas
        self.since = _NO_GROUP  # the step in which the group was made, the same on all replicas
        self._group: Any = None

    def wait_for_replicas(self, step: int, stage: int) -> int:
        """Wait for all replicas. Returns the step in which their group was made, or _NOBODY: they have none."""
        self._count = 0
        with self._begin_operation(step, stage, "barrier"):
            found = {since for (since,) in self._exchange_messages(Slot(step, READY, stage, 0, 0), (self.since,))}
        return self.since if found == {self.since} else _NO_GROUP

    def _exchange_messages(self, slot: Slot, message: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Send a message to all others, and return theirs."""
        for rank in self.peers:
            self._send(slot._replace(microbatch=rank, source=self.rank), message)
        return [self._slots.take_values(slot._replace(microbatch=self.rank, source=rank)) for rank in self.peers]

    def make_group(self, step: int, agreed: int) -> None:
        """Make a group, unless all have the same. `agreed`: the result of `wait_for_replicas`."""
        if agreed != _NO_GROUP:
            return
        self.drop_group()  # some may have none, or a broken one
        rounds = itertools.count()  # each key that gloo sets is an exchange of its own
        meeting = RendezvousStore(
            lambda key, value: self._exchange_messages(Slot(step, GROUP, next(rounds), 0, 0), (key, value))
        )
        host, slot = listen_host_for(self._agent, self.ids), Slot(step, DONE, _NO_GROUP, 0, self.rank)
        start_group(meeting, self.rank, len(self.ids), host, lambda made: self._slots.put(slot, lambda: made))
        self._group, error = self._slots.take_values(slot)  # the end of the step ends this wait, too
        if error is not None:
            raise error
        self.since = step

    def drop_group(self) -> None:
        """Drop the group, which may be broken."""
        self.since = _NO_GROUP
        if self._group is not None:
            groups, self._group = [self._group], None  # the last reference: to drop it blocks
            free_groups(groups)

    def all_reduce(self, step: int, stage: int, flats: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all replicas."""
        self._run_collective(step, stage, "all_reduce(SUM)", flats, lambda flat: self._group.allreduce([flat]))

    def broadcast_first(self, step: int, stage: int, flat: torch.Tensor) -> None:
        self._run_collective(step, stage, "broadcast(src=0)", [flat], lambda flat: self._group.broadcast(flat, 0))

    def _run_collective(
        self, step: int, stage: int, op: str, flats: Sequence[torch.Tensor], begin: Callable[[torch.Tensor], Any]
    ) -> None:
        """Start an operation on each tensor, and wait for all, or the end of the step. Raises the first error."""
        slots = [Slot(step, DONE, stage, number, self.rank) for number in range(len(flats))]
        entered = [self._begin_operation(step, stage, op, flat) for flat in flats]
        try:
            for slot, one, work in zip(slots, entered, [begin(flat) for flat in flats], strict=True):
                work.get_future().add_done_callback(partial(self._operation_done, slot, one))
            for slot in slots:
                (error,) = self._slots.take_values(slot)
                if error is not None:
                    raise error
        except BaseException:  # Ctrl-C, too: a row in the table of collectives must end
            for one in entered:
                one.record_end(failed=True)
            raise

    def _operation_done(self, slot: Slot, entered: CollectivePart, future: Any) -> None:
        """Fill the slot, on a thread of gloo."""
        error = None
        try:
            future.value()
        except RuntimeError as failed:
            error = ConnectionLostError(f"gradients could not be added up over the replicas: {failed}")
        entered.record_end(failed=error is not None)
        self._slots.put(slot, lambda: (error,))

    def _begin_operation(self, step: int, stage: int, op: str, flat: torch.Tensor | None = None) -> CollectivePart:
        """Record that the next operation of all replicas of a stage has begun here."""
        self._count += 1
        scope, group = f"{self._key}.{step}.{stage}", f"replicas of stage {stage}"
        shape, size = ("", 0) if flat is None else (layout_of(flat), flat.nbytes)
        return self._collective_events.record_entry(
            CollectivePart(scope, self._count, group, op, self._names, shape, size)
        )


class GradientAllReduce:
    """The all-reduces of one step on one worker. `replica_group` None: there is one replica."""

    def __init__(self, step: int, replica_group: ReplicaGroup | None, norms: Deferred) -> None:
        self._step, self._replica_group, self._norms = step, replica_group, norms
        self._kept: dict[int, list[Bucket]] = {}

    def add_to_buckets(self, stage: int, params: Sequence[torch.Tensor], gradients: Gradients) -> bool:
        """Add gradients of a stage's `params` to its buckets. Returns False if there is nothing to do."""
        if self._replica_group is None:
            return False
        kept = self._buckets_of_stage(stage, params)
        for param, gradient in zip(params, gradients, strict=True):
            if gradient is not None:
                next(bucket for bucket in kept if param in bucket.views).add_gradient(param, gradient)
        return True

    def _buckets_of_stage(self, stage: int, params: Iterable[torch.Tensor]) -> list[Bucket]:
        if stage not in self._kept:
            self._kept[stage] = make_buckets(params)
        return self._kept[stage]

    def wait_for_replicas(self, stage: int) -> int:
        """Wait until all replicas have all gradients of the stage. The result is an argument of `all_reduce_stage`."""
        assert self._replica_group is not None
        return self._replica_group.wait_for_replicas(self._step, stage)

    def all_reduce_stage(
        self, stage: int, module: nn.Module, params: Sequence[torch.Tensor], agreed: int
    ) -> tuple[Gradients, int]:
        """Return the stage's gradients of the whole batch, and the number of bytes that were summed."""
        replica_group = self._replica_group
        assert replica_group is not None
        kept = self._buckets_of_stage(stage, params)
        try:
            replica_group.make_group(self._step, agreed)
            replica_group.all_reduce(self._step, stage, [bucket.flat for bucket in kept])
            # batch norm statistics
            moments = self._norms.moment_rows(module, replica_group.rank, len(replica_group.ids))
            replica_group.all_reduce(self._step, stage, moments)
            self._norms.replace_moments(module, moments)
            self._share_buffers(replica_group, stage, module)
        except BaseException:
            replica_group.drop_group()  # the other replicas may be elsewhere: the next step makes a new group
            raise
        del self._kept[stage]
        found = dict(leaf for bucket in kept for leaf in bucket.summed_leaves())
        return [found.get(param) for param in params], sum(bucket.flat.nbytes for bucket in kept)

    def _share_buffers(self, replica_group: ReplicaGroup, stage: int, module: nn.Module) -> None:
        """Copy the buffers of the first replica to all, as DistributedDataParallel does."""
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if buffers:
            # as bytes: one broadcast for all dtypes
            flat = torch.cat([b.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for b in buffers])
            replica_group.broadcast_first(self._step, stage, flat)
            for buffer, part in zip(buffers, torch.split(flat, [buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


_UNENCRYPTED_WARNING = (
    "{workers} are on different hosts, and have the same stage: their gradients are added up through gloo, which "
    "neither encrypts nor authenticates, unlike all other messages of this world. Put replicas of a stage on one host, "
    "or use a network between them that you trust"
)


def replicate_stages(row: Sequence[Stage], workers: Sequence[str], replicas: int) -> list[Stage]:
    """Return the stages of all replicas, by their numbers. `row`: those of the first; `workers`: all of them."""
    wide = len(workers) // replicas
    own = {worker: place for place, worker in enumerate(workers[:wide])}
    return [
        replace(stage, index=replica * len(row) + stage.index, worker=workers[replica * wide + own[stage.worker]])
        for replica in range(replicas)
        for stage in row
    ]


def warn_of_hosts(agent: Agent, stages: Sequence[Stage], layout: WorkerMesh) -> None:
    """Issue a UserWarning, at the line that makes the pipeline, if replicas of a stage are on several hosts."""
    members = {
        member.name: member for member in agent.machine.read_node(lambda node: list(node.members.members.values()))
    }
    workers = {stage.index: stage.worker for stage in stages}
    for stage in range(layout.stages):
        replica_workers = layout.replica_entries(stage, workers)
        if len({members[worker].host for worker in replica_workers if worker in members}) > 1:
            warnings.warn(_UNENCRYPTED_WARNING.format(workers=" and ".join(replica_workers)), UserWarning, stacklevel=3)
            return

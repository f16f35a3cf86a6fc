"""The collectives that a program calls through torch itself, as rows of the table "collectives": also DDP's and FSDP's.

Guarantees
- Without a watcher torch runs as if this file did not exist; what it recorded itself is read when a watch begins.
- While this member is watched, every collective and transfer of a group that the program has made passes a kernel in
  torch's dispatcher: those of Python, of functional collectives, of DTensor, and of DistributedDataParallel's C++.
- All ranks give the same number to the same collective, though their watches begin at different times, and though each
  has other transfers. Transfers between two ranks are numbered from the beginning of the watch.
- This package's own calls make no row here: `distributed.groups` records those.
- Each operation runs once, with torch's own result or error: an error of the recording is logged and ends here.
"""

# Theory of operation
#
#     torch.distributed, DDP, FSDP, DTensor            flight recorder of torch
#               │ c10d::allreduce_, …                        │ all collectives so far: number, begin, sizes
#               ▼                                            │
#     dispatcher ──► Probe.kernel ──► gloo, NCCL             ▼
#                     │ while watched              TorchCollectives.set: once, when a watch begins
#                     └───────────► CollectiveEvents ◄───────┘
#
# The kernel stands at the dispatch key BackendSelect, which is on in every thread. It is registered once, and covered
# by a fall-through kernel whenever no member is watched. It is never unregistered: a thread of torch that is about to
# run it may wait for Python's lock meanwhile.
#
# A group's backend counts its operations, transfers included, which differ between ranks. So the number of a collective
# is the backend's count less this rank's transfers, and the flight recorder, which numbers collectives alone, gives
# their difference at the beginning of a watch.

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch._C import DispatchKey, _dispatch_keyset_full_after
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from rpcbench.base.conditions import Event
from rpcbench.distributed import groups
from rpcbench.distributed.call_sites import calling_site
from rpcbench.distributed.events import OWN_CALLS, CollectiveEvents, CollectivePart, count_operations
from rpcbench.distributed.flight_records import FlightEntry, flight_record, is_completed
from rpcbench.distributed.torch_ops import (
    BARRIERS,
    TORCH_OPS,
    TRANSFERS,
    Layouts,
    OpLabel,
    TorchOp,
    first_tensor,
    flatten_tensors,
    group_label,
)
from rpcbench.distributed.torch_worlds import rendezvous_of_group
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import Bystander
from rpcbench.runtime.handles import tensor_bytes

_log = logging.getLogger(__name__)
_STORE_SECONDS = timedelta(seconds=3)
_POLL_SECONDS = 0.005  # between two looks at operations that torch lets nobody wait for


# gloo gives no future for these; the work of a reduce_scatter is never complete, though its `wait` returns.
_WITHOUT_FUTURE = {
    "send", "recv_", "recv_any_source_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class WatchedGroup:
    """A process group of torch, as this rank sees it."""

    name: str  # torch's, alike on all ranks
    label: str  # for people
    scope: str  # of its parts
    ranks: tuple[int, ...]  # of the world, in the group's order
    members: tuple[str, ...]
    backend: Any  # torch's, which counts the operations
    is_gloo: bool
    lock: threading.RLock = field(default_factory=threading.RLock)  # from an operation's begin until it has its number
    transfers: int | None = None  # of this rank so far; None: not known since the watch began
    transfer_counts: Counter[str] = field(default_factory=Counter)  # transfers since the watch began, by direction


@dataclass(slots=True)
class SeenOperation:
    """An operation of torch that passes the kernel, and as much as is known of it."""

    name: str
    args: Sequence[Any]
    group: WatchedGroup | None = None  # None: it is left alone
    before: int = 0  # the backend's count of operations before it
    part: CollectivePart | None = None


class Probe:
    """The kernels in torch's dispatcher, of which a process has one set. They report to the member watched last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[TorchCollectives] = []
        self._library: Any = None  # registers the kernels
        self._cover: Any = None  # hides them, while no member is watched

    @property
    def is_active(self) -> bool:
        """Whether collectives of torch pass the kernels now."""
        return self._library is not None and self._cover is None

    def set_reporting(self, reports: TorchCollectives, on: bool) -> None:
        """Begin or end to report to one member's table."""
        with self._lock:
            self._watched = [each for each in self._watched if each is not reports] + [reports] * on
            if self._watched and self._library is None:
                self._library = self._register_kernels(self._make_kernel)
            if self._watched and self._cover is not None:
                self._cover._destroy()
                self._cover = None
            elif not self._watched and self._cover is None and self._library is not None:
                self._cover = self._register_kernels(lambda _name: torch.library.fallthrough_kernel)

    @staticmethod
    def _register_kernels(kernel: Callable[[str], Callable[..., Any]]) -> Any:
        """Return a library that registers a kernel for each operator."""
        library: Any = torch.library.Library("c10d", "IMPL", "BackendSelect")  # type: ignore[no-untyped-call]
        # torch warns where a kernel covers another, which is what is wanted here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*c10d::")
        for name in TORCH_OPS:
            made = kernel(name)
            library.impl(name, made, with_keyset=made is not torch.library.fallthrough_kernel)
        return library

    def _make_kernel(self, name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, name).default
        rest = _dispatch_keyset_full_after(DispatchKey.BackendSelect)

        def kernel(keys: Any, *args: Any, **options: Any) -> Any:
            go = partial(op.redispatch, keys & rest, *args, **options)
            watched = self._watched[-1:]
            return watched[0].run_and_record(name, args, go) if watched else go()

        return kernel


PROBE = Probe()


_Groups = dict[tuple[str, str], WatchedGroup | None]


class TorchCollectives:
    """Reports of torch's collectives to the table of one agent: `agent.part(TorchCollectives)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._event_table = agent, agent.part(CollectiveEvents)
        self._bystander = Bystander("torch's collectives")
        self._lock = threading.RLock()  # guards the following; held while a watch begins
        self._on = False
        self._world: c10d.ProcessGroup | None = None  # torch's default group, whose world the groups are of
        self._token = ""  # of that world, alike on all ranks
        self._names: tuple[str, ...] = ()  # of its ranks
        # by torch's name, and type of device; None: not one of the program's. One object for each backend
        self._groups: _Groups = {}
        self._record: dict[str, FlightEntry] = {}  # the last entry of each group when the watch began
        self._recorded: dict[str, int] = {}  # scope of a group → number of the last collective that has a row
        self._backends: dict[str, str] = {}  # group → the flight recorder's name of its backend
        self._polled_parts: dict[
            CollectivePart, Callable[[], bool]
        ] = {}  # part → whether it has ended: torch reports none
        self._wake = Event()  # there are such parts
        self._poller: threading.Thread | None = None
        agent.hooks.on_end.append(lambda: PROBE.set_reporting(self, on=False))

    # -- the watch
    def watch_changed(self) -> None:
        """Begin or end to report, as the event log is watched or not. Blocks for some 0.1 s at most."""
        with self._lock:
            on = self._agent.links.bus.listening
            if on == self._on:
                return
            self._on = on
            before = self._groups
            if on:
                self._groups = {}  # before the kernel runs, which then waits for the lock to find its group
            # before the rest: so no collective falls between the flight recorder and the kernel
            PROBE.set_reporting(self, on)
            if on:
                with self._bystander:
                    self._begin_watch(before)
            else:
                self._wake.set()  # ends the poller

    def _begin_watch(self, before: _Groups) -> None:
        """`before`: the groups of the last watch, which may have been used since."""
        if self._poll_once():  # operations of an earlier watch
            self._start_poller()
        self._record = {}
        for group in filter(None, before.values()):
            for direction in group.transfer_counts:
                self._event_table.drop_ended_parts(f"{group.scope}.{direction}")
        if not c10d.is_initialized() or not self._update_world():
            return
        entries = self._of_this_world(flight_record())
        self._record = {entry.group: entry for entry in entries}
        self._backends.update((entry.group, entry.backend) for entry in entries)
        own = {(group, n) for group, first, last in OWN_CALLS.call_ranges() for n in range(first, last + 1)}
        for entry in entries:
            if (entry.group, entry.op_id) not in own:
                self._add_recorded_entry(entry)

    def _of_this_world(self, entries: list[FlightEntry]) -> list[FlightEntry]:
        """Return the entries of groups that exist: those of an earlier world have the same names and numbers."""
        latest = {entry.group: entry for entry in entries}  # oldest first
        known = {name: group for name in latest if (group := self._find_group(name)) is not None}
        there = {name for name, group in known.items() if latest[name].op_id <= count_operations(group.backend)}
        return [each for each in entries if each.group in there and each.backend == latest[each.group].backend]

    def _add_recorded_entry(self, entry: FlightEntry) -> None:
        """Make a row of a collective that began before the watch."""
        group = self._find_group(entry.group)
        if group is None or entry.number <= self._recorded.get(group.scope, 0):
            return
        self._recorded[group.scope] = entry.number
        part = CollectivePart(
            group.scope, entry.number, group.label, entry.op, group.members, entry.shape, entry.size
        )  # fmt: skip
        self._event_table.record_entry(part, entry.begin)
        if entry.runs:
            self._poll_for_end(part, partial(is_completed, entry.backend, entry.op_id))
        else:
            self._event_table.record_end(part, failed=False, end=entry.begin)

    # -- the world and its groups
    def _update_world(self) -> bool:
        """Take over torch's present world. Returns whether it has one."""
        world = distributed_c10d._get_default_group() if c10d.is_initialized() else None
        if world is not self._world:
            if self._token:
                self._event_table.fail_running_parts(self._token)
            self._world, self._groups, self._record, self._recorded, self._backends = world, {}, {}, {}, {}
            self._token, self._names = "", ()
            if world is not None:
                self._take_over(world)
        return world is not None

    def _take_over(self, world: c10d.ProcessGroup) -> None:
        """Find the token of torch's present world, and the names of its ranks."""
        if (ours := groups.world_of_group(world)) is not None:
            token, ranks = ours.token, ours.ranks
        else:
            met = rendezvous_of_group(world, _STORE_SECONDS)
            token, ranks = met.store.compare_set("token", "", secrets.token_hex(8)).decode(), met.ranks
        self._token, self._names = f"{token}.torch", tuple(who.name for who in ranks)

    def _find_group(self, name: str, device: str = "cpu") -> WatchedGroup | None:
        """Return a group as a user of the backend that torch has for one type of device."""
        if (name, device) not in self._groups:
            there: list[c10d.ProcessGroup] = list(distributed_c10d._world.pg_map)
            known: dict[str, c10d.ProcessGroup] = {each.group_name: each for each in there}
            self._groups[name, device] = self._watched_group(known[name], device) if name in known else None
        return self._groups[name, device]

    def _watched_group(self, group: c10d.ProcessGroup, device: str) -> WatchedGroup | None:
        try:
            backend: Any = group._get_backend(torch.device(device))
            count_operations(backend)
        except RuntimeError:  # none for this type of device, or one that does not count, as torch's "fake"
            return None
        for other in self._groups.values():
            if other is not None and other.backend is backend:
                return other  # gloo serves CPU and GPUs, and counts the operations of both together
        is_gloo, label = backend.name() == "gloo", group_label(group, group is self._world)
        scope = f"{self._token}.{group.group_name}" + ("" if is_gloo else f".{backend.name()}")
        ranks = tuple(c10d.get_process_group_ranks(group))
        names = tuple(self._names[rank] for rank in ranks)
        made = WatchedGroup(group.group_name, label, scope, ranks, names, backend, is_gloo)
        if not is_gloo:
            made.transfers = 0  # NCCL counts collectives alone
        return made

    # -- operations
    def run_and_record(self, name: str, args: Sequence[Any], go: Callable[[], Any]) -> Any:
        """Run an operator of torch once, and record it unless it is this package's own."""
        seen = SeenOperation(name, args)
        with contextlib.ExitStack() as locks:
            with self._bystander, torch._C.DisableTorchFunction():  # reading a tensor runs no code of the program
                self._record_entry(seen, locks)
            try:
                result = go()
            except BaseException:
                with self._bystander:
                    self._record_failure(seen)
                raise
            finally:
                with self._bystander:
                    self._count_transfers(seen)
        with self._bystander:
            self._follow_operation(seen, result)
        return result

    def _record_entry(self, seen: SeenOperation, locks: contextlib.ExitStack) -> None:
        """Record that an operation begins. It takes its number under the group's lock, which `locks` then release."""
        op = TORCH_OPS[seen.name]
        tensor = first_tensor(seen.args[op.tensors])
        if tensor is None:
            return  # torch refuses a call without tensors
        group = self._group_of_operation(c10d.ProcessGroup.unbox(seen.args[op.group]), tensor.device.type)
        if group is None:
            return
        with group.lock:
            seen.group, seen.before = group, self._count_operations(group)
            if seen.name != "monitored_barrier_":  # returns when all have come, so no lock may be held
                locks.enter_context(group.lock)
            if not OWN_CALLS.is_active:
                seen.part = self._make_part(seen, group)
                self._event_table.record_entry(seen.part)

    @staticmethod
    def _record_failure(seen: SeenOperation) -> None:
        if seen.part is not None:
            seen.part.record_end(failed=True)

    @staticmethod
    def _count_transfers(seen: SeenOperation) -> None:
        if (group := seen.group) is not None and seen.name in TRANSFERS:
            with group.lock:
                assert group.transfers is not None
                group.transfers += count_operations(group.backend) - seen.before

    def _group_of_operation(self, group: c10d.ProcessGroup, device: str) -> WatchedGroup | None:
        """Return the group of an operation, if it is one of the program's."""
        key = group.group_name, device
        if distributed_c10d._world.default_pg is self._world and (found := self._groups.get(key)) is not None:
            return found
        with self._lock:
            return self._find_group(*key) if self._update_world() else None

    def _count_operations(self, group: WatchedGroup) -> int:
        """Return the backend's count of operations so far, and find this rank's transfers among them."""
        count = count_operations(group.backend)
        if group.transfers is None:
            with self._lock:  # the flight recorder has been read when a watch has begun
                last = self._record.get(group.name)
            # Operations since the last recorded collective are transfers, as the kernel sees all others.
            group.transfers = count if last is None else count - last.number
        return count

    def _make_part(self, seen: SeenOperation, group: WatchedGroup) -> CollectivePart:
        name, args, op = seen.name, seen.args, TORCH_OPS[seen.name]
        tensors = [] if name in BARRIERS else flatten_tensors(args[op.tensors])
        shape = Layouts((each.dtype, each.shape) for each in tensors)
        size = sum(map(tensor_bytes, tensors))
        if name == "monitored_barrier_":
            group.transfer_counts[op.name] += 1
            scope, number = f"{group.scope}.{op.name}", group.transfer_counts[op.name]
            return CollectivePart(scope, number, group.label, op.name, group.members, site=calling_site())
        if name in TRANSFERS:
            return self._make_transfer(group, op, args, shape, size)
        assert group.transfers is not None
        root = None if op.root is None else group.ranks[args[op.root]]
        label = OpLabel(op, None if op.reduce_op is None else args[op.reduce_op], root)
        number = self._recorded[group.scope] = seen.before - group.transfers + 1
        return CollectivePart(group.scope, number, group.label, label, group.members, shape, size, calling_site())

    def _make_transfer(
        self, group: WatchedGroup, op: TorchOp, args: Sequence[Any], shape: Layouts, size: int
    ) -> CollectivePart:
        """Return this rank's part of its next transfer in one direction.

        One with a rank that the group does not have is of this rank alone; torch lets it hang, fail or crash.
        """
        assert self._world is not None
        me = self._world.rank()
        pair: tuple[int, ...]
        name = op.name if op.root is None else "send"
        if op.root is None:
            direction, pair = f">{me}", (me,)
        elif not 0 <= args[op.root] < len(group.ranks):
            name = f"{op.name}: rank {args[op.root]} is not in the group"
            direction, pair = f">{me}", (me,)
        else:
            peer = group.ranks[args[op.root]]
            pair = (me, peer) if op.name == "send" else (peer, me)
            direction = f"{pair[0]}>{pair[1]}.{args[3]}"  # by tag, within which transfers keep their order
        ends = tuple(group.members[group.ranks.index(rank)] for rank in pair)
        group.transfer_counts[direction] += 1
        scope = f"{group.scope}.{direction}"
        return CollectivePart(
            scope, group.transfer_counts[direction], group.label, name, ends, shape, size, calling_site()
        )

    # -- ends
    def _follow_operation(self, seen: SeenOperation, result: Any) -> None:
        """Record the end of an operation that torch has begun, now or when it comes."""
        part, group = seen.part, seen.group
        if part is None or group is None:
            return
        try:
            self._follow_work(part, group, seen, result)
        except Exception:
            self._record_unknown_end(part)
            raise

    def _record_unknown_end(self, part: CollectivePart) -> None:
        """Record a part as ended at a time that is not known, after an error of the recording."""
        self._event_table.record_end(part, failed=False, end=part.begin)

    def _follow_work(self, part: CollectivePart, group: WatchedGroup, seen: SeenOperation, result: Any) -> None:
        name = seen.name
        work: Work | None = None
        if name != "monitored_barrier_":  # which has returned when it has ended
            work = Work.unbox(result[-1] if isinstance(result, tuple) else result)
        if work is None:  # NCCL gives none for a part of a batch of transfers
            part.record_end()
        elif not group.is_gloo or name not in _WITHOUT_FUTURE:
            work.get_future().add_done_callback(partial(self._operation_ended, part))
        elif name in TRANSFERS:
            self._poll_for_end(part, work.is_completed)
        elif any(arg is False for arg in seen.args):  # not asynchronous: the caller would wait now
            with contextlib.suppress(RuntimeError), part:  # the caller's own wait raises it again
                work.wait()
        else:
            self._poll_for_end(part, partial(is_completed, self._backend_of(group), seen.before + 1))

    def _operation_ended(self, part: CollectivePart, future: torch.futures.Future[Any]) -> None:
        """Record the end of a part, on a thread of torch."""
        with self._bystander:
            try:
                future.value()
            except RuntimeError:
                part.record_end(failed=True)
            else:
                part.record_end()

    def _backend_of(self, group: WatchedGroup) -> str:
        """Return the flight recorder's name of a group's backend, in which a collective has just begun."""
        if group.name not in self._backends:
            with self._lock:
                self._backends.update((entry.group, entry.backend) for entry in flight_record())
        return self._backends[group.name]

    def _poll_for_end(self, part: CollectivePart, ended: Callable[[], bool]) -> None:
        with self._lock:
            self._polled_parts[part] = ended
            self._start_poller()

    def _start_poller(self) -> None:
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll_all, name="rpcbench-transfers", daemon=True)
            self._poller.start()

    def _poll_all(self) -> None:
        """Look for the ends of such operations, while there are any and a watcher."""
        while True:
            with self._lock:  # so that no part is added to a poller that ends
                if not self._on or not self._poll_once():
                    self._poller = None
                    return
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()

    def _poll_once(self) -> bool:
        """Record the operations that have ended of which torch gives no event. Returns whether others run."""
        with self._lock:
            for part, ended in list(self._polled_parts.items()):
                with self._bystander:
                    self._end_unheard(part, ended)
            return bool(self._polled_parts)

    def _end_unheard(self, part: CollectivePart, ended: Callable[[], bool]) -> None:
        """Record the end of a part if it has come."""
        try:
            over = part.end is not None or ended()
        except Exception:
            del self._polled_parts[part]
            self._record_unknown_end(part)
            raise
        if over:
            del self._polled_parts[part]
            part.record_end()

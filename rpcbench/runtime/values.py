"""User data into messages and out of them, and the values that this member owns.

Guarantees
- The RRefs in a value are collected while it is pickled, then all are forked in one locked step. On arrival the handles
  are made while it is unpickled; a fork without a handle is released again.
- Device maps: tensors on devices follow this member's map for calls, and the caller's for replies; a gradient follows
  the map of its tensor backwards. All members know all maps, so all check them with the same verdict; each verdict
  begins with the text that programs written for torch match.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.base.futures import Future, make_future
from rpcbench.base.ids import Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.runtime.handles import (
    CreationSite,
    HandleRuntime,
    IncomingHandles,
    OutgoingHandles,
    RRefHandle,
    creation_site,
    notebook_cell,
    size_of,
    type_of,
)
from rpcbench.runtime.interceptors import AgentHooks, Recorder
from rpcbench.runtime.locked_node import EffectTable, LockedNode, is_main_thread
from rpcbench.runtime.pool import Job
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensor_types import CPU_ONLY, Route
from rpcbench.wire.messages import Body, Device, Devices, Fork, Mapped, Member, Message, Origin, Scope

Map = dict[torch.device, torch.device]


def validate_device_maps(used: Iterable[str], maps: Mapping[str, Mapping[str, str]]) -> Devices:
    """Return the description of this process's devices and maps for the other members."""
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else ""
    count = torch.get_device_module(kind).device_count() if kind else 0
    lines = tuple(Mapped(to, here, there) for to, pairs in maps.items() for here, there in pairs.items())
    return Devices(kind, count, tuple(map(Device, used)), lines)


def device_map_between(source: Member, target: Member) -> Map:
    """Return the devices that tensors of `source` are sent to when it calls `target`."""
    return _device_maps_of(source).get(target.name, {})


def find_map_error(members: Sequence[Member], closed: bool) -> str | None:
    """Return the first error in the device maps, or None. In an open world members named in a map may join later."""
    known = {member.name: member for member in members}
    return next((breach for member in members for breach in _device_map_errors(member, known, closed)), None)


def _device_map_errors(source: Member, known: dict[str, Member], closed: bool) -> Iterator[str]:
    used, node, maps = _used_devices(source), f"Node {source.name}", _device_maps_of(source)
    if len(set(used)) != len(used):
        yield f"{node} has duplicated devices: {_format_devices(used)}"
    if missing := _missing_devices(used, source):
        yield f"{node} has devices with invalid indices: {_format_devices(missing)}; {_describe_devices(source)}"
    if closed and not maps.keys() <= known.keys():
        unknown = sorted(maps.keys() - known.keys())
        yield f"{node} has invalid target node names in its device maps: {unknown} of {sorted(known)}"
    for name, pairs in maps.items():
        for breach in _breaches_of(pairs, source, known.get(name)):
            yield f"{node} has {breach[0]} in its device map for {name}: {breach[1]}"


def _breaches_of(pairs: Map, source: Member, target: Member | None) -> Iterator[tuple[str, str]]:
    if len(set(pairs.values())) != len(pairs):
        yield "duplicated target devices", _format_devices(pairs.values())
    yield from _unfit_devices("source", pairs.keys(), source)
    if target is not None:
        yield from _unfit_devices("target", pairs.values(), target)


def _unfit_devices(role: str, devices: Iterable[torch.device], member: Member) -> Iterator[tuple[str, str]]:
    used = _used_devices(member)
    if used:
        if strange := [device for device in devices if device not in used and device.type != "cpu"]:
            yield (
                f"unexpected {role} devices",
                f"{_format_devices(strange)}; {member.name} uses {_format_devices(used)}",
            )
    elif missing := _missing_devices(devices, member):
        yield f"{role} devices with invalid indices", f"{_format_devices(missing)}; {_describe_devices(member)}"


def _missing_devices(devices: Iterable[torch.device], member: Member) -> list[torch.device]:
    """Return the devices that the member does not have."""
    kind, count = member.devices.kind, member.devices.number
    return [d for d in devices if d.type != "cpu" and not (d.type == kind and (d.index or 0) < count)]


def _device_maps_of(member: Member) -> dict[str, Map]:
    found: dict[str, Map] = {}
    for to, here, there in member.devices.maps:
        found.setdefault(to, {})[torch.device(here)] = torch.device(there)
    return found


def _used_devices(member: Member) -> list[torch.device]:
    return [torch.device(device.name) for device in member.devices.used]


def _format_devices(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _describe_devices(member: Member) -> str:
    kind, count, *_ = member.devices
    return f"{member.name} has {count} of {kind}" if kind else f"{member.name} has only the CPU"


class Routes:
    """The routes of tensors between this member and its peers, cached so that a call needs no lock for its own."""

    def __init__(self, me: int, machine: LockedNode) -> None:
        self._me = me
        self._machine = machine
        self._kept: dict[tuple[int, bool], Route] = {}  # (peer, reply?) → route
        self._files: dict[int, set[str]] = {}  # whose sources a peer has

    def route_to(self, worker: int, answer: bool) -> Route:
        """Return the route of calls to a member, or of replies to its calls."""
        return self._kept.get((worker, answer)) or self._make_route(worker, answer)

    def forget_member(self, worker: int) -> None:
        """Drop the routes of a member that has left; another process may take its place."""
        for answer in (False, True):
            self._kept.pop((worker, answer), None)
        self._files.pop(worker, None)

    def forget_sources(self, worker: int) -> None:
        """Send a member all sources again: a message that may have brought some did not reach it."""
        if (files := self._files.get(worker)) is not None:
            files.clear()

    def device_map_error(self, closed: bool) -> str | None:
        """Return the error in the device maps of this world, None if there is none."""
        return find_map_error(list(self._current_members().values()), closed)

    def _make_route(self, worker: int, answer: bool) -> Route:
        members = self._current_members()
        me, other = members.get(self._me), members.get(worker)
        if me is None or other is None:
            return CPU_ONLY  # the call fails anyway: the peer has left
        files = self._files.setdefault(worker, set())
        if answer:
            there = {target: source for source, target in device_map_between(other, me).items()}
            route = Route(there, _refusal_text("Response", other.name), files)
        else:
            route = Route(device_map_between(me, other), _refusal_text("Request", other.name), files)
        self._kept[worker, answer] = route
        return route

    def _current_members(self) -> dict[int, Member]:
        return self._machine.read_node(lambda node: dict(node.members.members))


def _refusal_text(direction: str, name: str) -> str:
    return (
        "TensorPipe RPC backend only supports CPU tensors by default: move it to the CPU, or have the caller map its "
        "device by `set_device_map` on `TensorPipeRpcBackendOptions` (device_maps= of a Cluster). "
        f"{direction} device mapping is not available for destination {name}."
    )


MakeHandle = Callable[[Any, Id, int, "Id | None", "Future[Any] | None", str], RRefHandle]

PickledParts = tuple[Body, tuple[Fork, ...], "Scope | None"]
CALL = ("function", "args", "kwargs")
"""The path to each part of a call, for errors."""

_NAME = (int, int, int, int, str)  # types of the fields of an RRef name, see `make_named_handle`


class ObjectStore:
    def __init__(
        self,
        handle_runtime: HandleRuntime,
        machine: LockedNode,
        effects: EffectTable,
        spawn: Callable[[Job], None],
        make: MakeHandle,
        hooks: AgentHooks,
    ) -> None:
        self.codec = Codec()
        self.recorder: Recorder | None = None
        self.routes = Routes(handle_runtime.id, machine)
        self.around = hooks.around
        self.remote_cell: Origin | None = None  # the cell that runs on the main thread here
        self._agent = handle_runtime
        self._machine = machine
        self._make = make
        # for messages without forks
        self._bare = IncomingHandles(handle_runtime, (), self.make_handle, self.make_named_handle)
        self._on_long = hooks.report_wait
        # Taken before the node's lock, so that the values kept here match the RRefs that the node owns.
        self._lock = threading.Lock()
        self._kept: dict[Id, Future[Any]] = {}  # in use by other members
        self._sites: dict[Id, CreationSite] = {}  # creation sites of kept values made here
        self._known: weakref.WeakValueDictionary[Id, Future[Any]] = weakref.WeakValueDictionary()
        # freed on the maintenance thread
        effects.register(fx.Free, lambda e: handle_runtime.released.put(self.forget_value(e.rref)))
        effects.register(fx.ValueFailed, lambda effect: spawn(lambda: self.fail_value(effect.rref, effect.error)))
        effects.register(fx.OwnerLost, lambda effect: None)  # `living_owner` reads it from the node when it is needed
        effects.register(fx.BodyLost, lambda effect: self.routes.forget_sources(effect.to))

    # -- messages
    # Both return the parts of a message of the call `label`: body, forks of its RRefs, and the scope that records its
    # tensors, routed to their devices. SerializationError with the path to the part that cannot be pickled.
    def pack_call(
        self, to: int, function: Any, args: tuple[Any, ...], kwargs: Any, label: str, keeps: list[RRefHandle]
    ) -> PickledParts:
        """Pack a call. `keeps` gets the handles on values of `route_to`: they need no fork if the caller keeps them."""
        recorder, context = self.recorder, None
        if recorder is not None:
            function, context = recorder.wrap_function(function), recorder.current_context()
        route, name_of = self.routes.route_to(to, False), partial(self._name_of, to, keeps)
        handles: list[RRefHandle] = []
        # the fast form
        encoded = None if kwargs or route.targets else self.codec.encode_plain_call(function, args, name_of)
        if encoded is None:
            value, outgoing = (function, args, kwargs or {}), OutgoingHandles(self._agent, handles, name_of)
            encoded = self.codec.encode_fully(value, outgoing, CALL, route)
        body, tensors = encoded
        # before the record: it refuses RRefs of lost owners
        forks = self._share_handles(handles, to) if handles else ()
        scope = None
        if recorder is not None and (context is not None or tensors):
            if context is not None:
                scope = recorder.record_send(context, tensors, to, label)
            else:
                recorder.note_unrecorded(tensors, label)
        return body, forks, scope

    def pack_reply(self, to: int, value: Any, label: str, context: int | None) -> PickledParts:
        """Pack a reply, in that autograd context."""
        route = self.routes.route_to(to, True)
        handles: list[RRefHandle] = []
        encoded = None if route.targets else self.codec.encode_plainly(value)
        if encoded is None:
            encoded = self.codec.encode_fully(value, OutgoingHandles(self._agent, handles, None), "result", route)
        body, tensors = encoded
        forks = self._share_handles(handles, to) if handles else ()
        scope = None
        if context is not None and self.recorder is not None:
            scope = self.recorder.record_send(context, tensors, to, label)
        return body, forks, scope

    def withdraw_record(self, message: Message) -> None:
        """Take back the record of a message that could not be sent, if there is one."""
        scope = getattr(message, "scope", None)
        if scope is not None and self.recorder is not None:
            self.recorder.withdraw_send(scope)

    def _name_of(self, to: int, keeps: list[RRefHandle], value: object) -> tuple[int | str, ...] | None:
        """Return the name by which `route_to` finds an RRef that it owns, else None. The handle's fork outlives the
        call."""
        if not isinstance(value, RRefHandle) or value._agent is not self._agent or (fork := value._fork) is None:
            return None
        if value._owner != to or to == self._agent.id:
            return None
        value._check_alive("fork an UserRRef")
        user = self._machine.read_node(lambda node: node.rrefs.users.get(fork))
        if user is None:
            return None
        keeps.append(value)
        return (*value._rref, user.owner_incarnation, value._type)

    def _share_handles(self, handles: list[RRefHandle], to: int) -> tuple[Fork, ...]:
        """Fork the RRefs for `route_to` in one step, and keep the values that are shared for the first time."""
        now = time.monotonic()
        forks: list[Fork] = []

        def share(node: Node) -> None:
            for h in handles:
                made, size, origin = new.get(h._rref, (now, None, None))
                forks.append(node.rrefs.share_rref(h._rref, h._fork, h._type, to, made, size, origin))

        try:
            with self._lock:
                new = {
                    h._rref: _facts_of(h._value, now)
                    for h in handles
                    if h._value is not None and h._rref not in self._kept
                }
                for handle in handles:
                    if handle._value is not None:
                        self._known[handle._rref] = self._kept[handle._rref] = handle._value
                        if handle._site is not None:
                            self._sites.setdefault(handle._rref, handle._site)
                self._machine.read_node(share)
        except RpcError:  # one of them is dead: take the forks of the others back
            self._machine.feed_event(lambda node: node.withdraw_forks(forks))
            self.routes.forget_sources(to)
            for handle in handles:  # those behind the dead one
                if handle._value is not None:
                    self.forget_value(handle._rref)
            raise
        return tuple(forks)

    def unpack_message(
        self,
        source: int,
        body: Body,
        forks: tuple[Fork, ...],
        scope: Scope | None,
        answer: bool,
        site: CreationSite | None = None,
    ) -> Any:
        """Unpack a call or a reply (`answer`), with handles for its RRefs and its tensors attached to the graph.
        `creation_site_of`: the line of the user's program that asked, as any thread may open the reply."""
        if not forks and scope is None and not (answer and body.tensors):
            return self.codec.decode_value(body, self._bare)
        make = partial(self.make_handle, site=site)
        incoming = IncomingHandles(self._agent, forks, make, self.make_named_handle) if forks else self._bare

        def adopt_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            if scope is None or self.recorder is None:
                if answer and self.recorder is not None:
                    self.recorder.note_unattached(tensors, source)
                return tensors
            return self.recorder.record_receive(scope, tensors, source, self.routes.route_to(source, not answer))

        try:
            return self.codec.decode_value(body, incoming, adopt_tensors)
        finally:
            if forks:
                unopened = incoming.unopened_forks()
                self._machine.feed_event(lambda node: node.body_opened(forks))
                self._machine.feed_event(lambda node: node.body_dropped(unopened))

    def message_scope(self, to: int, call: str) -> Scope | None:
        """Return the scope of a message without values in the autograd context of this thread."""
        context = self.recorder.current_context() if self.recorder is not None else None
        return None if self.recorder is None or context is None else self.recorder.record_send(context, [], to, call)

    def enter_context(self, context: int | None) -> AbstractContextManager[None]:
        """Enter the autograd context, if any, and those of `around`, for a function that a message asked for."""
        inner = (
            contextlib.nullcontext()
            if context is None or self.recorder is None
            else self.recorder.enter_context(context)
        )
        return _nest_contexts(inner, *(enter() for enter in self.around)) if self.around else inner

    # -- handles
    def make_handle(self, fork: Fork, site: CreationSite | None = None) -> RRefHandle:
        """Make a handle on a fork that a message brought; `creation_site_of`: see `unpack_message`."""
        if fork.owner == self._agent.id:
            return self._make_located_handle(fork.rref, fork.owner, None, self.owned_future(fork.rref), fork.type, site)
        return self._make_located_handle(fork.rref, fork.owner, fork.fork, None, fork.type, site)

    def make_named_handle(
        self, worker: int, serial: int, incarnation: int, owner_incarnation: int, type_: str
    ) -> RRefHandle:
        """Make a handle on a value owned here, by its name in a message. ProtocolError for an invalid name."""
        if tuple(map(type, (worker, serial, incarnation, owner_incarnation, type_))) != _NAME:
            raise ProtocolError("a message contains an invalid name of an RRef")
        rref = Id(worker, serial, incarnation)
        if owner_incarnation != self._agent.incarnation:
            raise WorkerLostError(
                f"the value of RRef {rref} was lost with the worker that held it, before the one that runs here now"
            )
        return self._make(self._agent, rref, self._agent.id, None, self.live_future(rref), type_)

    def make_first_handle(self, to: int, label: str) -> RRefHandle:
        """Make a handle on a value that `route_to` is about to make, as its first user."""
        rref, fork = self._machine.read_node(lambda node: node.rrefs.create_user(to, label))
        return self._make_located_handle(rref, to, fork, self.owned_future(rref) if to == self._agent.id else None, "")

    def make_owner_handle(self, value: Any) -> RRefHandle:
        """Make a handle on a value of this process, as its owner."""
        future: Future[Any] = Future()
        future.set_result(value)
        # the clock of rows: that of the links may stand still
        future.beginning = time.monotonic(), self.current_cell()  # type: ignore[attr-defined]
        rref = self._machine.read_node(lambda node: node.rrefs.new_id())
        return self._make_located_handle(rref, self._agent.id, None, future, type_of(value))

    def _make_located_handle(
        self,
        rref: Id,
        owner: int,
        fork: Id | None,
        value: Future[Any] | None,
        type_: str,
        site: CreationSite | None = None,
    ) -> RRefHandle:
        """Make a handle that remembers `creation_site_of`, or the current line of the user's program."""
        handle = self._make(self._agent, rref, owner, fork, value, type_)
        handle._site = site or creation_site()
        return handle

    def is_confirmed(self, fork: Id | None) -> bool:
        """Return whether the owner has confirmed a fork held here."""

        def is_fork_confirmed(node: Node) -> bool:
            user = node.rrefs.users.get(fork) if fork is not None else None
            return user is None or user.is_confirmed

        return self._machine.read_node(is_fork_confirmed)

    # -- owned values
    def owned_future(self, rref: Id) -> Future[Any]:
        """Return the future of a value that this member owns; the value may not be made yet."""
        with self._lock:
            return self._future_of_value(rref)

    def live_future(self, rref: Id) -> Future[Any]:
        """Do as `owned_future` for a value named by a call. RpcError if it was released: no caller that waits allows
        that."""
        with self._lock:
            if self._machine.read_node(lambda node: node.rrefs.note_reference(rref)):
                return self._future_of_value(rref)
        raise RpcError(f"the value of RRef {rref} has been released: its caller released it, or no longer waits")

    def _future_of_value(self, rref: Id) -> Future[Any]:
        future = self._known.get(rref)
        if future is None:
            future = self._known[rref] = make_future(on_long=self._on_long)
        self._kept[rref] = future
        return future

    def resolve_value(self, rref: Id, value: Any, error: Exception | None) -> None:
        """Resolve an owned value: its function has returned, or raised."""
        future = self.owned_future(rref)
        self._report_value(rref, value, error)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
        self.forget_value(rref)  # unless it is still in use

    def fail_value(self, rref: Id, error: Exception) -> None:
        """Fail an owned value that no call will make. If a handle here has kept the value, late users still get it."""
        outcome = self.owned_future(rref).known_outcome()
        if outcome is None:
            self.resolve_value(rref, None, error)
        else:
            self._report_value(rref, *outcome)
            self.forget_value(rref)

    def _report_value(self, rref: Id, value: Any, error: BaseException | None) -> None:
        type_, size = (type_of(value), size_of(value)) if error is None else ("", None)
        self._machine.read_node(lambda node: node.rrefs.creation_finished(rref, type_, error is not None, size))

    def forget_value(self, rref: Id) -> Future[Any] | None:
        """Drop a value that is no longer used; it is freed with the result of this function."""
        with self._lock:
            if self._machine.read_node(lambda node: rref in node.rrefs.owned):
                return None  # used again meanwhile
            self._sites.pop(rref, None)
            return self._kept.pop(rref, None)

    def present_values(self) -> list[Any]:
        """Return the existing values that other members use. Runs no user code and takes no lock."""
        outcomes = [future.known_outcome() for future in list(self._kept.values())]
        return [outcome[0] for outcome in outcomes if outcome is not None and outcome[1] is None]

    def find_rref(self, future: Future[Any]) -> Id | None:
        """Return the RRef of this future, if this member owns it and others use it."""
        with self._lock:
            return next((rref for rref, other in self._kept.items() if other is future), None)

    def current_cell(self) -> Origin | None:
        """Return the cell that runs on this thread, if it is the main thread of the notebook or of a worker."""
        if not is_main_thread():
            return None
        return notebook_cell() if self._agent.id == 0 else self.remote_cell

    def creation_site_of(self, rref: Id) -> CreationSite | None:
        """Return where a value in use by others was made; None if not here."""
        with self._lock:
            return self._sites.get(rref)


def _facts_of(value: Future[Any], now: float) -> tuple[float, int | None, Origin | None]:
    """Return when a value that `make_owner_handle` was given became an RRef, its size and its origin."""
    if not hasattr(value, "beginning"):
        return now, None, None
    made, origin = value.beginning
    return made, size_of(value.value()), origin


@contextlib.contextmanager
def _nest_contexts(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

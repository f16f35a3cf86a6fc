"""User data into messages and out of them, and the values that this member owns.

Pickling has effects on the protocol: the RRefs inside a value are collected while it is pickled, then all are forked
in one locked step. On arrival the handles are made while unpickling; a fork that nobody took is released again.

Device maps: tensors on devices go by this member's map for calls, by the caller's for replies; a gradient takes the way
of the tensor it belongs to, backwards. What the maps of a world must keep to is checked with the same verdict on every
member, as all know all maps; each verdict begins with the words that programs written for torch match.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.protocol.node import Node
from rpcbench.runtime.handles import (
    CreationSite,
    Handle,
    Home,
    Incoming,
    Outgoing,
    creation_site,
    notebook_cell,
    size_of,
    type_of,
)
from rpcbench.runtime.interceptors import Recorder
from rpcbench.runtime.interrupts import on_main_thread
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensor_types import CPU_ONLY, Route
from rpcbench.wire.messages import Body, Device, Devices, Fork, Mapped, Member, Origin, Scope

if TYPE_CHECKING:
    import torch


Map = dict[torch.device, torch.device]


def validate_device_maps(used: Iterable[str], maps: Mapping[str, Mapping[str, str]]) -> Devices:
    """What this process tells the others of its devices."""
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else ""
    count = torch.get_device_module(kind).device_count() if kind else 0
    lines = tuple(Mapped(to, here, there) for to, pairs in maps.items() for here, there in pairs.items())
    return Devices(kind, count, tuple(map(Device, used)), lines)


def map_between(source: Member, target: Member) -> Map:
    """Where tensors on the devices of `source` go when it calls `target`."""
    return _maps(source).get(target.name, {})


def problem(members: Sequence[Member], closed: bool) -> str | None:
    """The first breach, None if there is none. In an open world those whom a map names may come later."""
    known = {member.name: member for member in members}
    return next((breach for member in members for breach in _breaches(member, known, closed)), None)


def _breaches(source: Member, known: dict[str, Member], closed: bool) -> Iterator[str]:
    used, node, maps = _used(source), f"Node {source.name}", _maps(source)
    if len(set(used)) != len(used):
        yield f"{node} has duplicated devices: {_list(used)}"
    if missing := _missing(used, source):
        yield f"{node} has devices with invalid indices: {_list(missing)}; {_equipment(source)}"
    if closed and not maps.keys() <= known.keys():
        unknown = sorted(maps.keys() - known.keys())
        yield f"{node} has invalid target node names in its device maps: {unknown} of {sorted(known)}"
    for name, pairs in maps.items():
        for breach in _breaches_of(pairs, source, known.get(name)):
            yield f"{node} has {breach[0]} in its device map for {name}: {breach[1]}"


def _breaches_of(pairs: Map, source: Member, target: Member | None) -> Iterator[tuple[str, str]]:
    if len(set(pairs.values())) != len(pairs):
        yield "duplicated target devices", _list(pairs.values())
    yield from _unfit("source", pairs.keys(), source)
    if target is not None:
        yield from _unfit("target", pairs.values(), target)


def _unfit(role: str, devices: Iterable[torch.device], member: Member) -> Iterator[tuple[str, str]]:
    used = _used(member)
    if used:
        if strange := [device for device in devices if device not in used and device.type != "cpu"]:
            yield f"unexpected {role} devices", f"{_list(strange)}; {member.name} uses {_list(used)}"
    elif missing := _missing(devices, member):
        yield f"{role} devices with invalid indices", f"{_list(missing)}; {_equipment(member)}"


def _missing(devices: Iterable[torch.device], member: Member) -> list[torch.device]:
    """Those that the member does not have."""
    kind, count = member.devices.kind, member.devices.number
    return [d for d in devices if d.type != "cpu" and not (d.type == kind and (d.index or 0) < count)]


def _maps(member: Member) -> dict[str, Map]:
    found: dict[str, Map] = {}
    for to, here, there in member.devices.maps:
        found.setdefault(to, {})[torch.device(here)] = torch.device(there)
    return found


def _used(member: Member) -> list[torch.device]:
    return [torch.device(device.name) for device in member.devices.used]


def _list(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _equipment(member: Member) -> str:
    kind, count, *_ = member.devices
    return f"{member.name} has {count} of {kind}" if kind else f"{member.name} has the CPU alone"


Ask = Callable[[Callable[[Node], dict[int, Member]]], dict[int, Member]]


class Routes:
    """`ask` looks into the machine; routes are kept until `forget`, so that a call needs no lock to find its own."""

    def __init__(self, me: int, ask: Ask) -> None:
        self._me = me
        self._ask = ask
        self._kept: dict[tuple[int, bool], Route] = {}

    def to(self, worker: int, answer: bool) -> Route:
        """The way of calls to a member, or of answers to its calls."""
        return self._kept.get((worker, answer)) or self._made(worker, answer)

    def forget(self, worker: int) -> None:
        """The member has gone; another may come in its place."""
        for answer in (False, True):
            self._kept.pop((worker, answer), None)

    def problem(self, closed: bool) -> str | None:
        """What is wrong with the device maps of this world; None if nothing is."""
        return problem(list(self._members().values()), closed)

    def _made(self, worker: int, answer: bool) -> Route:
        members = self._members()
        me, other = members.get(self._me), members.get(worker)
        if me is None or other is None:
            return CPU_ONLY  # the call fails anyway
        if answer:
            there = {target: source for source, target in map_between(other, me).items()}
            route = Route(there, _refusal("Response", other.name))
        else:
            route = Route(map_between(me, other), _refusal("Request", other.name))
        self._kept[worker, answer] = route
        return route

    def _members(self) -> dict[int, Member]:
        return self._ask(lambda node: dict(node.members.members))


def _refusal(direction: str, name: str) -> str:
    return (
        "TensorPipe RPC backend only supports CPU tensors by default: move it to the CPU, or have the caller map its "
        "device by `set_device_map` on `TensorPipeRpcBackendOptions` (device_maps= of a Cluster). "
        f"{direction} device mapping is not available for destination {name}."
    )


MakeHandle = Callable[[Any, Id, int, "Id | None", "Future[Any] | None", str], Handle]

PickledParts = tuple[Body, tuple[Fork, ...], "Scope | None"]
CALL = ("function", "args", "kwargs")
"""The path to each part of what a call takes along, for errors."""

_NAME = (int, int, int, int, str)


class ObjectStore:
    def __init__(
        self,
        home: Home,
        machine: LockedNode,
        make: MakeHandle,
        clock: Callable[[], float],
        on_long: Callable[[float], object],
    ) -> None:
        self.codec = Codec()
        self.recorder: Recorder | None = None
        self.routes = Routes(home.id, machine.ask)
        self.around: Callable[[], AbstractContextManager[None]] | None = None  # put around functions that callers run
        self.remote_cell: Origin | None = None  # that runs on the main thread here, for the notebook
        self._home = home
        self._machine = machine
        self._make = make
        self._bare = Incoming(home, (), self.handle, self.named)  # of calls that bring nothing of the kind
        self._clock = clock
        self._on_long = on_long
        # Taken before the machine's lock, so that what is kept is what the machine says is owned.
        self._lock = threading.Lock()
        self._kept: dict[Id, Future[Any]] = {}
        self._sites: dict[Id, CreationSite] = {}  # where the kept values came from that were made here
        self._known: weakref.WeakValueDictionary[Id, Future[Any]] = weakref.WeakValueDictionary()

    # -- messages
    # Both give the parts of a message of the call `label`: what goes along, its RRefs forked, its tensors recorded, and
    # on their way to the devices where they belong. SerializationError with the path to the part that cannot travel.
    def pack_call(
        self, to: int, function: Any, args: tuple[Any, ...], kwargs: Any, label: str, keeps: list[Handle]
    ) -> PickledParts:
        """A call. RRefs of values that are there already need not travel, as long as the caller keeps what is added to
        `keeps` until there is an answer."""
        recorder, context = self.recorder, None
        if recorder is not None:
            function, context = recorder.outgoing(function), recorder.current()
        route, name_of = self.routes.to(to, False), partial(self._name_of, to, keeps)
        handles: list[Handle] = []
        encoded = None if kwargs or route.targets else self.codec.plain_call(function, args, name_of)
        if encoded is None:
            value, outgoing = (function, args, kwargs or {}), Outgoing(self._home, handles, name_of)
            encoded = self.codec.fully(value, outgoing, CALL, route)
        body, tensors = encoded
        scope = None
        if recorder is not None and (context is not None or tensors):
            if context is not None:
                scope = recorder.sending(context, tensors, to, label)
            else:
                recorder.unrecorded(tensors, label)
        return body, self._share(handles, to) if handles else (), scope

    def pack(self, to: int, value: Any, label: str, context: int | None) -> PickledParts:
        """An answer, in that autograd context."""
        route = self.routes.to(to, True)
        handles: list[Handle] = []
        encoded = None if route.targets else self.codec.plainly(value)
        if encoded is None:
            encoded = self.codec.fully(value, Outgoing(self._home, handles, None), "result", route)
        body, tensors = encoded
        scope = None
        if context is not None and self.recorder is not None:
            scope = self.recorder.sending(context, tensors, to, label)
        return body, self._share(handles, to) if handles else (), scope

    def _name_of(self, to: int, keeps: list[Handle], value: object) -> tuple[int | str, ...] | None:
        """What `to` knows an RRef by that it owns itself; None for another, and for what is none.

        It goes by the handle's own fork, which outlives the call, so none is made for it."""
        if not isinstance(value, Handle) or value._agent is not self._home or (fork := value._fork) is None:
            return None
        if value._owner != to or to == self._home.id:
            return None
        value._check_alive("fork an UserRRef")
        user = self._machine.ask(lambda node: node.rrefs.users.get(fork))
        if user is None:
            return None
        keeps.append(value)
        return (*value._rref, user.life, value._type)

    def _share(self, handles: list[Handle], to: int) -> tuple[Fork, ...]:
        now = self._clock()
        forks: list[Fork] = []

        def share(node: Node) -> None:
            for h in handles:
                size, origin = new.get(h._rref, (None, None))
                forks.append(node.rrefs.share(h._rref, h._fork, h._type, to, now, size, origin))

        try:
            with self._lock:
                new = {h._rref: _made(h._value) for h in handles if h._value is not None and h._rref not in self._kept}
                for handle in handles:
                    if handle._value is not None:
                        self._known[handle._rref] = self._kept[handle._rref] = handle._value
                        if handle._site is not None:
                            self._sites.setdefault(handle._rref, handle._site)
                self._machine.ask(share)
        except RpcError:  # one of them is dead; the others are not sent
            self._machine.feed(lambda node: node.unshared(forks))
            raise
        return tuple(forks)

    def unpack(
        self,
        source: int,
        body: Body,
        forks: tuple[Fork, ...],
        scope: Scope | None,
        answer: bool,
        site: CreationSite | None = None,
    ) -> Any:
        """The value of an answer, or of a call, with handles for its RRefs and its tensors attached to the graph.

        `site`: the line of the user's program that asked; any thread may open the answer.
        """
        if not forks and scope is None and not (answer and body.tensors):
            return self.codec.decode(body, self._bare)
        incoming = Incoming(self._home, forks, partial(self.handle, site=site), self.named) if forks else self._bare

        def adopt(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            if scope is None or self.recorder is None:
                if answer and self.recorder is not None:
                    self.recorder.unattached(tensors, source)
                return tensors
            return self.recorder.received(scope, tensors, source, self.routes.to(source, not answer))

        try:
            return self.codec.decode(body, incoming, adopt)
        finally:
            if forks:
                unopened = incoming.unopened()
                self._machine.feed(lambda node: node.opened(forks))
                self._machine.feed(lambda node: node.dropped(unopened))

    def asks(self, to: int, call: str) -> Scope | None:
        """What a message without values says of the autograd context of this thread."""
        context = self.recorder.current() if self.recorder is not None else None
        return None if self.recorder is None or context is None else self.recorder.sending(context, [], to, call)

    def inside(self, context: int | None) -> AbstractContextManager[None]:
        """Around a function that a message asked for, perhaps one of an autograd context."""
        inner = contextlib.nullcontext() if context is None or self.recorder is None else self.recorder.inside(context)
        return inner if self.around is None else _nested(inner, self.around())

    # -- handles
    def handle(self, fork: Fork, site: CreationSite | None = None) -> Handle:
        """A handle on a fork that a message brought; `site`: see `unpack`."""
        if fork.owner == self._home.id:
            return self._seen(fork.rref, fork.owner, None, self.owned(fork.rref), fork.type, site)
        return self._seen(fork.rref, fork.owner, fork.fork, None, fork.type, site)

    def named(self, worker: int, serial: int, incarnation: int, life: int, type_: str) -> Handle:
        """A handle on a value that a message names, whose caller says that it is here. ProtocolError for no name."""
        if tuple(map(type, (worker, serial, incarnation, life, type_))) != _NAME:
            raise ProtocolError("a message names an RRef as none is called")
        rref = Id(worker, serial, incarnation)
        if life != self._home.incarnation:
            raise WorkerLostError(
                f"the value of RRef {rref} was lost with the worker that held it, before the one that runs here now"
            )
        return self._make(self._home, rref, self._home.id, None, self.here(rref), type_)

    def first(self, to: int, label: str) -> Handle:
        """A handle on a value that `to` will make, as its first user."""
        rref, fork = self._machine.ask(lambda node: node.rrefs.create_user(to, label))
        return self._seen(rref, to, fork, self.owned(rref) if to == self._home.id else None, "")

    def keep(self, value: Any) -> Handle:
        """A handle on a value of this process's own, as its owner."""
        future: Future[Any] = Future()
        future.set_result(value)
        future.origin = self.cell()  # type: ignore[attr-defined]
        rref = self._machine.ask(lambda node: node.rrefs.new_id())
        return self._seen(rref, self._home.id, None, future, type_of(value))

    def _seen(
        self,
        rref: Id,
        owner: int,
        fork: Id | None,
        value: Future[Any] | None,
        type_: str,
        site: CreationSite | None = None,
    ) -> Handle:
        """A handle that remembers the line of the user's program that runs, or `site`."""
        handle = self._make(self._home, rref, owner, fork, value, type_)
        handle._site = site or creation_site()
        return handle

    def confirmed(self, fork: Id | None) -> bool:
        """Whether the owner knows of a fork held here."""

        def known(node: Node) -> bool:
            user = node.rrefs.users.get(fork) if fork is not None else None
            return user is None or user.confirmed

        return self._machine.ask(known)

    # -- owned values
    def owned(self, rref: Id) -> Future[Any]:
        """The future of a value that this member owns; it may not be made yet."""
        with self._lock:
            return self._future(rref)

    def here(self, rref: Id) -> Future[Any]:
        """As `owned`, of one that a call names. RpcError where it has gone, which no caller that waits would allow."""
        with self._lock:
            if self._machine.ask(lambda node: node.rrefs.named(rref)):
                return self._future(rref)
        raise RpcError(f"the value of RRef {rref} has been let go of: by who made this call, or who waits no longer")

    def _future(self, rref: Id) -> Future[Any]:
        future = self._known.get(rref)
        if future is None:
            future = self._known[rref] = Future(on_long=self._on_long)
        self._kept[rref] = future
        return future

    def made(self, rref: Id, value: Any, error: Exception | None) -> None:
        """The function that makes an owned value has returned, or raised."""
        future = self.owned(rref)
        self._tell(rref, value, error)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
        self.forget(rref)  # unless somebody uses it still

    def unmade(self, rref: Id, error: Exception) -> None:
        """No call will make an owned value (any more). Where a handle here has kept it, who asks late gets it all the
        same."""
        outcome = self.owned(rref).outcome()
        if outcome is None:
            self.made(rref, None, error)
        else:
            self._tell(rref, *outcome)
            self.forget(rref)

    def _tell(self, rref: Id, value: Any, error: BaseException | None) -> None:
        type_, size = (type_of(value), size_of(value)) if error is None else ("", None)
        self._machine.ask(lambda node: node.rrefs.value_set(rref, type_, error is not None, size))

    def forget(self, rref: Id) -> Future[Any] | None:
        """Let go of a value that nobody uses any more; the value is gone when the result is."""
        with self._lock:
            if self._machine.ask(lambda node: rref in node.rrefs.owned):
                return None  # used again meanwhile
            self._sites.pop(rref, None)
            return self._kept.pop(rref, None)

    def present(self) -> list[Any]:
        """The values there are that others use. Runs nothing and waits for nobody: it may be asked under any lock."""
        outcomes = [future.outcome() for future in list(self._kept.values())]
        return [outcome[0] for outcome in outcomes if outcome is not None and outcome[1] is None]

    def rref_of(self, future: Future[Any]) -> Id | None:
        """The RRef that this is the value of, if this member owns it and others use it."""
        with self._lock:
            return next((rref for rref, other in self._kept.items() if other is future), None)

    def cell(self) -> Origin | None:
        """The notebook's cell that runs on this thread, if it is the main thread of the notebook or of a worker."""
        if not on_main_thread():
            return None
        return notebook_cell() if self._home.id == 0 else self.remote_cell

    def site(self, rref: Id) -> CreationSite | None:
        """Where a value was made that is used elsewhere; None if that was not here."""
        with self._lock:
            return self._sites.get(rref)


def _made(value: Future[Any]) -> tuple[int | None, Origin | None]:
    """Size and origin of a value that `keep` was given."""
    return (size_of(value.value()), value.origin) if hasattr(value, "origin") else (None, None)


@contextlib.contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

"""Every message that crosses the wire, and the check of the fields that a peer sends; `encoding` has its form as bytes.

Guarantees
- Fields are numbers, strings, bytes, named tuples, or tuples of any of these. `rebuild` checks what a peer sends
  against the annotations of the tuple before it makes one.
- Only user data (`Body`) holds a pickle: with numbered by-reference slots, the table of its tensors, and their raw
  bytes. Nobody opens it before the peer has proved that it knows the secret; the protocol never looks into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from rpcbench.base.errors import ProtocolError
from rpcbench.base.ids import Id

_Make = Callable[[Any], Any]
"""What a field holds, made of what a peer says."""


class _Fields(NamedTuple):
    """How a kind is made: the types that its fields may have, and (place, make) of those that are made of others."""

    types: frozenset[tuple[type, ...]]
    made: tuple[tuple[int, _Make], ...]


_FIELDS: dict[type[Any], _Fields] = {}
_new_tuple = tuple.__new__


def know(*kinds: type[Any]) -> None:
    """Named tuples that may come; first those that others are made of."""
    for kind in kinds:
        hints = get_type_hints(kind)
        found = [_field(hints[name]) for name in kind._fields if name != "body"]
        types = frozenset(itertools.product(*[types for types, _ in found]))
        _FIELDS[kind] = _Fields(types, tuple([(place, make) for place, (_, make) in enumerate(found) if make]))


def rebuild(kind: type[Any], values: Any) -> Sequence[Any]:
    """The fields of a kind that is known. ProtocolError where they are not."""
    types, made = _FIELDS[kind]
    if type(values) is not tuple or tuple(map(type, values)) not in types:
        raise ProtocolError(f"no {kind.__name__} is made of {_shape(values)}")
    if not made:
        return values
    found = [*values]
    for place, make in made:
        if (value := found[place]) is not None:
            found[place] = make(value)
    return found


def _field(hint: Any) -> tuple[set[type], _Make | None]:
    """The types that a field may come with, and how it is made if it is not as it comes."""
    types: set[type] = set()
    make = None
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if get_origin(option) is tuple:
            make = _many(get_args(option)[0])
        elif hasattr(option, "_fields"):
            make = _one(option)
        else:
            types |= {float, int} if option is float else {option}
    return (types | {tuple} if make else types), make


def _one(kind: type[Any]) -> _Make:
    assert kind in _FIELDS, f"{kind.__name__} is to be known before what it is part of"
    return lambda value: _new_tuple(kind, rebuild(kind, value))


def _many(kind: type[Any]) -> _Make:
    if hasattr(kind, "_fields"):
        one = _one(kind)
        return lambda value: tuple([one(item) for item in value])

    def same(value: Any) -> Any:
        if not {kind}.issuperset(map(type, value)):
            raise ProtocolError(f"a {_shape(value)} is no tuple of {kind.__name__}")
        return value

    return same


def _shape(value: Any) -> str:
    if type(value) is not tuple:
        return type(value).__name__
    return f"({', '.join([type(item).__name__ for item in value])})"


class Body(NamedTuple):
    """Opaque to everything but the codec.

    `buffers` are views of tensor memory on the sending side (nothing is copied) and writable buffers, owned by nobody
    else, on the receiving side.
    """

    payload: bytes
    tensors: bytes
    buffers: Sequence[memoryview | bytearray | bytes]


class Fork(NamedTuple):
    """One RRef inside a body: what the receiver needs to become a user of it. `life`: the owner's incarnation."""

    rref: Id
    owner: int
    fork: Id
    parent: int
    type: str
    life: int = 0


class Scope(NamedTuple):
    """The autograd context a message belongs to, and the message's own number in it.

    `behind`: the sends that a backward pass from this message reaches, itself among them; None if not told.
    """

    context: int
    message: int
    behind: tuple[int, ...] | None


class Origin(NamedTuple):
    """The notebook's cell that made something: the front end's id for it, and the number that it shows."""

    cell: str
    number: int


class Call(NamedTuple):
    """Run a function and send back what it returns. `budget`: seconds until the caller stops waiting."""

    call: int
    label: str
    budget: float | None
    forks: tuple[Fork, ...]
    scope: Scope | None
    body: Body


class Create(NamedTuple):
    """Run a function and keep what it returns as the value of `rref`; the caller is its first user, `fork`."""

    call: int
    rref: Id
    fork: Id
    label: str
    budget: float | None
    forks: tuple[Fork, ...]
    scope: Scope | None
    origin: Origin | None
    body: Body


class Fetch(NamedTuple):
    """Send back a copy of the value of `rref`, once it is there."""

    call: int
    rref: Id
    budget: float | None
    scope: Scope | None


class Result(NamedTuple):
    """The answer to a Call or Fetch, or (with an empty body) that a Create has finished."""

    call: int
    forks: tuple[Fork, ...]
    scope: Scope | None
    body: Body


class Failure(NamedTuple):
    """The answer where the function raised: the exception itself, if it can travel, and its story as text."""

    call: int
    type: str
    text: str
    body: Body


class Cancel(NamedTuple):
    """The caller no longer waits."""

    call: int


class ForkRequest(NamedTuple):
    """A new user tells the owner."""

    rref: Id
    fork: Id


class ForkAccept(NamedTuple):
    """The owner knows this user now. `first`: the one that has the value made."""

    rref: Id
    fork: Id
    first: bool = False


class ChildAccept(NamedTuple):
    """A new user tells the one it got its RRef from that the owner knows it, so the parent may go."""

    fork: Id


class UserDelete(NamedTuple):
    """A user tells the owner that it is gone."""

    rref: Id
    fork: Id


class Discover(NamedTuple):
    """The send with this number takes part in a backward pass: find out what lies behind it."""

    context: int
    walk: Id
    message: int


class Discovered(NamedTuple):
    """All that lies behind that send is known."""

    context: int
    walk: Id
    message: int


class Awaited(NamedTuple):
    """A send that a worker waits for in a fast backward pass: its number, its receiver, and what it was part of."""

    message: int
    to: int
    label: str


class Settled(NamedTuple):
    """To the root: the gradients of this send have run, and others went out for the recvs `fired`."""

    context: int
    walk: Id
    message: int
    fired: tuple[int, ...]
    awaited: tuple[Awaited, ...]


class Gradients(NamedTuple):
    """Gradients for the tensors of the send with this number.

    `plan`: the sends that take part, where no discovery has told; `fast`: all sends do. `settled`: what the root would
    be told in a message of its own.
    """

    context: int
    walk: Id
    message: int
    retain: bool
    fast: bool
    plan: tuple[int, ...]
    settled: Settled | None
    body: Body


class WalkFailed(NamedTuple):
    """A backward pass is over; it went wrong on this worker."""

    context: int
    walk: Id
    worker: int
    type: str
    text: str
    body: Body


class ReleaseContext(NamedTuple):
    """The context is over; forget it and tell the others you know of."""

    context: int


class Attending(NamedTuple):
    """To the worker that began a context: its sender takes part, and lost the one it may have it from."""

    context: int


class Device(NamedTuple):
    """One of its own devices that a member names, such as "cuda:0"."""

    name: str


class Mapped(NamedTuple):
    """One line of a device map: in calls of `to`, tensors on the device `here` go to the device `there`."""

    to: str
    here: str
    there: str


class Devices(NamedTuple):
    """What a member says of its accelerators: their kind ("": none) and number, those it uses (none named: all), and
    its device maps."""

    kind: str
    number: int
    used: tuple[Device, ...]
    maps: tuple[Mapped, ...]


NO_DEVICES = Devices("", 0, (), ())


class Member(NamedTuple):
    """One process of the world, and where it listens: for members on its host, and for others ("": nowhere)."""

    id: int
    name: str
    incarnation: int
    address: str
    host: str = ""
    remote: str = ""
    devices: Devices = NO_DEVICES

    def ways(self, host: str) -> tuple[str, ...]:
        """The addresses to try from a process on `host`, the best first."""
        near = (self.address,) if self.host == host else ()
        return near + ((self.remote,) if self.remote else ())


class Join(NamedTuple):
    """A process asks the one who leads to be let in."""

    member: Member
    world_size: int | None


class Refused(NamedTuple):
    """It is not let in. `again`: who leads may change its mind, or be another by now."""

    reason: str
    again: bool = False


class Loss(NamedTuple):
    """A member that went without a word, and what is known of the reason."""

    id: int
    reason: str


class Past(NamedTuple):
    """The latest process under an id that has none now."""

    id: int
    incarnation: int


class View(NamedTuple):
    """Who leads tells everyone who is in the world now, and who of those before went without a word.

    `complete`: the world has had all the members that it waits for, even if some have left again. `leader`: who
    publishes the next view; not the sender of this one where that goes with it.
    """

    epoch: int
    members: tuple[Member, ...]
    lost: tuple[Loss, ...]
    closing: bool
    complete: bool
    past: tuple[Past, ...] = ()
    leader: int = 0


class Ready(NamedTuple):
    """A member has nothing more to do and waits for the others (`leaving` False), or goes now (True)."""

    leaving: bool


class Report(NamedTuple):
    """A member tells the one who leads that another cannot be reached any more."""

    id: int
    incarnation: int
    reason: str


class Notice(NamedTuple):
    """One-way words between faces: cell output, telemetry. `data` is msgpack, for whoever listens on `channel`."""

    channel: str
    data: bytes


class Parcel(NamedTuple):
    """Values, one way, for whoever listens on `channel`; `place` says which they are, and `label` says it in pictures.

    Its receiver opens it when it needs the values; nobody answers.
    """

    channel: str
    place: tuple[int, ...]
    label: str
    scope: Scope | None
    body: Body


class Seen(NamedTuple):
    """An acknowledgement: every message below `floor` has come, and these beyond it. It has no number itself.

    `answer`: the sender asks for one in turn, at once.
    """

    floor: int
    early: tuple[int, ...]
    answer: bool = False


class Forget(NamedTuple):
    """Whichever of these messages has not come by now must never be handled any more."""

    counts: tuple[int, ...]


class Fate(NamedTuple):
    """The answer: which of them never came, and which had."""

    lost: tuple[int, ...]
    had: tuple[int, ...]


class Uncreated(NamedTuple):
    """In place of a Create that did not go out, or was lost: `rref` has its first user, but will have no value."""

    rref: Id
    fork: Id
    label: str
    reason: str


Message = Any
"""Any of the tuples above."""
KINDS: tuple[type[Any], ...] = (
    Call, Create, Fetch, Result, Failure, Cancel,
    ForkRequest, ForkAccept, ChildAccept, UserDelete,
    Discover, Discovered, Gradients, Settled, WalkFailed, ReleaseContext,
    Join, Refused, View, Ready, Report, Notice,
    Seen, Forget, Fate, Uncreated, Attending, Parcel,
)  # fmt: skip
UNHURRIED: frozenset[type[Any]] = frozenset((ChildAccept, UserDelete, ReleaseContext, ForkAccept))
"""Kinds of messages that nobody may be waiting for, see `unhurried`."""
EMPTY = Body(b"", b"", [])
know(Id, Fork, Scope, Origin, Awaited, Settled, Device, Mapped, Devices, Member, Loss, Past, *KINDS)


def unhurried(message: Message) -> bool:
    """Whether nobody waits for it: it goes with the next message to the same peer, or a moment later."""
    return type(message) in UNHURRIED and (type(message) is not ForkAccept or message.first)

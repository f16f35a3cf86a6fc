"""All messages between members; `encoding` defines their bytes and validates their fields.

Guarantees
- Fields are numbers, strings, bytes, named tuples, or tuples of these.
- Only user data (`Body`) contains a pickle, with numbered by-reference slots, the table of its tensors, and their raw
  bytes. No process opens it before the peer has proved that it has the secret; the protocol never reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rpcbench.base.ids import Id

new_tuple = tuple.__new__  # makes a named tuple: one Python call fewer than its constructor


class Body(NamedTuple):
    """User data, which only the codec reads."""

    payload: bytes  # a pickle
    tensors: bytes  # the table of its tensors
    # Sender: views of tensor memory, without a copy. Receiver: writable buffers that belong to this body alone.
    buffers: Sequence[memoryview | bytearray | bytes]


class Fork(NamedTuple):
    """One RRef inside a body: the data that makes the receiver a user of it."""

    rref: Id
    owner: int
    fork: Id
    parent: int  # the member that has sent it
    type: str  # the name of the value's type
    owner_incarnation: int = 0  # the owner's incarnation


class Scope(NamedTuple):
    """The place of a message in a distributed autograd context."""

    context: int
    message: int  # the number of this send in the context
    behind: tuple[int, ...] | None  # the sends that a backward pass from this one reaches, itself included, if given


class Origin(NamedTuple):
    """The notebook's cell that has created an RRef."""

    cell: str  # the front end's id of the cell
    number: int  # the execution count that it shows


class Call(NamedTuple):
    """A request to run a function and send back its result."""

    call: int  # the caller's number of the call, which its result repeats
    label: str  # the function's name, for panels and errors
    budget: float | None  # seconds until the caller stops waiting; None: no deadline
    forks: tuple[Fork, ...]  # the RRefs in the body
    scope: Scope | None
    body: Body


class Create(NamedTuple):
    """A request to run a function and keep its result as the value of an RRef."""

    call: int
    rref: Id
    fork: Id  # the caller, as the first user
    label: str
    budget: float | None
    forks: tuple[Fork, ...]
    scope: Scope | None
    origin: Origin | None
    body: Body


class Fetch(NamedTuple):
    """A request for a copy of the value of `rref`, which is sent once the value exists."""

    call: int
    rref: Id
    budget: float | None
    scope: Scope | None


class Result(NamedTuple):
    """The reply to a Call or Fetch; with an empty body, to a Create that has finished."""

    call: int
    forks: tuple[Fork, ...]
    scope: Scope | None
    body: Body


class Failure(NamedTuple):
    """The reply if the function has raised."""

    call: int
    type: str  # the name of the exception's type
    text: str  # its traceback
    body: Body  # the exception itself, if it can be pickled


class Cancel(NamedTuple):
    """The caller does not wait for the call any more."""

    call: int


class ForkRequest(NamedTuple):
    """A new user registers with the owner."""

    rref: Id
    fork: Id


class ForkAccept(NamedTuple):
    """The owner has registered this user."""

    rref: Id
    fork: Id
    first: bool = False  # the user whose Create makes the value


class ChildAccept(NamedTuple):
    """From a new user to the member that sent it the RRef: the owner has registered it, the parent may be released."""

    fork: Id


class UserDelete(NamedTuple):
    """A user releases its reference at the owner."""

    rref: Id
    fork: Id


class Discover(NamedTuple):
    """The send with this number takes part in a backward pass: a request to discover the sends behind it."""

    context: int
    pass_id: Id  # the backward pass
    message: int


class Discovered(NamedTuple):
    """All sends behind that one are discovered."""

    context: int
    pass_id: Id
    message: int


class Awaited(NamedTuple):
    """A send whose gradients a worker waits for in a fast backward pass."""

    message: int
    to: int  # its receiver
    label: str  # of the call that it was part of


class Settled(NamedTuple):
    """To the root of a backward pass: the gradients of this send have been propagated."""

    context: int
    pass_id: Id
    message: int
    fired: tuple[int, ...]  # the recvs for which gradients were sent on
    awaited: tuple[Awaited, ...]


class Gradients(NamedTuple):
    """Gradients for the tensors of the send with this number."""

    context: int
    pass_id: Id
    message: int
    retain: bool  # keep the graph for another pass
    fast: bool  # all sends of the context take part
    plan: tuple[int, ...]  # the sends that take part, if no discovery has run
    settled: Settled | None  # saves a message of its own where the receiver is the root
    body: Body


class BackwardFailed(NamedTuple):
    """A backward pass has ended with an error."""

    context: int
    pass_id: Id
    worker: int  # where the error was raised; the next fields are as in Failure
    type: str
    text: str
    body: Body


class ReleaseContext(NamedTuple):
    """The context has ended: release it, and pass this on to the other participants that you have contacted."""

    context: int


class ContextParticipant(NamedTuple):
    """To the worker that began a context: the sender takes part, and has lost the peer that would release it."""

    context: int


class Device(NamedTuple):
    """One of a member's own devices, such as "cuda:0"."""

    name: str


class Mapped(NamedTuple):
    """One entry of a device map: in calls to `to`, tensors on the device `here` arrive on the device `there`."""

    to: str
    here: str
    there: str


class Devices(NamedTuple):
    """A member's accelerators and device maps."""

    kind: str  # such as "cuda"; "": none
    number: int
    used: tuple[Device, ...]  # empty: all
    maps: tuple[Mapped, ...]


NO_DEVICES = Devices("", 0, (), ())


class Member(NamedTuple):
    """One process of the world."""

    id: int
    name: str
    incarnation: int
    address: str  # where it listens for members on its host
    host: str = ""  # see `transport.hosts.host_id`
    remote: str = ""  # where it listens for members on other hosts; "": nowhere
    devices: Devices = NO_DEVICES

    def addresses_from(self, host: str) -> tuple[str, ...]:
        """Return the addresses to try from a process on `host`, the best first."""
        near = (self.address,) if self.host == host else ()
        return near + ((self.remote,) if self.remote else ())


class Join(NamedTuple):
    """A process asks the leader for admission."""

    member: Member
    world_size: int | None  # the number of members that it expects; None: an open world


class Refused(NamedTuple):
    """The leader does not admit a process."""

    reason: str
    again: bool = False  # worth another try: the reason may pass, or there may be another leader by now


class Loss(NamedTuple):
    """A member that has left unexpectedly."""

    id: int
    reason: str  # as far as it is known


class Past(NamedTuple):
    """The latest process that had an id which no process has now."""

    id: int
    incarnation: int


class View(NamedTuple):
    """The leader publishes the members of the world."""

    epoch: int
    members: tuple[Member, ...]
    lost: tuple[Loss, ...]  # former members that have left unexpectedly
    closing: bool
    complete: bool  # the world has had all the members that it waits for, even if some have left again
    past: tuple[Past, ...] = ()
    leader: int = 0  # publishes the next view; another one than the sender if that leaves with this view


class Ready(NamedTuple):
    """A member has finished its work."""

    leaving: bool  # False: it waits for the others; True: it leaves now


class Report(NamedTuple):
    """A member reports to the leader that another member cannot be reached any more."""

    id: int
    incarnation: int
    reason: str


class Notice(NamedTuple):
    """One-way plain data between components, such as cell output and telemetry."""

    channel: str
    data: bytes  # msgpack


class Parcel(NamedTuple):
    """One-way values. The receiver unpickles them when it needs them, and sends no reply."""

    channel: str
    place: tuple[int, ...]  # which values these are, for the listener on `channel`
    label: str  # the same in words, for panels
    scope: Scope | None
    body: Body


class Seen(NamedTuple):
    """An acknowledgement. It has no sequence number itself."""

    first_missing: int  # all messages with lower sequence numbers have been received
    early: tuple[int, ...]  # and these above it
    answer: bool = False  # the sender requests an acknowledgement in return, at once


class CancelDelivery(NamedTuple):
    """A request never to handle those of these messages that have not been received by now."""

    counts: tuple[int, ...]  # sequence numbers


class DeliveryReport(NamedTuple):
    """The reply to CancelDelivery."""

    lost: tuple[int, ...]  # never received
    had: tuple[int, ...]  # received before


class CreateFailed(NamedTuple):
    """In place of a Create that was not sent or was lost: `rref` has its first user, but will have no value."""

    rref: Id
    fork: Id
    label: str
    reason: str


Message = Any
"""Any of the tuples above."""
KINDS: tuple[type[Any], ...] = (
    Call, Create, Fetch, Result, Failure, Cancel,
    ForkRequest, ForkAccept, ChildAccept, UserDelete,
    Discover, Discovered, Gradients, Settled, BackwardFailed, ReleaseContext,
    Join, Refused, View, Ready, Report, Notice,
    Seen, CancelDelivery, DeliveryReport, CreateFailed, ContextParticipant, Parcel,
)  # fmt: skip
EMPTY = Body(b"", b"", [])

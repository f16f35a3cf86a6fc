"""What a machine wants done. Effects of different events may be carried out in any order."""

from __future__ import annotations

from typing import Any, NamedTuple

from rpcbench.base.ids import Id
from rpcbench.wire.messages import (  # fmt: skip
    Call,
    Create,
    Failure,
    Fetch,
    Gradients,
    Member,
    Message,
    Notice,
    Parcel,
    Result,
    WalkFailed,
)


class Send(NamedTuple):
    """Put a message, with its number for that receiver, on the wire."""

    to: int
    seq: int
    message: Message


class Wake(NamedTuple):
    """Call `tick` when one period has passed."""


class Enqueue(NamedTuple):
    """A call may run, as all RRefs it needs are known to their owners: `begin` it when there is a thread for it."""

    source: int
    call: int


class Run(NamedTuple):
    """Run a user's function, or fetch a value, on this thread."""

    source: int
    message: Call | Create | Fetch


class Resolve(NamedTuple):
    """The answer to a call of ours has come."""

    call: int
    source: int
    answer: Result | Failure


class Reject(NamedTuple):
    """A call of ours will get no answer."""

    call: int
    error: Exception


class Free(NamedTuple):
    """Nobody uses this RRef any more: let go of its value, unless this member has shared it again since."""

    rref: Id


class Unmade(NamedTuple):
    """The call that was to make this value will not run: give those who wait for the value, or ask later, the error."""

    rref: Id
    error: Exception


class OwnerLost(NamedTuple):
    """The owner of this RRef is gone, and its value with it."""

    rref: Id


class Explore(NamedTuple):
    """Find the recvs behind this send; answer with `explored`."""

    context: int
    walk: Id
    message: int


class Propagate(NamedTuple):
    """Discovery is over: start the backward pass from its roots; answer with `propagated`."""

    context: int
    walk: Id


class Accumulate(NamedTuple):
    """Gradients for a send have come: run what became complete; answer with `propagated`."""

    source: int
    message: Gradients


class WalkEnded(NamedTuple):
    """The backward pass that this member began is over; `failure` where it went wrong."""

    context: int
    walk: Id
    failure: WalkFailed | None


class ForgetWalk(NamedTuple):
    """This member's part of a pass is over: its graph may go."""

    context: int
    walk: Id


class ForgetContext(NamedTuple):
    """The context is released: its graph and gradients may go."""

    context: int


class Heard(NamedTuple):
    """A notice has come for whoever listens."""

    source: int
    notice: Notice


class Came(NamedTuple):
    """Values have come for whoever listens."""

    source: int
    parcel: Parcel


class Undelivered(NamedTuple):
    """Values of ours will not come to `to`."""

    to: int
    parcel: Parcel
    error: Exception


class Joined(NamedTuple):
    """A new member is in the world."""

    member: Member


class Gone(NamedTuple):
    """A member is no longer in the world; `lost` if it went without a word."""

    member: Member
    lost: bool
    reason: str

    @property
    def words(self) -> str:
        """What to say where it is called."""
        return f"{self.member.name} is gone ({self.reason}); start it again or use another worker"


class Complete(NamedTuple):
    """The world has all members it waits for (at start), or it is over (`closing`)."""

    closing: bool


class HandedOver(NamedTuple):
    """This member led, and is about to leave: newcomers are to find the one who leads from this view on."""

    heir: Member
    epoch: int


class Leads(NamedTuple):
    """From this view on this member leads: newcomers are to find it."""

    epoch: int


class Watch(NamedTuple):
    """Be in touch with this member: who leads, and those who follow, must see each other end."""

    member: Member


class Rejected(NamedTuple):
    """Who leads does not let this process in, or led but does no more (`again`: then another may be asked)."""

    reason: str
    again: bool = False


Effect = Any
"""Any of the tuples above."""
Effects = list[Effect]

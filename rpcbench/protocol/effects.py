"""Effects: the actions that a node asks its agent to carry out. Effects of different events may run in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rpcbench.base.ids import Id
from rpcbench.wire import messages as m


class Send(NamedTuple):
    """Put a message, with its number for that receiver, on the wire."""

    to: int
    seq: int
    message: m.Message


class Wake(NamedTuple):
    """Call `tick` when one period has passed."""


class Enqueue(NamedTuple):
    """`begin` this call when a thread is free: the owners of all its RRefs have confirmed them."""

    source: int
    call: int


class Run(NamedTuple):
    """Run a user's function, or fetch a value, on this thread."""

    source: int
    message: m.Call | m.Create | m.Fetch


class Resolve(NamedTuple):
    """Complete a call made here with its answer."""

    call: int
    source: int
    answer: m.Result | m.Failure


class Reject(NamedTuple):
    """Fail a call made here: it will get no answer."""

    call: int
    error: Exception


class Free(NamedTuple):
    """Free the value of an RRef without users, unless this member has shared it again since."""

    rref: Id


class ValueFailed(NamedTuple):
    """Fail the value of an RRef, for present and later readers: the call that creates it will not run."""

    rref: Id
    error: Exception


class OwnerLost(NamedTuple):
    """Fail the local handles of an RRef: its owner is lost, and its value with it."""

    rref: Id


class Explore(NamedTuple):
    """Find the recvs behind this send; answer with `explored`."""

    context: int
    pass_id: Id
    message: int


class Propagate(NamedTuple):
    """Start the backward pass from its roots, now that discovery is over; answer with `propagated`."""

    context: int
    pass_id: Id


class Accumulate(NamedTuple):
    """Take gradients for a send and run the regions that they complete; answer with `propagated`."""

    source: int
    message: m.Gradients


class PassEnded(NamedTuple):
    """End the wait for a backward pass that this member began; `failure` if it failed."""

    context: int
    pass_id: Id
    failure: m.BackwardFailed | None


class ForgetPass(NamedTuple):
    """Free this member's part of a pass, which is over."""

    context: int
    pass_id: Id


class ForgetContext(NamedTuple):
    """Free the graph and the gradients of a released context."""

    context: int


class NoticeReceived(NamedTuple):
    """Pass a control message to the listeners of its channel."""

    source: int
    notice: m.Notice


class DataReceived(NamedTuple):
    """Pass one-way data to the listener of its channel."""

    source: int
    parcel: m.Parcel


class Undelivered(NamedTuple):
    """Report that one-way data was not delivered to `to`."""

    to: int
    parcel: m.Parcel
    error: Exception


class BodyLost(NamedTuple):
    """Note that a message with a body did not reach `to`, which is still a member: it lacks all that the body had."""

    to: int


class MemberJoined(NamedTuple):
    """Note that a new member has joined the world."""

    member: m.Member


class MemberLeft(NamedTuple):
    """Note that a member has left the world."""

    member: m.Member
    lost: bool  # it did not announce its departure
    reason: str

    @property
    def error_text(self) -> str:
        """The text of the error for calls to it."""
        return f"{self.member.name} is gone ({self.reason}); start it again or use another worker"


class Complete(NamedTuple):
    """Note that the world is complete, or over."""

    closing: bool  # False: all members that it waits for at the start have joined; True: it is over


class HandedOver(NamedTuple):
    """Direct newcomers to the next leader: this member led, and is about to leave."""

    heir: m.Member
    epoch: int  # of the first view in which it leads


class Leads(NamedTuple):
    """Direct newcomers to this member: it leads from this view on."""

    epoch: int


class WatchMember(NamedTuple):
    """Connect to this member: the leader and its followers must detect each other's end."""

    member: m.Member


class Rejected(NamedTuple):
    """Report that the leader has refused this process, or that the member asked is not the leader any more."""

    reason: str
    again: bool = False  # another member may admit it, so it may retry


Effect = Any
"""Any of the tuples above."""
Effects = list[Effect]
Outbox = list[tuple[int, Any]]
"""(receiver, message) pairs; the node numbers them."""
Outcome = tuple[Effects, Outbox]


def join_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Return all effects and all messages of several outcomes, in order."""
    effects: Effects = []
    outbox: Outbox = []
    for more, out in outcomes:
        effects += more
        outbox += out
    return effects, outbox

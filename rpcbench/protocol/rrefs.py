"""The RRef protocol: distributed reference counting of values that live on one member.

An RRef has one owner, which keeps the value, and users, each with a fork of its own. Messages may arrive in any order.

Guarantees
- The owner keeps a value while any user, or any RRef inside a message in transit, can still reach it.
- When the last fork is deleted the owner frees the value, and no table of any member holds anything.

Rules that give them
- A user sends UserDelete only after its last handle is released, the owner has confirmed the fork, and the owner
  has confirmed every fork that this user passed on (ChildAccept).
- A function runs only after the owners of all RRefs among its arguments have confirmed them.
- An RRef that returns to its owner counts as a fork of the owner until the message is opened: from then on the owner
  holds the value directly.
"""

# Theory of operation
# The sequence is torch's: user 1 passes its fork on to user 2 as an argument of a call. This parent fork must outlive
# the child's confirmation; otherwise the owner's reference count could reach zero while the child is in transit.
#
#     owner                    user 1 (parent)               user 2 (child)
#       │                        │  Call(Fork child) ────────> │  adopt: pending; the call is held
#       │ <──────────────────────┼──────────── ForkRequest ─── │
#       │  owned.forks += child  │                             │
#       │ ─── ForkAccept ────────┼───────────────────────────> │  confirmed; the call may run
#       │                        │ <────────── ChildAccept ─── │
#       │ <─── UserDelete ────── │  if released, confirmed, without children
#
# If the owner itself shares the value, it adds the fork before it sends, so the child is confirmed at once.
#
# The states are in two tables, `User.transitions` and `Owned.transitions`; docs/internals/journey-of-a-rref.md draws
# them. Forks and children are counts beside a state: of these a machine hears only that the last one has gone.
#
# Why each table exists
#     owned     forks of each RRef that this member owns, with their holders: its reference count. The forks of a lost
#               holder can be dropped from it.
#     users     forks held here
#     children  forks passed on from here that their owner may not have confirmed yet; they keep their parent alive
# Two bounded sets of tombstones (`_maybe_passed_on`, `_freed`) decide whether a request for an unknown RRef is early or
# late: an early one waits for the Create, a late one fails.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from rpcbench.base.errors import WorkerLostError
from rpcbench.base.ids import Id, Note, Row, Table, Tombstones, make_row
from rpcbench.base.state_machine import StateMachine
from rpcbench.protocol.effects import Effects, Free, Outbox, Outcome, OwnerLost, ValueFailed, join_outcomes
from rpcbench.wire.messages import ChildAccept, Fork, ForkAccept, ForkRequest, Origin, UserDelete

# NAMED: the call that creates the value has not arrived. CREATED: its result is awaited.
RRefState = StrEnum("RRefState", "NAMED CREATED READY FAILED FREED")
NAMED, CREATED, READY, FAILED, FREED = RRefState
RRefEvent = StrEnum("RRefEvent", "CREATE_ARRIVED CALL_DROPPED RETURNED RAISED FORKS_GONE")
CREATE_ARRIVED, CALL_DROPPED, RETURNED, RAISED, FORKS_GONE = RRefEvent


@dataclass(slots=True)
class Owned(StateMachine[RRefState, RRefEvent]):
    """The owner's side of one RRef."""

    transitions = {
        NAMED: {CREATE_ARRIVED: CREATED, CALL_DROPPED: CREATED, FORKS_GONE: NAMED},
        CREATED: {RETURNED: READY, RAISED: FAILED, CALL_DROPPED: CREATED, FORKS_GONE: FREED},
        # or it was freed, and shared again by a handle of the owner before the call has returned
        READY: {CREATE_ARRIVED: CREATED, RETURNED: READY, RAISED: FAILED, CALL_DROPPED: READY, FORKS_GONE: FREED},
        FAILED: {RAISED: FAILED, FORKS_GONE: FREED},
    }  # fmt: skip
    state: RRefState = NAMED
    type: str = ""
    made: float = 0.0  # time of the creating call, in seconds
    size: int | None = None  # bytes, if known
    origin: Origin | None = None  # the notebook cell that made it
    forks: dict[Id, int] = field(default_factory=dict)  # fork → id of its holder: the reference count


# CONFIRMED: the owner has this fork in its table. RELEASED: the last local handle went before that. DELETING: it is
# confirmed and released, but a fork that was passed on from here may not be confirmed.
ForkState = StrEnum("ForkState", "PENDING CONFIRMED RELEASED DELETING DELETED")
PENDING, CONFIRMED, RELEASED, DELETING, DELETED = ForkState
ForkEvent = StrEnum("ForkEvent", "ACCEPTED HANDLES_GONE CHILDREN_GONE OWNER_GONE")
ACCEPTED, HANDLES_GONE, CHILDREN_GONE, OWNER_GONE = ForkEvent


@dataclass(slots=True)
class User(StateMachine[ForkState, ForkEvent]):
    """One fork held here. `parent` is None for the fork that came with the creating call."""

    transitions = {  # a second HANDLES_GONE comes from the finalizer of a handle that was released
        PENDING: {ACCEPTED: CONFIRMED, HANDLES_GONE: RELEASED, OWNER_GONE: DELETED},
        CONFIRMED: {HANDLES_GONE: DELETING, OWNER_GONE: DELETED},
        RELEASED: {ACCEPTED: DELETING, HANDLES_GONE: RELEASED, OWNER_GONE: DELETED},
        DELETING: {CHILDREN_GONE: DELETED, HANDLES_GONE: DELETING, OWNER_GONE: DELETED},
    }
    state: ForkState
    rref: Id
    owner: int
    parent: int | None
    owner_incarnation: int = 0  # the owner's incarnation
    type: str = ""
    children: dict[Id, int] = field(default_factory=dict)  # unconfirmed fork → id of its receiver

    @property
    def is_confirmed(self) -> bool:
        return self.state in (CONFIRMED, DELETING)

    @property
    def is_released(self) -> bool:
        return self.state in (RELEASED, DELETING)


class HeldFork(NamedTuple):
    """A fork of an RRef that this member owns, and its holder."""

    rref: Id
    type: str
    fork: Id
    holder: int


class RRefs:
    """All RRefs of one member."""

    def __init__(self, me: int, incarnation: int) -> None:
        self.note: Note | None = None
        self.on_empty: Callable[[], object] | None = None  # called when nothing is owned or used any more
        self.me = me
        self.alive: Callable[[int, int], bool | None] = lambda worker, life: True  # None: no View has named it yet
        self.incarnation_of: Callable[[int], int] = lambda worker: 0  # id → incarnation
        self.owned: dict[Id, Owned] = {}
        self.users: dict[Id, User] = {}  # by fork
        self.children: dict[Id, Id] = {}  # child fork → parent fork
        self.made = 0.0  # when an RRef is made that the message in hand creates
        self._incarnation = incarnation
        self._serial = 0
        self._departed_processes: set[tuple[int, int]] = set()  # (id, incarnation) of lost members
        self._maybe_passed_on = Tombstones()  # RRefs of lost holders, which may have passed them on unseen
        self._freed = Tombstones()  # RRefs freed here; an unknown holder may still have passed them on

    def new_id(self) -> Id:
        serial, self._serial = self._serial, self._serial + 1
        return Id(self.me, serial, self._incarnation)

    # -- creating and sharing
    def create_user(self, owner: int, type_: str) -> tuple[Id, Id]:
        """Make this member the first user of a value that `owner` will make, for `remote()`; return (RRef, fork)."""
        rref, fork = self.new_id(), self.new_id()
        self.users[fork] = User(PENDING, rref, owner, None, self.incarnation_of(owner), type_)
        self._tell_user("UserCreated", fork)
        return rref, fork

    def share_rref(
        self, rref: Id, fork: Id | None, type_: str, to: int, made: float, size: int | None = None,
        origin: Origin | None = None,
    ) -> Fork:  # fmt: skip
        """Fork an RRef for a message to `to`. `fork` is the user's own; None if this owner holds the value itself."""
        child, user = self.new_id(), None if fork is None else self.users.get(fork)
        if fork is None or (user is not None and user.owner == self.me):
            owned = self.owned.get(rref)
            if owned is None:
                # with a fork of its own, the creating call is still in transit, from this member to itself
                state = READY if user is None else NAMED
                owned = self.owned[rref] = Owned(state, type_, made, size, origin)
            owned.forks[child] = to
            self._tell_owned("ForkAdded", rref)
            return Fork(rref, self.me, child, self.me, type_, self._incarnation)
        if user is None:
            raise WorkerLostError(f"RRef {rref} cannot be passed on: its owner is lost or never got the creating call")
        user.children[child] = to
        self.children[child] = fork
        self._tell_user("ChildAdded", fork)
        return Fork(rref, user.owner, child, self.me, type_, user.owner_incarnation)

    def is_shared(self, fork: Fork) -> bool:
        """Return whether a fork made here still counts; it does not if its receiver was lost since."""
        if fork.owner != self.me:
            return fork.fork in self.children
        return fork.rref in self.owned and fork.fork in self.owned[fork.rref].forks

    def withdraw_fork(self, fork: Fork) -> Outcome:
        """Withdraw a fork: the message with it was not sent."""
        if fork.owner == self.me:
            return self.drop_fork(fork.rref, fork.fork), []
        return self.child_known(fork.fork)

    # -- receiving
    def adopt_fork(self, fork: Fork) -> tuple[bool, Effects, Outbox]:
        """Take the RRef of a received message. True if its owner must confirm it before a function may run on it."""
        outbox: Outbox = [] if fork.parent == self.me else [(fork.parent, ChildAccept(fork.fork))]
        if fork.owner == self.me:
            predecessors = fork.owner_incarnation != self._incarnation
            return False, self._add_fork(fork.rref, fork.fork, self.me, predecessors), outbox
        alive = self.alive(fork.owner, fork.owner_incarnation)
        if alive is False:
            return False, [OwnerLost(fork.rref)], outbox
        confirmed = fork.parent == fork.owner
        state = CONFIRMED if confirmed else PENDING
        self.users[fork.fork] = User(state, fork.rref, fork.owner, fork.parent, fork.owner_incarnation, fork.type)
        self._tell_user("UserAdded", fork.fork)
        must_confirm = alive and not confirmed  # an owner that no View has named yet is asked by `owner_joined`
        return not confirmed, [], [(fork.owner, ForkRequest(fork.rref, fork.fork))] if must_confirm else []

    def note_reference(self, rref: Id) -> bool:
        """Note that a call refers to a value owned here; False if the value has been freed."""
        if rref not in self.owned:
            if self._is_past(rref):
                return False
            # The creating call is in transit, so the value is awaited; `member_lost` fails it if its creator is lost.
            self.owned[rref] = Owned()
            self._tell_owned("RRefNamed", rref)
        return True

    def on_create(self, source: int, rref: Id, fork: Id, type_: str, origin: Origin | None = None) -> Outbox:
        owned = self.owned.setdefault(rref, Owned())
        owned.apply_event(CREATE_ARRIVED, rref)
        owned.type, owned.made, owned.origin = type_, self.made, origin
        owned.forks[fork] = source
        self._tell_owned("RRefCreated", rref)
        return [(source, ForkAccept(rref, fork, first=True))]

    def on_fork_request(self, source: int, message: ForkRequest) -> Outcome:
        return self._add_fork(message.rref, message.fork, source), [(source, ForkAccept(message.rref, message.fork))]

    def on_fork_accept(self, message: ForkAccept) -> Outcome:
        user = self.users.get(message.fork)
        if user is None:
            return [], []
        user.apply_event(ACCEPTED, message.fork)
        self._tell_user("UserConfirmed", message.fork)
        outbox: Outbox = [] if user.parent is None else [(user.parent, ChildAccept(message.fork))]
        return [], outbox + self._retire_if_unused(message.fork)

    # -- ends of forks and values
    def child_known(self, child: Id) -> Outcome:
        """Note that a fork passed on from here no longer needs its parent."""
        parent = self.children.pop(child, None)
        if parent is None:
            return [], []
        del self.users[parent].children[child]
        self._tell_user("ChildAccepted", parent)
        return [], self._retire_if_unused(parent)

    def drop_fork(self, rref: Id, fork: Id) -> Effects:
        """Drop a fork of an RRef that this member owns, and free the value after the last one."""
        owned = self.owned.get(rref)
        if owned is None or owned.forks.pop(fork, None) is None:
            return []
        if owned.forks or owned.apply_event(FORKS_GONE, rref) is not FREED:
            self._tell_owned("ForkDropped", rref)
            return []
        return self._let_go(rref)

    def release_fork(self, fork: Id) -> Outbox:
        """Release a fork: its last local handle has gone."""
        user = self.users.get(fork)
        if user is None:
            return []
        user.apply_event(HANDLES_GONE, fork)
        self._tell_user("UserReleased", fork)
        return self._retire_if_unused(fork)

    def creation_finished(self, rref: Id, type_: str, failed: bool, size: int | None = None) -> None:
        """Note that the creating call has returned, or failed."""
        owned = self.owned.get(rref)
        if owned is not None:
            owned.apply_event(RAISED if failed else RETURNED, rref)
            owned.type, owned.size = type_ or owned.type, size
            self._tell_owned("ValueSet", rref)

    def creation_failed(self, rref: Id, error: Exception) -> Effects:
        """Give the users of a value the error of its creating call, which will not run."""
        owned = self.owned.get(rref)
        if owned is not None:
            owned.apply_event(CALL_DROPPED, rref)
        # The owner may be the only holder: its own RRef came home, so no UserDelete would ever free the entry.
        unused = owned is not None and not owned.forks and owned.apply_event(FORKS_GONE, rref) is FREED
        return [ValueFailed(rref, error), *(self._let_go(rref) if unused else [])]

    def owner_lost(self, fork: Id) -> Outcome:
        """Drop a fork of a lost owner."""
        user = self.users.get(fork)
        if user is None:
            return [], []
        user.apply_event(OWNER_GONE, fork)
        self._forget_user(fork)
        # The ChildAccept lets the parent go: the owner will never confirm this fork.
        return [OwnerLost(user.rref)], [] if user.parent is None else [(user.parent, ChildAccept(fork))]

    def member_lost(self, worker: int, incarnation: int) -> tuple[Effects, Outbox, list[Id]]:
        """Drop the forks and the values of a lost member. Third result: forks that waited for its confirmation."""
        effects: Effects = []
        self._departed_processes.add((worker, incarnation))
        for rref, owned in list(self.owned.items()):
            for fork in [fork for fork, holder in owned.forks.items() if holder == worker]:
                effects += self.drop_fork(rref, fork)
                self._maybe_passed_on.add_tombstone(rref)
            if owned.state is NAMED and (rref.worker, rref.incarnation) == (worker, incarnation):
                effects += self.creation_failed(rref, _lost_value(rref))
        passed_on = [c for c, parent in self.children.items() if self.users[parent].children[c] == worker]
        outcomes = [(effects, []), *map(self.child_known, passed_on)]
        waiting = [
            fork for fork, user in self.users.items() if (user.owner, user.owner_incarnation) == (worker, incarnation)
        ]
        return *join_outcomes([*outcomes, *map(self.owner_lost, waiting)]), waiting

    def owner_joined(self, worker: int, incarnation: int) -> Outbox:
        """Request confirmation from a new member of forks that arrived here before the View that names it."""
        return [
            (worker, ForkRequest(user.rref, fork))
            for fork, user in self.users.items()
            if (user.owner, user.owner_incarnation) == (worker, incarnation)
            and not user.is_confirmed
            and user.parent is not None
        ]

    def orphaned_forks(self) -> list[Id]:
        """Return the forks of owners that have left, even if no View has ever named them."""
        return [fork for fork, user in self.users.items() if self.alive(user.owner, user.owner_incarnation) is False]

    # -- observation
    def forks_held_by(self, worker: int | None = None) -> list[HeldFork]:
        """Return the forks of RRefs owned here that a member holds; of all members, if None."""
        return [
            HeldFork(rref, owned.type, fork, holder)
            for rref, owned in self.owned.items()
            for fork, holder in owned.forks.items()
            if worker is None or holder == worker
        ]

    def rref_tables(self) -> dict[str, Table]:
        return {
            "owned": {str(rref): _owned_row(rref, owned) for rref, owned in self.owned.items()},
            "users": {str(fork): _user_row(fork, user) for fork, user in self.users.items()},
        }

    def check_rrefs(self) -> None:
        for child, parent in self.children.items():
            assert child in self.users[parent].children, f"child {child} unknown to its parent {parent}"
        for rref, owned in self.owned.items():
            assert owned.forks or owned.state is NAMED, f"{rref} is kept without a fork"

    # -- internals
    def _add_fork(self, rref: Id, fork: Id, holder: int, predecessors: bool = False) -> Effects:
        never = rref not in self.owned and (predecessors or self._is_past(rref))
        self.owned.setdefault(rref, Owned()).forks[fork] = holder
        self._tell_owned("ForkAdded", rref)
        return self.creation_failed(rref, _lost_value(rref)) if never else []

    def _is_past(self, rref: Id) -> bool:
        """Return whether a value that is not here was freed, or will never be made; else its call is in transit."""
        gone = (rref.worker, rref.incarnation) in self._departed_processes
        return gone or rref.worker == self.me or rref in self._maybe_passed_on or rref in self._freed

    def _let_go(self, rref: Id) -> Effects:
        del self.owned[rref]
        if rref.worker != self.me:  # `_is_past` tells our own RRefs by their id
            self._freed.add_tombstone(rref)
        self._tell_owned("RRefFreed", rref)
        self._tell_empty()
        return [Free(rref)]

    def _retire_if_unused(self, fork: Id) -> Outbox:
        user = self.users[fork]
        if user.state is not DELETING or user.children:  # the first rule of the header
            return []
        user.apply_event(CHILDREN_GONE, fork)
        self._forget_user(fork)
        return [(user.owner, UserDelete(user.rref, fork))]

    def _forget_user(self, fork: Id) -> None:
        for child in self.users.pop(fork).children:
            del self.children[child]
        self._tell_user("UserGone", fork)
        self._tell_empty()

    def _tell_empty(self) -> None:
        if self.on_empty is not None and not (self.owned or self.users):
            self.on_empty()

    def _tell_owned(self, kind: str, rref: Id) -> None:
        if self.note is not None:
            self.note(kind, "owned", str(rref), partial(make_row, self.owned, rref, _owned_row))

    def _tell_user(self, kind: str, fork: Id) -> None:
        if self.note is not None:
            self.note(kind, "users", str(fork), partial(make_row, self.users, fork, _user_row))


def _lost_value(rref: Id) -> WorkerLostError:
    return WorkerLostError(f"RRef {rref} has no value: the worker that held it, or that was to create it, is lost")


def _owned_row(rref: Id, owned: Owned) -> Row:
    forks = [{"fork": str(fork), "holder": holder} for fork, holder in owned.forks.items()]
    ready, failed = owned.state in (READY, FAILED), owned.state is FAILED
    return {
        "rref": str(rref), "ready": ready, "failed": failed, "type": owned.type, "forks": forks,
        "made": owned.made, "size": owned.size,
        "cell": owned.origin.cell if owned.origin else "", "number": owned.origin.number if owned.origin else None,
    }  # fmt: skip


def _user_row(fork: Id, user: User) -> Row:
    state = str(DELETING if user.state is RELEASED else user.state)
    children = [{"fork": str(child), "to": to} for child, to in user.children.items()]
    return {
        "rref": str(user.rref), "fork": str(fork), "owner": user.owner, "parent": user.parent, "state": state,
        "children": children, "type": user.type,
    }  # fmt: skip

"""The RRef protocol: who owns which value, who uses it, and when it may be let go.

An RRef has one owner, which keeps the value, and users, each with a fork of its own. Messages may overtake each other.

Guarantees
- The owner keeps a value while any user, or any RRef on its way inside a message, can still reach it.
- When all users are gone the owner lets go, and no table holds anything.

Rules that give them
- A user tells the owner that it is gone (UserDelete) only when it is released here, the owner has confirmed it,
  and every fork it passed on is known to the owner (ChildAccept).
- A function runs only when the owners of all RRefs among its arguments have confirmed them.
- An RRef that comes home to its owner is a fork of the owner's own until it is opened: then the owner holds the value.

Why each table exists
    owned     forks of each RRef this member owns: its reference count, with the holder, so a lost holder's can go
    users     forks held here
    children  forks passed on from here that their owner may not know yet; they keep the parent alive
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rpcbench.base.errors import WorkerLostError
from rpcbench.base.events import Note, Row, Table
from rpcbench.base.ids import Id
from rpcbench.protocol.effects import Effects, Free, OwnerLost, Unmade
from rpcbench.wire.messages import ChildAccept, Fork, ForkAccept, ForkRequest, Origin, UserDelete

Outbox = list[tuple[int, Any]]
"""(receiver, message) pairs; the node numbers them."""
_TOMBSTONES = 4096


@dataclass(slots=True)
class Owned:
    """The owner's side of one RRef."""

    type: str = ""
    created: bool = False  # a fork may be known before the call that creates the value has come
    ready: bool = False
    failed: bool = False
    made: float = 0.0
    size: int | None = None  # bytes, where they are known
    origin: Origin | None = None
    forks: dict[Id, int] = field(default_factory=dict)


@dataclass(slots=True)
class User:
    """One fork held here. `parent` is None for the fork that came with the creating call."""

    rref: Id
    owner: int
    parent: int | None
    life: int = 0  # the owner's incarnation
    type: str = ""
    confirmed: bool = False
    released: bool = False
    children: dict[Id, int] = field(default_factory=dict)


class Held(NamedTuple):
    """A fork of an RRef that this member owns, and who holds it."""

    rref: Id
    type: str
    fork: Id
    holder: int


class RRefs:
    """All RRefs of one member. Methods return effects and messages, `(effects, outbox)`."""

    def __init__(self, me: int, incarnation: int) -> None:
        self.note: Note | None = None
        self.on_empty: Callable[[], object] | None = None  # called when nothing is owned or used any more
        self.me = me
        self.alive: Callable[[int, int], bool | None] = lambda worker, life: True  # None: it is not known here yet
        self.life_of: Callable[[int], int] = lambda worker: 0
        self.owned: dict[Id, Owned] = {}
        self.users: dict[Id, User] = {}
        self.children: dict[Id, Id] = {}
        self._incarnation = incarnation
        self._serial = 0
        self._gone: set[tuple[int, int]] = set()
        self._bereft: dict[Id, None] = {}  # RRefs of a lost holder: it may have passed them on unknown to us
        self._freed: dict[Id, None] = {}  # the same may be true of a holder that we never knew of

    def new_id(self) -> Id:
        serial, self._serial = self._serial, self._serial + 1
        return Id(self.me, serial, self._incarnation)

    # -- making and sharing
    def create_user(self, owner: int, type_: str) -> tuple[Id, Id]:
        """For `remote()`: this member becomes the first user of a value that `owner` will make."""
        rref, fork = self.new_id(), self.new_id()
        self.users[fork] = User(rref, owner, None, self.life_of(owner), type_)
        self._tell_user("UserCreated", fork)
        return rref, fork

    def share(
        self, rref: Id, fork: Id | None, type_: str, to: int, now: float, size: int | None = None,
        origin: Origin | None = None,
    ) -> Fork:  # fmt: skip
        """An RRef goes into a message to `to`. `fork` is the user's own, None where the owner holds the value itself;
        `size` and `origin` are the value's then.

        WorkerLostError where the fork is no more: its owner was lost, or could not be told to make the value.
        """
        child, user = self.new_id(), None if fork is None else self.users.get(fork)
        if fork is None or (user is not None and user.owner == self.me):
            owned = self.owned.get(rref)
            if owned is None:
                made = user is None  # else the call that makes it is still on its way to ourselves
                owned = self.owned[rref] = Owned(type_, made, made, made=now, size=size, origin=origin)
            owned.forks[child] = to
            self._tell_owned("ForkAdded", rref)
            return Fork(rref, self.me, child, self.me, type_, self._incarnation)
        if user is None:
            raise WorkerLostError(f"RRef {rref} cannot be passed on: its owner is gone, or never got the call for it")
        user.children[child] = to
        self.children[child] = fork
        self._tell_user("ChildAdded", fork)
        return Fork(rref, user.owner, child, self.me, type_, user.life)

    def shared(self, fork: Fork) -> bool:
        """Whether a fork made here still stands for something: the one it was made for may have gone since."""
        if fork.owner != self.me:
            return fork.fork in self.children
        return fork.rref in self.owned and fork.fork in self.owned[fork.rref].forks

    def unshare(self, fork: Fork) -> tuple[Effects, Outbox]:
        """The message that was to carry it was not sent."""
        if fork.owner == self.me:
            return self._drop_fork(fork.rref, fork.fork), []
        return self._child_known(fork.fork)

    # -- receiving
    def adopt(self, fork: Fork) -> tuple[bool, Effects, Outbox]:
        """A message brought this RRef. True if its owner must confirm it before a function may run on it."""
        told: Outbox = [] if fork.parent == self.me else [(fork.parent, ChildAccept(fork.fork))]
        if fork.owner == self.me:
            return False, self._add_fork(fork.rref, fork.fork, self.me, fork.life != self._incarnation), told
        alive = self.alive(fork.owner, fork.life)
        if alive is False:
            return False, [OwnerLost(fork.rref)], told
        confirmed = fork.parent == fork.owner
        self.users[fork.fork] = User(fork.rref, fork.owner, fork.parent, fork.life, fork.type, confirmed)
        self._tell_user("UserAdded", fork.fork)
        asks = alive and not confirmed  # else once it is known
        return not confirmed, [], [(fork.owner, ForkRequest(fork.rref, fork.fork))] if asks else []

    def named(self, rref: Id) -> bool:
        """A call names a value that its caller holds here; False where it is gone, as its caller may be by now.

        One that was never here is on its way, and waited for: should its maker be lost, that is told.
        """
        if rref not in self.owned:
            if self._is_past(rref):
                return False
            self.owned[rref] = Owned()
            self._tell_owned("RRefNamed", rref)
        return True

    def came_home(self, fork: Fork) -> Effects:
        """The owner holds the value that this RRef stands for by itself now."""
        return self._drop_fork(fork.rref, fork.fork)

    def on_create(
        self, source: int, rref: Id, fork: Id, type_: str, now: float, origin: Origin | None = None
    ) -> Outbox:
        owned = self.owned.setdefault(rref, Owned())
        owned.created, owned.ready, owned.type, owned.made, owned.origin = True, False, type_, now, origin
        owned.forks[fork] = source
        self._tell_owned("RRefCreated", rref)
        return [(source, ForkAccept(rref, fork, first=True))]

    def on_fork_request(self, source: int, message: ForkRequest) -> tuple[Effects, Outbox]:
        effects = self._add_fork(message.rref, message.fork, source)
        return effects, [(source, ForkAccept(message.rref, message.fork))]

    def on_fork_accept(self, message: ForkAccept) -> tuple[Effects, Outbox]:
        user = self.users.get(message.fork)
        if user is None or user.confirmed:
            return [], []
        user.confirmed = True
        self._tell_user("UserConfirmed", message.fork)
        told: Outbox = [] if user.parent is None else [(user.parent, ChildAccept(message.fork))]
        return [], told + self._retire(message.fork)

    def on_child_accept(self, message: ChildAccept) -> tuple[Effects, Outbox]:
        return self._child_known(message.fork)

    def on_user_delete(self, message: UserDelete) -> Effects:
        return self._drop_fork(message.rref, message.fork)

    # -- ends
    def release(self, fork: Id) -> Outbox:
        """The last handle on this fork is gone."""
        user = self.users.get(fork)
        if user is None or user.released:
            return []
        user.released = True
        self._tell_user("UserReleased", fork)
        return self._retire(fork)

    def value_set(self, rref: Id, type_: str, failed: bool, size: int | None = None) -> None:
        """The creating call has returned, or failed."""
        owned = self.owned.get(rref)
        if owned is not None:
            owned.ready, owned.failed, owned.type, owned.size = True, failed, type_ or owned.type, size
            self._tell_owned("ValueSet", rref)

    def unmade(self, rref: Id, error: Exception) -> Effects:
        """The call that was to make this value will not run: its users get the error instead.

        So does its owner, who may hold it alone, since it came home; then no fork, or no more, tells of that.
        """
        owned = self.owned.get(rref)
        if owned is not None:
            owned.created = True
        unused = owned is not None and not owned.forks
        return [Unmade(rref, error), *(self._let_go(rref) if unused else [])]

    def owner_lost(self, fork: Id) -> tuple[Effects, Outbox]:
        """The owner cannot be reached any more; the parent need not wait for it."""
        user = self.users.get(fork)
        if user is None:
            return [], []
        self._forget_user(fork)
        return [OwnerLost(user.rref)], [] if user.parent is None else [(user.parent, ChildAccept(fork))]

    def lost(self, worker: int, incarnation: int) -> tuple[Effects, Outbox, list[Id]]:
        """A member is gone: its forks with it, and all values it owned. Third: forks that were waiting for it."""
        effects: Effects = []
        outbox: Outbox = []
        waiting: list[Id] = []
        self._gone.add((worker, incarnation))
        for rref, owned in list(self.owned.items()):
            for fork in [fork for fork, holder in owned.forks.items() if holder == worker]:
                effects += self._drop_fork(rref, fork)
                _bury(rref, self._bereft)
            if not owned.created and (rref.worker, rref.incarnation) == (worker, incarnation):
                effects += self.unmade(rref, _lost_value(rref))
        for child in [c for c, parent in self.children.items() if self.users[parent].children[c] == worker]:
            more, out = self._child_known(child)
            effects, outbox = effects + more, outbox + out
        for fork, user in list(self.users.items()):
            if (user.owner, user.life) == (worker, incarnation):
                more, out = self.owner_lost(fork)
                effects, outbox = effects + more, outbox + out
                waiting.append(fork)
        return effects, outbox, waiting

    def came(self, worker: int, incarnation: int) -> Outbox:
        """A member is known now: ask it for forks of its RRefs that came here before it was."""
        return [
            (worker, ForkRequest(user.rref, fork))
            for fork, user in self.users.items()
            if (user.owner, user.life) == (worker, incarnation) and not user.confirmed and user.parent is not None
        ]

    def forsaken(self) -> list[Id]:
        """Forks whose owner is known to be gone, though perhaps it was never known to be there."""
        return [fork for fork, user in self.users.items() if self.alive(user.owner, user.life) is False]

    # -- looking
    def held_by(self, worker: int | None = None) -> list[Held]:
        """Forks of RRefs owned here that a member holds; of all members, if None."""
        return [
            Held(rref, owned.type, fork, holder)
            for rref, owned in self.owned.items()
            for fork, holder in owned.forks.items()
            if worker is None or holder == worker
        ]

    def tables(self) -> dict[str, Table]:
        return {
            "owned": {str(rref): _owned_row(rref, owned) for rref, owned in self.owned.items()},
            "users": {str(fork): _user_row(fork, user) for fork, user in self.users.items()},
        }

    def check(self) -> None:
        """Raise if the tables contradict each other."""
        for child, parent in self.children.items():
            assert child in self.users[parent].children, f"child {child} unknown to its parent {parent}"
        for rref, owned in self.owned.items():
            assert owned.forks or not owned.created, f"{rref} is kept for nobody"

    # -- inside
    def _add_fork(self, rref: Id, fork: Id, holder: int, predecessors: bool = False) -> Effects:
        never = rref not in self.owned and (predecessors or self._is_past(rref))
        self.owned.setdefault(rref, Owned()).forks[fork] = holder
        self._tell_owned("ForkAdded", rref)
        return self.unmade(rref, _lost_value(rref)) if never else []

    def _is_past(self, rref: Id) -> bool:
        """Whether a value that is not here has been here, or will never be; else the call for it is on its way."""
        gone = (rref.worker, rref.incarnation) in self._gone
        return gone or rref.worker == self.me or rref in self._bereft or rref in self._freed

    def _drop_fork(self, rref: Id, fork: Id) -> Effects:
        owned = self.owned.get(rref)
        if owned is None or owned.forks.pop(fork, None) is None:
            return []
        if owned.forks or not owned.created:
            self._tell_owned("ForkDropped", rref)
            return []
        return self._let_go(rref)

    def _let_go(self, rref: Id) -> Effects:
        del self.owned[rref]
        if rref.worker != self.me:
            _bury(rref, self._freed)
        self._tell_owned("RRefFreed", rref)
        self._tell_empty()
        return [Free(rref)]

    def _child_known(self, child: Id) -> tuple[Effects, Outbox]:
        parent = self.children.pop(child, None)
        if parent is None:
            return [], []
        del self.users[parent].children[child]
        self._tell_user("ChildAccepted", parent)
        return [], self._retire(parent)

    def _retire(self, fork: Id) -> Outbox:
        user = self.users[fork]
        if not (user.released and user.confirmed and not user.children):
            return []
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
            self.note(kind, "owned", str(rref), partial(self._row_of_owned, rref))

    def _tell_user(self, kind: str, fork: Id) -> None:
        if self.note is not None:
            self.note(kind, "users", str(fork), partial(self._row_of_user, fork))

    def _row_of_owned(self, rref: Id) -> Row | None:
        owned = self.owned.get(rref)
        return _owned_row(rref, owned) if owned else None

    def _row_of_user(self, fork: Id) -> Row | None:
        user = self.users.get(fork)
        return _user_row(fork, user) if user else None


def _bury(rref: Id, graves: dict[Id, None]) -> None:
    graves[rref] = None
    if len(graves) > _TOMBSTONES:
        del graves[next(iter(graves))]


def _lost_value(rref: Id) -> WorkerLostError:
    return WorkerLostError(f"the value of RRef {rref} is gone with a worker that held it or was to have it made")


def _owned_row(rref: Id, owned: Owned) -> Row:
    forks = [{"fork": str(fork), "holder": holder} for fork, holder in owned.forks.items()]
    return {
        "rref": str(rref), "ready": owned.ready, "failed": owned.failed, "type": owned.type, "forks": forks,
        "made": owned.made, "size": owned.size,
        "cell": owned.origin.cell if owned.origin else "", "number": owned.origin.number if owned.origin else None,
    }  # fmt: skip


def _user_row(fork: Id, user: User) -> Row:
    state = "deleting" if user.released else "confirmed" if user.confirmed else "pending"
    children = [{"fork": str(child), "to": to} for child, to in user.children.items()]
    return {
        "rref": str(user.rref), "fork": str(fork), "owner": user.owner, "parent": user.parent, "state": state,
        "children": children, "type": user.type,
    }  # fmt: skip

"""What the end of a connection means: a pair that finds together again, or a peer that is gone.

- A connection that its peer ends on purpose, or that brings nonsense, was the last to that process.
- One that breaks says nothing of its peer: both sides dial again. Where nobody listens any more the process has
  ended; else the pair has `grace` seconds to find together, and senders wait so long.
- The machine hears of every break, after the last message has gone into that connection and before another one takes
  its place; then, that this one stands. Only where the process turns out to have ended, it hears just that.

`ConnectionTable` says which connections stand to which process, and what is owed where one has fallen. Each step of it
is atomic.
- Of the connections to a member one carries what is sent to it, and both sides agree which.
- Each connection is taken out of the table by one thread, which learns in the same step whether others stand. So
  there is always one that sees to what was lost with it.
- While a process is looked for, or what came from it is still being read, nobody else dials it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rpcbench.base.errors import NotConnectedError, ProtocolError, RefusedError
from rpcbench.transport.handshake import Identity
from rpcbench.transport.stream import Ending, StreamConnection


class ConnectionEntry(NamedTuple):
    """A connection, the peer at its other end, and the id of the member that dialled."""

    peer: Identity
    dialler: int
    connection: StreamConnection


@dataclass(slots=True)
class PeerEntry:
    """This process and one other."""

    peer: Identity
    ties: list[ConnectionEntry] = field(default_factory=list)
    unsaid: str | None = None  # why a connection broke of which the machine has not heard
    apart: bool = False  # the machine has heard of a break, and not that a connection stands again
    search: ConnectionEntry | None = None  # the last connection to fall; who took it out looks for the peer


class ConnectionTable:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # a plain one, as Ctrl-C can leave a Condition locked for ever
        self._changed = threading.Condition(self._lock)
        self._bonds: dict[int, list[PeerEntry]] = {}
        self._carriers: dict[int, StreamConnection] = {}
        self._dialled: set[int] = set()
        self._barred: dict[tuple[int, int], str] = {}  # id and incarnation → why it may not come back
        self._closed = False

    # -- sending
    def find(self, to: int) -> StreamConnection | None:
        """What carries messages to a member."""
        carrier = self._carriers.get(to)
        if carrier is not None and not carrier.ended:
            return carrier
        with self._lock:
            return self._best(to)

    def _best(self, to: int) -> StreamConnection | None:
        """Of its last incarnation, the one that the lower id dialled."""
        ties = [tie for bond in self._bonds.get(to, ()) for tie in bond.ties if not tie.connection.ended]
        ties.sort(key=lambda tie: (-tie.peer.incarnation, tie.dialler))
        return ties[0].connection if ties else None

    def find_or_dial(self, to: int) -> StreamConnection | None:
        """What carries messages to a member; None where the caller is to dial it, until it calls `dialled`."""
        with self._lock:
            self._changed.wait_for(lambda: self._best(to) is not None or not self._busy(to))
            if (best := self._best(to)) is None:
                self._dialled.add(to)
            return best

    def _busy(self, to: int) -> bool:
        """Whether somebody sees to it that a connection will stand, or that the member is known to be gone."""
        found = any(bond.ties or bond.search for bond in self._bonds.get(to, ()))
        return not self._closed and (found or to in self._dialled)

    def dialled(self, to: int) -> None:
        with self._lock:
            self._dialled.discard(to)
            self._changed.notify_all()

    # -- connections that come
    def make_way(self, peer: Identity) -> tuple[list[ConnectionEntry], list[PeerEntry]]:
        """A connection to this process is about to stand: take out what is over then.

        Those that have ended, or of which the peer says so; and earlier processes under its id that are looked for.
        """
        with self._lock:
            bond = self._bond(peer)
            over = [tie for tie in bond.ties if tie.connection.ended or tie.peer.serial < peer.base] if bond else []
            for tie in over:
                bond.ties.remove(tie)  # type: ignore[union-attr]
            former = [old for old in self._bonds.get(peer.id, ()) if old is not bond and not old.ties]
            for old in former:
                self._bonds[peer.id].remove(old)
            self._moved(peer.id)
            return over, former

    def add(self, tie: ConnectionEntry) -> bool:
        """False where it may not stand."""
        peer = tie.peer
        with self._lock:
            if self._closed or (peer.id, peer.incarnation) in self._barred:
                return False
            bond = self._bond(peer)
            if bond is None:
                bond = PeerEntry(peer)
                self._bonds.setdefault(peer.id, []).append(bond)
            bond.ties.append(tie)
            bond.search = None
            self._moved(peer.id)
            return True

    # -- connections that go
    def fell(self, tie: ConnectionEntry, reason: str | None) -> int | None:
        """Take out one that has ended: how many others stand; None where there is nothing to see to.

        `reason`: why it broke, None where it was ended on purpose. For the last one a search begins, which ends when
        another is added, or falls, or with `drop`.
        """
        with self._lock:
            bond = self._bond(tie.peer)
            if bond is None or tie not in bond.ties:
                return None
            bond.ties.remove(tie)
            bond.unsaid = reason or bond.unsaid
            bond.search = None if bond.ties else tie
            self._moved(tie.peer.id)
            return None if self._closed else len(bond.ties)

    def broke(self, tie: ConnectionEntry, reason: str) -> None:
        """One that `make_way` took out takes no more messages."""
        with self._lock:
            if bond := self._bond(tie.peer):
                bond.unsaid = bond.unsaid or reason

    def others_end(self, peer: Identity, seconds: float) -> bool:
        """Whether there are none to this process, or none any more in so many seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._stand(peer), seconds)

    def stand(self, peer: Identity) -> bool:
        """Whether there are some to this process."""
        with self._lock:
            return self._stand(peer)

    def _stand(self, peer: Identity) -> bool:
        bond = self._bond(peer)
        return not self._closed and bond is not None and bool(bond.ties)

    def searching(self, fallen: ConnectionEntry, pause: float) -> bool:
        """Whether to look on for a peer, after a pause; not where a connection stands, or a later one has fallen."""
        with self._lock:
            return not self._changed.wait_for(lambda: not self._sought(fallen), pause)

    def _sought(self, fallen: ConnectionEntry) -> bool:
        bond = self._bond(fallen.peer)
        return not self._closed and bond is not None and bond.search is fallen

    def lose(self, fallen: ConnectionEntry, reason: str) -> bool:
        """Bar a process that is gone. False where a connection stands after all, or a later one has fallen."""
        with self._lock:
            sought = self._sought(fallen)
            if sought:
                self._bar(fallen.peer.id, fallen.peer.incarnation, reason)
            return sought

    # -- what the machine is told
    def unsaid(self, peer: Identity) -> str | None:
        """Why connections broke of which the machine has not heard: the caller tells it, then calls `said`."""
        with self._lock:
            bond = self._bond(peer)
            if bond is None:
                return None
            reason, bond.unsaid = bond.unsaid, None
            return reason

    def said(self, peer: Identity) -> None:
        with self._lock:
            if bond := self._bond(peer):
                bond.apart = True

    def together(self, peer: Identity) -> bool:
        """Whether the machine is to hear that a connection stands again."""
        with self._lock:
            bond = self._bond(peer)
            if bond is None or not bond.ties or not bond.apart:
                return False
            bond.apart = False
            return True

    # -- ends
    def barred(self, peer: Identity) -> str | None:
        """Why a process may not come back."""
        return self._barred.get((peer.id, peer.incarnation))

    def _bar(self, member: int, incarnation: int, reason: str) -> None:
        self._barred.setdefault((member, incarnation), f"this world goes on without it: {reason}")

    def drop(self, member: int, incarnation: int, reason: str) -> list[ConnectionEntry]:
        """No more to or from a process; its connections, to be closed."""
        with self._lock:
            self._bar(member, incarnation, reason)
            bonds = [bond for bond in self._bonds.get(member, ()) if bond.peer.incarnation == incarnation]
            for bond in bonds:
                self._bonds[member].remove(bond)
            self._moved(member)
            return [tie for bond in bonds for tie in bond.ties]

    def close(self) -> list[ConnectionEntry]:
        """Take no more; those there are."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        return self.all()

    def await_none(self, seconds: float) -> None:
        """Until all have ended that were in the table, or so many seconds."""
        with self._lock:
            self._changed.wait_for(lambda: not any(self._all()), seconds)

    def forked(self) -> None:
        """In a forked child: the sockets belong to the parent, which would not see them close."""
        for tie in self._all():
            tie.connection.forked()

    # -- looking
    def all(self) -> list[ConnectionEntry]:
        with self._lock:
            return list(self._all())

    def _all(self) -> Iterator[ConnectionEntry]:
        return (tie for bonds in self._bonds.values() for bond in bonds for tie in bond.ties)

    def _bond(self, peer: Identity) -> PeerEntry | None:
        return next((bond for bond in self._bonds.get(peer.id, ()) if bond.peer.incarnation == peer.incarnation), None)

    def _moved(self, member: int) -> None:
        """Something has changed between this process and a member."""
        if best := self._best(member):
            self._carriers[member] = best
        else:
            self._carriers.pop(member, None)
        self._changed.notify_all()


_PAUSE = 0.05
_ATTEMPT_SECONDS = 2.0
_TOGETHER = 0.25
"""Seconds in which all connections to a process end that has ended itself."""
Dial = Callable[[int, Sequence[str], float], None]
"""(member, addresses, seconds): have a connection stand. NotConnectedError, caused by an OSError; ProtocolError."""


class OnEnd(Protocol):
    """Who hears what becomes of peers, on threads that may not wait for a write."""

    def ended(self, peer: Identity, reason: str) -> None:
        """A peer is gone for good."""

    def broken(self, peer: Identity, reason: str) -> None:
        """What was on its way to a peer may be lost; another connection is about to stand."""

    def resumed(self, peer: Identity) -> None:
        """It does."""

    def ways(self, peer: Identity) -> Sequence[str]:
        """Addresses by which to dial a peer again; none where it is no business of ours."""


class Reconnector:
    def __init__(self, ties: ConnectionTable, told: OnEnd, dial: Dial, grace: float) -> None:
        self._ties = ties
        self._told = told
        self._dial = dial
        self._grace = grace

    # -- a connection that comes
    def make_way(self, peer: Identity) -> None:
        """A connection to a peer is about to stand: what was before is over."""
        over, former = self._ties.make_way(peer)
        for bond in former:
            self._told.ended(bond.peer, f"{bond.unsaid or 'its connection broke'}, and it was started again")
        for tie in over:
            tie.connection.cut()
            self._ties.broke(tie, "it has lost its connection")
        self._say(peer)

    def stands(self, peer: Identity) -> None:
        """It does."""
        if self._ties.together(peer):
            self._told.resumed(peer)

    def _say(self, peer: Identity) -> None:
        reason = self._ties.unsaid(peer)
        if reason is not None:
            self._told.broken(peer, reason)
            self._ties.said(peer)  # not before: it must not hear first that they are together again

    def _together(self, peer: Identity) -> None:
        """If a connection stands, the machine is to hear of all breaks, and of that."""
        if self._ties.stand(peer):
            self._say(peer)
            self.stands(peer)

    # -- one that goes
    def over(self, tie: ConnectionEntry, ending: Ending) -> None:
        """A connection has ended. Returns when it is clear what that means."""
        others = self._ties.fell(tie, ending.reason if ending.broken else None)
        if others is None:
            return
        if not others:
            self._last(tie, ending)
        elif ending.broken and not self._ties.others_end(tie.peer, _TOGETHER):
            self._together(tie.peer)

    def _last(self, tie: ConnectionEntry, ending: Ending) -> None:
        ways = self._told.ways(tie.peer) if ending.broken else ()
        verdict = self._search(tie, ending.reason, ways) if ways else ending.reason
        if verdict is None or not self._ties.lose(tie, verdict):
            self._together(tie.peer)
            return
        self._told.ended(tie.peer, verdict)
        self._ties.drop(tie.peer.id, tie.peer.incarnation, verdict)

    def _search(self, fallen: ConnectionEntry, reason: str, ways: Sequence[str]) -> str | None:
        """Dial until there is a connection, dialled here or there; or why there will be none."""
        deadline, pause = time.monotonic() + self._grace, 0.0
        while self._ties.searching(fallen, pause):
            left, pause = deadline - time.monotonic(), _PAUSE
            if left <= 0:
                return f"{reason}, and it could not be reached again in {self._grace:g} s"
            try:
                self._dial(fallen.peer.id, ways, min(left, _ATTEMPT_SECONDS))
            except RefusedError as error:
                return str(error)
            except NotConnectedError as error:
                if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    return reason  # its process has ended
                if not isinstance(error.__cause__, ConnectionError):
                    self._say(fallen.peer)  # out of reach, and perhaps for a while
            except ProtocolError:
                pass  # it hung up, as a process does that is just ending: nobody will listen the next time
        return None

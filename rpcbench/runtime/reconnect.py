"""The meaning of a connection's end: the pair reconnects, or the peer is lost.

Guarantees
- A connection that its peer ends on purpose, or on which it sends invalid data, was the last one to that process.
- A connection that breaks proves nothing about the peer: both sides dial again. If no process listens any more, the
  peer has ended; else the pair has `grace` seconds to reconnect, and senders wait for that long.
- Every break is reported to the node after the last message has been written to that connection and before another one
  takes its place; then the new connection is. If the process turns out to have ended, only that is reported.

`ConnectionTable` holds the connections to each process, and the breaks that are not reported yet. Each step is atomic.
- Of the connections to a member one carries the messages to it, and both sides agree on which.
- Each connection is removed by one thread, which gets in the same step the number of others left. So one thread always
  handles the messages lost with it.
- While a process is searched for, or its last messages are still being read, no other thread dials it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcbench.base.errors import NotConnectedError, ProtocolError, RefusedError
from rpcbench.protocol.membership import Membership
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import Members
from rpcbench.transport.handshake import Identity, Objection
from rpcbench.transport.stream import ConnectionEnd, StreamConnection
from rpcbench.wire.encoding import decode_message
from rpcbench.wire.framing import Frame


class ConnectionEntry(NamedTuple):
    """A connection, the peer at its other end, and the id of the member that dialled."""

    peer: Identity
    dialler: int
    connection: StreamConnection


@dataclass(slots=True)
class PeerEntry:
    """The state of this process and one peer process."""

    peer: Identity
    entries: list[ConnectionEntry] = field(default_factory=list)
    unreported: str | None = None  # reason of a break that the node has no report of yet
    break_reported: bool = False  # a break is reported to the node, a new connection is not
    search: ConnectionEntry | None = None  # the last broken one; the thread that removed it searches


class ConnectionTable:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # a plain one, as Ctrl-C can leave a Condition locked for ever
        self._changed = threading.Condition(self._lock)
        self._peer_entries: dict[int, list[PeerEntry]] = {}  # a list, as incarnations of one member may overlap
        self._carriers: dict[int, StreamConnection] = {}  # cache of `_best_connection`, read without the lock
        self._dialled: set[int] = set()  # members that a thread dials now
        self._barred: dict[tuple[int, int], str] = {}  # (id, incarnation) → reason not to admit it again
        self._closed = False

    # -- sending
    def find_connection(self, to: int) -> StreamConnection | None:
        carrier = self._carriers.get(to)
        if carrier is not None and not carrier.ended:
            return carrier
        with self._lock:
            return self._best_connection(to)

    def _best_connection(self, to: int) -> StreamConnection | None:
        """Return the one that the lower id dialled, of the member's last incarnation."""
        found = [e for known in self._peer_entries.get(to, ()) for e in known.entries if not e.connection.ended]
        best = min(found, key=lambda entry: (-entry.peer.incarnation, entry.dialler), default=None)
        return None if best is None else best.connection

    def find_or_dial(self, to: int) -> StreamConnection | None:
        """Do as `find_connection`, but wait for dials under way. None: the caller must dial, then call
        `dial_finished`."""
        with self._lock:
            self._changed.wait_for(lambda: self._best_connection(to) is not None or not self._is_connecting(to))
            if (best := self._best_connection(to)) is None:
                self._dialled.add(to)
            return best

    def _is_connecting(self, to: int) -> bool:
        """Return whether a thread is about to connect to the member, or to find out that it is lost."""
        found = any(peer_entry.entries or peer_entry.search for peer_entry in self._peer_entries.get(to, ()))
        return not self._closed and (found or to in self._dialled)

    def dial_finished(self, to: int) -> None:
        with self._lock:
            self._dialled.discard(to)
            self._changed.notify_all()

    # -- new connections
    def remove_replaced(self, peer: Identity) -> tuple[list[ConnectionEntry], list[PeerEntry]]:
        """Remove and return the entries that a new connection to this process replaces: connections that have ended,
        here or according to the peer, and earlier incarnations under search."""
        with self._lock:
            over: list[ConnectionEntry] = []
            if (peer_entry := self._peer_entry(peer)) is not None:
                # `base`: the peer has lost all of its connections to us with smaller handshake numbers.
                over = [e for e in peer_entry.entries if e.connection.ended or e.peer.serial < peer.base]
                peer_entry.entries = [entry for entry in peer_entry.entries if entry not in over]
            former = [old for old in self._peer_entries.get(peer.id, ()) if old is not peer_entry and not old.entries]
            for old in former:
                self._peer_entries[peer.id].remove(old)
            self._update_carrier(peer.id)
            return over, former

    def add_connection(self, entry: ConnectionEntry) -> bool:
        """Add a connection; return False if it is not admitted."""
        peer = entry.peer
        with self._lock:
            if self._closed or (peer.id, peer.incarnation) in self._barred:
                return False
            peer_entry = self._peer_entry(peer)
            if peer_entry is None:
                peer_entry = PeerEntry(peer)
                self._peer_entries.setdefault(peer.id, []).append(peer_entry)
            peer_entry.entries.append(entry)
            peer_entry.search = None  # found: the searching thread stops
            self._update_carrier(peer.id)
            return True

    # -- ended connections
    def remove_ended(self, entry: ConnectionEntry, reason: str | None) -> int | None:
        """Remove an ended connection; return how many others are left, None if there is nothing to handle. `reason`: of
        a break, else None. For the last one a search begins; it ends when another is added or breaks, or with
        `bar_process`.
        """
        with self._lock:
            peer_entry = self._peer_entry(entry.peer)
            if peer_entry is None or entry not in peer_entry.entries:
                return None
            peer_entry.entries.remove(entry)
            peer_entry.unreported = reason or peer_entry.unreported
            peer_entry.search = None if peer_entry.entries else entry
            self._update_carrier(entry.peer.id)
            return None if self._closed else len(peer_entry.entries)  # at the end of the agent all fall

    def connection_broke(self, entry: ConnectionEntry, reason: str) -> None:
        """Note the break of a connection that `remove_replaced` removed, and that takes no more messages."""
        with self._lock:
            if peer_entry := self._peer_entry(entry.peer):
                peer_entry.unreported = peer_entry.unreported or reason

    def wait_for_others(self, peer: Identity, seconds: float) -> bool:
        """Wait at most `seconds` until no connection to this process is left; return whether that is so."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._is_connected(peer), seconds)

    def _is_connected(self, peer: Identity) -> bool:
        peer_entry = self._peer_entry(peer)
        return not self._closed and peer_entry is not None and bool(peer_entry.entries)

    def pause_search(self, fallen: ConnectionEntry, pause: float) -> bool:
        """Pause; return whether to continue a search: not if a connection is open, or a later one has broken."""
        with self._lock:
            return not self._changed.wait_for(lambda: not self._is_searched(fallen), pause)

    def _is_searched(self, fallen: ConnectionEntry) -> bool:
        peer_entry = self._peer_entry(fallen.peer)
        return not self._closed and peer_entry is not None and peer_entry.search is fallen

    def bar_lost_process(self, fallen: ConnectionEntry, reason: str) -> bool:
        """Bar a lost process. Return False if a connection is open after all, or a later one has broken."""
        with self._lock:
            sought = self._is_searched(fallen)
            if sought:
                self._bar_process(fallen.peer.id, fallen.peer.incarnation, reason)
            return sought

    # -- reports to the node
    def take_unreported(self, peer: Identity) -> str | None:
        """Take the reason of unreported breaks: the caller reports it to the node, then calls `mark_reported`."""
        with self._lock:
            peer_entry = self._peer_entry(peer)
            if peer_entry is None:
                return None
            reason, peer_entry.unreported = peer_entry.unreported, None
            return reason

    def mark_reported(self, peer: Identity) -> None:
        with self._lock:
            if peer_entry := self._peer_entry(peer):
                peer_entry.break_reported = True

    def take_resumed(self, peer: Identity) -> bool:
        """Return, once, whether the node must get the report of a new connection."""
        with self._lock:
            peer_entry = self._peer_entry(peer)
            if peer_entry is None or not peer_entry.entries or not peer_entry.break_reported:
                return False
            peer_entry.break_reported = False
            return True

    # -- ends
    def bar_reason(self, peer: Identity) -> str | None:
        """Return the reason why a process is not admitted again."""
        return self._barred.get((peer.id, peer.incarnation))

    def _bar_process(self, member: int, incarnation: int, reason: str) -> None:
        self._barred.setdefault((member, incarnation), f"this world continues without it: {reason}")

    def bar_process(self, member: int, incarnation: int, reason: str) -> list[ConnectionEntry]:
        """Bar a process, and return its connections, which the caller closes."""
        with self._lock:
            self._bar_process(member, incarnation, reason)
            known = self._peer_entries.get(member, [])
            dropped = [each for each in known if each.peer.incarnation == incarnation]
            for peer_entry in dropped:
                known.remove(peer_entry)
            self._update_carrier(member)
            return [entry for peer_entry in dropped for entry in peer_entry.entries]

    def close(self) -> list[ConnectionEntry]:
        """Admit no more connections; return all that are left."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        return self.all_entries()

    def wait_until_empty(self, seconds: float) -> None:
        """Wait at most `seconds` until the table is empty."""
        with self._lock:
            self._changed.wait_for(lambda: not any(self._iterate_entries()), seconds)

    def after_fork(self) -> None:
        """Drop the sockets in a forked child: they are the parent's, which would not see them close."""
        for entry in self._iterate_entries():
            entry.connection.after_fork()

    # -- queries
    def all_entries(self) -> list[ConnectionEntry]:
        with self._lock:
            return list(self._iterate_entries())

    def _iterate_entries(self) -> Iterator[ConnectionEntry]:
        for peer_entry in itertools.chain.from_iterable(self._peer_entries.values()):
            yield from peer_entry.entries

    def _peer_entry(self, peer: Identity) -> PeerEntry | None:
        known = self._peer_entries.get(peer.id, ())
        return next((each for each in known if each.peer.incarnation == peer.incarnation), None)

    def _update_carrier(self, member: int) -> None:
        """Update the carrier to a member, and wake waiting threads: its connections have changed."""
        if best := self._best_connection(member):
            self._carriers[member] = best
        else:
            self._carriers.pop(member, None)
        self._changed.notify_all()


_PAUSE = 0.05  # seconds between two dials
_ATTEMPT_SECONDS = 2.0  # at most, for one dial
_TOGETHER = 0.25
"""Seconds within which all connections to an ended process have ended."""


Dial = Callable[[int, Sequence[str], float], None]
"""(member, addresses, seconds): open a connection. NotConnectedError, caused by an OSError; ProtocolError."""


class PeerEvents:
    """Feeds the node with messages, through the interceptors, and with lost and restored connections."""

    def __init__(self, machine: LockedNode, member_table: Members, links: Interceptors, host: str) -> None:
        self._machine = machine
        self._member_table = member_table
        self._links = links
        self._host = host

    def frame_received(self, peer: Identity, frame: Frame) -> None:
        seq, message = decode_message(*frame)
        self._links.incoming(peer.id, seq, message)

    def peer_lost(self, peer: Identity, reason: str) -> None:
        explanation = self._member_table.explain(peer.name, reason)  # may add the exit status of the process
        self._machine.feed_event(lambda node: node.member_lost(peer.id, peer.incarnation, explanation))

    def admission_objection(self, newcomer: Identity) -> Objection | None:
        """Return None if this member leads a world that continues, and has no member with that id."""
        return self._machine.read_node(lambda node: _objection_to_newcomer(node.members, newcomer))

    def incarnation_for(self, newcomer: Identity) -> int:
        return self._machine.read_node(lambda node: node.members.next_incarnation(newcomer.id))

    def connection_broken(self, peer: Identity, reason: str) -> None:
        self._machine.feed_event(lambda node: node.connection_broken(peer.id, peer.incarnation, reason))

    def connection_resumed(self, peer: Identity) -> None:
        self._machine.feed_event(lambda node: node.connection_resumed(peer.id, peer.incarnation))

    def peer_addresses(self, peer: Identity) -> Sequence[str]:
        """Return the peer's addresses; none for a process that is no member, or if the world is about to end."""
        members = self._machine.read_node(lambda node: {} if node.members.closing else dict(node.members.members))
        member = members.get(peer.id)
        return (
            member.addresses_from(self._host) if member is not None and member.incarnation == peer.incarnation else ()
        )


def _objection_to_newcomer(members: Membership, newcomer: Identity) -> Objection | None:
    if not members.is_leader:
        return Objection(f"{members.me.name} does not lead this world", members.may_outlive_leaders)
    if members.closing:
        return Objection("this world is about to end", members.may_outlive_leaders)
    taken = members.id_refusal(newcomer.id)
    return Objection(taken) if taken else None


class Reconnector:
    """Handles the ends of connections. `events` gets their meaning, `dial` opens one, `grace` is in seconds."""

    def __init__(self, table: ConnectionTable, events: PeerEvents, dial: Dial, grace: float) -> None:
        self._table = table
        self._events = events
        self._dial = dial
        self._grace = grace

    # -- a new connection
    def prepare_replacement(self, peer: Identity) -> None:
        """Prepare for a new connection to a peer: older ones have ended."""
        over, former = self._table.remove_replaced(peer)
        for peer_entry in former:
            self._events.peer_lost(
                peer_entry.peer, f"{peer_entry.unreported or 'its connection broke'}, and it was started again"
            )
        for entry in over:
            entry.connection.break_connection()
            self._table.connection_broke(entry, "it has lost its connection")
        self._report_break(peer)

    def connection_established(self, peer: Identity) -> None:
        """Report a new connection, if the node has a report of a break."""
        if self._table.take_resumed(peer):
            self._events.connection_resumed(peer)

    def _report_break(self, peer: Identity) -> None:
        reason = self._table.take_unreported(peer)
        if reason is not None:
            self._events.connection_broken(peer, reason)
            self._table.mark_reported(peer)  # after it: `connection_resumed` must not be reported first

    def _report_resumed(self, peer: Identity) -> None:
        """If a connection is open, report all breaks, then this connection."""
        if not self._table.wait_for_others(peer, 0.0):
            self._report_break(peer)
            self.connection_established(peer)

    # -- an ended connection
    def connection_ended(self, entry: ConnectionEntry, ending: ConnectionEnd) -> None:
        """Handle the end of a connection; return when its meaning is clear."""
        others = self._table.remove_ended(entry, ending.reason if ending.broken else None)
        if others is None:
            return
        if not others:
            self._last_connection_ended(entry, ending)
        # Others are left: if the process has ended, they end in a moment, and the last one gives the verdict.
        elif ending.broken and not self._table.wait_for_others(entry.peer, _TOGETHER):
            self._report_resumed(entry.peer)

    def _last_connection_ended(self, entry: ConnectionEntry, ending: ConnectionEnd) -> None:
        addresses = self._events.peer_addresses(entry.peer) if ending.broken else ()
        verdict = self._search_peer(entry, ending.reason, addresses) if addresses else ending.reason
        if verdict is None or not self._table.bar_lost_process(entry, verdict):
            self._report_resumed(entry.peer)
            return
        self._events.peer_lost(entry.peer, verdict)
        self._table.bar_process(entry.peer.id, entry.peer.incarnation, verdict)

    def _search_peer(self, fallen: ConnectionEntry, reason: str, addresses: Sequence[str]) -> str | None:
        """Dial until there is a connection, from either side; return None, or the reason why there is none."""
        deadline, pause = time.monotonic() + self._grace, 0.0
        while self._table.pause_search(fallen, pause):
            left, pause = deadline - time.monotonic(), _PAUSE
            if left <= 0:
                return f"{reason}, and it could not be reached again in {self._grace:g} s"
            try:
                self._dial(fallen.peer.id, addresses, min(left, _ATTEMPT_SECONDS))
            except RefusedError as error:
                return str(error)
            except NotConnectedError as error:
                if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    return reason  # no process listens: it has ended
                if not isinstance(error.__cause__, ConnectionError):
                    self._report_break(fallen.peer)  # unreachable, perhaps for long: report it now
            except ProtocolError:
                pass  # it closed the connection, as an ending process does: the next dial shows whether it listens
        return None

"""The connections of one agent: dial on first use, admit authenticated peers, receive, close.

Guarantees
- Two members that dial each other at once get two connections; both are read, and both sides send on the one that the
  lower id dialled. A member that dials because its connection broke says so, as the peer may not have noticed.
- A message is written to an open connection, or its sender gets an error; `reconnect` handles connections that break.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rpcbench.base.conditions import Event
from rpcbench.base.config import HANDSHAKE_SECONDS, LOCAL_HANDSHAKE_SECONDS, WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError
from rpcbench.runtime.acceptor import Acceptor, Handshakes
from rpcbench.runtime.pool import Pool
from rpcbench.runtime.receiver import Receiver
from rpcbench.runtime.reconnect import ConnectionEntry, ConnectionTable, PeerEvents, Reconnector
from rpcbench.transport import handshake
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import NO_WORLD, Identity, Objection
from rpcbench.transport.hosts import host_id
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.transport.stream import ConnectionEnd, StreamConnection, TrafficCounts
from rpcbench.wire.framing import Limits
from rpcbench.wire.messages import Body

_LATE = TimeoutError, ConnectionResetError, BrokenPipeError
"""Errors of a dial where this side was too late, or where the peer was and closed the connection."""


class ConnectionManager:
    """All connections of one agent, its listeners and its threads that accept. `due`: whether replies are to come."""

    def __init__(self, config: WorldConfig, pool: Pool, events: PeerEvents, due: Callable[[], bool]) -> None:
        me = Identity(config.cluster, config.id, config.name, config.incarnation, host_id())
        self._config = config
        self._handshakes = Handshakes(me)
        self._opener = Opener(config.secret)
        self._table = ConnectionTable()
        # id → the connection to send on
        self.find: Callable[[int], StreamConnection | None] = self._table.find_connection
        self._reconnector = Reconnector(self._table, events, self._dial_member, config.grace_seconds)
        offer = events.incarnation_for
        self.acceptor = Acceptor(
            config, self._opener, self._handshakes.handshake_identity, self._objection_to_peer, offer, self._admit_peer
        )
        self._pool = pool
        self._events = events
        self._due = due
        self._limits = Limits()  # of frames, shared by all connections
        self._lock = threading.Lock()  # guards the threads
        self._stopped = Event()
        self._threads: list[threading.Thread] = []  # of listeners

    @property
    def own_identity(self) -> Identity:
        return self._handshakes.me

    # -- open connections
    def remote_connections(self) -> dict[int, list[StreamConnection]]:
        """Return the connections to members on other hosts, by id."""
        found: dict[int, list[StreamConnection]] = {}
        for entry in self._table.all_entries():
            if entry.peer.host != self.own_identity.host:
                found.setdefault(entry.peer.id, []).append(entry.connection)
        return found

    def traffic_by_member(self) -> dict[int, TrafficCounts]:
        """Return the bytes of each member's open connections."""
        found: dict[int, TrafficCounts] = {}
        for entry in self._table.all_entries():
            now, before = entry.connection.traffic_counts(), found.get(entry.peer.id, TrafficCounts())
            found[entry.peer.id] = TrafficCounts(*map(sum, zip(now, before, strict=True)))
        return found

    def flush_connections(self) -> None:
        """Write the messages that connections hold back."""
        for entry in self._table.all_entries():
            entry.connection.flush()

    def free_idle_memory(self) -> None:
        """Free memory that no connection has needed for some time."""
        for entry in self._table.all_entries():
            entry.connection.free_idle_memory()

    def send_message(self, to: int, addresses: Sequence[str], control: bytes, body: Body) -> None:
        """Write a message to the connection to a member, opened if there is none. Blocks. Within one host a timeout
        proves nothing, as the process may be stopped or busy: it is dialled until it answers or ends."""
        while True:
            try:
                connection = self.connect_to_member(to, addresses)
            except NotConnectedError as error:
                silent = isinstance(error.__cause__, _LATE)
                if silent and not any(each.startswith("tls:") for each in addresses):
                    continue
                raise
            with contextlib.suppress(NotConnectedError):  # it ended meanwhile; the next one may work
                connection.send(control, body, True)
                return

    def connect_to_member(self, to: int, addresses: Sequence[str]) -> StreamConnection:
        """Return the connection to a member; dial if there is none. NotConnectedError if none answers. Blocks."""
        # A dialler that gives up just after the peer's last word leaves the peer with a connection that has ended, and
        # the peer's calls on it are lost. Within one host only a busy machine is late, so there it has more patience.
        local = all(each.startswith("unix:") for each in addresses)
        seconds = LOCAL_HANDSHAKE_SECONDS if local else HANDSHAKE_SECONDS
        while (connection := self._table.find_or_dial(to)) is None:
            with contextlib.ExitStack() as after:
                after.callback(self._table.dial_finished, to)
                self._dial_member(to, addresses, seconds)
        return connection

    def reach_leader(self) -> Identity:
        """Connect to the leader. NotConnectedError if it does not listen (yet), ProtocolError if it is another one."""
        leader = self._config.led_by
        self.connect_to_member(leader, self._meeting_addresses())
        for entry in self._table.all_entries():
            if entry.peer.id == leader:
                return entry.peer
        raise NotConnectedError("it closed the connection")

    def _meeting_addresses(self) -> list[str]:
        meeting = Rendezvous(Path(self._config.directory))
        addresses = [self._config.leader] if self._config.leader else []
        try:
            return [meeting.find_leader(), *addresses]
        except FileNotFoundError as error:
            if addresses:
                return addresses
            raise NotConnectedError(f"nobody answers at {meeting.path}: {error.strerror}") from error

    # -- new connections
    def found_world(self) -> None:
        self._handshakes.me = replace(self.own_identity, epoch=1 + secrets.randbits(60))

    def _objection_to_peer(self, peer: Identity) -> Objection | None:
        if (reason := self._table.bar_reason(peer)) is not None:
            return Objection(reason)
        return self._events.admission_objection(peer) if peer.epoch == NO_WORLD else None

    def _dial_member(self, to: int, addresses: Sequence[str], seconds: float) -> None:
        """Open a connection. NotConnectedError, caused by the last address's OSError, if no address answers."""
        if self._stopped.is_set():
            raise NotConnectedError("this agent has stopped")
        with self._handshakes.handshake_identity(lambda: self.find(to) is None) as me:
            stream, peer = self._first_answer(addresses, me, seconds)
            if peer.id != to:
                stream.close_descriptor()
                raise ProtocolError(f"{peer.name} answers at the address of worker {to}")
            self._handshakes.adopt_epoch(peer)
            self._add_connection(stream, peer, me.id)

    def _first_answer(self, addresses: Sequence[str], me: Identity, seconds: float) -> tuple[Stream, Identity]:
        failed: OSError | None = None
        reason = "it has no address for this host"
        for address in addresses:
            try:
                return self._opener.dial_peer(address, me, seconds)
            except OSError as error:
                failed, reason = error, f"nobody answers at {address}: {error.strerror or error}"
        raise NotConnectedError(reason) from failed

    def start_accepting(self) -> None:
        self.acceptor.start_accepting(self._start_thread, self._pool.spawn_job)

    def _admit_peer(self, stream: Stream, peer: Identity) -> None:
        with contextlib.suppress(NotConnectedError):  # the agent has stopped, or has dropped the peer
            self._add_connection(stream, peer, peer.id)

    def _add_connection(self, stream: Stream, peer: Identity, dialler: int) -> None:
        entry = ConnectionEntry(peer, dialler, StreamConnection(stream, self._limits, self._pool.spawn_job))
        self._reconnector.prepare_replacement(peer)  # first: the node gets reports of breaks before new messages
        if not self._table.add_connection(entry):
            stream.close_descriptor()
            raise NotConnectedError(self._table.bar_reason(peer) or "this agent has stopped")
        arrived, over = partial(self._events.frame_received, peer), partial(self._connection_ended, entry)
        receiver = Receiver(self._pool, entry.connection, arrived, over, self._due)
        receiver.start()
        if entry.connection.watch is not None:  # else no thread may borrow its read lock
            entry.connection.receive_until = receiver.receive_until
        self._reconnector.connection_established(peer)
        if not self._config.launched:  # else the cluster of member 0 reports on all workers in one line
            handshake.warn_of_versions(self.own_identity.versions, peer.versions, peer.name)

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"rpcbench-{self.own_identity.name}-{name}", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    def _connection_ended(self, entry: ConnectionEntry, ending: ConnectionEnd) -> None:
        """Handle the end of a connection, or of its use: its next messages cannot be handled."""
        try:
            if ending.broken:
                entry.connection.break_connection()
            self._reconnector.connection_ended(entry, ending)  # before the peer can see the end, and dial again
        finally:
            entry.connection.break_connection()
            entry.connection.close_descriptor()

    # -- ends
    def drop_member(self, member: int, incarnation: int, reason: str) -> None:
        """Close the connections to a member that has left, and refuse new ones."""
        for entry in self._table.bar_process(member, incarnation, reason):
            self._pool.spawn_job(entry.connection.close)

    def give_up_member(self, member: int, reason: str) -> None:
        """Drop a member as lost, in whichever state its connections are."""
        peers = {entry.peer.incarnation: entry.peer for entry in self._table.all_entries() if entry.peer.id == member}
        for peer in peers.values():
            for entry in self._table.bar_process(member, peer.incarnation, reason):
                self._pool.spawn_job(lambda entry=entry: entry.connection.close(0.0))  # type: ignore[misc]
            self._events.peer_lost(peer, reason)

    def close(self) -> None:
        """Write queued messages, end all connections, stop listening. Idempotent."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            threads = list(self._threads)
        entries = self._table.close()
        self.acceptor.close()
        for entry in entries:
            entry.connection.close()
        self._table.wait_until_empty(5)  # seconds, as below: a peer that does not read must not keep this process alive
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(5)

    def after_fork(self) -> None:
        """Drop the sockets in a forked child: they are the parent's, which would not see them close."""
        self._table.after_fork()
        self.acceptor.after_fork()

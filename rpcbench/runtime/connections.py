"""Connections of one agent: dialling on first use, letting authenticated peers in, reading, closing.

- Two members that dial each other at once get two connections; both are read, and the one dialled by the lower id
  carries what is sent, so both sides agree. Who dials because his connection broke says so: the other may not have
  noticed.
- A message is put on a connection that stands, or its sender is told; `reconnect` sees to connections that break.

`PeerEvents` tells the protocol what connections say of their peers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rpcbench.base.conditions import Flag
from rpcbench.base.config import HANDSHAKE_SECONDS, WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError
from rpcbench.protocol.membership import Membership, Verdict
from rpcbench.runtime.acceptor import Acceptor, Handshakes
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import Members
from rpcbench.runtime.pool import Pool
from rpcbench.runtime.receiver import receive
from rpcbench.runtime.reconnect import ConnectionEntry, ConnectionTable, OnEnd, Reconnector
from rpcbench.transport import handshake
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Connection, Stream
from rpcbench.transport.handshake import NEWCOMER, Identity, Objection
from rpcbench.transport.hosts import host_id
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.transport.stream import Ending, StreamConnection
from rpcbench.wire.encoding import unpack
from rpcbench.wire.framing import Frame, Limits
from rpcbench.wire.messages import Body


class PeerEvents:
    """`give_up` ends all connections to a member that is lost; messages come in through `links`."""

    def __init__(self, machine: LockedNode, roster: Members, links: Interceptors, host: str) -> None:
        self.give_up: Callable[[int, str], None] = lambda member, reason: None
        self._machine = machine
        self._roster = roster
        self._links = links
        self._host = host

    def arrived(self, peer: Identity, frame: Frame) -> None:
        seq, message = unpack(*frame)
        self._links.incoming(peer.id, seq, message)

    def ended(self, peer: Identity, reason: str) -> None:
        told = self._roster.explain(peer.name, reason)
        self._machine.feed(lambda node: node.lost(peer.id, peer.incarnation, told))

    def objection(self, newcomer: Identity) -> Objection | None:
        """None where this member leads a world that goes on, and has nobody under that id."""
        return self._machine.ask(lambda node: _objection(node.members, newcomer))

    def incarnation_for(self, newcomer: Identity) -> int:
        return self._machine.ask(lambda node: node.members.life_for(newcomer.id))

    def broken(self, peer: Identity, reason: str) -> None:
        self._machine.feed(lambda node: node.broken(peer.id, peer.incarnation, reason))

    def resumed(self, peer: Identity) -> None:
        self._machine.feed(lambda node: node.resume(peer.id, peer.incarnation))

    def ways(self, peer: Identity) -> Sequence[str]:
        """None for a process that is no member (any more), or once the world is about to end."""
        members = self._machine.ask(lambda node: {} if node.members.closing else dict(node.members.members))
        member = members.get(peer.id)
        return member.ways(self._host) if member is not None and member.incarnation == peer.incarnation else ()

    def judged(self, verdict: Verdict) -> None:
        """The heartbeat has changed its mind about a member."""
        if verdict.kind == "lost":
            self.give_up(verdict.peer, verdict.reason)
        else:
            self._roster.doubted(verdict.kind, verdict.peer, verdict.reason)


def _objection(members: Membership, newcomer: Identity) -> Objection | None:
    if not members.leads:
        return Objection(f"{members.me.name} does not lead this world", members.outlives_leaders)
    if members.closing:
        return Objection("this world is about to end", members.outlives_leaders)
    taken = members.taken(newcomer.id)
    return Objection(taken) if taken else None


class Listens(OnEnd, Protocol):
    """Who is told of what comes in, too."""

    def arrived(self, peer: Identity, frame: Frame) -> None:
        """A message has come."""

    def objection(self, newcomer: Identity) -> Objection | None:
        """Why a process of no world does not get in here."""

    def incarnation_for(self, newcomer: Identity) -> int:
        """Which one it is to be."""


class ConnectionManager:
    def __init__(self, config: WorldConfig, pool: Pool, told: Listens) -> None:
        me = Identity(config.cluster, config.id, config.name, config.incarnation, host_id())
        self._config = config
        self._handshakes = Handshakes(me)
        self._opener = Opener(config.secret)
        self._ties = ConnectionTable()
        self.find: Callable[[int], StreamConnection | None] = self._ties.find  # what carries messages to a member
        self._reunion = Reconnector(self._ties, told, self._dial, config.grace_seconds)
        offer = told.incarnation_for
        self.entrance = Acceptor(config, self._opener, self._handshakes.one, self._objection, offer, self._admit)
        self._pool = pool
        self._told = told
        self._limits = Limits()
        self._lock = threading.Lock()
        self._stopped = Flag()
        self._threads: list[threading.Thread] = []

    @property
    def me(self) -> Identity:
        return self._handshakes.me

    # -- using
    def far(self) -> dict[int, list[StreamConnection]]:
        """Connections to members on other hosts."""
        found: dict[int, list[StreamConnection]] = {}
        for tie in self._ties.all():
            if tie.peer.host != self.me.host:
                found.setdefault(tie.peer.id, []).append(tie.connection)
        return found

    def traffic(self) -> dict[int, tuple[int, int]]:
        """By member: bytes that went to it and that came from it, through the connections that stand."""
        found: dict[int, tuple[int, int]] = {}
        for tie in self._ties.all():
            (out, come), (before, earlier) = tie.connection.traffic(), found.get(tie.peer.id, (0, 0))
            found[tie.peer.id] = out + before, come + earlier
        return found

    def flush(self) -> None:
        """Write what connections hold."""
        for tie in self._ties.all():
            tie.connection.flush()

    def tidy(self) -> None:
        """Give back memory that has not been needed for some time."""
        for tie in self._ties.all():
            tie.connection.tidy()

    def send(self, to: int, addresses: Iterable[str], control: bytes, body: Body) -> None:
        """Put a message on the connection to a member, as `connect` gives it. Blocks.

        On one host silence says nothing: a process that is stopped, or busy, is asked until it answers, or ends.
        """
        while True:
            try:
                connection = self.connect(to, addresses)
            except NotConnectedError as error:
                silent = isinstance(error.__cause__, TimeoutError | ConnectionResetError)  # here, or there
                if silent and not any(each.startswith("tls:") for each in addresses):
                    continue
                raise
            with contextlib.suppress(NotConnectedError):  # it has ended meanwhile, which says nothing of the next
                connection.send(control, body, True)
                return

    def connect(self, to: int, addresses: Iterable[str]) -> Connection:
        """The connection to a member, dialled if there is none. NotConnectedError where nobody answers. Blocks."""
        while (connection := self._ties.find_or_dial(to)) is None:
            with contextlib.ExitStack() as after:
                after.callback(self._ties.dialled, to)
                self._dial(to, addresses, HANDSHAKE_SECONDS)
        return connection

    def reach_leader(self) -> Identity:
        """Connect to who leads. NotConnectedError where it is not there (yet), ProtocolError where it is another."""
        leader = self._config.led_by
        self.connect(leader, self._meeting_ways())
        for tie in self._ties.all():
            if tie.peer.id == leader:
                return tie.peer
        raise NotConnectedError("it hung up")

    def _meeting_ways(self) -> list[str]:
        meeting = Rendezvous(Path(self._config.directory))
        ways = [self._config.leader] if self._config.leader else []
        try:
            return [meeting.find(), *ways]
        except FileNotFoundError as error:
            if ways:
                return ways
            raise NotConnectedError(f"nobody answers at {meeting.path}: {error.strerror}") from error

    # -- making
    def found(self) -> None:
        """This member founds a new world, that is no other."""
        self._handshakes.me = replace(self.me, epoch=1 + secrets.randbits(60))

    def _objection(self, peer: Identity) -> Objection | None:
        if (reason := self._ties.barred(peer)) is not None:
            return Objection(reason)
        return self._told.objection(peer) if peer.epoch == NEWCOMER else None

    def _dial(self, to: int, addresses: Iterable[str], seconds: float) -> None:
        """NotConnectedError, caused by the OSError of the last address, where nobody answers at any."""
        if self._stopped.is_set():
            raise NotConnectedError("this agent has stopped")
        with self._handshakes.one(lambda: self.find(to) is None) as me:
            stream, peer = self._first_answer(addresses, me, seconds)
            if peer.id != to:
                stream.release()
                raise ProtocolError(f"{peer.name} answers at the address of worker {to}")
            self._handshakes.met(peer)
            self._add(stream, peer, me.id)

    def _first_answer(self, addresses: Iterable[str], me: Identity, seconds: float) -> tuple[Stream, Identity]:
        failed: OSError | None = None
        told = "it has no address for this host"
        for address in addresses:
            try:
                return self._opener.dial(address, me, seconds)
            except OSError as error:
                failed, told = error, f"nobody answers at {address}: {error.strerror or error}"
        raise NotConnectedError(told) from failed

    def listen(self) -> None:
        """Let peers in from now on."""
        self.entrance.open(self._start, self._pool.spawn)

    def _admit(self, stream: Stream, peer: Identity) -> None:
        with contextlib.suppress(NotConnectedError):  # this agent has stopped meanwhile, or gone on without the peer
            self._add(stream, peer, peer.id)

    def _add(self, stream: Stream, peer: Identity, dialler: int) -> None:
        tie = ConnectionEntry(peer, dialler, StreamConnection(stream, self._limits, self._pool.spawn))
        self._reunion.make_way(peer)
        if not self._ties.add(tie):
            stream.release()
            raise NotConnectedError(self._ties.barred(peer) or "this agent has stopped")
        arrived, over = partial(self._told.arrived, peer), partial(self._over, tie)
        receiver = receive(self._pool, tie.connection, arrived, over)
        if tie.connection.watch is not None:
            tie.connection.receiver = receiver
        self._reunion.stands(peer)
        handshake.warn_of_versions(self.me.versions, peer.versions, peer.name)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"rpcbench-{self.me.name}-{name}", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    def _over(self, tie: ConnectionEntry, ending: Ending) -> None:
        """A connection has ended, or nothing that it brings can be handled any more."""
        try:
            if ending.broken:
                tie.connection.cut()
            self._reunion.over(tie, ending)  # before a peer that is parted from can see it, and dial again
        finally:
            tie.connection.cut()
            tie.connection.release()

    # -- ends
    def drop(self, member: int, incarnation: int, reason: str) -> None:
        """A member is gone: no more to or from it."""
        for tie in self._ties.drop(member, incarnation, reason):
            self._pool.spawn(tie.connection.close)

    def give_up(self, member: int, reason: str) -> None:
        """A member is not there any more, whatever its connections look like."""
        for peer in {tie.peer.incarnation: tie.peer for tie in self._ties.all() if tie.peer.id == member}.values():
            for tie in self._ties.drop(member, peer.incarnation, reason):
                self._pool.spawn(lambda tie=tie: tie.connection.close(0.0))  # type: ignore[misc]
            self._told.ended(peer, reason)

    def close(self) -> None:
        """Write out what is queued, end all connections, stop listening."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            threads = list(self._threads)
        ties = self._ties.close()
        self.entrance.close()
        for tie in ties:
            tie.connection.close()
        self._ties.await_none(5)
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(5)

    def forked(self) -> None:
        """In a forked child: the sockets belong to the parent, which would not see them close."""
        self._ties.forked()
        self.entrance.forked()

"""Connections of one agent: dialling on first use, letting authenticated peers in, and what the end of one means.

- Two members that dial each other at once get two connections; both are read, and the one dialled by the lower id
  carries what is sent, so both sides agree. Who dials because his connection broke says so: the other may not have
  noticed.
- A connection that its peer ends on purpose, or that brings nonsense, was the last to that process.
- One that breaks says nothing of its peer: both sides dial again. Where nobody listens any more the process has
  ended; else the pair has `grace_seconds` to find together, and senders wait so long.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rpcbench.agent.entrance import Entrance
from rpcbench.agent.pool import Pool
from rpcbench.agent.ties import Tie, Ties
from rpcbench.transport import ends, versions
from rpcbench.transport.base import Connection, Stream
from rpcbench.transport.ends import Opener
from rpcbench.transport.handshake import NEWCOMER, Identity
from rpcbench.transport.host import host_id
from rpcbench.transport.stream import Ending, StreamConnection
from rpcbench.wire.frames import Frame, Limits
from rpcbench.words.config import HANDSHAKE_SECONDS, WorldConfig
from rpcbench.words.errors import NotConnectedError, ProtocolError, RefusedError, RpcError

_PAUSE = 0.05
_ATTEMPT_SECONDS = 2.0
_TOGETHER = 0.25
"""Seconds in which all connections to a process end that has ended itself."""


class Listens(Protocol):
    """Who is told what happens to peers, on threads that may not wait for a write."""

    def arrived(self, peer: Identity, frame: Frame) -> None:
        """A message has come."""

    def ended(self, peer: Identity, reason: str) -> None:
        """A peer is gone for good."""

    def broken(self, peer: Identity, reason: str) -> None:
        """What was on its way to a peer may be lost; another connection is about to stand."""

    def resumed(self, peer: Identity) -> None:
        """It does."""

    def ways(self, peer: Identity) -> Sequence[str]:
        """Addresses by which to dial a peer again; none where it is no business of ours."""


class _Break:
    """A pair that is apart. Its calls fail once it is clear that the peer has not just ended."""

    def __init__(self, peer: Identity, reason: str) -> None:
        self.peer, self.reason = peer, reason
        self.told = False

    def tell(self, told: Listens) -> None:
        if not self.told:
            self.told = True
            told.broken(self.peer, self.reason)


class Peers:
    def __init__(self, config: WorldConfig, pool: Pool, told: Listens) -> None:
        epoch = 1 + secrets.randbits(60) if config.id == 0 else NEWCOMER
        self.me = Identity(config.cluster, config.id, config.name, config.incarnation, host_id(), epoch)
        self._config = config
        self._opener = Opener(config.secret)
        self.entrance = Entrance(config, self._opener, self._handshake, self._objection, self._admit)
        self._pool = pool
        self._told = told
        self._limits = Limits()
        self._ties = Ties()
        self._lock = threading.Lock()
        self._dialling: dict[int, threading.Event] = {}
        self._breaks: dict[int, _Break] = {}
        self._barred: dict[tuple[int, int], str] = {}  # id and incarnation → why it may not come back
        self._serials = itertools.count(1)
        self._opening: set[int] = set()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- using
    def find(self, to: int) -> Connection | None:
        """The connection to a member, if there is one."""
        return self._ties.find(to)

    def far(self) -> dict[int, list[StreamConnection]]:
        """Connections to members on other hosts."""
        found: dict[int, list[StreamConnection]] = {}
        for tie in self._ties.all():
            if tie.peer.host != self.me.host:
                found.setdefault(tie.peer.id, []).append(tie.connection)
        return found

    def flush(self) -> None:
        """Write what connections hold."""
        for tie in self._ties.all():
            tie.connection.flush()

    def await_room(self, to: int) -> None:
        """Wait while a member is far behind in reading what it was sent."""
        connection = self.find(to)
        if connection is not None:
            connection.await_room()

    def connect(self, to: int, addresses: Iterable[str]) -> Connection:
        """The connection to a member, dialled if there is none. NotConnectedError where nobody answers. Blocks."""
        while (connection := self.find(to)) is None:
            with self._lock:
                if self._stopped.is_set():
                    raise NotConnectedError("this agent has stopped")
                dialled = self._dialling.get(to)
                mine = dialled is None
                if dialled is None:
                    dialled = self._dialling[to] = threading.Event()
            if mine:
                with contextlib.ExitStack() as after:
                    after.callback(self._dialled, to)
                    self._dial(to, addresses, HANDSHAKE_SECONDS)
            else:
                dialled.wait()
        return connection

    def _dialled(self, to: int) -> None:
        with self._lock:
            self._dialling.pop(to).set()

    def _dial(self, to: int, addresses: Iterable[str], seconds: float) -> None:
        """NotConnectedError, caused by the OSError of the last address, where nobody answers at any."""
        with self._handshake(to) as me:
            stream, peer = self._first_answer(addresses, me, seconds)
            if peer.id != to:
                stream.release()
                raise ProtocolError(f"{peer.name} answers at the address of worker {to}")
            self._met(peer)
            self._add(stream, peer, self.me.id)

    def _first_answer(self, addresses: Iterable[str], me: Identity, seconds: float) -> tuple[Stream, Identity]:
        failed: OSError | None = None
        told = "it has no address for this host"
        for address in addresses:
            try:
                return self._opener.dial(address, me, seconds)
            except OSError as error:
                failed, told = error, f"nobody answers at {address}: {error.strerror or error}"
        raise NotConnectedError(told) from failed

    def reach_leader(self, clock: Callable[[], float], deadline: float) -> None:
        """Connect to member 0, which may not be there yet. RpcError once `clock` is past the deadline."""
        local = ends.leader_address(Path(self._config.directory))
        ways = (local, self._config.leader) if self._config.leader else (local,)
        while True:
            try:
                self.connect(0, ways)
                return
            except NotConnectedError as error:
                if clock() > deadline:
                    raise RpcError(f"{self.me.name} cannot reach worker 0 of its world: {error}") from error
                self._stopped.wait(_PAUSE)  # nothing can tell us when member 0 begins to listen

    # -- who is who
    @contextlib.contextmanager
    def _handshake(self, to: int | None = None) -> Iterator[Identity]:
        """What this member is called in one handshake, with a member that it dials or with whoever dialled.

        A dialler without a connection says that those of before have ended; but not those that are about to stand.
        """
        with self._lock:
            serial = next(self._serials)
            base = min(self._opening, default=serial)
            self._opening.add(serial)
        try:
            none = to is not None and self.find(to) is None
            yield replace(self.me, serial=serial, base=base if none else 0)
        finally:
            with self._lock:
                self._opening.remove(serial)

    # -- letting in
    def listen(self) -> None:
        """Let peers in from now on."""
        self.entrance.open(self._start, self._pool.spawn)

    def _objection(self, peer: Identity) -> str | None:
        return self._barred.get((peer.id, peer.incarnation))

    def _admit(self, stream: Stream, peer: Identity) -> None:
        with contextlib.suppress(NotConnectedError):  # this agent has stopped meanwhile
            self._add(stream, peer, peer.id)

    def _met(self, leader: Identity) -> None:
        """The world that this process asks to join is the one it has found."""
        if self.me.epoch == NEWCOMER:
            self.me = replace(self.me, epoch=leader.epoch)

    def _add(self, stream: Stream, peer: Identity, dialler: int) -> None:
        tie = Tie(peer, dialler, StreamConnection(stream, self._limits, self._pool.spawn))
        returns = self._end_breaks(peer)
        if not self._ties.add(tie):
            stream.release()
            raise NotConnectedError("this agent has stopped")
        self._pool.read(
            tie.connection.read,
            lambda frame: self._told.arrived(peer, frame),
            lambda ending: self._over(tie, ending),
        )
        if returns:
            self._told.resumed(peer)
        versions.warn(self.me.versions, peer.versions, peer.name)

    def _end_breaks(self, peer: Identity) -> bool:
        """A connection to a peer is about to stand: whether others were before that are no more."""
        with self._lock:
            apart = self._breaks.pop(peer.id, None)
        if apart is not None and apart.peer.incarnation != peer.incarnation:
            self._told.ended(apart.peer, f"{apart.reason}, and it was started again")
            apart = None
        for tie in self._ties.of(peer):
            if (tie.connection.ended or tie.peer.serial < peer.base) and self._ties.remove(tie):
                tie.connection.cut()
                apart = apart or _Break(peer, "it has lost its connection")
        if apart is not None:
            apart.tell(self._told)
        return apart is not None

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"rpcbench-{self.me.name}-{name}", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    def _over(self, tie: Tie, ending: Ending) -> None:
        """A connection has ended, and nobody here closed it."""
        known = self._ties.remove(tie)
        tie.connection.cut()
        tie.connection.release()
        if not known or self._stopped.is_set():
            return
        if self._ties.of(tie.peer):
            if ending.broken and not self._ties.others_end(tie.peer, _TOGETHER):
                self._told.broken(tie.peer, ending.reason)
                self._told.resumed(tie.peer)
        elif ending.broken and (ways := self._told.ways(tie.peer)):
            self._reunite(tie.peer, ending.reason, ways)
        else:
            self._bar(tie.peer, ending.reason)
            self._told.ended(tie.peer, ending.reason)

    def _reunite(self, peer: Identity, reason: str, ways: Sequence[str]) -> None:
        with self._lock:
            apart = self._breaks[peer.id] = _Break(peer, reason)
            mine = peer.id not in self._dialling
            if mine:
                self._dialling[peer.id] = threading.Event()  # who has something to send waits
        try:
            verdict = self._await_return(apart, ways)
            with self._lock:
                still = self._breaks.pop(peer.id, None) is not None
            if still and not self._stopped.is_set():
                self._settle(apart, verdict)
        finally:
            if mine:
                self._dialled(peer.id)

    def _settle(self, apart: _Break, verdict: str | None) -> None:
        """There will be no connection; or there was another one, before anybody knew that this one was needed."""
        if verdict is None:
            apart.tell(self._told)
            self._told.resumed(apart.peer)
        else:
            self._bar(apart.peer, verdict)
            self._told.ended(apart.peer, verdict)

    def _await_return(self, apart: _Break, ways: Sequence[str]) -> str | None:
        """Dial until there is a connection, dialled here or there; or why there will be none."""
        grace = self._config.grace_seconds
        deadline = time.monotonic() + grace
        while not self._ties.of(apart.peer) and not self._stopped.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return f"{apart.reason}, and it could not be reached again in {grace:g} s"
            try:
                self._dial(apart.peer.id, ways, min(left, _ATTEMPT_SECONDS))
                break
            except RefusedError as error:
                return str(error)
            except NotConnectedError as error:
                if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    return apart.reason  # its process has ended
                if not isinstance(error.__cause__, ConnectionError):
                    apart.tell(self._told)  # out of reach, and perhaps for a while
            except ProtocolError:
                pass  # it hung up, as a process does that is just ending: nobody will listen the next time
            self._stopped.wait(_PAUSE)
        return None

    # -- ends
    def _bar(self, peer: Identity, reason: str) -> None:
        self._barred[peer.id, peer.incarnation] = reason

    def drop(self, member: int, incarnation: int, reason: str) -> None:
        """A member is gone: no more to or from it."""
        self._barred[member, incarnation] = f"this world goes on without it: {reason}"
        for tie in self._ties.all():
            if (tie.peer.id, tie.peer.incarnation) == (member, incarnation) and self._ties.remove(tie):
                self._pool.spawn(tie.connection.close)

    def give_up(self, member: int, reason: str) -> None:
        """A member is not there any more, whatever its connections look like."""
        ties = self._ties.take(member)
        for tie in ties:
            self._bar(tie.peer, reason)
            self._pool.spawn(lambda tie=tie: tie.connection.close(0.0))  # type: ignore[misc]
        if ties:
            self._told.ended(ties[-1].peer, reason)

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

"""Connections of one agent: who is connected, dialling on first use, letting authenticated peers in.

Two members that dial each other at once get two connections; both are read, and the one dialled by the lower id
carries what is sent, so both sides agree. A connection that ends without a word is told once, when it was the last.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rpcbench.agent.entrance import Entrance
from rpcbench.agent.pool import Pool
from rpcbench.transport import ends, versions
from rpcbench.transport.base import Connection, Stream
from rpcbench.transport.ends import Opener
from rpcbench.transport.handshake import NEWCOMER, Identity
from rpcbench.transport.host import host_id
from rpcbench.transport.stream import StreamConnection
from rpcbench.wire.frames import Frame, Limits
from rpcbench.words.config import WorldConfig
from rpcbench.words.errors import NotConnectedError, ProtocolError, RpcError

Receive = Callable[[Identity, Frame], None]
Ended = Callable[[Identity, str], None]


class Peers:
    def __init__(self, config: WorldConfig, pool: Pool, receive: Receive, ended: Ended) -> None:
        epoch = 1 + secrets.randbits(60) if config.id == 0 else NEWCOMER
        self.me = Identity(config.cluster, config.id, config.name, config.incarnation, host_id(), epoch)
        self._config = config
        self._opener = Opener(config.secret)
        self.entrance = Entrance(config, self._opener, lambda: self.me, self._objection, self._admit)
        self._pool = pool
        self._receive = receive
        self._ended = ended
        self._limits = Limits()
        self._lock = threading.Lock()
        self._connections: dict[int, list[tuple[int, StreamConnection]]] = {}
        self._dialling: dict[int, threading.Event] = {}
        self._closed = False
        self._threads: list[threading.Thread] = []

    # -- using
    def find(self, to: int) -> Connection | None:
        """The connection to a member, if there is one."""
        with self._lock:
            connections = self._connections.get(to)
            return min(connections, key=lambda entry: entry[0])[1] if connections else None

    def await_room(self, to: int) -> None:
        """Wait while a member is far behind in reading what it was sent."""
        connection = self.find(to)
        if connection is not None:
            connection.await_room()

    def connect(self, to: int, addresses: Iterable[str]) -> Connection:
        """The connection to a member, dialled if there is none. NotConnectedError where nobody answers. Blocks."""
        while (connection := self.find(to)) is None:
            with self._lock:
                if self._closed:
                    raise NotConnectedError("this agent has stopped")
                dialled = self._dialling.get(to)
                mine = dialled is None
                if dialled is None:
                    dialled = self._dialling[to] = threading.Event()
            if mine:
                self._dial(to, addresses, dialled)
            else:
                dialled.wait()
        return connection

    def _dial(self, to: int, addresses: Iterable[str], dialled: threading.Event) -> None:
        try:
            stream, identity = self._first_answer(addresses)
            if identity.id != to:
                stream.release()
                raise ProtocolError(f"{identity.name} answers at the address of worker {to}")
            self._met(identity)
            self._add(stream, identity, self.me.id)
        finally:
            with self._lock:
                del self._dialling[to]
            dialled.set()

    def _first_answer(self, addresses: Iterable[str]) -> tuple[Stream, Identity]:
        failed: OSError | None = None
        told = "it has no address for this host"
        for address in addresses:
            try:
                return self._opener.dial(address, self.me)
            except OSError as error:
                failed, told = error, f"nobody answers at {address}: {error.strerror or error}"
        raise NotConnectedError(told) from failed

    def reach_leader(self, clock: Callable[[], float], deadline: float) -> None:
        """Connect to member 0, which may not be there yet. RpcError once `clock` is past the deadline."""
        local = ends.leader_address(Path(self._config.directory))
        ways = (local, self._config.leader) if self._config.leader else (local,)
        pause = threading.Event()
        while True:
            try:
                self.connect(0, ways)
                return
            except NotConnectedError as error:
                if clock() > deadline:
                    raise RpcError(f"{self.me.name} cannot reach worker 0 of its world: {error}") from error
                pause.wait(0.02)  # nothing can tell us when member 0 begins to listen

    # -- letting in
    def listen(self) -> None:
        """Let peers in from now on."""
        self.entrance.open(self._start, self._pool.spawn)

    def _objection(self, peer: Identity) -> str | None:
        return None

    def _admit(self, stream: Stream, identity: Identity) -> None:
        with contextlib.suppress(NotConnectedError):  # this agent has stopped meanwhile
            self._add(stream, identity, identity.id)

    def _met(self, leader: Identity) -> None:
        """The world that this process asks to join is the one it has found."""
        if self.me.epoch == NEWCOMER:
            self.me = replace(self.me, epoch=leader.epoch)

    def _add(self, stream: Stream, identity: Identity, dialler: int) -> None:
        connection = StreamConnection(stream, self._limits, self._pool.spawn)
        with self._lock:
            if self._closed:
                stream.release()
                raise NotConnectedError("this agent has stopped")
            self._connections.setdefault(identity.id, []).append((dialler, connection))
        self._start(lambda: self._read(identity, connection), f"read-{identity.name}")
        versions.warn(self.me.versions, identity.versions, identity.name)

    def _read(self, identity: Identity, connection: StreamConnection) -> None:
        reason = "what it sent could not be handled"
        try:
            reason = connection.read_forever(lambda frame: self._receive(identity, frame))
        finally:
            self._forget(identity, connection, reason)

    def _forget(self, identity: Identity, connection: StreamConnection, reason: str) -> None:
        """A connection has ended; if it was the last one to a member, and nobody here closed it, that is told."""
        with self._lock:
            left = [entry for entry in self._connections.get(identity.id, []) if entry[1] is not connection]
            self._connections[identity.id] = left
            if not left:
                del self._connections[identity.id]
            last = not left and not self._closed
        connection.release()
        if last:
            self._ended(identity, reason)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"rpcbench-{self.me.name}-{name}", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    # -- ends
    def drop(self, worker: int) -> None:
        """A member is gone: no more to or from it."""
        with self._lock:
            connections = list(self._connections.get(worker, []))
        for _, connection in connections:
            self._pool.spawn(connection.close)

    def close(self) -> None:
        """Write out what is queued, end all connections, stop listening."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = [connection for entries in self._connections.values() for _, connection in entries]
            threads = list(self._threads)
        self.entrance.close()
        for connection in connections:
            connection.close()
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(5)

    def forked(self) -> None:
        """In a forked child: the sockets belong to the parent, which would not see them close."""
        for entries in self._connections.values():
            for _, connection in entries:
                connection.forked()
        self.entrance.forked()

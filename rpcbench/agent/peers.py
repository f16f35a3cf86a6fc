"""Connections of one agent: who is connected, dialling on first use, letting authenticated peers in.

Two members that dial each other at once get two connections; both are read, and the one dialled by the lower id
carries what is sent, so both sides agree. A connection that ends without a word is told once, when it was the last.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rpcbench.agent.pool import Pool
from rpcbench.transport import ends, versions
from rpcbench.transport.base import Connection, Stream
from rpcbench.transport.handshake import NEWCOMER, Identity, Objection
from rpcbench.transport.stream import StreamConnection
from rpcbench.wire.frames import Frame, Limits
from rpcbench.words.errors import NotConnectedError, ProtocolError

Receive = Callable[[Identity, Frame], None]
Ended = Callable[[Identity, str], None]


class Peers:
    def __init__(
        self, me: Identity, secret: bytes, directory: Path, pool: Pool, receive: Receive, ended: Ended
    ) -> None:
        self.me = me
        self.address = ""  # where others find this member, once it is bound
        self.refused = 0  # connections closed in the handshake: strangers, wrong secrets
        self._opener = ends.Opener(secret)
        self._directory = directory
        self._pool = pool
        self._receive = receive
        self._ended = ended
        self._limits = Limits()
        self._lock = threading.Lock()
        self._connections: dict[int, list[tuple[int, StreamConnection]]] = {}
        self._dialling: dict[int, threading.Event] = {}
        self._closed = False
        self._objection: Objection = lambda peer: None
        self._listener: ends.Listener | None = None
        self._posted: ends.AddressFile | None = None
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

    def connect(self, to: int, address: str) -> Connection:
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
                self._dial(to, address, dialled)
            else:
                dialled.wait()
        return connection

    def _dial(self, to: int, address: str, dialled: threading.Event) -> None:
        try:
            stream, identity = self._opener.dial(address, self.me)
            if identity.id != to:
                stream.release()
                raise ProtocolError(f"{identity.name} answers at the address of worker {to}")
            self._met(identity)
            self._add(stream, identity, self.me.id)
        except OSError as error:
            raise NotConnectedError(f"nobody answers at {address}: {error.strerror or error}") from error
        finally:
            with self._lock:
                del self._dialling[to]
            dialled.set()

    # -- letting in
    def bind(self) -> str:
        """Take an address and return it; who dials it waits for `listen`.

        NotConnectedError where another process listens there.
        """
        wanted = ends.own_address(self._directory, self.me.id, self.me.incarnation)
        self._listener, self.address = self._opener.listen(wanted)
        meeting = ends.leader_address(self._directory)
        if self.me.id == 0 and meeting.startswith("file:"):
            self._posted = ends.AddressFile(Path(meeting.removeprefix("file:")), self.address)
        return self.address

    def listen(self) -> None:
        """Let peers in from now on."""
        listener = self._listener
        assert listener is not None, "bind comes first"
        self._start(lambda: self._accept_forever(listener), "accept")

    def _accept_forever(self, listener: ends.Listener) -> None:
        while (sock := listener.accept()) is not None:
            self._pool.spawn(partial(self._let_in, listener, sock))

    def _let_in(self, listener: ends.Listener, sock: socket.socket) -> None:
        try:
            stream, identity = self._opener.let_in(listener, sock, self.me, self._objection)
        except (ProtocolError, OSError):
            self.refused += 1  # no word to a stranger
            return
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

    def stop_listening(self) -> None:
        """Let nobody in any more, and leave no file behind. May be called again."""
        with self._lock:
            listener, self._listener = self._listener, None
            posted, self._posted = self._posted, None
        if posted is not None:
            posted.remove()
        if listener is not None:
            listener.close()

    def close(self) -> None:
        """Write out what is queued, end all connections, stop listening."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = [connection for entries in self._connections.values() for _, connection in entries]
            threads = list(self._threads)
        self.stop_listening()
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
        if self._listener is not None:
            self._listener.forked()

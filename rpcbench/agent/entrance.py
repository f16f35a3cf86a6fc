"""Where a member listens, and how others get in: on its host, and beyond where the world has several hosts.

Strangers get no word, and no more of them at once than `_AT_ONCE`: the others wait at the door.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rpcbench.agent.pool import Job
from rpcbench.transport import ends
from rpcbench.transport.base import Stream
from rpcbench.transport.ends import AddressFile, Listener, Opener
from rpcbench.transport.handshake import Identity, Objection
from rpcbench.words.config import WorldConfig
from rpcbench.words.errors import ProtocolError

_AT_ONCE = 64
Admit = Callable[[Stream, Identity], object]
"""Takes a stream to a peer that has proved who it is."""


class Entrance:
    """`identity` says, for the time of one handshake, who this member is; `objection` why a peer does not get in."""

    def __init__(
        self,
        config: WorldConfig,
        opener: Opener,
        identity: Callable[[], AbstractContextManager[Identity]],
        objection: Objection,
        admit: Admit,
    ) -> None:
        self.refused = 0  # connections closed in the handshake
        self._config = config
        self._opener = opener
        self._identity = identity
        self._objection = objection
        self._admit = admit
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._listeners: list[Listener] = []
        self._posted: AddressFile | None = None

    def bind(self) -> tuple[str, str]:
        """Take addresses, and return them: for members on this host, and for others ("" where there are none).

        Who dials them waits for `open`. NotConnectedError where another process listens there.
        """
        config, directory = self._config, Path(self._config.directory)
        address = self._take(ends.own_address(directory, config.id, config.incarnation))
        meeting = ends.leader_address(directory)
        if config.id == 0 and meeting.startswith("file:"):
            self._posted = AddressFile(Path(meeting.removeprefix("file:")), address)
        remote = self._take(config.remote, config.bind) if config.remote else ""
        return address, remote

    def _take(self, address: str, bind: str = "") -> str:
        listener, taken = self._opener.listen(address, bind)
        self._listeners.append(listener)
        return taken

    def open(self, start: Callable[[Callable[[], None], str], None], spawn: Callable[[Job], None]) -> None:
        """Let peers in from now on. `start` makes a named thread, `spawn` runs a short job on one."""
        for listener in self._listeners:
            start(partial(self._accept_forever, listener, spawn), "accept")

    def _accept_forever(self, listener: Listener, spawn: Callable[[Job], None]) -> None:
        while (sock := listener.accept()) is not None:
            self._free.acquire()
            spawn(partial(self._let_in, listener, sock))

    def _let_in(self, listener: Listener, sock: socket.socket) -> None:
        with self._identity() as me:
            try:
                stream, identity = self._opener.let_in(listener, sock, me, self._objection)
            except (ProtocolError, OSError):
                self.refused += 1
                return
            finally:
                self._free.release()
            self._admit(stream, identity)

    def close(self) -> None:
        """Let nobody in any more, and leave no file behind. May be called again."""
        with self._lock:
            listeners, self._listeners = self._listeners, []
            posted, self._posted = self._posted, None
        if posted is not None:
            posted.remove()
        for listener in listeners:
            listener.close()

    def forked(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for listener in self._listeners:
            listener.forked()

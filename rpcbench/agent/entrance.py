"""Where a member listens, and how others get in: on its host, and beyond where the world has several hosts.

Strangers get no word, and they keep no member out (see `half_open`).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rpcbench.agent.half_open import HalfOpen
from rpcbench.agent.pool import Job
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError, TurnedAwayError
from rpcbench.transport import addresses
from rpcbench.transport.addresses import Listener, Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import NEWCOMER, UNBORN, Identity, Object, Offer
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import Member

_log = logging.getLogger("rpcbench")
Admit = Callable[[Stream, Identity], object]
"""Takes a stream to a peer that has proved who it is."""


class Entrance:
    """`identity` says, for the time of one handshake, who this member is; `objection` why a peer does not get in;
    `offer` which incarnation it is to be, where it asks for one."""

    def __init__(
        self,
        config: WorldConfig,
        opener: Opener,
        identity: Callable[[], AbstractContextManager[Identity]],
        objection: Object,
        offer: Offer,
        admit: Admit,
    ) -> None:
        self.refused = 0  # connections closed in the handshake
        self._config = config
        self._opener = opener
        self._identity = identity
        self._objection = objection
        self._offer = offer
        self._admit = admit
        self._lock = threading.Lock()
        self.half_open = HalfOpen()
        self._listeners: list[Listener] = []
        self._closed = False
        self._accept: Callable[[Listener], None] = lambda listener: None
        self._meeting = Rendezvous(Path(config.directory))
        self._address = ""

    def bind(self, world: int) -> tuple[str, str]:
        """Take addresses, and return them: for members on this host, and for others ("" where there are none).

        `world`: the epoch of the one that this member founds, NEWCOMER for one that it asks to join. Who dials waits
        for `open`. NotConnectedError where another process listens there; TurnedAwayError where one leads already.
        """
        founds = world != NEWCOMER
        try:
            return self._bind(world, founds)
        except (NotConnectedError, TurnedAwayError) as error:
            if founds and self._config.world_size is not None:  # in an open world another one may, or has
                self._meeting.fail(str(error))
            raise

    def _bind(self, world: int, founds: bool) -> tuple[str, str]:
        config = self._config
        address = addresses.own_address(Path(config.directory), config.id, config.incarnation)
        self._address = self._take(address)
        if founds and not self._meeting.found(world, self._address):
            raise TurnedAwayError(f"another process already listens where this world meets, in {config.directory}")
        remote = config.leader if founds and config.leader else config.remote
        return self._address, self._take(remote, config.bind) if remote else ""

    def _take(self, address: str, bind: str = "") -> str:
        listener, taken = self._opener.listen(address, bind)
        with self._lock:
            late = self._closed
            if not late:
                self._listeners.append(listener)
        if late:
            listener.close()
        else:
            self._accept(listener)
        return taken

    def open(self, start: Callable[[Callable[[], None], str], None], spawn: Callable[[Job], None]) -> None:
        """Let peers in from now on. `start` makes a named thread, `spawn` runs a short job on one."""
        self._accept = lambda listener: start(partial(self._accept_forever, listener, spawn), "accept")
        for listener in list(self._listeners):
            self._accept(listener)

    # -- who leads is to be found
    def lead(self, me: Identity, view: int) -> None:
        """From this view on this member leads."""
        self._meeting.lead(me.epoch, view, self._address)
        if self._closed:
            self._leave()  # it has gone again meanwhile
        elif self._config.leader:
            try:
                self._take(self._config.leader, self._config.bind)
            except NotConnectedError as error:
                _log.warning("%s leads its world now; newcomers on other hosts will not find it: %s", me.name, error)

    def hand_over(self, me: Identity, heir: Member, view: int) -> None:
        """From this view on the heir leads: it needs the port where this member was found."""
        if heir.host == me.host:
            self._meeting.hand_over(me.epoch, view, heir.address)
        self.close()

    def _accept_forever(self, listener: Listener, spawn: Callable[[Job], None]) -> None:
        while (sock := listener.accept()) is not None:
            self.half_open.enter(sock)
            spawn(partial(self._let_in, listener, sock))

    def _let_in(self, listener: Listener, sock: socket.socket) -> None:
        with self._identity() as me:
            try:
                stream, identity = self._opener.let_in(listener, sock, me, self._objection, self._offer)
            except (ProtocolError, OSError):
                self.refused += 1
                return
            finally:
                self.half_open.leave(sock)
            if identity.incarnation == UNBORN:
                stream.release()  # it has only asked
            else:
                self._admit(stream, identity)

    def close(self) -> None:
        """Let nobody in any more, and leave no file behind. May be called again."""
        with self._lock:
            listeners, self._listeners = self._listeners, []
            self._closed = True
        for listener in listeners:
            listener.close()
        if listeners:
            self._leave()

    def _leave(self) -> None:
        try:
            self._meeting.leave(self._address)
        except OSError as error:  # such as no descriptor left: a note of one that listens no more hinders nobody
            _log.warning("could not take away the note %s: %s", self._meeting.path, error)

    def forked(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for listener in self._listeners:
            listener.forked()

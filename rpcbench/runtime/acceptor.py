"""Where a member listens, on its host and for other hosts, and the handshakes that it takes part in.

Guarantees
- A stranger receives no data and cannot keep members out: over TCP it gets no further than the lobby of the listener
  (`transport.lobby`), and no stranger reaches Unix sockets. So a handshake is one with a process that has the secret,
  or with an eavesdropper, which can use a recorded preamble once for each other listener with the same secret.
- `MOST` handshakes of a listener run at once, each for HANDSHAKE_SECONDS at most. While so many run, all other
  connections wait, in the lobby too, as one thread serves it and starts the handshakes.
- Handshakes are numbered, so that a dialler without a connection can report which of its earlier ones have ended, even
  if the peer has not noticed; a handshake that is about to succeed is never reported so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError, TurnedAwayError
from rpcbench.runtime.pool import Job
from rpcbench.transport import addresses
from rpcbench.transport.addresses import Listener, Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import NO_INCARNATION, NO_WORLD, Identity, Object, Offer
from rpcbench.transport.lobby import Refusals
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import Member

MOST = 64  # handshakes of one listener at once
_log = logging.getLogger("rpcbench")


class Handshakes:
    """Numbers the handshakes of one member, and holds its identity."""

    def __init__(self, me: Identity) -> None:
        self.me = me
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._opening: set[int] = set()  # numbers of handshakes under way

    @contextlib.contextmanager
    def handshake_identity(self, afresh: Callable[[], bool] = lambda: False) -> Iterator[Identity]:
        """Give this member's identity for one handshake. `afresh`: whether it has no connection to that peer now."""
        with self._lock:
            serial = next(self._serials)
            base = min(self._opening, default=serial)
            self._opening.add(serial)
        try:
            # `base`: the peer may drop connections with smaller numbers; handshakes under way are not below it.
            yield replace(self.me, serial=serial, base=base if afresh() else 0)
        finally:
            with self._lock:
                self._opening.remove(serial)

    def adopt_epoch(self, leader: Identity) -> None:
        """Take over the epoch of the world that this process asked to join, and has found."""
        if self.me.epoch == NO_WORLD:
            self.me = replace(self.me, epoch=leader.epoch)


class Acceptor:
    """Listens for one member: `identity` for one handshake, `objection` to a peer, `offer` of an incarnation; `admit`
    takes the stream to a peer that has proved its identity."""

    def __init__(
        self,
        config: WorldConfig,
        opener: Opener,
        identity: Callable[[], AbstractContextManager[Identity]],
        objection: Object,
        offer: Offer,
        admit: Callable[[Stream, Identity], object],
    ) -> None:
        self.refusals = Refusals()
        self._config = config
        self._opener = opener
        self._identity = identity
        self._objection = objection
        self._offer = offer
        self._admit = admit
        self._lock = threading.Lock()  # guards the listeners and `_closed`
        self._listeners: list[Listener] = []
        self._closed = False
        self._accept: Callable[[Listener], None] = lambda listener: None  # set by `start_accepting`: starts a thread
        self._meeting = Rendezvous(Path(config.directory))
        self._address = ""  # for members on this host

    def bind_listeners(self, world: int) -> tuple[str, str]:
        """Listen; return the addresses for members on this host, and for others ("" if there are none). `world`: the
        epoch of the world that this member founds, or NEWCOMER. Peers that dial wait until `start_accepting`.
        NotConnectedError if another process listens there; TurnedAwayError if another one leads already."""
        founds, config = world != NO_WORLD, self._config
        try:
            self._address = self._start_listener(
                addresses.own_address(Path(config.directory), config.id, config.incarnation)
            )
            if founds and not self._meeting.claim_leadership(world, self._address):
                raise TurnedAwayError(f"another process already listens where this world meets, in {config.directory}")
            remote = config.leader if founds and config.leader else config.remote
            return self._address, self._start_listener(remote, config.bind) if remote else ""
        except (NotConnectedError, TurnedAwayError) as error:
            if founds and config.world_size is not None:  # in an open world another one may lead
                self._meeting.record_failure(str(error))
            raise

    def _start_listener(self, address: str, bind: str = "") -> str:
        listener, taken = self._opener.open_listener(address, bind, self.refusals)
        with self._lock:
            late = self._closed  # closed while this thread was about to listen
            if not late:
                self._listeners.append(listener)
        if late:
            listener.close()
        else:
            self._accept(listener)
        return taken

    def start_accepting(self, start: Callable[[Callable[[], None], str], None], spawn: Callable[[Job], None]) -> None:
        """Admit peers from now on. `start` makes a named thread, `spawn` runs a short job on one."""
        self._accept = lambda listener: start(partial(self._accept_forever, listener, spawn), "accept")
        for listener in list(self._listeners):
            self._accept(listener)

    # -- the leader's address
    def publish_leadership(self, me: Identity, view: int) -> None:
        """Publish this member as the leader from this view on."""
        self._meeting.record_leadership(me.epoch, view, self._address)
        if self._closed:
            self._remove_address()  # the member has left meanwhile
        elif self._config.leader:
            try:
                self._start_listener(self._config.leader, self._config.bind)
            except NotConnectedError as error:
                _log.warning("%s leads its world now; newcomers on other hosts will not find it: %s", me.name, error)

    def hand_over_leadership(self, me: Identity, heir: Member, view: int) -> None:
        """Publish the heir as the leader from this view on, and free the port, which the heir needs."""
        if heir.host == me.host:
            self._meeting.record_successor(me.epoch, view, heir.address)
        self.close()

    def _accept_forever(self, listener: Listener, spawn: Callable[[Job], None]) -> None:
        places = threading.BoundedSemaphore(MOST)
        while (sock := listener.accept()) is not None:
            places.acquire()
            spawn(partial(self._let_in, listener, sock, places))  # a silent peer must not block the thread that accepts

    def _let_in(self, listener: Listener, sock: socket.socket, places: threading.BoundedSemaphore) -> None:
        with self._identity() as me:
            try:
                stream, identity = self._opener.authenticate_peer(listener, sock, me, self._objection, self._offer)
            except (ProtocolError, OSError):
                self.refusals.count_refusal()
                return
            finally:
                places.release()
            if identity.incarnation == NO_INCARNATION:
                stream.close_descriptor()  # it only asked for an incarnation
            else:
                self._admit(stream, identity)

    def close(self) -> None:
        """Admit no more peers, and leave no file behind. Idempotent."""
        with self._lock:
            listeners, self._listeners = self._listeners, []
            self._closed = True
        for listener in listeners:
            listener.close()
        if listeners:
            self._remove_address()

    def _remove_address(self) -> None:
        try:
            self._meeting.remove_address(self._address)
        except OSError as error:  # say, no descriptor left; a stale rendezvous file does no harm
            _log.warning("could not remove the rendezvous file %s: %s", self._meeting.path, error)

    def after_fork(self) -> None:
        """Drop the sockets in a forked child: they belong to the parent."""
        for listener in self._listeners:
            listener.after_fork()

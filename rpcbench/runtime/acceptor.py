"""How processes get into a member: where it listens, on its host and beyond, and the handshakes that it takes part in.

Guarantees
- A stranger gets no word and keeps no member out. Connections whose peers have not yet proved that they know the secret
  are half-open, and their number is bounded: where there are `MOST` of them, the next one displaces the oldest one of
  the host that has most, once that has had `LEAST_SECONDS`. So strangers who connect and say nothing displace each
  other, and a member that comes among them waits for seconds at most; where it is displaced itself, it dials again.
  Unix sockets are not displaced: no stranger gets to one.
- Handshakes are numbered, so that a dialler without a connection can say which of its earlier ones have ended, however
  they look from the other side; but never one that is about to stand.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError, TurnedAwayError, counted
from rpcbench.runtime.pool import Job
from rpcbench.transport import addresses
from rpcbench.transport.addresses import Listener, Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import NEWCOMER, UNBORN, Identity, Object, Offer
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import Member

MOST = 256
MOST_HERE = 64
"""Of processes of this host and user: the others wait at the door."""
LEAST_SECONDS = 0.5
_log = logging.getLogger("rpcbench")


class _Peer(NamedTuple):
    host: str
    since: float


class HalfOpen:
    """The half-open connections of one member."""

    def __init__(self) -> None:
        self._far, self._near = (threading.BoundedSemaphore(most) for most in (MOST, MOST_HERE))
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, _Peer] = {}  # that may be displaced, in the order in which they came
        self._displaced: Counter[str] = Counter()

    def enter(self, sock: socket.socket) -> None:
        """Returns once there is room for this one."""
        if sock.family == socket.AF_UNIX:
            self._near.acquire()
            return
        while not self._far.acquire(blocking=False):
            if self._far.acquire(timeout=self._displace()):
                break
        with contextlib.suppress(OSError), self._lock:  # it has gone again
            self._peers[sock] = _Peer(sock.getpeername()[0], time.monotonic())

    def leave(self, sock: socket.socket) -> None:
        """Its handshake is over."""
        with self._lock:
            self._peers.pop(sock, None)
        (self._near if sock.family == socket.AF_UNIX else self._far).release()

    def _displace(self) -> float:
        """Shut the connection whose turn it is, if it has had its time; how long to wait for room."""
        with self._lock:
            shares = Counter(peer.host for peer in self._peers.values())
            if not shares:
                return LEAST_SECONDS
            host = max(shares, key=shares.__getitem__)
            sock, since = next((sock, peer.since) for sock, peer in self._peers.items() if peer.host == host)
            if (rest := since + LEAST_SECONDS - time.monotonic()) > 0:
                return rest
            del self._peers[sock]
            self._displaced[host] += 1
            first = self._displaced[host] == 1
            with contextlib.suppress(OSError):  # it has gone by itself
                sock.shutdown(socket.SHUT_RDWR)
        if first:
            _log.warning(
                "%d connections, most of them from %s, do not prove that they belong to this world; from now on the "
                "oldest is closed for each that comes, and members that join have to wait in between",
                MOST,
                host,
            )
        return LEAST_SECONDS

    def complaint(self) -> str:
        """Which hosts had connections displaced, for whoever waits for a member; "" where none was."""
        with self._lock:
            told = [f"{counted(n, 'connection')} from {host}" for host, n in self._displaced.items()]
        return f"; {' and '.join(told)} did not prove to belong to this world and made others wait" if told else ""


class Handshakes:
    def __init__(self, me: Identity) -> None:
        self.me = me
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._opening: set[int] = set()

    @contextlib.contextmanager
    def one(self, afresh: Callable[[], bool] = lambda: False) -> Iterator[Identity]:
        """What this member is called in one handshake. `afresh`: whether it has no connection to that peer now."""
        with self._lock:
            serial = next(self._serials)
            base = min(self._opening, default=serial)
            self._opening.add(serial)
        try:
            yield replace(self.me, serial=serial, base=base if afresh() else 0)
        finally:
            with self._lock:
                self._opening.remove(serial)

    def met(self, leader: Identity) -> None:
        """The world that this process asks to join is the one it has found."""
        if self.me.epoch == NEWCOMER:
            self.me = replace(self.me, epoch=leader.epoch)


Admit = Callable[[Stream, Identity], object]
"""Takes a stream to a peer that has proved who it is."""


class Acceptor:
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

"""Where a member listens, on its host and for other hosts, and the handshakes that it takes part in.

Guarantees
- A stranger receives no data and cannot keep members out. A connection is half-open until its peer has proved that it
  has the secret. Their number is bounded: at `MOST` of them, the next one displaces the oldest one of the host that has
  most, once that is `LEAST_SECONDS` old. So strangers that connect and send nothing displace each other, and a member
  among them waits for seconds at most; a displaced member dials again. No stranger reaches Unix sockets.
- Handshakes are numbered, so that a dialler without a connection can report which of its earlier ones have ended, even
  if the peer has not noticed; a handshake that is about to succeed is never reported so.
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

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import NotConnectedError, ProtocolError, TurnedAwayError, counted
from rpcbench.runtime.pool import Job
from rpcbench.transport import addresses
from rpcbench.transport.addresses import Listener, Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import NO_INCARNATION, NO_WORLD, Identity, Object, Offer
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import Member

MOST = 256  # half-open connections from anywhere but Unix sockets
MOST_HERE = 64
"""Half-open connections on Unix sockets, from processes of this host and user; others wait in `enter`."""
LEAST_SECONDS = 0.5
_log = logging.getLogger("rpcbench")


class HalfOpen:
    """The half-open connections of one member."""

    def __init__(self) -> None:
        self._far, self._near = (threading.BoundedSemaphore(most) for most in (MOST, MOST_HERE))
        self._lock = threading.Lock()  # guards the two below
        self._peers: dict[socket.socket, tuple[str, float]] = {}  # that may be displaced, by age: host, since when (s)
        self._displaced: Counter[str] = Counter()  # host → connections closed, for `complaint`

    def enter(self, sock: socket.socket) -> None:
        """Wait until there is room for this connection, and count it."""
        if sock.family == socket.AF_UNIX:
            self._near.acquire()
            return
        while not self._far.acquire(blocking=False):
            if self._far.acquire(timeout=self._displace()):  # a place may become free before that
                break
        with contextlib.suppress(OSError), self._lock:  # the peer has closed it already
            self._peers[sock] = sock.getpeername()[0], time.monotonic()

    def leave(self, sock: socket.socket) -> None:
        with self._lock:
            self._peers.pop(sock, None)
        (self._near if sock.family == socket.AF_UNIX else self._far).release()

    def _displace(self) -> float:
        """Shut the next connection if it is old enough; return the seconds to wait for room."""
        with self._lock:
            shares = Counter(host for host, _ in self._peers.values())
            if not shares:
                return LEAST_SECONDS
            host = max(shares, key=shares.__getitem__)
            sock, since = next((sock, since) for sock, (of, since) in self._peers.items() if of == host)
            if (rest := since + LEAST_SECONDS - time.monotonic()) > 0:
                return rest
            del self._peers[sock]
            self._displaced[host] += 1
            first = self._displaced[host] == 1  # warn once for each host
            with contextlib.suppress(OSError):  # closed by the peer
                sock.shutdown(socket.SHUT_RDWR)  # its handshake fails and calls `leave`
        if first:
            _log.warning(
                "%d connections, most of them from %s, do not prove that they belong to this world. From now on each "
                "new connection closes the oldest one, and members that join have to wait.",
                MOST,
                host,
            )
        return LEAST_SECONDS

    def complaint(self) -> str:
        """Name the hosts with displaced connections, for the error of a wait for members; "" if there are none."""
        with self._lock:
            told = [f"{counted(n, 'connection')} from {host}" for host, n in self._displaced.items()]
        return f"; {' and '.join(told)} did not prove to belong to this world and delayed others" if told else ""


class Handshakes:
    """Numbers the handshakes of one member, and holds its identity."""

    def __init__(self, me: Identity) -> None:
        self.me = me
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._opening: set[int] = set()  # numbers of handshakes under way

    @contextlib.contextmanager
    def one(self, afresh: Callable[[], bool] = lambda: False) -> Iterator[Identity]:
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

    def met(self, leader: Identity) -> None:
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
        self.refused = 0  # connections closed in the handshake
        self._config = config
        self._opener = opener
        self._identity = identity
        self._objection = objection
        self._offer = offer
        self._admit = admit
        self._lock = threading.Lock()  # guards `refused`, the listeners and `_closed`
        self.half_open = HalfOpen()
        self._listeners: list[Listener] = []
        self._closed = False
        self._accept: Callable[[Listener], None] = lambda listener: None  # set by `open`: starts a thread
        self._meeting = Rendezvous(Path(config.directory))
        self._address = ""  # for members on this host

    def bind(self, world: int) -> tuple[str, str]:
        """Listen; return the addresses for members on this host, and for others ("" if there are none). `world`: the
        epoch of the world that this member founds, or NEWCOMER. Peers that dial wait until `open`. NotConnectedError if
        another process listens there; TurnedAwayError if another one leads already."""
        founds, config = world != NO_WORLD, self._config
        try:
            self._address = self._take(addresses.own_address(Path(config.directory), config.id, config.incarnation))
            if founds and not self._meeting.found(world, self._address):
                raise TurnedAwayError(f"another process already listens where this world meets, in {config.directory}")
            remote = config.leader if founds and config.leader else config.remote
            return self._address, self._take(remote, config.bind) if remote else ""
        except (NotConnectedError, TurnedAwayError) as error:
            if founds and config.world_size is not None:  # in an open world another one may lead
                self._meeting.fail(str(error))
            raise

    def _take(self, address: str, bind: str = "") -> str:
        listener, taken = self._opener.listen(address, bind)
        with self._lock:
            late = self._closed  # closed while this thread was about to listen
            if not late:
                self._listeners.append(listener)
        if late:
            listener.close()
        else:
            self._accept(listener)
        return taken

    def open(self, start: Callable[[Callable[[], None], str], None], spawn: Callable[[Job], None]) -> None:
        """Admit peers from now on. `start` makes a named thread, `spawn` runs a short job on one."""
        self._accept = lambda listener: start(partial(self._accept_forever, listener, spawn), "accept")
        for listener in list(self._listeners):
            self._accept(listener)

    # -- the leader's address
    def lead(self, me: Identity, view: int) -> None:
        """Publish this member as the leader from this view on."""
        self._meeting.lead(me.epoch, view, self._address)
        if self._closed:
            self._leave()  # the member has left meanwhile
        elif self._config.leader:
            try:
                self._take(self._config.leader, self._config.bind)
            except NotConnectedError as error:
                _log.warning("%s leads its world now; newcomers on other hosts will not find it: %s", me.name, error)

    def hand_over(self, me: Identity, heir: Member, view: int) -> None:
        """Publish the heir as the leader from this view on, and free the port, which the heir needs."""
        if heir.host == me.host:
            self._meeting.hand_over(me.epoch, view, heir.address)
        self.close()

    def _accept_forever(self, listener: Listener, spawn: Callable[[Job], None]) -> None:
        while (sock := listener.accept()) is not None:
            self.half_open.enter(sock)
            spawn(partial(self._let_in, listener, sock))  # a silent peer must not block the thread that accepts

    def _let_in(self, listener: Listener, sock: socket.socket) -> None:
        with self._identity() as me:
            try:
                stream, identity = self._opener.let_in(listener, sock, me, self._objection, self._offer)
            except (ProtocolError, OSError):
                with self._lock:
                    self.refused += 1
                return
            finally:
                self.half_open.leave(sock)
            if identity.incarnation == NO_INCARNATION:
                stream.release()  # it only asked for an incarnation
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
            self._leave()

    def _leave(self) -> None:
        try:
            self._meeting.leave(self._address)
        except OSError as error:  # say, no descriptor left; a stale rendezvous file does no harm
            _log.warning("could not remove the rendezvous file %s: %s", self._meeting.path, error)

    def forked(self) -> None:
        """Drop the sockets in a forked child: they belong to the parent."""
        for listener in self._listeners:
            listener.forked()

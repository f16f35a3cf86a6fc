"""Half-open connections: those whose peers have not proved yet that they know the secret. Their number is bounded.

Where there are `MOST` of them, the next one displaces the oldest one of the host that has most, once that has had
`LEAST_SECONDS`. So strangers who connect and say nothing displace each other, and a member that comes among them waits
for seconds at most; where it is displaced itself, it dials again. Unix sockets are not displaced: no stranger gets to
one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from typing import NamedTuple

from rpcbench.base.errors import counted

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

"""The lobby of a TCP listener: connections that have not shown yet that they come from a process with the secret.

Guarantees
- No stranger gets past it: a connection leaves the lobby once its first bytes are a right `preambles.make_preamble`,
  and ends if they are anything else. So a stranger costs a descriptor and some microseconds, no thread and no TLS.
- Strangers cannot keep members out. All connections are accepted at once, so no member waits behind strangers in the
  backlog. At most `max_waiting()` stay in the lobby, each for HANDSHAKE_SECONDS at most. The next one displaces the
  oldest one of the host that has most; a member's preamble has usually come by then, as it is sent first.
- A displaced member sees a connection that broke, and dials again; one with another secret sees an orderly end.
- An eavesdropper can use a recorded preamble once for each listener that it was not meant for, and gets a handshake.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import resource
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from rpcbench.base.config import HANDSHAKE_SECONDS
from rpcbench.base.errors import count_noun
from rpcbench.transport.preambles import PREAMBLE, WELCOME, Preambles

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # they last, unlike the error of one peer
_MOST = 4096
_HOSTS = 16  # that a complaint names
_BATCH = 64  # connections accepted before the next look at those that wait
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: `close` resets the connection, and the port is free at once
_PASSED = (BlockingIOError, ConnectionAbortedError, InterruptedError)  # of `accept`: it has no connection any more
_log = logging.getLogger("rpcbench")


def max_waiting() -> int:
    """Return how many connections may wait: a quarter of the descriptors that this process may open, 4096 at most."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if allowed == resource.RLIM_INFINITY else min(_MOST, max(1, allowed // 4))


class Refusals:
    """The refused connections of one member, on all of its listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self.count = 0
        self._strangers: Counter[str] = Counter()  # host → connections without a right preamble

    def count_refusal(self) -> None:
        """Count a connection that ended in the handshake."""
        with self._lock:
            self.count += 1

    def count_stranger(self, host: str) -> None:
        """Count a connection that ended in the lobby."""
        with self._lock:
            self.count += 1
            known = host in self._strangers or len(self._strangers) < _HOSTS
            self._strangers[host if known else "other addresses"] += 1

    def describe_strangers(self) -> str:
        """Name the hosts of refused strangers, for the error of a wait for members; "" if there are none."""
        with self._lock:
            parts = [f"{count_noun(n, 'connection')} from {host}" for host, n in self._strangers.items()]
        return f"; {' and '.join(parts)} did not prove to belong to this world" if parts else ""


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection that waits."""

    sock: socket.socket
    host: str
    until: float  # when it is refused, in seconds of the monotonic clock
    received: bytearray = field(default_factory=bytearray)


class Lobby:
    """The connections to one listening socket, for one thread. `refusals` counts those that end here.

    The thread takes connections by `next_admitted` until there is none, and then waits until `fileno()` is readable,
    for `seconds_left()` at most.
    """

    def __init__(self, listening: socket.socket, preambles: Preambles, refusals: Refusals) -> None:
        self._listening, self._preambles, self._refusals = listening, preambles, refusals
        self._visitors: dict[_Visitor, None] = {}  # by age
        self._hosts: dict[str, dict[_Visitor, None]] = {}  # the same, by host
        self._welcome: collections.deque[socket.socket] = collections.deque()  # that have sent a right preamble
        self._warned: set[str] = set()  # hosts; of few, see `_displace_oldest`
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection has come, or bytes on one."""
        return self._selector.fileno()

    def seconds_left(self) -> float | None:
        """Return in how many seconds the next connection is to be refused; None if none waits."""
        if not self._visitors:
            return None
        return max(0.0, next(iter(self._visitors)).until - time.monotonic())

    def next_admitted(self) -> socket.socket | None:
        """Return a connection with a right preamble, None if none has come. Does not wait. OSError as of `accept`."""
        if not self._welcome:
            self._process_events()
        return self._welcome.popleft() if self._welcome else None

    def _process_events(self) -> None:
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept_visitors()
            elif key.data in self._visitors:  # else it was displaced just now
                self._examine_visitor(cast(_Visitor, key.data))
        while self._visitors and (oldest := next(iter(self._visitors))).until <= time.monotonic():
            self._dismiss_visitor(oldest)

    def _accept_visitors(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, address = self._listening.accept()
            except _PASSED:
                return
            except OSError as error:
                if error.errno not in SHORTAGES or not self._visitors:
                    raise
                self._displace_oldest()  # strangers must not hold the last descriptors
                continue
            sock.setblocking(False)  # a default timeout of the program's sockets would let each `recv` wait
            visitor = _Visitor(sock, address[0], time.monotonic() + HANDSHAKE_SECONDS)
            if (right := self._check_preamble(visitor)) is None:
                self._keep_visitor(visitor)
            else:  # most preambles come with the connection, which then need not wait
                self._admit_or_refuse(visitor, right)

    def _examine_visitor(self, visitor: _Visitor) -> None:
        if (right := self._check_preamble(visitor)) is not None:
            self._forget_visitor(visitor)
            self._admit_or_refuse(visitor, right)

    def _check_preamble(self, visitor: _Visitor) -> bool | None:
        """Read what has come, at most the preamble; return whether it is right, None while it is incomplete."""
        try:
            data = visitor.sock.recv(PREAMBLE - len(visitor.received))
        except BlockingIOError:
            return None
        except OSError:  # the peer has reset the connection
            return False
        visitor.received += data
        if data and len(visitor.received) < PREAMBLE:
            return None
        return self._preambles.is_acceptable(bytes(visitor.received))

    def _admit_or_refuse(self, visitor: _Visitor, right: bool) -> None:
        if right:
            with contextlib.suppress(OSError):  # the peer has gone, which the handshake meets next
                visitor.sock.send(WELCOME)  # there is room for it: it is the first byte
            visitor.sock.setblocking(True)
            self._welcome.append(visitor.sock)
        else:
            self._refusals.count_stranger(visitor.host)
            with contextlib.suppress(OSError):  # a program that closes all descriptors has closed it
                visitor.sock.close()

    def _keep_visitor(self, visitor: _Visitor) -> None:
        try:
            self._selector.register(visitor.sock, selectors.EVENT_READ, visitor)
        except OSError:  # the system is short of memory or of watches
            self._reset_visitor(visitor)
            return
        self._visitors[visitor] = None
        self._hosts.setdefault(visitor.host, {})[visitor] = None
        if len(self._visitors) > max_waiting():
            self._displace_oldest()

    def _displace_oldest(self) -> None:
        """Refuse the oldest connection of the host that has most."""
        host = max(self._hosts, key=lambda each: len(self._hosts[each]))
        if host not in self._warned and len(self._warned) < _HOSTS:  # once for each host
            self._warned.add(host)
            _log.warning(
                "%d connections wait here, most of them from %s, and do not prove that they belong to this world: from "
                "now on each new one closes the oldest one of the host that has most",
                len(self._visitors),
                host,
            )
        self._dismiss_visitor(next(iter(self._hosts[host])))

    def _dismiss_visitor(self, visitor: _Visitor) -> None:
        """Reset a connection that waits."""
        self._forget_visitor(visitor)
        self._reset_visitor(visitor)

    def _reset_visitor(self, visitor: _Visitor) -> None:
        with contextlib.suppress(OSError):  # the peer has reset it, or the program has closed all descriptors
            visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._admit_or_refuse(visitor, False)

    def _forget_visitor(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor], self._hosts[visitor.host][visitor]
        if not self._hosts[visitor.host]:
            del self._hosts[visitor.host]

    def close(self) -> None:
        """End all connections that wait. Idempotent."""
        for visitor in list(self._visitors):
            self._dismiss_visitor(visitor)
        self.after_fork()

    def after_fork(self) -> None:
        """Close the descriptors in a forked child. The selector is the parent's too, so nothing is taken out of it."""
        self._selector.close()
        for sock in [*self._welcome, *(visitor.sock for visitor in self._visitors)]:
            with contextlib.suppress(OSError):
                sock.close()
        self._welcome.clear()

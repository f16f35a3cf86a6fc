"""Bytes as they are, on a connected stream socket: what unix sockets and TCP have in common.

A stream has one reader and one writer at a time, which may be different threads. Waits end by `shut`, by the peer, or
by the limit set for the opening of a connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys

from rpcbench.transport.shared_memory import BufferStore
from rpcbench.transport.waiting import Watch
from rpcbench.wire.framing import (
    Parts,
)

_MOST_PARTS = 512
_ACKNOWLEDGED = 56 if sys.platform == "linux" else 0
"""Where `tcp_info` has the milliseconds since the last acknowledgement (tcpi_last_ack_recv, see linux/tcp.h)."""
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


class SocketStream:
    """A connected socket, and from now on its only owner."""

    pending = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send = sock.send
        self.store = BufferStore()
        self.read_into = sock.recv_into  # no step between: every byte comes this way
        self.watch = Watch(sock) if hasattr(select, "epoll") else None  # not every system has it

    def write(self, parts: Parts, may_wait: bool) -> None:
        """All of `parts`, in order. BlockingIOError, with what is left in `parts`, where it would have to wait."""
        while parts:
            first = parts[0]
            try:
                if len(parts) == 1:
                    sent = self._send(first, _FLAGS)
                    if sent == len(first):
                        parts.clear()
                        return
                else:
                    sent = self._sock.sendmsg(parts[:_MOST_PARTS], [], _FLAGS)
            except BlockingIOError:
                if not may_wait:
                    raise
                self._await_room()
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _await_room(self) -> None:
        limit = self._sock.gettimeout()
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        if not poller.poll(None if limit is None else limit * 1000):
            raise TimeoutError("timed out")

    def share(self, deadline: float, last: bool) -> None:
        """There is nothing to share with another host."""

    def limit(self, seconds: float | None) -> None:
        """From now on a single read or write takes so long at most, then TimeoutError; None: as long as it takes."""
        self._sock.settimeout(seconds)

    def silence(self) -> float | None:
        """Seconds since the peer's host has last acknowledged anything; None where this system does not tell.

        A host acknowledges for a process that is stopped, or too busy to answer; a cable that is cut does not.
        """
        if not _ACKNOWLEDGED or self._sock.family == socket.AF_UNIX:
            return None
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 4)
        except OSError:
            return None  # it has just ended
        return int.from_bytes(info[_ACKNOWLEDGED:], sys.byteorder) / 1000

    def shut(self) -> None:
        """End both directions: whoever reads or writes comes back. May be called again."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the descriptor back, once nobody reads or writes."""
        if self.watch is not None:
            self.watch.close()
        self.store.close()
        self._sock.close()

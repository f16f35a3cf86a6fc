"""A stream over a connected socket: the common part of unix sockets and TCP.

A stream has one reader and one writer at a time, which may be different threads. A wait ends by `shut`, by the peer, or
by the limit set while the connection is opened.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys

from rpcbench.transport.shared_memory import BufferStore
from rpcbench.transport.waiting import SocketWaiter
from rpcbench.wire.framing import Parts

MOST_PARTS = 512  # of one `sendmsg`, which takes 1024 at most (IOV_MAX)
_ACKNOWLEDGED = 56 if sys.platform == "linux" else 0
"""Offset in `tcp_info` of the milliseconds since the last acknowledgement (tcpi_last_ack_recv, see linux/tcp.h)."""
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


class SocketStream:
    """A stream over a connected socket, which it owns from now on."""

    pending = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send = sock.send
        self.store = BufferStore()
        self.read_into = sock.recv_into  # the bound method itself, as every received byte passes here
        self.watch = SocketWaiter(sock) if hasattr(select, "epoll") else None  # Linux has epoll

    def write(self, parts: Parts, may_wait: bool) -> None:
        while parts:
            first = parts[0]
            try:
                if len(parts) == 1:  # most messages: `send` is cheaper than `sendmsg`
                    sent = self._send(first, _FLAGS)
                    if sent == len(first):
                        parts.clear()
                        return
                else:
                    sent = self._sock.sendmsg(parts[:MOST_PARTS], [], _FLAGS)
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
        """Do nothing: two hosts have no memory in common."""

    def limit(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def silence(self) -> float | None:
        # The kernel acknowledges for a stopped or busy process too, so a long silence is a fault of the network.
        if not _ACKNOWLEDGED or self._sock.family == socket.AF_UNIX:
            return None
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 4)
        except OSError:
            return None  # it has just ended
        return int.from_bytes(info[_ACKNOWLEDGED:], sys.byteorder) / 1000

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.store.close()
        self._sock.close()

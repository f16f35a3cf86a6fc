"""TCP: the same streams as unix sockets, by host and port.

Addresses are "host:port", an IPv6 host in brackets. A port of 0 takes a free one.
"""

from __future__ import annotations

import errno
import socket
import time
from urllib.parse import urlsplit

from rpcbench.transport.base import Stream
from rpcbench.transport.sockets import SocketStream, shut_listener
from rpcbench.words.errors import NotConnectedError


class TcpListener:
    """A listening socket on one interface. NotConnectedError where the address is taken or no address of this host."""

    def __init__(self, place: str) -> None:
        host, port = split(place)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # The port of a world that has just ended is free for the next one.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(where)
            self._sock.listen(128)
        except OSError as error:
            self._sock.close()
            taken = error.errno == errno.EADDRINUSE
            why = "another process already listens on" if taken else f"{error.strerror}: this process cannot listen on"
            raise NotConnectedError(f"{why} {place}") from error
        self.place = join(host, self._sock.getsockname()[1])

    def accept(self) -> socket.socket | None:
        """The next peer's socket, not yet looked at; None once the listener is closed."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        return sock

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        """The stream of an accepted socket."""
        return SocketStream(tuned(sock))

    def close(self) -> None:
        """Stop listening."""
        shut_listener(self._sock)

    def forked(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._sock.close()


def connect(place: str, deadline: float) -> Stream:
    """Dial. OSError where nobody listens (yet)."""
    return SocketStream(connect_socket(place, deadline))


def connect_socket(place: str, deadline: float) -> socket.socket:
    return tuned(socket.create_connection(split(place), max(0.001, deadline - time.monotonic())))


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def split(place: str) -> tuple[str, int]:
    """Host and port. ValueError for anything else."""
    parts = urlsplit(f"//{place}")
    if not parts.hostname or parts.port is None:
        raise ValueError(f"{place!r} is no host:port")
    return parts.hostname, parts.port


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

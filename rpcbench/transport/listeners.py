"""Listening sockets: TCP, and unix sockets for the processes of one user on one host.

Guarantees
- A TCP listener gives out only connections whose dialler has shown that it has the secret (see `lobby`).
- `close` ends `accept`, on every system, and nothing else does. While the process has no descriptor left, peers wait in
  the backlog; that is logged once, and `accept` is retried a few times a second.
- A unix socket accepts processes of the same user only, even if they have the secret.

TCP addresses are "host:port", an IPv6 host in brackets. A port of 0 takes a free one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rpcbench.base.conditions import Event
from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport import shared_memory
from rpcbench.transport.base import Stream
from rpcbench.transport.lobby import SHORTAGES, Lobby, Refusals
from rpcbench.transport.preambles import WELCOME, Preambles
from rpcbench.transport.sockets import SocketStream

_PAUSE = 0.2
"""Seconds until the next try: the system has no event for a descriptor that becomes free."""
_log = logging.getLogger("rpcbench")


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


class SocketListener:
    """The owner of a listening socket."""

    def __init__(self, sock: socket.socket) -> None:
        # `_wait_readable` waits for it: for as long as it takes, and no longer than until `close`
        sock.setblocking(False)
        self._sock = sock
        self._ending, self._end = socket.socketpair()  # `close` writes to the second one, which wakes `_wait_readable`
        self._end.setblocking(False)
        self._waking = threading.Lock()  # held where `close` uses `_end`, lest it writes to a descriptor used anew
        self._closed = Event()
        self._turn = threading.Lock()  # held in `accept`, whose thread then closes the socket, as it may wait for it
        self._short = False  # whether a shortage was logged that still lasts

    def accept(self) -> socket.socket | None:
        """Return the next peer's socket, not authenticated; None once the listener is closed. One thread at a time."""
        with self._turn:
            while not self._closed.is_set():
                try:
                    sock = self._next_socket()
                except OSError as error:  # closed, short of a resource, or the peer has closed its connection already
                    if not self._closed.wait(_PAUSE):
                        self._warn_of_shortage(error)
                else:
                    self._short = False
                    return sock
            self._close_sockets()
            return None

    def _next_socket(self) -> socket.socket:
        self._wait_readable(self._sock, None)
        sock, _ = self._sock.accept()
        sock.setblocking(True)  # whatever the mode of the listening socket and the program's default
        return sock

    def _wait_readable(self, source: _HasDescriptor, seconds: float | None) -> None:
        """Wait until `source` is readable, for `seconds` at most. OSError once `close` is called."""
        poll = select.poll()  # unlike epoll it also wakes where the program closes all descriptors meanwhile
        poll.register(source, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._ending.fileno() in ready:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _close_sockets(self) -> None:
        """Close the socket, and end connections that `accept` has not returned. Idempotent."""
        for sock in (self._sock, self._ending):
            with contextlib.suppress(OSError):  # a program that closes all descriptors has closed it
                sock.close()

    def _warn_of_shortage(self, error: OSError) -> None:
        if error.errno in SHORTAGES and not self._short:
            self._short = True
            _log.warning(
                "no process can connect to this one for now (%s): close files, or allow more with `ulimit -n`; "
                "processes that connect meanwhile have to wait",
                error.strerror,
            )

    def close(self) -> None:
        self._closed.set()
        with self._waking, contextlib.suppress(OSError), self._end:  # a second call finds it closed
            self._end.send(b"\0")  # not `shutdown` of the listening socket, which some systems refuse
        if self._turn.acquire(blocking=False):
            try:
                self._close_sockets()
            finally:
                self._turn.release()

    def after_fork(self) -> None:
        for sock in (self._sock, self._ending, self._end):
            sock.close()


class TcpListener(SocketListener):
    """A listening socket on one interface. NotConnectedError for an address in use, or not of this host."""

    def __init__(self, place: str, secret: bytes, refusals: Refusals) -> None:
        host, port = split_address(place)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the port of a world that has just ended
            sock.bind(where)
            sock.listen(4096)  # large: a member must not wait for room in it while strangers connect
            super().__init__(sock)
        except OSError as error:
            sock.close()
            raise NotConnectedError(_listen_error_text(place, error)) from error
        self.port: int = sock.getsockname()[1]
        self._lobby = Lobby(sock, Preambles(secret), refusals)

    def _next_socket(self) -> socket.socket:
        while (sock := self._lobby.next_admitted()) is None:
            self._wait_readable(self._lobby, self._lobby.seconds_left())
        return sock

    def _close_sockets(self) -> None:
        self._lobby.close()
        super()._close_sockets()

    def open_stream(self, sock: socket.socket, deadline: float) -> Stream:
        return SocketStream(disable_delay(sock))

    def after_fork(self) -> None:
        self._lobby.after_fork()
        super().after_fork()


def _listen_error_text(place: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"another process already listens on {place}; where that is torch's own process group, give "
            "RPCBENCH_MASTER_PORT another port, the same for all workers"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place} is not an address of this host: set RPCBENCH_BIND to one that is"
    return f"this process cannot listen on {place}: {error.strerror}"


def connect_tcp(place: str, preamble: bytes, deadline: float) -> Stream:
    """Dial a TCP address. OSError where no process listens (yet), AuthenticationError where the preamble is refused."""
    return SocketStream(connect_socket(place, preamble, deadline))


def connect_socket(place: str, preamble: bytes, deadline: float) -> socket.socket:
    sock = disable_delay(socket.create_connection(split_address(place), max(0.001, deadline - time.monotonic())))
    try:
        sock.sendall(preamble)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if not (answer := sock.recv(len(WELCOME))):
            raise AuthenticationError("the peer ended the handshake: does it use another secret?")
        if answer != WELCOME:
            raise AuthenticationError(f"another service answers at {place}: is that the right address?")
    except BaseException:
        sock.close()
        raise
    return sock


def disable_delay(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Nagle's algorithm would delay small messages
    return sock


def is_loopback(host: str) -> bool:
    """Return whether an address is on the loopback interface, which other hosts cannot reach."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_towards(host: str, port: int) -> str:
    """Return the address of the interface that routes to `host`. OSError where none does. Sends no packet."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # for a datagram socket this only selects the route
        name: str = probe.getsockname()[0]
        return name


def split_address(place: str) -> tuple[str, int]:
    """Return host and port of "host:port". ValueError for anything else."""
    parts = urlsplit(f"//{place}")
    if not parts.hostname or parts.port is None:
        raise ValueError(f"{place!r} is not host:port")
    return parts.hostname, parts.port


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_BUFFER = 1 << 20  # bytes of a unix socket's send and receive buffers
_CRED = struct.Struct("3i")  # struct ucred: pid, uid, gid


class LocalStream(SocketStream):
    """A stream between two processes that can share memory."""

    def share_memory(self, deadline: float, last: bool) -> None:
        self.store = shared_memory.exchange_memory(self._sock, deadline, last)


class LocalListener(SocketListener):
    """A listening unix socket in a directory that only its owner can enter."""

    def __init__(self, path: Path) -> None:
        _clear_stale(path)
        self.path = path
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        path.chmod(0o600)  # before `listen`: until then no process can connect
        sock.listen(128)
        super().__init__(sock)

    def open_stream(self, sock: socket.socket, deadline: float) -> LocalStream:
        """Return the stream of an accepted socket. AuthenticationError for a process of another user."""
        check_peer_user(sock)
        return _make_local_stream(sock)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        super().close()


def check_peer_user(sock: socket.socket) -> None:
    """Raise AuthenticationError if the peer of a unix socket is a process of another user, where the system tells."""
    if hasattr(socket, "SO_PEERCRED"):
        _, uid, _ = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
        if uid != os.getuid():
            raise AuthenticationError(f"a process of user {uid} tried to connect")


def connect_unix(path: str, deadline: float) -> LocalStream:
    """Dial a unix socket. OSError where no process listens (yet)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return _make_local_stream(sock)


def _make_local_stream(sock: socket.socket) -> LocalStream:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return LocalStream(sock)


def _clear_stale(path: Path) -> None:
    """Remove the socket file of a process that has died; NotConnectedError where a process still listens on it."""
    if is_socket_listening(path):
        raise NotConnectedError(f"another process already listens on {path}: does this worker run already?")
    path.unlink(missing_ok=True)


def is_socket_listening(path: Path) -> bool:
    """Return whether a process listens on a socket file; False where there is no file. Does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # so many wait for the process that there is room for no more
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True

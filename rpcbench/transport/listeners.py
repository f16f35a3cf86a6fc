"""Listening sockets: TCP, and unix sockets for the processes of one user on one host.

Guarantees
- `accept` ends by `close`, and by nothing else. Where the system has no descriptor left for a peer, peers wait in the
  backlog until there is one again; that is logged once, and tried a few times a second.
- A unix socket lets in processes of the same user only, whatever they know.

TCP addresses are "host:port", an IPv6 host in brackets. A port of 0 takes a free one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import struct
import time
from pathlib import Path
from urllib.parse import urlsplit

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport.base import Stream
from rpcbench.transport.sockets import SocketStream

_PAUSE = 0.2
"""Seconds until the next try: nothing announces a descriptor that is free again."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("rpcbench")


class SocketListener:
    """Owns a socket that already listens."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._closed = Flag()
        self._short = False

    def accept(self) -> socket.socket | None:
        """The next peer's socket, not yet looked at; None once the listener is closed. One thread at a time."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:  # closed, or short of something, or that one peer has gone again
                if self._closed.wait(_PAUSE):
                    return None
                self._note(error)
            else:
                self._short = False
                return sock

    def _note(self, error: OSError) -> None:
        if error.errno in _SHORTAGES and not self._short:
            self._short = True
            _log.warning(
                "nobody can connect to this process for now (%s): close files, or allow more with `ulimit -n`; "
                "those who connect meanwhile have to wait",
                error.strerror,
            )

    def close(self) -> None:
        """Stop listening: whoever waits in `accept` comes back."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def forked(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._sock.close()


class TcpListener(SocketListener):
    """A listening socket on one interface. NotConnectedError where the address is taken or no address of this host."""

    def __init__(self, place: str) -> None:
        host, port = split_address(place)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # The port of a world that has just ended is free for the next one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(1024)  # strangers may fill it: see `runtime.acceptor`
        except OSError as error:
            sock.close()
            raise NotConnectedError(_refusal(place, error)) from error
        super().__init__(sock)
        self.port: int = sock.getsockname()[1]

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        """The stream of an accepted socket."""
        return SocketStream(tuned(sock))


def _refusal(place: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"another process already listens on {place}; where that is torch's own process group, give "
            "RPCBENCH_MASTER_PORT another port, the same for all workers"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place} is no address of this host: set RPCBENCH_BIND to one that is"
    return f"this process cannot listen on {place}: {error.strerror}"


def connect_tcp(place: str, deadline: float) -> Stream:
    """Dial. OSError where nobody listens (yet)."""
    return SocketStream(connect_socket(place, deadline))


def connect_socket(place: str, deadline: float) -> socket.socket:
    return tuned(socket.create_connection(split_address(place), max(0.001, deadline - time.monotonic())))


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def is_loopback(host: str) -> bool:
    """Whether a host is this one, and cannot be reached from another."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_towards(host: str, port: int) -> str:
    """The address of this host on the interface that reaches `host`. OSError where none does. Sends nothing."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        name: str = probe.getsockname()[0]
        return name


def split_address(place: str) -> tuple[str, int]:
    """Host and port. ValueError for anything else."""
    parts = urlsplit(f"//{place}")
    if not parts.hostname or parts.port is None:
        raise ValueError(f"{place!r} is no host:port")
    return parts.hostname, parts.port


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_BUFFER = 1 << 20
_CRED = struct.Struct("3i")


class LocalStream(SocketStream):
    """A stream between two processes that can share memory."""

    def share(self, deadline: float, last: bool) -> None:
        from rpcbench.transport import shared_memory  # needs what Windows does not have

        self.store = shared_memory.exchange(self._sock, deadline, last)


class LocalListener(SocketListener):
    """A unix socket in a directory of its owner alone."""

    def __init__(self, path: Path) -> None:
        _clear_stale(path)
        self.path = path
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(128)
        super().__init__(sock)

    def open(self, sock: socket.socket, deadline: float) -> LocalStream:
        """The stream of an accepted socket. AuthenticationError where it is another user's."""
        if hasattr(socket, "SO_PEERCRED"):
            _same_user(sock)
        return _stream(sock)

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self.path.unlink(missing_ok=True)
        super().close()


def connect_unix(path: str, deadline: float) -> LocalStream:
    """Dial. OSError where nobody listens (yet)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return _stream(sock)


def _stream(sock: socket.socket) -> LocalStream:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return LocalStream(sock)


def _same_user(sock: socket.socket) -> None:
    _, uid, _ = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    if uid != os.getuid():
        raise AuthenticationError(f"a process of user {uid} tried to connect")


def _clear_stale(path: Path) -> None:
    """Remove the socket file of a process that died; NotConnectedError where somebody still listens on it."""
    if somebody_listens(path):
        raise NotConnectedError(f"another process already listens on {path}: does this worker run already?")
    path.unlink(missing_ok=True)


def somebody_listens(path: Path) -> bool:
    """Whether a socket file, if there is one, is that of a process that lives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True

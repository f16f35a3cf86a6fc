"""Unix sockets: processes of one user on one host. Only such processes are let in, whatever they know."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport.listener import SocketListener
from rpcbench.transport.sockets import SocketStream

_BUFFER = 1 << 20
_CRED = struct.Struct("3i")


class LocalStream(SocketStream):
    """A stream between two processes that can share memory."""

    def share(self, deadline: float, last: bool) -> None:
        from rpcbench.transport import shared  # needs what Windows does not have

        self.store = shared.exchange(self._sock, deadline, last)


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


def connect(path: str, deadline: float) -> LocalStream:
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

"""A listening socket, of whatever kind, and the one place where peers are accepted.

Guarantees: `accept` ends by `close`, and by nothing else. Where the system has no descriptor left for a peer, the peers
wait at the door until there is one again; that is said once, and tried a few times a second.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket

from rpcbench.base.conditions import Flag

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

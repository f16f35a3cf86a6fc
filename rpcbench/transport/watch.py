"""Tells when a socket has something to read: to the thread that is about to read it, or to one that stands by.

Who stands by is woken only while the watch is armed. To disarm it costs one step and wakes nobody, so others may read
in between without a change of threads. One event wakes once: then the watch is to be armed again.
"""

from __future__ import annotations

import functools
import select
import socket

from rpcbench.transport.bells import Ear
from rpcbench.transport.eager import Eager, asked_for

_DISARMED = getattr(select, "EPOLLONESHOT", 0)
_ARMED = getattr(select, "EPOLLIN", 0) | _DISARMED


class Watch:
    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._fd = sock.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.eager = Eager(functools.partial(self._poll.poll, 0)) if asked_for() else None
        self._armed = select.epoll()
        self._armed.register(self._fd, _DISARMED)
        self._ear: Ear | None = None
        self._both = self._poll

    def hear(self, ear: Ear) -> None:
        """Who waits for something to read may also listen for this peer's bell."""
        self._ear, self._both = ear, select.poll()
        for descriptor in (self._fd, ear.descriptor):
            self._both.register(descriptor, select.POLLIN)

    def readable(self, seconds: float, eager: bool = False) -> bool:
        """Whether a read would not wait, now or in that time. `eager`: looked for eagerly, if the user wants that."""
        if not eager or self.eager is None:
            return bool(self._poll.poll(seconds * 1000))
        if self.eager.soon():
            return True
        found = bool(self._poll.poll(seconds * 1000))
        self.eager.came()
        return found

    def listen(self, seconds: float, ear: Ear) -> bool | None:
        """As `readable`, but that a bell ends the wait, too: None where that is all. `ear`: of this connection; where
        it is of another one, or somebody else waits there, there is no wait."""
        if ear is not self._ear or not ear.turn.acquire(blocking=False):
            return False
        try:
            found = self._both.poll(seconds * 1000)
            if found and (ear.descriptor, select.POLLIN) in found:
                ear.heard()
                return True if len(found) > 1 else None
            return bool(found)
        finally:
            ear.turn.release()

    def await_some(self) -> None:
        """Wait until a read would not. Who waits in a read of a unix socket is woken also when the peer has read."""
        self._poll.poll()

    def arm(self) -> None:
        """Wake who stands by as soon as there is something to read, or the end."""
        self._armed.modify(self._fd, _ARMED)

    def disarm(self) -> None:
        self._armed.modify(self._fd, _DISARMED)  # an end still wakes, once

    def wait(self) -> None:
        """Stand by. It may have been for nothing."""
        self._armed.poll()

    def close(self) -> None:
        """Once nobody stands by, and before the socket is closed."""
        self.closed = True
        self._armed.close()


def watch(sock: socket.socket) -> Watch | None:
    """None where this system has no way to."""
    return Watch(sock) if hasattr(select, "epoll") else None

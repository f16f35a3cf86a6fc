"""A connection to oneself: messages go round through memory, in order, with the same copies as through a socket."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from rpcbench.wire.framing import Frame
from rpcbench.wire.messages import Body


class MemoryConnection:
    """Hands one message after the other to `receive`, on a thread of `later`, never on the sender's own."""

    def __init__(self, receive: Callable[[Frame], None], later: Callable[[Callable[[], None]], object]) -> None:
        self._receive = receive
        self._later = later
        self._lock = threading.Lock()
        self._frames: collections.deque[Frame] = collections.deque()
        self._busy = False

    def send(self, control: bytes, body: Body, may_wait: bool, hold: bool = False) -> None:
        copied = Body(body.payload, body.tensors, [bytearray(buffer) for buffer in body.buffers])
        with self._lock:
            self._frames.append(Frame(control, copied))
            if self._busy:
                return
            self._busy = True
        self._later(self._deliver)

    def _deliver(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._receive(frame)
            except BaseException:
                self._later(self._deliver)  # the next messages are not to blame
                raise

    def _next(self) -> Frame | None:
        with self._lock:
            self._busy = bool(self._frames)
            return self._frames.popleft() if self._frames else None

    def flush(self) -> None:
        """Nothing is held here."""

    def await_room(self, _seconds: float | None = None) -> bool:
        """There always is."""
        return True

    def close(self) -> None:
        """Nothing to end."""

"""A connection to oneself: messages go round through memory, with the same copies as through a socket."""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.wire.body import Body
from rpcbench.wire.frames import Frame


class MemoryConnection:
    """Hands each message to `receive` on a thread of `later`, never on the sender's own."""

    def __init__(self, receive: Callable[[Frame], None], later: Callable[[Callable[[], None]], object]) -> None:
        self._receive = receive
        self._later = later

    def send(self, control: bytes, body: Body, may_wait: bool) -> None:
        copied = Body(body.payload, body.tensors, [bytearray(buffer) for buffer in body.buffers])
        self._later(lambda: self._receive(Frame(control, copied)))

    def await_room(self) -> None:
        """There always is."""

    def close(self) -> None:
        """Nothing to end."""

"""What the agent needs of a connection, and the one seam between the machines and the wire.

A `Connection` moves whole messages to one authenticated peer. A `Link` stands between an agent and all of its
connections, on every transport: recording, faults, holding and reordering of messages attach there, by overriding
`outgoing` and `incoming`.

`MemoryConnection` is a connection of an agent to itself: messages go through memory, in order, with the same copies as
through a socket.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rpcbench.transport.shared_memory import BufferStore
from rpcbench.wire.framing import Frame, Parts
from rpcbench.wire.messages import Body, Message


class Stream(Protocol):
    """Bytes to and from one peer. One thread reads and one writes at a time, which may be different ones."""

    store: BufferStore
    """Where large buffers go."""

    @property
    def pending(self) -> bool:
        """Whether something has come that the system does not tell of any more."""
        ...

    def share(self, deadline: float, last: bool) -> None:
        """Share memory with the peer, which has proved who it is, where that is possible. `last`: whether this side has
        the last word. OSError past the deadline."""
        ...

    def read_into(self, target: memoryview, /) -> int:
        """Put the next bytes into `target`; how many, 0 at the end of the stream.

        Waits until something has come; BlockingIOError where that makes no whole byte yet.
        """
        ...

    def write(self, parts: Parts, may_wait: bool) -> None:
        """Write all of `parts`, in order, and empty the list.

        BlockingIOError where that would have to wait and `may_wait` is False; another call, with what is left in
        `parts`, goes on from there.
        """
        ...

    def limit(self, seconds: float | None) -> None:
        """From now on a single read or write takes so long at most, then TimeoutError; None: as long as it takes."""
        ...

    def silence(self) -> float | None:
        """Seconds since the peer's host has last acknowledged anything; None where this system does not tell."""
        ...

    def shut(self) -> None:
        """End both directions: whoever reads or writes comes back. May be called again."""
        ...

    def release(self) -> None:
        """Give the descriptor back, once nobody reads or writes."""
        ...


class Connection(Protocol):
    """One authenticated peer. `send` may be called from any thread."""

    def send(self, control: bytes, body: Body, may_wait: bool, hold: bool = False) -> None:
        """Queue or write one message. NotConnectedError once the connection has ended.

        With `may_wait` a caller far ahead of the peer is held back; without it the call never blocks. With `hold` the
        message may wait until another one goes, or until somebody calls `flush`.
        """
        ...

    def flush(self) -> None:
        """Write what is held, unless somebody is at it. Never blocks."""
        ...

    def await_room(self, seconds: float | None = None) -> bool:
        """Wait while the peer is far behind, or so many seconds. Whether there is room. Ctrl-C ends the wait alone."""
        ...

    def close(self) -> None:
        """Write out what is queued, then end the connection. The peer reads an end of stream."""
        ...


Deliver = Callable[[int, int, Message], None]
"""(source, number, message): hands a message that arrived to the agent."""
Transmit = Callable[[int, int, Message, bool], None]
"""(receiver, number, message, may_wait): puts a message on its connection."""


class Link:
    """Passes everything on at once. Subclasses may hold, drop, repeat, reorder or record."""

    lossy = False
    """Whether messages may be lost without the connection breaking: then those not acknowledged go again."""
    retry_seconds = 1.0
    """How long an acknowledgement may take before a message that may go again does so; later tries wait longer."""

    def __init__(self) -> None:
        self._transmit: Transmit | None = None
        self._deliver: Deliver | None = None

    def attach(self, transmit: Transmit, deliver: Deliver) -> None:
        self._transmit, self._deliver = transmit, deliver

    def outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        """A message is on its way out."""
        assert self._transmit is not None
        self._transmit(to, seq, message, may_wait)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        """A message has come in."""
        assert self._deliver is not None
        self._deliver(source, seq, message)

    def closed(self) -> None:
        """The agent has stopped."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, for the deadlines of an agent that begins with this link."""


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

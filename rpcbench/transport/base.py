"""The interface of streams, the interceptor of all messages of an agent, and an agent's connection to itself.

A `Link` intercepts all messages between an agent and its connections, on every transport: recording, faults, holding
and reordering are subclasses that override `handle_outgoing` and `handle_incoming`. On a `MemoryConnection` messages
pass through memory, in order, and are copied as a socket would copy them.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rpcbench.transport.shared_memory import BufferStore
from rpcbench.wire.framing import Frame, Parts
from rpcbench.wire.messages import Body, Message

T = TypeVar("T")


class Stream(Protocol):
    """Bytes to and from one peer. At a time one thread reads and one thread writes; they may differ."""

    store: BufferStore
    """The memory for large buffers."""

    @property
    def pending(self) -> bool:
        """Whether received bytes are buffered in this process, which no poll of the descriptor reports."""

    def share_memory(self, deadline: float, last: bool) -> None:
        """Share memory with the peer, if possible. `last`: this side sends the last word. OSError past the deadline."""

    def read_into(self, target: memoryview, /) -> int:
        """Wait for the next bytes, put them into `target` and return their count: 0 at the end of the stream.
        BlockingIOError if only a part of an encrypted record has come."""

    def write(self, parts: Parts, may_wait: bool) -> None:
        """Write all of `parts`, in order, and empty the list. BlockingIOError where that would have to wait and
        `may_wait` is False; a later call with the rest, which is left in `parts`, continues."""

    def set_time_limit(self, seconds: float | None) -> None:
        """Limit each later read and write to `seconds`, after which it raises TimeoutError; None: no limit."""

    def silence_seconds(self) -> float | None:
        """Return the seconds since the peer's host last acknowledged any data; None where the system cannot tell."""

    def shut_down(self) -> None:
        """End both directions: pending reads and writes return. Idempotent."""

    def close_descriptor(self) -> None:
        """Close the descriptor, once no thread reads or writes."""


Deliver = Callable[[int, int, Message], None]
"""(source, sequence number, message): passes a received message to the agent."""
Transmit = Callable[[int, int, Message, bool], None]
"""(receiver, sequence number, message, may_wait): sends a message on its connection."""


class Link:
    """An interceptor of messages that passes all of them on. Subclasses may hold, drop, repeat, reorder or record."""

    lossy = False
    """Whether messages may be lost while the connection stays up: then unacknowledged messages are retransmitted."""
    retry_seconds = 1.0
    """Seconds without an acknowledgement before the first retransmission; later ones back off."""

    def __init__(self) -> None:
        self._transmit: Transmit | None = None
        self._deliver: Deliver | None = None

    def attach_callbacks(self, transmit: Transmit, deliver: Deliver) -> None:
        self._transmit, self._deliver = transmit, deliver

    def handle_outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        """Handle a message that the agent sends."""
        assert self._transmit is not None
        self._transmit(to, seq, message, may_wait)

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        """Handle a message that was received."""
        assert self._deliver is not None
        self._deliver(source, seq, message)

    def release_resources(self) -> None:
        """Release resources: the agent has stopped."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, for the deadlines of an agent that starts with this interceptor."""


class SerialQueue(Generic[T]):
    """A queue that passes its items, one at a time and in order, to `handle` on a thread of `spawn`."""

    def __init__(self, handle: Callable[[T], object], spawn: Callable[[Callable[[], None]], object]) -> None:
        self._handle = handle
        self._spawn = spawn
        self._lock = threading.Lock()  # guards the two below
        self._items: collections.deque[T] = collections.deque()
        self._busy = False  # whether a thread drains the queue, or is about to

    def put(self, item: T) -> None:
        with self._lock:
            self._items.append(item)
            if self._busy:
                return
            self._busy = True
        self._spawn(self._handle_items)  # never on this thread, which may hold locks that `handle` takes

    def _handle_items(self) -> None:
        while (item := self._take_next()) is not None:
            try:
                self._handle(item)
            except BaseException:
                self._spawn(self._handle_items)  # the next items are still handled; the pool reports the error
                raise

    def _take_next(self) -> T | None:
        with self._lock:
            self._busy = bool(self._items)
            return self._items.popleft() if self._items else None


class MemoryConnection(SerialQueue[Frame]):
    """A connection of an agent to itself."""

    def send(self, control: bytes, body: Body, may_wait: bool, hold: bool = False) -> None:
        """Queue a message, as `StreamConnection.send` does, but never wait and hold nothing back."""
        # The receiver owns its buffers, and the sender may change its tensors once `send` returns.
        copied = Body(body.payload, body.tensors, [bytearray(buffer) for buffer in body.buffers])
        self.put(Frame(control, copied))

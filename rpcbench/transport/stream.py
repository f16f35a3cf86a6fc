"""A connection over any stream of bytes: whole messages, from any thread, in both directions at once.

Rules
- One thread at a time reads a connection (`read_frames`). Before it waits for a write, it releases the read lock
  (`release_duties`).
- Any thread may send. The thread that finds no writer writes its message, and then those that other threads have
  queued meanwhile. A thread that must not wait passes an unfinished write to a helper thread. So two peers that send
  each other more than the stream holds always have a reader.
- Backpressure: a connection is full while more than `_HELD_BACK` bytes are queued. A call waits for room at most until
  its deadline (`wait_for_room`), and then for no write; other senders that may wait do so until the peer reads, or the
  connection ends.
- Small messages are written between the chunks of large ones.
- A message with `hold` is written right after the next message, or by `flush`: one write, and the peer wakes up once.
- A descriptor is closed only when no thread reads or writes it: its number may be another file's from then on.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from rpcbench.base.errors import NotConnectedError, ProtocolError
from rpcbench.base.futures import Waits, release_duties
from rpcbench.transport.base import Stream
from rpcbench.transport.sockets import MOST_PARTS, SocketWaiter
from rpcbench.wire.framing import (
    BEAT,
    END,
    Decoder,
    Frame,
    Limits,
    Parts,
    check_limits,
    encode_frame,
    encode_lent,
    encode_returned,
    encode_small,
    raw_buffers,
)
from rpcbench.wire.messages import Body

_HELD_BACK = 64 << 20  # queued bytes from which on senders wait
_MOST_HELD = 64  # parts kept back at most
_CLOSE_SECONDS = 5.0


class ConnectionEnd(NamedTuple):
    """How a connection ended. `broken`: neither side has closed it, so the peer may still run."""

    reason: str
    broken: bool


class TrafficCounts(NamedTuple):
    """The bytes that went over a connection, those in shared memory included."""

    sent: int = 0
    received: int = 0
    lent: int = 0  # of those sent, the bytes in shared memory


class StreamConnection:
    """A connection to one authenticated peer over a stream. `helper` runs a job on another thread."""

    def __init__(self, stream: Stream, limits: Limits, helper: Callable[[Callable[[], None]], object]) -> None:
        self._stream = stream
        self._store = stream.store
        self._limits = limits
        self._sure = limits.safe_size  # frames up to this size need no check
        self._decoder = Decoder(limits, self._store)
        self._helper = helper
        self._state = threading.Lock()
        self._drained = threading.Condition(self._state)
        self._small: collections.deque[Parts] = collections.deque()  # whole frames, written before any chunk
        self._large: collections.deque[Iterator[Parts]] = collections.deque()  # chunks of messages, in turn
        self._held: Parts = []  # frames kept back until the next write
        self._queued = 0  # bytes in `_small` and `_large`
        self._writing = False  # a thread writes: the only one that may touch the stream's sending side
        self.ended = False
        self._waiters = 0  # threads that wait for `_drained`; without any, writers notify none
        self._numbers = itertools.count(1)
        self.bytes_received = 0  # bytes read from the stream
        self.said = 0  # bytes written to the stream, or queued
        self.silence = stream.silence_seconds
        self.watch: SocketWaiter | None = getattr(stream, "watch", None)  # None where the system has no epoll
        # Receives on a waiting thread, at most until nothing has come for some seconds; None where no thread may.
        self.receive_until: Callable[[Waits, float], object] | None = None

    # -- writing
    def send(self, control: bytes, body: Body, may_wait: bool, hold: bool = False) -> None:
        """Queue or write one message. NotConnectedError once the connection has ended. With `may_wait` the call applies
        backpressure: it blocks while the peer is far behind. Without it the call never blocks. With `hold` the message
        may be kept back until the next message or `flush`."""
        none_to_return = self._store.none_to_return()
        # The short path of most messages: no buffer, no block to return, no queue. It takes the lock once.
        if none_to_return and not body.buffers and not hold:
            frame = encode_small(control, body)
            if len(frame) > self._sure:
                check_limits(control, body, self._limits)
            with self._state:
                alone = not (self._writing or self._held or self.ended)
                if alone:
                    self._writing = True
                    self.said += len(frame)
            if alone:
                self._write_queued([frame], may_wait)
            else:
                self._send_or_queue([frame], None, None, body, may_wait, hold)
            return
        first, chunks = self._encode_message(control, body)
        self._send_or_queue(first, chunks, None if none_to_return else self._encode_returns(), body, may_wait, hold)

    def _send_or_queue(
        self,
        first: Parts,
        chunks: Iterator[Parts] | None,
        owed: Parts | None,
        body: Body,
        may_wait: bool,
        hold: bool,
    ) -> None:
        if may_wait and self.is_full:  # read without the lock: a stale value only shifts the limit a little
            self.wait_for_room()
        with self._state:
            if self.ended:
                raise NotConnectedError("the connection has ended")
            if owed is not None:
                self._held += owed
            self.said += len(first[0]) if len(first) == 1 else _size_of_parts(first)
            parts: Parts = []
            if hold:
                self._held += first
            elif self._small or self._writing:
                self._small.append(first)
                self._queued += _size_of_parts(first)
            else:
                parts = first
                if self._held:
                    parts = [b"".join(parts + self._held)] if len(parts) == 1 else parts + self._held
                    self._held = []
            if chunks is not None:
                self._large.append(chunks)
                size = sum(buffer.nbytes for buffer in raw_buffers(body))
                self._queued += size
                self.said += size
            if self._writing or (hold and len(self._held) < _MOST_HELD):
                return
            self._writing = True
        self._write_queued(parts, may_wait)

    def _encode_message(self, control: bytes, body: Body) -> tuple[Parts, Iterator[Parts] | None]:
        check_limits(control, body, self._limits)
        if not body.buffers:
            return [encode_small(control, body)], None
        places = self._store.copy_buffers(raw_buffers(body))
        if places is not None:
            return [encode_lent(control, body, places)], None
        first, chunks = encode_frame(next(self._numbers) & 0xFFFFFFFF, control, body)
        return first, chunks if len(first) == 1 else None

    def _encode_returns(self) -> Parts:
        places = self._store.blocks_to_return()
        return [encode_returned(places)] if places else []

    def free_idle_memory(self) -> None:
        """Return idle memory to the peer and to the system. Never blocks."""
        self._store.free_idle_memory()
        owed = self._encode_returns()
        with self._state:
            self._held += owed
        self.flush()

    def flush(self) -> None:
        """Write the messages kept back, unless a thread is writing already. Never blocks."""
        with self._state:
            if self.ended or self._writing or not self._held:
                return
            self._writing = True
        self._write_queued([], False)

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless a thread is writing. Never blocks."""
        with self._state:
            if self.ended or self._writing:  # any bytes are as good a sign of life
                return
            self._writing = True
        self._write_queued([BEAT], False)

    @property
    def is_full(self) -> bool:
        """Whether so many bytes are queued that senders which may wait do so."""
        return self._queued > _HELD_BACK

    def wait_for_room(self, seconds: float | None = None) -> bool:
        """Wait for room or the end, at most `seconds`; return whether either came. Ctrl-C interrupts the wait only."""
        if not self.is_full:
            return True
        release_duties()  # the peer may wait for this process to read before it reads
        with self._state:
            return self._wait_until(lambda: self.ended or not self.is_full, seconds)

    def _wait_until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait, with the lock held, until the condition holds or `seconds` have passed; return whether it holds."""
        self._waiters += 1
        try:
            return self._drained.wait_for(condition, seconds)
        finally:
            self._waiters -= 1

    def _write_queued(self, parts: Parts, may_wait: bool, resumes: bool = False) -> None:
        """Write `parts`, then all that is queued. Only for the thread that set `_writing`, or its helper (resumes)."""
        try:
            if not resumes:
                parts = parts or self._next_parts()  # a caller without parts writes the messages kept back
            while parts or resumes:
                resumes = False
                try:
                    self._stream.write(parts, False)
                except BlockingIOError:  # `parts` now holds the rest, or the stream itself does, as that of TLS
                    if not may_wait:
                        self._helper(partial(self._write_queued, parts, True, True))
                        return
                    release_duties()
                    self._stream.write(parts, True)
                parts = self._next_parts()
        except BaseException as error:  # a part of a message may have been sent: no other can follow it
            self.break_connection()
            with self._state:
                self._writing = False
                self._drained.notify_all()
            if not isinstance(error, OSError):  # the reader reports a broken connection
                raise

    def _next_parts(self) -> Parts:
        """Return the next parts to write: small messages, else those kept back, else a chunk; without any, stop."""
        with self._state:
            parts: Parts = []
            if self._small:
                parts = self._batch_small()
            elif self._held:
                parts, self._held = self._held, []  # a new list, as the writer uses the old one without the lock
            elif self._large:
                parts = self._next_chunk()
            if not parts:
                self._writing = False
            if self._waiters:
                self._drained.notify_all()
        return parts

    def _batch_small(self) -> Parts:
        parts = self._small.popleft()
        while self._small and len(parts) + len(self._small[0]) <= MOST_PARTS:
            parts += self._small.popleft()
        self._queued -= _size_of_parts(parts)
        return parts

    def _next_chunk(self) -> Parts:
        while self._large:
            source = self._large.popleft()
            chunk = next(source, None)
            if chunk is not None:
                self._large.append(source)  # round robin: no large message waits for the whole of another one
                self._queued -= len(chunk[1])
                return chunk
        return []

    def traffic_counts(self) -> TrafficCounts:
        """Return the bytes sent and received so far."""
        lent = self._store.lent
        return TrafficCounts(self.said + lent, self.bytes_received + self._store.borrowed, lent)

    # -- reading
    def read_frames(self) -> list[Frame] | ConnectionEnd:
        """Return the next messages, perhaps none yet, or how the connection has ended. One thread at a time."""
        try:
            count = self._stream.read_into(self._decoder.receive_buffer())
            self.bytes_received += count
            if count:
                frames = self._decoder.decode_received(count)
                return self._read_buffered(frames) if self._stream.pending else frames
            how = "closed" if self._decoder.is_idle else "closed in mid-message"
            ending = ConnectionEnd(f"its connection {how}", not self._decoder.over)
        except BlockingIOError:
            return []
        except OSError as error:
            ending = ConnectionEnd(f"its connection broke ({error.strerror or error})", not self._decoder.over)
        except ProtocolError as error:
            # Not `_end` here: the peer must not see the end before this process has recorded it, or it would redial.
            return ConnectionEnd(f"it sent invalid data ({error})", False)
        self.break_connection()
        return ending

    def _read_buffered(self, frames: list[Frame]) -> list[Frame]:
        """Read all that is buffered in this process: a wait for the descriptor would not report it."""
        with contextlib.suppress(BlockingIOError):
            while self._stream.pending and (count := self._stream.read_into(self._decoder.receive_buffer())):
                self.bytes_received += count
                frames += self._decoder.decode_received(count)
        return frames  # the next `read_frames` returns the end of the stream, if there is one

    # -- ends
    def close(self, patience: float | None = None) -> None:
        """Write what is queued, within `patience` seconds, announce the end to the peer, and end the connection."""
        self.flush()
        with self._state:
            patience = _CLOSE_SECONDS if patience is None else patience
            free = self._wait_until(lambda: self.ended or not self._writing, patience)
            farewell = free and not self.ended  # END must not be written into the middle of a message
            self._writing |= farewell
        if farewell:
            self._write_queued([END], False)
        self.break_connection()

    def break_connection(self) -> None:
        """End the connection as if it had broken."""
        with self._state:
            self.ended = True
            self._small.clear()
            self._held.clear()
            self._large.clear()
            self._drained.notify_all()
        self._stream.shut_down()  # wakes the reader, which returns the end from `read_frames`

    def close_descriptor(self) -> None:
        """Close the descriptor; only after `read_frames` has returned the end."""
        with self._state:
            self._wait_until(lambda: not self._writing, _CLOSE_SECONDS)  # `shut_down` ends a helper's write
        self._store.release_memory()
        self._stream.close_descriptor()

    def after_fork(self) -> None:
        """Close the descriptor in a forked child, which must not keep the parent's connection open."""
        self._stream.close_descriptor()


def _size_of_parts(parts: Parts) -> int:
    return sum(len(part) for part in parts)

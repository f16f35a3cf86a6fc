"""A connection over any stream of bytes: whole messages, from any thread, in both directions at once.

Rules
- One thread at a time reads a connection (`read`); before it waits for a write it lets another one read on
  (`step_aside`).
- Any thread may send. Who finds the line free writes, and then writes what others have queued meanwhile; a thread
  that must not wait passes an unfinished write to a helper thread. So two peers that send each other more than the
  stream holds always have a reader.
- Backpressure: a peer is full while more than `_HELD_BACK` bytes wait to be written to it. A call waits for room at
  most as long as it may take (`await_room`), and then for no write; a sender of anything else that may wait is held
  back until the peer reads, or the connection ends.
- Small messages go between the chunks of large ones.
- A message that may be held waits for the next one, or for `flush`, and goes right behind it: one write, and the peer
  wakes up once.
- A descriptor is given back when nobody reads or writes it any more: its number may stand for another file then.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from rpcbench.base.errors import NotConnectedError, ProtocolError
from rpcbench.base.futures import Waits, step_aside
from rpcbench.transport.base import Stream
from rpcbench.transport.waiting import Watch
from rpcbench.wire.framing import (
    BEAT,
    END,
    Decoder,
    Frame,
    Limits,
    Parts,
    check,
    encode,
    encode_lent,
    encode_returned,
    encode_small,
    raw,
)
from rpcbench.wire.messages import Body

_HELD_BACK = 64 << 20
_MOST_PARTS = 512
_MOST_HELD = 64
_CLOSE_SECONDS = 5.0


class Ending(NamedTuple):
    """How a connection ended; `broken` where neither side meant it to, so the peer may still be there."""

    reason: str
    broken: bool


class Receives(Protocol):
    """See `runtime.receiver`."""

    def receive_until(self, waiting: Waits, quiet: float) -> object: ...


class StreamConnection:
    """One authenticated peer at the other end of a stream. `helper` runs a job on another thread."""

    def __init__(self, stream: Stream, limits: Limits, helper: Callable[[Callable[[], None]], object]) -> None:
        self._stream = stream
        self.store = self._store = stream.store
        self._limits = limits
        self._sure = limits.sure
        self._decoder = Decoder(limits, self._store)
        self._helper = helper
        self._state = threading.Lock()
        self._drained = threading.Condition(self._state)
        self._small: collections.deque[Parts] = collections.deque()
        self._large: collections.deque[Iterator[Parts]] = collections.deque()
        self._held: Parts = []
        self._queued = 0
        self._writing = False
        self.ended = False
        self._patient = 0  # threads that wait for `_drained`
        self._numbers = itertools.count(1)
        self.heard = 0  # bytes that have come through the stream
        self.said = 0  # and that were given to it
        self.silence = stream.silence
        self.watch: Watch | None = getattr(stream, "watch", None)  # not every stream can tell what it has
        self.receiver: Receives | None = None  # by which threads that wait for replies receive them, if they may

    # -- writing
    def send(self, control: bytes, body: Body, may_wait: bool, hold: bool = False) -> None:
        owes_nothing = self._store.owes_nothing()
        if owes_nothing and not body.buffers and not hold:
            frame = encode_small(control, body)
            if len(frame) > self._sure:
                check(control, body, self._limits)
            with self._state:
                alone = not (self._writing or self._held or self.ended)  # the line is free, and nothing else is to go
                if alone:
                    self._writing = True
                    self.said += len(frame)
            if alone:
                self._write([frame], may_wait)
            else:
                self._send([frame], None, None, body, may_wait, hold)
            return
        first, chunks = self._encoded(control, body)
        self._send(first, chunks, None if owes_nothing else self._owed(), body, may_wait, hold)

    def _send(
        self,
        first: Parts,
        chunks: Iterator[Parts] | None,
        owed: Parts | None,
        body: Body,
        may_wait: bool,
        hold: bool,
    ) -> None:
        if may_wait and self.full:
            self.await_room()
        with self._state:
            if self.ended:
                raise NotConnectedError("the connection has ended")
            if owed is not None:
                self._held += owed
            self.said += len(first[0]) if len(first) == 1 else _size(first)
            parts: Parts = []
            if hold:
                self._held += first
            elif self._small or self._writing:
                self._small.append(first)
                self._queued += _size(first)
            else:
                parts = first
                if self._held:
                    parts = [b"".join(parts + self._held)] if len(parts) == 1 else parts + self._held
                    self._held = []
            if chunks is not None:
                self._large.append(chunks)
                size = sum(buffer.nbytes for buffer in raw(body))
                self._queued += size
                self.said += size
            if self._writing or (hold and len(self._held) < _MOST_HELD):
                return
            self._writing = True
        self._write(parts, may_wait)

    def _encoded(self, control: bytes, body: Body) -> tuple[Parts, Iterator[Parts] | None]:
        check(control, body, self._limits)
        if not body.buffers:
            return [encode_small(control, body)], None
        places = self._store.put(raw(body))
        if places is not None:
            return [encode_lent(control, body, places)], None
        first, chunks = encode(next(self._numbers) & 0xFFFFFFFF, control, body)
        return first, chunks if len(first) == 1 else None

    def _owed(self) -> Parts:
        places = self._store.owed()
        return [encode_returned(places)] if places else []

    def tidy(self) -> None:
        """Tell the peer which of its memory is needed no more, and give the system what is idle here. Never blocks."""
        self._store.tidy()
        owed = self._owed()
        with self._state:
            self._held += owed
        self.flush()

    def flush(self) -> None:
        """Write what is held, unless somebody is at it. Never blocks."""
        with self._state:
            if self.ended or self._writing or not self._held:
                return
            self._writing = True
        self._write([], False)

    def beat(self) -> None:
        """Give a sign of life, unless something is on its way already. Never blocks."""
        with self._state:
            if self.ended or self._writing:
                return
            self._writing = True
        self._write([BEAT], False)

    @property
    def full(self) -> bool:
        """Whether the peer is so far behind that who may wait does."""
        return self._queued > _HELD_BACK

    def await_room(self, seconds: float | None = None) -> bool:
        """Wait while the peer is far behind, or so many seconds. Whether there is room (or the connection has ended).
        Ctrl-C ends the wait and nothing else."""
        if not self.full:
            return True
        step_aside()
        with self._state:
            return self._await(self._has_room, seconds)

    def _await(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Under the lock: wait until the condition holds, or so many seconds; whether it does."""
        self._patient += 1
        try:
            return self._drained.wait_for(condition, seconds)
        finally:
            self._patient -= 1

    def _has_room(self) -> bool:
        return self.ended or self._queued <= _HELD_BACK

    def _write(self, parts: Parts, may_wait: bool) -> None:
        """Write `parts`, then all that is queued. Only for the thread that set `_writing`, and the helper it names."""
        try:
            parts = parts or self._next()  # what is held, where there is nothing else
            while parts:
                try:
                    self._stream.write(parts, False)
                except BlockingIOError:
                    if not may_wait:
                        self._helper(partial(self._write, parts, True))
                        return
                    step_aside()
                    self._stream.write(parts, True)
                parts = self._next()
        except BaseException as error:  # half a message may be out: nothing can come after it
            self._end()
            self._stop_writing()
            if not isinstance(error, OSError):
                raise

    def _next(self) -> Parts:
        """What to write next: all small messages, else a chunk of a large one, in turn. Nothing: writing ends."""
        with self._state:
            parts: Parts = self._chosen() if self._small or self._held or self._large else []
            if not parts:
                self._writing = False
            if self._patient:
                self._drained.notify_all()
        return parts

    def _chosen(self) -> Parts:
        if self._small:
            return self._few_small()
        if self._held:
            parts, self._held = self._held, []  # the writer's own: what is held next is not to get into it
            return parts
        return self._chunk()

    def _few_small(self) -> Parts:
        parts = self._small.popleft()
        while self._small and len(parts) + len(self._small[0]) <= _MOST_PARTS:
            parts += self._small.popleft()
        self._queued -= _size(parts)
        return parts

    def _chunk(self) -> Parts:
        while self._large:
            source = self._large.popleft()
            chunk = next(source, None)
            if chunk is not None:
                self._large.append(source)
                self._queued -= len(chunk[1])
                return chunk
        return []

    def traffic(self) -> tuple[int, int]:
        """Bytes that went out and that came in, those in shared memory too."""
        return self.said + self._store.lent, self.heard + self._store.borrowed

    # -- reading
    def read(self) -> list[Frame] | Ending:
        """The next messages, perhaps none yet; or how the stream has ended. One thread at a time, which may change."""
        try:
            count = self._stream.read_into(self._decoder.target())
            self.heard += count
            if count:
                frames = self._decoder.received(count)
                return self._rest(frames) if self._stream.pending else frames
            how = "closed" if self._decoder.idle else "closed in mid-message"
            ending = Ending(f"its connection {how}", not self._decoder.over)
        except BlockingIOError:
            return []
        except OSError as error:
            ending = Ending(f"its connection broke ({error.strerror or error})", not self._decoder.over)
        except ProtocolError as error:  # the peer is not to see the end before others hear of it: it would dial again
            return Ending(f"it sent nonsense ({error})", False)
        self._end()
        return ending

    def _rest(self, frames: list[Frame]) -> list[Frame]:
        """And all that nobody would tell of: whoever waits for more to read waits for what the system has."""
        with contextlib.suppress(BlockingIOError):
            while self._stream.pending and (count := self._stream.read_into(self._decoder.target())):
                self.heard += count
                frames += self._decoder.received(count)
        return frames  # if it has ended, the next read tells

    # -- ends
    def close(self, patience: float | None = None) -> None:
        """Write out what is queued, within `patience` seconds, tell the peer that this is on purpose, and end."""
        self.flush()
        with self._state:
            patience = _CLOSE_SECONDS if patience is None else patience
            free = self._await(lambda: self.ended or not self._writing, patience)
            farewell = free and not self.ended
            self._writing |= farewell
        if farewell:
            self._write([END], False)
        self._end()

    def cut(self) -> None:
        """End the connection as if it had broken."""
        self._end()

    def _end(self) -> None:
        with self._state:
            self.ended = True
            self._small.clear()
            self._held.clear()
            self._large.clear()
            self._drained.notify_all()
        self._stream.shut()

    def _stop_writing(self) -> None:
        with self._state:
            self._writing = False
            self._drained.notify_all()

    def release(self) -> None:
        """Give the descriptor back; only after `read` has told of the end."""
        with self._state:
            self._await(lambda: not self._writing, _CLOSE_SECONDS)
        self._store.end()
        self._stream.release()

    def forked(self) -> None:
        """In a forked child: the parent's connection is not ours; do not keep it open."""
        self._store.forked()
        self._stream.release()


def _size(parts: Parts) -> int:
    return sum(len(part) for part in parts)

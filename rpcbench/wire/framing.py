"""The framing of messages on a stream of bytes, without I/O.

A frame is a fixed header, then its parts. If the buffers of a message are large, its frame only announces them and
CHUNK frames follow, so that a small frame waits for one chunk at most. All sizes are checked against `Limits` before
memory is reserved. `Decoder` provides the memory for the next bytes: large buffers are received without a copy.

    MESSAGE  kind=1  lengths of control, payload, tensors; count of buffers; stream of its chunks (0: none)
                     then lengths of buffers, control, payload, tensors, and the buffers unless they are large
    CHUNK    kind=2  stream, length; then bytes, which continue the buffers of that stream
    BEAT     kind=3  a heartbeat, without content
    END      kind=4  the peer closes the connection now
    LENT     kind=5  as MESSAGE, with offsets of its buffers in shared memory instead of the buffers
    RETURNED kind=6  length; then offsets of blocks that the peer has lent, and that it gets back
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpcbench.base.errors import MessageTooLarge, ProtocolError
from rpcbench.wire.messages import Body, new_tuple

HEAD = struct.Struct("<BBHIIQI")  # kind, chunked, buffers, stream, control, payload, tensors
_BEGIN = HEAD.size
CHUNK = 1 << 20  # bytes
_MESSAGE, _CHUNK, _BEAT, _END, _LENT, _RETURNED = 1, 2, 3, 4, 5, 6
BEAT, END = (HEAD.pack(kind, 0, 0, 0, 0, 0, 0) for kind in (_BEAT, _END))
_NUMBER = struct.Struct("<Q")
_SCRATCH = 1 << 18  # bytes read at once where no large buffer is the target
_SURE = 1 << 17  # bytes of a frame that is accepted without a look at each limit
_FEW = 8  # lent buffers of a message on the fast path


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest parts that a peer may announce, in bytes or counts."""

    control: int = 16 << 20  # bytes
    body: int = 8 << 30  # bytes, buffers included
    buffers: int = 1 << 15  # of one message
    streams: int = 1 << 10  # messages whose chunks are incomplete

    @property
    def safe_size(self) -> int:
        """The size in bytes up to which a frame is within all limits."""
        return min(_SURE, self.control, self.body)


class Frame(NamedTuple):
    """One decoded message: control bytes and body."""

    control: bytes
    body: Body


Parts = list["bytes | memoryview"]


class Memory:
    """The memory for received buffers. This class shares none with the peer."""

    lent = borrowed = 0
    """Bytes sent to the peer, and received from it, in shared memory."""

    def allocate_buffer(self, size: int) -> memoryview | bytearray:
        """Return an exclusive buffer for bytes to be received. MemoryError if the system has none."""
        return bytearray(size)

    def borrow_buffer(self, place: int, size: int) -> memoryview:
        """Return a buffer that the peer has put into shared memory. ProtocolError for an invalid offset or size."""
        raise ProtocolError(f"the peer lends memory at {place}, though none is shared")

    def free_block(self, place: int) -> None:
        """Free the block at an offset, which the peer has returned. ProtocolError where none was lent."""
        raise ProtocolError(f"the peer gives back memory at {place}, which it was never lent")


def check_limits(control: bytes, body: Body, limits: Limits) -> None:
    """Raise MessageTooLarge for a message over the limits."""
    size = len(body.payload) + sum(memoryview(buffer).nbytes for buffer in body.buffers)
    if len(control) > limits.control or size + len(body.tensors) > limits.body:
        raise MessageTooLarge(
            f"message of {size} bytes (control {len(control)}) is over the limit of "
            f"{limits.body} ({limits.control}); send it in parts"
        )
    if (count := len(body.buffers)) > limits.buffers:
        raise MessageTooLarge(f"a message carries at most {limits.buffers} large tensors, this one {count}")


def encode_small(control: bytes, body: Body) -> bytes:
    """Return the frame of a message without buffers."""
    payload, tensors, _ = body
    return HEAD.pack(_MESSAGE, 0, 0, 0, len(control), len(payload), len(tensors)) + control + payload + tensors


def encode_frame(stream: int, control: bytes, body: Body) -> tuple[Parts, Iterator[Parts]]:
    """Return the frame of a message, and the chunks that follow it (none for a small message)."""
    buffers = raw_buffers(body)
    chunked = sum(buffer.nbytes for buffer in buffers) > CHUNK
    first: Parts = [_encode_announcement(_MESSAGE, chunked, stream if chunked else 0, control, body)]
    if not chunked:
        return [*first, *buffers], iter(())
    return first, _encode_chunks(stream, buffers)


def encode_lent(control: bytes, body: Body, places: Sequence[int]) -> bytes:
    """Return the frame of a message whose buffers are in shared memory already."""
    return _encode_announcement(_LENT, False, 0, control, body, places)


def encode_returned(places: Sequence[int]) -> bytes:
    """Return the frame that returns blocks which the peer has lent."""
    return HEAD.pack(_RETURNED, 0, 0, 0, len(places) * _NUMBER.size, 0, 0) + struct.pack(f"<{len(places)}Q", *places)


def raw_buffers(body: Body) -> list[memoryview]:
    """Return the buffers of a body as byte views."""
    return [memoryview(b).cast("B") for b in body.buffers]


def _encode_announcement(
    kind: int, chunked: bool, stream: int, control: bytes, body: Body, places: Sequence[int] = ()
) -> bytes:
    lengths = [memoryview(buffer).nbytes for buffer in body.buffers]
    head = HEAD.pack(kind, chunked, len(lengths), stream, len(control), len(body.payload), len(body.tensors))
    numbers = struct.pack(f"<{len(lengths) + len(places)}Q", *lengths, *places)
    return b"".join((head, numbers, control, body.payload, body.tensors))


def _encode_chunks(stream: int, buffers: list[memoryview]) -> Iterator[Parts]:
    for buffer in buffers:
        for start in range(0, buffer.nbytes, CHUNK):
            piece = buffer[start : start + CHUNK]
            yield [HEAD.pack(_CHUNK, 0, 0, stream, 0, piece.nbytes, 0), piece]


class _PartialMessage:
    """A message whose buffers are not yet complete."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._views = [memoryview(b) for b in frame.body.buffers if len(b)]  # the memory still to be filled
        self.left = sum(map(len, self._views))  # bytes

    def receive_buffer(self, limit: int) -> memoryview:
        return self._views[0][:limit]

    def advance_by(self, count: int) -> None:
        self.left -= count
        view = self._views[0][count:]
        if view.nbytes:
            self._views[0] = view
        else:
            self._views.pop(0)


class Decoder:
    """The decoder of one connection. The reader puts bytes into `receive_buffer()`, and gets frames from
    `decode_received(count)`."""

    def __init__(self, limits: Limits, memory: Memory | None = None) -> None:
        self._limits = limits
        self._sure = limits.safe_size
        self._memory = memory or Memory()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._pending = bytearray()  # bytes not yet decoded
        self._streams: dict[int, _PartialMessage] = {}
        self._current: _PartialMessage | None = None
        self._left = 0  # bytes of the current buffers or chunk still to come
        self._direct = False  # whether the last target was a buffer of the current message
        self.over = False  # the peer has sent END

    def receive_buffer(self) -> memoryview:
        """Return the memory for the next bytes, which is never empty."""
        if self._current is not None and not self._pending:
            self._direct = True  # no copy: the bytes are received into the memory of the tensor
            return self._current.receive_buffer(self._left)
        self._direct = False
        return self._scratch

    def decode_received(self, count: int) -> list[Frame]:
        """Return the frames completed by the `count` bytes in the last target. ProtocolError for invalid bytes."""
        frames: list[Frame] = []
        if self._direct:
            self._advance_current(count, frames)
        else:
            begin = 0 if self._pending or self._current is not None else self._decode_whole_frames(count, frames)
            if begin < count:  # the rest takes the general way, a frame at a time
                self._pending += self._scratch[begin:count]
        while self._pending and self._decode_next(frames):
            pass
        return frames

    def _decode_whole_frames(self, count: int, frames: list[Frame]) -> int:
        """Decode, without a copy to `_pending`, the messages that are complete; return the count of bytes consumed."""
        scratch, begin = self._scratch, 0
        while begin + _BEGIN <= count:
            kind, _, buffers, _, control, payload, tensors = HEAD.unpack_from(scratch, begin)
            first = begin + _BEGIN
            if kind == _RETURNED and not control % _NUMBER.size and control <= self._sure and first + control <= count:
                self._give_back(scratch, first, control)
                begin = first + control
                continue
            found: Sequence[memoryview] = ()
            if kind == _LENT and 0 < buffers <= _FEW and first + 16 * buffers <= count:
                numbers = struct.unpack_from(f"<{2 * buffers}Q", scratch, first)
                first += 16 * buffers
            elif kind != _MESSAGE or buffers:
                break
            second = first + control
            third = second + payload
            end = third + tensors
            if end > count or end - begin > self._sure:
                break
            if buffers:  # the limits are checked before memory is borrowed; the general way raises the error
                if end - second + sum(numbers[:buffers]) > self._limits.body or buffers > self._limits.buffers:
                    break
                found = [*map(self._memory.borrow_buffer, numbers[buffers:], numbers[:buffers])]
            table = bytes(scratch[third:end]) if tensors else b""
            body = new_tuple(Body, (bytes(scratch[second:third]), table, found or []))
            frames.append(new_tuple(Frame, (bytes(scratch[first:second]), body)))
            begin = end
        return begin

    @property
    def is_idle(self) -> bool:
        """Whether no message is incomplete: a stream that ends now ends cleanly."""
        return not self._pending and not self._streams and self._current is None

    def _decode_next(self, frames: list[Frame]) -> bool:
        """Decode one frame, or a part of the current buffers, from `_pending`; return whether that was possible."""
        if self._current is not None:
            self._copy_to_buffers(frames)
            return True
        if len(self._pending) < HEAD.size:
            return False
        kind, chunked, buffers, stream, control, payload, tensors = HEAD.unpack_from(self._pending)
        if kind == _CHUNK:
            self._begin_chunk(stream, payload)
            return True
        if kind in (_BEAT, _END):
            del self._pending[: HEAD.size]
            self.over |= kind == _END
            return True
        if kind == _RETURNED:
            return self._take_back(control)
        if kind not in (_MESSAGE, _LENT):
            raise ProtocolError(f"frame of unknown kind {kind}")
        announced = self._decode_announcement(kind == _LENT, buffers, control, payload, tensors)
        if announced is not None:
            self._begin_message(kind == _LENT, announced, bool(chunked), stream, frames)
        return announced is not None

    def _take_back(self, length: int) -> bool:
        if length > self._limits.control or length % _NUMBER.size:
            raise ProtocolError(f"the peer sent {length} bytes of offsets of memory")
        end = HEAD.size + length
        if len(self._pending) < end:
            return False
        with memoryview(self._pending) as view:  # released before the deletion: a view would forbid to resize
            self._give_back(view, HEAD.size, length)
        del self._pending[:end]
        return True

    def _give_back(self, data: memoryview, begin: int, length: int) -> None:
        """Free the blocks whose offsets the peer has sent."""
        for place in struct.unpack_from(f"<{length // _NUMBER.size}Q", data, begin):
            self._memory.free_block(place)

    def _begin_chunk(self, stream: int, length: int) -> None:
        incoming = self._streams.get(stream)
        # An empty chunk would make the next target empty, and a read of 0 bytes means the end of the stream.
        if incoming is None or not 0 < length <= min(CHUNK, incoming.left):
            raise ProtocolError(f"chunk of {length} bytes for stream {stream}, which does not expect it")
        del self._pending[: HEAD.size]
        self._current, self._left = incoming, length

    def _decode_announcement(self, lent: bool, buffers: int, control: int, payload: int, tensors: int) -> Frame | None:
        """Return the announced message, with buffers to fill unless they are lent; None if it is not complete yet."""
        limits = self._limits
        if control > limits.control or payload + tensors > limits.body or buffers > limits.buffers:
            raise ProtocolError("a message announces more than the limits allow")
        count = 2 * buffers if lent else buffers
        start = HEAD.size + _NUMBER.size * count
        if len(self._pending) < start:
            return None
        numbers = struct.unpack_from(f"<{count}Q", self._pending, HEAD.size)
        lengths, places = numbers[:buffers], numbers[buffers:]
        if payload + tensors + sum(lengths) > limits.body or len(self._streams) >= limits.streams:
            raise ProtocolError("a message announces more than the limits allow")
        second = start + control
        third = second + payload
        end = third + tensors
        if len(self._pending) < end:
            return None
        with memoryview(self._pending) as view:
            parts = bytes(view[start:second]), bytes(view[second:third]), bytes(view[third:end])
        del self._pending[:end]
        memory = self._memory
        try:
            found = [*map(memory.borrow_buffer, places, lengths)] if lent else [*map(memory.allocate_buffer, lengths)]
        except MemoryError:
            raise ProtocolError(f"a message announces {sum(lengths)} bytes, for which there is no memory") from None
        return Frame(parts[0], Body(parts[1], parts[2], found))

    def _begin_message(self, lent: bool, announced: Frame, chunked: bool, stream: int, frames: list[Frame]) -> None:
        incoming = _PartialMessage(announced)
        if lent or incoming.left == 0:
            frames.append(announced)
        elif chunked:
            if stream in self._streams:
                raise ProtocolError(f"stream {stream} is announced twice")
            self._streams[stream] = incoming
        else:
            self._current, self._left = incoming, incoming.left

    def _copy_to_buffers(self, frames: list[Frame]) -> None:
        assert self._current is not None
        target = self._current.receive_buffer(min(self._left, len(self._pending)))
        count = target.nbytes
        target[:] = self._pending[:count]
        del self._pending[:count]
        self._advance_current(count, frames)

    def _advance_current(self, count: int, frames: list[Frame]) -> None:
        incoming = self._current
        assert incoming is not None
        incoming.advance_by(count)
        self._left -= count
        if self._left == 0:
            self._current = None
        if incoming.left == 0:
            frames.append(incoming.frame)
            # By identity, as a message does not keep its stream's number; few streams are open at once.
            self._streams = {key: value for key, value in self._streams.items() if value is not incoming}

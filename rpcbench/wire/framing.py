"""Messages as bytes on a stream, without any I/O.

A frame is a fixed header, then its parts. A message whose buffers are large is announced by its frame and its buffers
follow in CHUNK frames, so that a small frame never waits for more than one chunk. All sizes are checked against
`Limits` before memory is taken. `Decoder` tells the reader where to put the next bytes: large buffers are received
straight into the memory where they stay.

    MESSAGE  kind=1  stream  lengths of control, payload, tensors; number of buffers
                             stream: of its chunks; 0 where it has none
                             lengths of buffers, control, payload, tensors, and the buffers unless they are large
    CHUNK    kind=2  stream  length
                             bytes, continuing that stream's buffers
    BEAT     kind=3          nothing: a sign of life
    END      kind=4          the connection ends now, on purpose
    LENT     kind=5          as MESSAGE, with places of its buffers in shared memory instead of the buffers
    RETURNED kind=6          length
                             places of buffers that are the peer's again
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpcbench.base.errors import MessageTooLarge, ProtocolError
from rpcbench.wire.messages import Body

HEAD = struct.Struct("<BBHIIQI")  # kind, chunked, buffers, stream, control, payload, tensors
_BEGIN = HEAD.size
CHUNK = 1 << 20
_MESSAGE, _CHUNK, _BEAT, _END, _LENT, _RETURNED = 1, 2, 3, 4, 5, 6
BEAT, END = (HEAD.pack(kind, 0, 0, 0, 0, 0, 0) for kind in (_BEAT, _END))
_NUMBER = struct.Struct("<Q")
_SCRATCH = 1 << 18
_SURE = 1 << 17
_FEW = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest parts that a peer may announce, in bytes (buffers: a count)."""

    control: int = 16 << 20
    body: int = 8 << 30
    buffers: int = 1 << 15
    streams: int = 1 << 10

    @property
    def sure(self) -> int:
        """A whole frame may always be as large as that."""
        return min(_SURE, self.control, self.body)


class Frame(NamedTuple):
    """One decoded message: control bytes and body."""

    control: bytes
    body: Body


_new = tuple.__new__  # a step less than the class itself takes
Parts = list["bytes | memoryview"]


class Memory:
    """Where a decoder puts and finds buffers. This one shares none with the peer."""

    lent = borrowed = 0
    """Bytes that went to the peer, and that came from it, in shared memory."""

    def room(self, size: int) -> memoryview | bytearray:
        """A buffer of its own for bytes that are to come."""
        return bytearray(size)

    def borrow(self, place: int, size: int) -> memoryview:
        """A buffer that the peer has put into shared memory. ProtocolError where it cannot be there."""
        raise ProtocolError(f"the peer lends memory at {place}, though none is shared")

    def returned(self, place: int) -> None:
        """The peer needs what was put there no more. ProtocolError where nothing was."""
        raise ProtocolError(f"the peer gives back memory at {place}, which it was never lent")


def check(control: bytes, body: Body, limits: Limits) -> None:
    """MessageTooLarge for what may not be sent."""
    size = len(body.payload) + sum(memoryview(buffer).nbytes for buffer in body.buffers)
    if len(control) > limits.control or size + len(body.tensors) > limits.body:
        raise MessageTooLarge(
            f"message of {size} bytes (control {len(control)}) is over the limit of "
            f"{limits.body} ({limits.control}); send it in parts"
        )
    if (count := len(body.buffers)) > limits.buffers:
        raise MessageTooLarge(f"a message carries at most {limits.buffers} large tensors, this one {count}")


def encode_small(control: bytes, body: Body) -> bytes:
    """The frame of a message without buffers."""
    payload, tensors, _ = body
    return HEAD.pack(_MESSAGE, 0, 0, 0, len(control), len(payload), len(tensors)) + control + payload + tensors


def encode(stream: int, control: bytes, body: Body) -> tuple[Parts, Iterator[Parts]]:
    """The announcing frame, and the chunks that follow it (none for a small message)."""
    buffers = raw(body)
    chunked = sum(buffer.nbytes for buffer in buffers) > CHUNK
    first: Parts = [_announcement(_MESSAGE, chunked, stream if chunked else 0, control, body)]
    if not chunked:
        return [*first, *buffers], iter(())
    return first, _chunks(stream, buffers)


def encode_lent(control: bytes, body: Body, places: Sequence[int]) -> bytes:
    """The frame of a message whose buffers are in shared memory already."""
    return _announcement(_LENT, False, 0, control, body, places)


def encode_returned(places: Sequence[int]) -> bytes:
    """The frame that gives back what the peer has lent."""
    return HEAD.pack(_RETURNED, 0, 0, 0, len(places) * _NUMBER.size, 0, 0) + struct.pack(f"<{len(places)}Q", *places)


def raw(body: Body) -> list[memoryview]:
    """The buffers of a body as bytes."""
    return [memoryview(b).cast("B") for b in body.buffers]


def _announcement(
    kind: int, chunked: bool, stream: int, control: bytes, body: Body, places: Sequence[int] = ()
) -> bytes:
    lengths = [memoryview(buffer).nbytes for buffer in body.buffers]
    head = HEAD.pack(kind, chunked, len(lengths), stream, len(control), len(body.payload), len(body.tensors))
    numbers = struct.pack(f"<{len(lengths) + len(places)}Q", *lengths, *places)
    return b"".join((head, numbers, control, body.payload, body.tensors))


def _chunks(stream: int, buffers: list[memoryview]) -> Iterator[Parts]:
    for buffer in buffers:
        for start in range(0, buffer.nbytes, CHUNK):
            piece = buffer[start : start + CHUNK]
            yield [HEAD.pack(_CHUNK, 0, 0, stream, 0, piece.nbytes, 0), piece]


class _Incoming:
    """A message under way: where the next bytes of its buffers go."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._views = [memoryview(b) for b in frame.body.buffers if len(b)]
        self.left = sum(map(len, self._views))

    def target(self, limit: int) -> memoryview:
        return self._views[0][:limit]

    def advance(self, count: int) -> None:
        self.left -= count
        view = self._views[0][count:]
        if view.nbytes:
            self._views[0] = view
        else:
            self._views.pop(0)


class Decoder:
    """Bytes in, frames out. `target()` says where the next bytes go, `received(n)` that n have been put there."""

    def __init__(self, limits: Limits, memory: Memory | None = None) -> None:
        self._limits = limits
        self._sure = limits.sure
        self._memory = memory or Memory()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._pending = bytearray()
        self._streams: dict[int, _Incoming] = {}
        self._current: _Incoming | None = None
        self._left = 0  # bytes of the current buffers or chunk still to come
        self._direct = False
        self.over = False  # the peer has said that it ends the connection

    def target(self) -> memoryview:
        """Memory for the next bytes: never empty."""
        if self._current is not None and not self._pending:
            self._direct = True
            return self._current.target(self._left)
        self._direct = False
        return self._scratch

    def received(self, count: int) -> list[Frame]:
        """Frames completed by the `count` bytes put into the last target. ProtocolError for nonsense."""
        if not self._direct and not self._pending and (frame := self._only(count)) is not None:
            return [frame]
        frames: list[Frame] = []
        if self._direct:
            self._filled(count, frames)
        else:
            begin = 0 if self._pending or self._current is not None else self._whole(count, frames)
            if begin < count:
                self._pending += self._scratch[begin:count]
        while self._pending and self._step(frames):
            pass
        return frames

    def _only(self, count: int) -> Frame | None:
        """The one message that these bytes are, if they are, and it is a small one without buffers."""
        if count < _BEGIN or count > self._sure:
            return None
        scratch = self._scratch
        kind, _, buffers, _, control, payload, tensors = HEAD.unpack_from(scratch)
        second = _BEGIN + control
        third = second + payload
        if kind != _MESSAGE or buffers or third + tensors != count:
            return None
        table = bytes(scratch[third:count]) if tensors else b""
        return _new(Frame, (bytes(scratch[_BEGIN:second]), _new(Body, (bytes(scratch[second:third]), table, []))))

    def _whole(self, count: int, frames: list[Frame]) -> int:
        """The quick way for messages that are here as a whole; how many bytes they took."""
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
            if buffers:
                if end - second + sum(numbers[:buffers]) > self._limits.body or buffers > self._limits.buffers:
                    break
                found = [*map(self._memory.borrow, numbers[buffers:], numbers[:buffers])]
            table = bytes(scratch[third:end]) if tensors else b""
            body = _new(Body, (bytes(scratch[second:third]), table, found or []))
            frames.append(_new(Frame, (bytes(scratch[first:second]), body)))
            begin = end
        return begin

    @property
    def idle(self) -> bool:
        """No message is half here: a stream that ends now ends cleanly."""
        return not self._pending and not self._streams and self._current is None

    def _step(self, frames: list[Frame]) -> bool:
        if self._current is not None:
            self._copy(frames)
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
        announced = self._announced(kind == _LENT, buffers, control, payload, tensors)
        if announced is not None:
            self._begin_message(kind == _LENT, announced, bool(chunked), stream, frames)
        return announced is not None

    def _take_back(self, length: int) -> bool:
        if length > self._limits.control or length % _NUMBER.size:
            raise ProtocolError(f"the peer gives back {length} bytes of places")
        end = HEAD.size + length
        if len(self._pending) < end:
            return False
        with memoryview(self._pending) as view:
            self._give_back(view, HEAD.size, length)
        del self._pending[:end]
        return True

    def _give_back(self, data: memoryview, begin: int, length: int) -> None:
        """The peer gives back the places that it names there."""
        for place in struct.unpack_from(f"<{length // _NUMBER.size}Q", data, begin):
            self._memory.returned(place)

    def _begin_chunk(self, stream: int, length: int) -> None:
        incoming = self._streams.get(stream)
        if incoming is None or not 0 < length <= min(CHUNK, incoming.left):
            raise ProtocolError(f"chunk of {length} bytes for stream {stream}, which does not expect it")
        del self._pending[: HEAD.size]
        self._current, self._left = incoming, length

    def _announced(self, lent: bool, buffers: int, control: int, payload: int, tensors: int) -> Frame | None:
        """The message that is announced, with buffers that are yet to be filled, unless they are lent; None: not all
        of it is here."""
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
        end = start + control + payload + tensors
        if len(self._pending) < end:
            return None
        with memoryview(self._pending) as view:
            parts = [bytes(view[a:b]) for a, b in _spans(start, control, payload, tensors)]
        del self._pending[:end]
        memory = self._memory
        found = [*map(memory.borrow, places, lengths)] if lent else [*map(memory.room, lengths)]
        return Frame(parts[0], Body(parts[1], parts[2], found))

    def _begin_message(self, lent: bool, announced: Frame, chunked: bool, stream: int, frames: list[Frame]) -> None:
        incoming = _Incoming(announced)
        if lent or incoming.left == 0:
            frames.append(announced)
        elif chunked:
            if stream in self._streams:
                raise ProtocolError(f"stream {stream} is announced twice")
            self._streams[stream] = incoming
        else:
            self._current, self._left = incoming, incoming.left

    def _copy(self, frames: list[Frame]) -> None:
        assert self._current is not None
        target = self._current.target(min(self._left, len(self._pending)))
        count = target.nbytes
        target[:] = self._pending[:count]
        del self._pending[:count]
        self._filled(count, frames)

    def _filled(self, count: int, frames: list[Frame]) -> None:
        incoming = self._current
        assert incoming is not None
        incoming.advance(count)
        self._left -= count
        if self._left == 0:
            self._current = None
        if incoming.left == 0:
            frames.append(incoming.frame)
            self._streams = {key: value for key, value in self._streams.items() if value is not incoming}


def _spans(start: int, *lengths: int) -> Iterator[tuple[int, int]]:
    for length in lengths:
        yield start, start + length
        start += length

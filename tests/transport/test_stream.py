"""Connections over streams of each kind: blocking, the order of bytes, and the reports of ends."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from streams import ALL, KINDS, pair, spawn
from worlds import PATIENCE, until

from rpcbench.base.errors import NotConnectedError
from rpcbench.transport import stream
from rpcbench.transport.base import Stream
from rpcbench.transport.sockets import SocketStream
from rpcbench.transport.stream import ConnectionEnd, StreamConnection
from rpcbench.wire import framing
from rpcbench.wire.framing import END, Frame, Limits, Parts
from rpcbench.wire.messages import Body

LARGE = bytes(range(256)) * (1 << 15)  # 8 MB: many times the capacity of a stream


class End:
    """One end of a connection, and the frames that it has received."""

    def __init__(self, stream: Stream) -> None:
        self.connection = StreamConnection(stream, Limits(), spawn)
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.reason, self.broken = "", False
        self.reader: threading.Thread | None = None

    def read(self, also: Callable[[Frame], object] = lambda frame: None) -> None:
        def receive(frame: Frame) -> None:
            also(frame)
            self.frames.put(frame)

        def run() -> None:
            while not isinstance(got := self.connection.read_frames(), ConnectionEnd):
                for frame in got:
                    receive(frame)
            self.reason, self.broken = got
            self.connection.close_descriptor()

        self.reader = spawn(run)

    def send(self, label: bytes, *buffers: bytes, may_wait: bool = False) -> None:
        self.connection.send(label, Body(b"", b"", buffers), may_wait)

    def next(self) -> Frame:
        return self.frames.get(timeout=PATIENCE)

    def ended(self) -> str:
        assert self.reader is not None
        self.reader.join(PATIENCE)
        return self.reason


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[tuple[End, End]]:
    one, other = (End(end) for end in pair(request.param))
    yield one, other
    for end in (one, other):
        end.connection.break_connection()
        if end.reader is None:
            end.read()
        end.ended()


@pytest.mark.parametrize("ends", ALL, indirect=True)
def test_a_sent_message_arrives_with_its_payload_and_buffers(ends: tuple[End, End]) -> None:
    one, other = ends
    other.read()
    one.connection.send(b"a", Body(b"payload", b"tensors", [b"", bytearray(b"xy"), memoryview(LARGE)]), True)
    one.connection.send(b"b", Body(b"", b"", [memoryview(bytearray(6 << 20)).cast("I")]), False)
    first, second = other.next(), other.next()
    assert (first.control, first.body.payload, first.body.tensors) == (b"a", b"payload", b"tensors")
    assert [bytes(buffer) for buffer in first.body.buffers] == [b"", b"xy", LARGE]
    assert bytes(second.body.buffers[0]) == bytes(6 << 20)


@pytest.mark.parametrize("ends", ALL, indirect=True)
@pytest.mark.parametrize("may_wait", [True, False])
def test_both_ends_can_send_more_than_the_sockets_hold(ends: tuple[End, End], may_wait: bool) -> None:
    """Three calls and echoes of 8 MB each way, none awaited: a reading thread must never block in a write."""
    for end in ends:
        end.read(lambda frame, end=end: end.send(b"echo", *frame.body.buffers) if frame.control == b"call" else None)
    senders = [
        spawn(lambda end=end: [end.send(b"call", LARGE, may_wait=may_wait) for _ in range(3)])  # type: ignore[misc]
        for end in ends
    ]
    for sender in senders:
        sender.join(PATIENCE)
    for end in ends:
        frames = [end.next() for _ in range(6)]
        assert sorted(frame.control for frame in frames) == [b"call"] * 3 + [b"echo"] * 3
        assert all(frame.body.buffers == [LARGE] for frame in frames)


class AlwaysFull(SocketStream):
    """A stream that takes nothing from a thread that may not wait."""

    def write(self, parts: Parts, may_wait: bool) -> None:
        if parts and not may_wait:
            raise BlockingIOError
        super().write(parts, may_wait)


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_message_passes_a_stream_that_is_full_before_each_chunk(
    monkeypatch: pytest.MonkeyPatch, may_wait: bool
) -> None:
    """The message has more chunks than Python allows nested calls."""
    monkeypatch.setattr(framing, "CHUNK", 1 << 12)
    left, right = socket.socketpair()
    one, other = End(AlwaysFull(left)), End(SocketStream(right))
    other.read()
    one.send(b"large", LARGE, may_wait=may_wait)
    one.send(b"small", may_wait=may_wait)
    arrived = {frame.control: frame.body.buffers for frame in (other.next(), other.next())}
    assert len(LARGE) >> 12 > sys.getrecursionlimit() and arrived == {b"large": [LARGE], b"small": []}
    one.connection.close()
    assert "closed" in other.ended()
    one.read()
    one.ended()


@pytest.mark.parametrize("then", ["wait", "close"])
def test_the_rest_that_a_tls_stream_holds_itself_is_written(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    left, right = pair("tls")
    plain: Any = left._plain  # type: ignore[attr-defined]
    write = plain.write

    def full(parts: Parts, may_wait: bool) -> None:
        if parts and not may_wait:
            raise BlockingIOError
        write(parts, may_wait)

    monkeypatch.setattr(plain, "write", full)
    one, other = End(left), End(right)
    other.read()
    one.send(b"only", may_wait=False)
    if then == "close":
        one.connection.close()
    assert other.next().control == b"only"
    one.connection.close()
    assert "closed" in other.ended()
    one.read()
    one.ended()


def test_an_error_in_a_write_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all later messages would wait for ever behind it."""
    left, right = socket.socketpair()
    one, other = End(SocketStream(left)), End(SocketStream(right))

    def fails(views: object, may_wait: bool) -> None:
        raise MemoryError

    monkeypatch.setattr(one.connection._stream, "write", fails)
    with pytest.raises(MemoryError):
        one.send(b"first")
    with pytest.raises(NotConnectedError):
        one.send(b"second")
    for end in (other, one):
        end.read()
        assert end.ended()


def test_a_small_message_does_not_wait_for_a_large_one(ends: tuple[End, End]) -> None:
    one, other = ends
    one.send(b"large", LARGE)
    one.send(b"small")
    other.read()
    assert [other.next().control for _ in range(2)] == [b"small", b"large"]


def test_large_messages_take_turns(ends: tuple[End, End]) -> None:
    one, other = ends
    one.send(b"larger", LARGE, LARGE, LARGE)
    one.send(b"large", LARGE)
    other.read()
    assert [other.next().control for _ in range(2)] == [b"large", b"larger"]


@pytest.mark.parametrize("size", [len(LARGE), 100_000])
def test_a_sender_that_may_wait_is_held_back_when_much_is_queued(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(stream, "_HELD_BACK", 8 << 20)
    one, other = ends
    count = 3 * (8 << 20) // size
    for _ in range(count):
        one.send(b"", LARGE[:size])  # never blocks, even if the peer does not read
    polite = spawn(lambda: one.send(b"polite", may_wait=True))
    polite.join(0.2)
    assert polite.is_alive()
    other.read()
    polite.join(PATIENCE)
    assert b"polite" in [other.next().control for _ in range(count + 1)]


def test_a_wait_for_room_ends_with_room_or_at_its_timeout(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_HELD_BACK", 1 << 20)
    one, other = ends
    assert one.connection.wait_for_room(0.0)
    for _ in range(8):
        one.send(b"", LARGE)
    if not one.connection.is_full:
        pytest.skip("all of it lies in shared memory")
    assert not one.connection.wait_for_room(0.01)
    other.read()
    assert one.connection.wait_for_room(PATIENCE)


@pytest.mark.parametrize("then", ["next", "flush", "close"])
def test_a_held_message_leaves_with_the_next_message_a_flush_or_a_close(ends: tuple[End, End], then: str) -> None:
    one, other = ends
    writes: list[list[bytes]] = []
    write = one.connection._stream.write

    def noted(views: list[memoryview], may_wait: bool) -> None:
        writes.extend([[bytes(view) for view in views]] if views else [])
        write(views, may_wait)

    one.connection._stream.write = noted  # type: ignore[method-assign]
    one.connection.send(b"held", Body(b"", b"", []), False, hold=True)
    assert not writes
    match then:
        case "next":
            one.send(b"next")
            assert len(writes) == 1
        case "flush":
            one.connection.flush()
        case "close":
            one.connection.close()
            assert len(writes) == 2 and writes[-1] == [END]
    other.read()
    if then == "next":
        assert other.next().control == b"next"
    assert other.next().control == b"held"


def test_a_message_that_is_held_while_a_writer_stops_is_sent_once(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has found nothing more and is about to stop; meanwhile another thread holds a message."""
    one, other = ends
    find, left = one.connection._next_parts, [b"held"]

    def find_then_hold() -> Parts:
        found = find()
        if not found and left:
            one.connection.send(left.pop(), Body(b"", b"", []), False, hold=True)
        return found

    monkeypatch.setattr(one.connection, "_next_parts", find_then_hold)
    for label in (b"first", b"second"):
        one.send(label)
    other.read()
    assert [other.next().control for _ in range(3)] == [b"first", b"second", b"held"]
    one.connection.close()
    assert other.ended() and other.frames.empty()


def test_a_full_batch_of_held_messages_is_sent(ends: tuple[End, End]) -> None:
    one, other = ends
    other.read()
    for _ in range(stream._MOST_HELD):
        one.connection.send(b"held", Body(b"", b"", []), False, hold=True)
    assert {other.next().control for _ in range(stream._MOST_HELD)} == {b"held"}


@pytest.mark.parametrize("ends", ALL, indirect=True)
def test_a_close_writes_all_queued_messages(ends: tuple[End, End]) -> None:
    one, other = ends
    for _ in range(4):
        one.send(b"", LARGE)
    closing = spawn(one.connection.close)
    other.read()
    assert [other.next().body.buffers for _ in range(4)] == [[LARGE]] * 4
    assert other.ended() == "its connection closed"
    closing.join(PATIENCE)
    with pytest.raises(NotConnectedError, match="has ended"):
        one.send(b"too late")


def test_a_close_does_not_wait_for_ever_for_a_peer_that_does_not_read(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_CLOSE_SECONDS", 0.1)
    one, other = ends
    one.send(b"", LARGE)
    closing = spawn(one.connection.close)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    other.read()
    assert other.ended() == "its connection closed in mid-message"


# -- ends
ENDS: dict[str, tuple[bytes, str]] = {
    "a clean end": (b"", "its connection closed"),
    "half a header": (b"\1\0", "its connection closed in mid-message"),
    "half a message": (struct.pack("<BBHIIQI", 1, 0, 0, 1, 10, 0, 0) + b"con", "its connection closed in mid-message"),
    "a chunk of nothing": (struct.pack("<BBHIIQI", 2, 0, 0, 9, 0, 5, 0), "it sent invalid data (chunk of 5 bytes"),
    "an unknown kind": (struct.pack("<BBHIIQI", 7, 0, 0, 9, 0, 5, 0), "it sent invalid data (frame of unknown kind 7"),
}


@pytest.mark.parametrize("what", ENDS)
def test_the_end_of_a_connection_states_its_reason(what: str) -> None:
    data, reason = ENDS[what]
    raw, sock = socket.socketpair()
    end = End(SocketStream(sock))
    end.read()
    with raw:
        raw.sendall(data)
    assert end.ended().startswith(reason)
    assert sock.fileno() == -1


def test_a_peer_that_dies_with_unread_data_breaks_the_connection() -> None:
    raw, sock = socket.socketpair()
    end = End(SocketStream(sock))
    end.send(b"never read")
    raw.close()
    end.read()
    assert end.ended() == "its connection broke (Connection reset by peer)"


def test_the_end_of_a_peer_ends_the_waits_of_all_senders(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_HELD_BACK", 1 << 20)
    one, other = ends
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def patient() -> None:
        with contextlib.suppress(NotConnectedError):
            while True:
                one.send(b"", LARGE, may_wait=True)
        told.put("told")

    threads = [spawn(patient) for _ in range(3)]
    until(lambda: one.connection._queued > stream._HELD_BACK, "the senders to be held back")
    one.read()
    other.connection._stream.shut_down()
    assert [told.get(timeout=PATIENCE) for _ in threads] == ["told"] * 3


def test_a_descriptor_stays_open_while_a_thread_writes_to_it() -> None:
    """As soon as it is closed, its number may refer to another connection."""
    sock, raw = socket.socketpair()
    written = threading.Event()
    jobs: list[Callable[[], None]] = []
    connection = StreamConnection(SocketStream(sock), Limits(), jobs.append)
    connection.send(b"", Body(b"", b"", [LARGE]), False)
    assert len(jobs) == 1, "a helper thread writes the rest"
    raw.close()

    def read() -> None:
        while not isinstance(connection.read_frames(), ConnectionEnd):
            pass
        connection.close_descriptor()
        written.set()

    reader = spawn(read)
    until(lambda: connection.ended)
    assert sock.fileno() != -1
    jobs.pop()()
    assert written.wait(PATIENCE) and sock.fileno() == -1
    reader.join(PATIENCE)


def test_a_forked_child_closes_its_copy_and_the_connection_of_the_parent_stays_usable() -> None:
    raw, sock = socket.socketpair()
    copy = sock.dup()
    inherited = StreamConnection(SocketStream(copy), Limits(), spawn)
    inherited.after_fork()
    assert copy.fileno() == -1
    with raw, sock:
        raw.sendall(b"still here")
        assert sock.recv(100) == b"still here"

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcbench.base.errors import ProtocolError
from rpcbench.wire.framing import (
    CHUNK,
    HEAD,
    Decoder,
    Frame,
    Limits,
    Memory,
    check_limits,
    encode_frame,
    encode_lent,
    encode_returned,
    encode_small,
)
from rpcbench.wire.messages import Body

LIMITS = Limits()
SMALL = Limits(control=100, body=4000, buffers=4, streams=2)


def stream_of(messages: list[tuple[bytes, Body]], seed: int = 0) -> bytes:
    """Encode all messages on one stream; the chunks of the large ones are interleaved with the others."""
    rng, out, running = random.Random(seed), [], []
    for number, (control, body) in enumerate(messages):
        first, chunks = encode_frame(number, control, body)
        out += first
        running.append(chunks)
        for chunk_source in rng.sample(running, len(running)):
            out += next(chunk_source, [])
    for chunk_source in running:
        for parts in chunk_source:
            out += parts
    return b"".join(bytes(part) for part in out)


def feed(decoder: Decoder, data: bytes, sizes: list[int]) -> list[Frame]:
    frames, at, turn = [], 0, 0
    while at < len(data):
        target = decoder.receive_buffer()
        count = min(len(target), sizes[turn % len(sizes)], len(data) - at)
        target[:count] = data[at : at + count]
        frames += decoder.decode_received(count)
        at, turn = at + count, turn + 1
    return frames


def plain(frame: Frame) -> tuple[bytes, bytes, bytes, list[bytes]]:
    return frame.control, frame.body.payload, frame.body.tensors, [bytes(b) for b in frame.body.buffers]


bodies = st.builds(Body, st.binary(max_size=50), st.binary(max_size=50), st.lists(st.binary(max_size=3000), max_size=3))


@given(st.lists(st.tuples(st.binary(max_size=30), bodies), max_size=6), st.lists(st.integers(1, 5000), min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_decoder_restores_any_messages_from_pieces_of_any_size(
    messages: list[tuple[bytes, Body]], sizes: list[int]
) -> None:
    decoder = Decoder(LIMITS)
    frames = feed(decoder, stream_of(messages), sizes)
    assert sorted(map(plain, frames)) == sorted((c, b.payload, b.tensors, list(b.buffers)) for c, b in messages)
    assert decoder.is_idle


@pytest.mark.parametrize("seed", range(5))
def test_a_decoder_restores_large_messages_with_interleaved_chunks(seed: int) -> None:
    rng = random.Random(seed)
    messages = [(b"%d" % i, Body(b"p", b"", [rng.randbytes(CHUNK + rng.randrange(3 * CHUNK))])) for i in range(3)]
    messages.append((b"small", Body(b"", b"", [])))
    frames = feed(Decoder(LIMITS), stream_of(messages, seed), [70_000, 13, 1 << 21])
    assert sorted(map(plain, frames)) == sorted((c, b.payload, b.tensors, list(b.buffers)) for c, b in messages)


def test_a_small_message_passes_between_two_chunks() -> None:
    first, chunks = encode_frame(1, b"large", Body(b"", b"", [bytes(3 * CHUNK)]))
    small, none = encode_frame(2, b"small", Body(b"", b"", []))
    decoder = Decoder(LIMITS)
    seen = [plain(f)[0] for parts in (first, next(chunks), small) for f in feed(decoder, b"".join(parts), [1 << 20])]
    assert seen == [b"small"] and list(none) == []


def test_an_announcement_over_the_limits_is_refused() -> None:
    for head in (
        HEAD.pack(1, 0, 0, 0, 101, 0, 0),
        HEAD.pack(1, 0, 0, 0, 0, 1 << 60, 0),
        HEAD.pack(1, 0, 5, 0, 0, 0, 0),
        HEAD.pack(1, 0, 1, 0, 0, 0, 0) + (1 << 62).to_bytes(8, "little"),
    ):
        with pytest.raises(ProtocolError, match="limits"):
            feed(Decoder(SMALL), head, [4096])


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(7, 0, 0, 0, 0, 0, 0),
        HEAD.pack(2, 0, 0, 9, 0, 10, 0),
        HEAD.pack(2, 0, 0, 9, 0, 0, 0),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_invalid_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(Decoder(SMALL), data, [4096])


def test_more_large_messages_at_once_than_the_limit_are_refused() -> None:
    announce = [encode_frame(n, b"", Body(b"", b"", [bytes(CHUNK + 1)]))[0] for n in range(3)]
    limits = Limits(streams=2)
    with pytest.raises(ProtocolError, match="limits"):
        feed(Decoder(limits), b"".join(bytes(p) for parts in announce for p in parts), [1 << 20])


def test_a_message_over_the_limit_is_an_error_of_the_sender() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        check_limits(b"", Body(b"", b"", [bytes(5000)]), SMALL)


@given(st.binary(max_size=200))
def test_random_bytes_cause_no_error_but_a_protocol_error(data: bytes) -> None:
    try:
        feed(Decoder(SMALL), data, [64])
    except ProtocolError:
        pass


# -- shared memory
class Shelf(Memory):
    """Buffers that the peer has put into shared memory, by place."""

    def __init__(self, buffers: dict[int, bytes]) -> None:
        self.buffers, self.back = buffers, list[int]()

    def borrow_buffer(self, place: int, size: int) -> memoryview:
        return memoryview(self.buffers[place])[:size]

    def free_block(self, place: int) -> None:
        self.back.append(place)


@given(st.lists(st.integers(1, 60), min_size=1))
@settings(max_examples=30, deadline=None)
def test_lent_and_returned_buffers_can_come_between_chunks(sizes: list[int]) -> None:
    shelf = Shelf({4096: b"first", 1 << 40: b"second"})
    lent = Body(b"payload", b"table", [bytes(5), bytes(6)])
    large, chunks = encode_frame(3, b"large", Body(b"", b"", [bytes(CHUNK + 9)]))
    data = [*large, *next(chunks), encode_lent(b"lent", lent, [4096, 1 << 40]), encode_returned([5, 1 << 50])]
    pieces = [*data, *next(chunks), encode_returned([])]
    decoder = Decoder(LIMITS, shelf)
    frames = feed(decoder, b"".join(bytes(piece) for piece in pieces), [*sizes, CHUNK])
    assert plain(frames[0]) == (b"lent", b"payload", b"table", [b"first", b"second"])
    assert plain(frames[1]) == (b"large", b"", b"", [bytes(CHUNK + 9)])
    assert shelf.back == [5, 1 << 50] and decoder.is_idle


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (encode_lent(b"", Body(b"", b"", [b"x"]), [0]), "though none is shared"),
        (encode_returned([0]), "never lent"),
        (HEAD.pack(6, 0, 0, 0, 7, 0, 0), "7 bytes of offsets"),
        (HEAD.pack(6, 0, 0, 0, 1 << 30, 0, 0), "bytes of offsets"),
        (encode_lent(b"", Body(b"", b"", [bytes(2000)] * 3), [0] * 3), "limits"),
    ],
)
def test_invalid_frames_about_shared_memory_are_refused(data: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        feed(Decoder(SMALL), data, [4096])


def test_a_small_message_in_one_read_is_decoded() -> None:
    decoder = Decoder(LIMITS)
    (frame,) = feed(decoder, encode_small(b"abc", Body(b"defg", b"hi", [])), [5000])
    assert plain(frame) == (b"abc", b"defg", b"hi", []) and decoder.is_idle


def test_the_second_half_of_a_message_is_not_taken_for_a_new_one() -> None:
    """Here the second half has the form of a message."""
    inner = encode_small(b"abc", Body(b"defg", b"", []))
    outer = encode_small(b"", Body(b"x" + inner, b"", []))
    decoder = Decoder(LIMITS)
    (frame,) = feed(decoder, outer, [len(outer) - len(inner), len(inner)])
    assert frame.body.payload == b"x" + inner and decoder.is_idle


@pytest.mark.parametrize(("control", "payload"), [(101, 10), (10, 4001)])
def test_a_small_message_over_small_limits_is_refused(control: int, payload: int) -> None:
    data = encode_small(bytes(control), Body(bytes(payload), b"", []))
    with pytest.raises(ProtocolError, match="more than the limits allow"):
        feed(Decoder(SMALL), data, [5000])

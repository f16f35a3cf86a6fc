"""Any data from strangers and from faulty members: no crash, no growth, and nothing is unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import SECRET, address_of, config, entries, far_world, until, world

from rpcbench.base.errors import MessageTooLarge, ProtocolError
from rpcbench.rpc.init import start_agent
from rpcbench.runtime.agent import Agent
from rpcbench.transport import addresses, listeners, lobby
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import Identity, handshake_as_dialler
from rpcbench.transport.preambles import make_preamble
from rpcbench.transport.sockets import SocketStream
from rpcbench.transport.stream import StreamConnection
from rpcbench.wire.framing import HEAD, Decoder, Limits, Memory, encode_frame
from rpcbench.wire.messages import Body

KINDS = ["unix", "tcp", "tls", "lobby"]
"""In the lobby strangers send no preamble. The others have one that they have overheard, and get a handshake."""
SMALL = Limits(control=1 << 16, body=1 << 20, buffers=64, streams=8)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


class Door:
    """An agent, and connections to it without the secret, of one kind."""

    def __init__(self, agent: Agent, address: str, kind: str, directory: Path) -> None:
        self.agent = agent
        self.address = address
        self.kind = kind
        self.canary = directory / "canary"
        self.sings = pickle.dumps(Canary(self.canary))

    @property
    def refused(self) -> int:
        return self.agent.links.peers.acceptor.refusals.count

    def knock(self) -> Stream:
        deadline, place = time.monotonic() + 5, self.address.partition("://")[2]
        if self.kind == "unix":
            return Opener(b"").connect_stream(self.address, deadline)
        if self.kind == "lobby":
            return SocketStream(socket.create_connection(listeners.split_address(place)))
        return listeners.connect_tcp(place, make_preamble(SECRET), deadline)

    def throw(self, data: bytes) -> None:
        """Send all of the data, hang up, and wait until it is refused."""
        before = self.refused
        stream = self.knock()
        with contextlib.suppress(OSError):
            stream.write([memoryview(data)], True)
        stream.shut_down()
        stream.close_descriptor()
        until(lambda: self.refused > before, "the stranger to be refused")
        assert not self.canary.exists()


@pytest.fixture(params=KINDS)
def door(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    if request.param != "unix":
        monkeypatch.setenv("RPCBENCH_TRANSPORT", "tcp")
    remote = "tls://127.0.0.1:0" if request.param == "tls" else ""
    agent = start_agent(config(tmp_path, 0, remote=remote))
    try:
        member = agent.machine.read_node(lambda node: node.members.me)
        yield Door(agent, member.remote or member.address, request.param, tmp_path)
        assert agent.call(0, max, (1, 2)).wait() == 2
    finally:
        agent.stop()


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (addresses, lobby):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 2.5)
    monkeypatch.setattr(addresses, "LOCAL_HANDSHAKE_SECONDS", 2.5)


def hello(secret: bytes = SECRET, **changes: Any) -> bytes:
    fields = {"cluster": "test", "id": 1, "name": "worker1", "incarnation": 0, **changes}
    return next(handshake_as_dialler(Identity(**fields), secret))[0]


def flipped(data: bytes, bit: int) -> bytes:
    place, shift = divmod(bit % (8 * len(data)), 8)
    return data[:place] + bytes([data[place] ^ 1 << shift]) + data[place + 1 :]


THROWN = st.one_of(
    st.binary(max_size=1500),
    st.integers(0, 511).map(lambda n: hello()[:n]),
    st.integers(0, 4095).map(lambda bit: flipped(hello(), bit) + secrets.token_bytes(32)),
    st.just(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20),
    st.builds(lambda proof: hello() + proof, st.binary(min_size=32, max_size=32)),
    st.builds(lambda cluster: hello(cluster=cluster) + bytes(32), st.text(max_size=16)),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(thrown=THROWN)
def test_a_stranger_is_refused_for_any_data(door: Door, thrown: bytes) -> None:
    door.throw(thrown + door.sings)


def test_refused_strangers_leave_no_descriptors_and_no_memory(door: Door) -> None:
    def measured() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), psutil.Process().memory_info().rss >> 20

    for _ in range(5):
        door.throw(os.urandom(1 << 20) + door.sings)
    files, size = measured()
    for _ in range(40):
        door.throw(os.urandom(1 << 20) + door.sings)
    after, grown = measured()
    assert after <= files + 2 and grown <= size + 32


def test_silent_strangers_do_not_block_a_member(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than the agent handles at once, and each keeps its connection open as long as it can."""
    be_impatient(monkeypatch)
    silent = [door.knock() for _ in range(100)]
    try:
        stream, peer = Opener(SECRET).dial_peer(door.address, Identity("test", 5, "worker5", 0), 20.0)
        assert peer.name == "notebook"
        stream.close_descriptor()
        until(lambda: door.refused >= 100, "all to be refused")
    finally:
        for stream in silent:
            stream.close_descriptor()


def test_a_replayed_handshake_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_TRANSPORT", "tcp")
    agent = start_agent(config(tmp_path, 0))
    said: list[bytes] = []
    connect = Opener.connect_stream

    def overhear(self: Opener, address: str, deadline: float) -> Stream:
        stream = connect(self, address, deadline)
        write = stream.write
        stream.write = lambda views, may_wait: (said.extend(map(bytes, views)), write(views, may_wait))[1]  # type: ignore[method-assign]
        return stream

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Opener, "connect_stream", overhear)
            Opener(SECRET).dial_peer(address_of(agent), Identity("test", 5, "worker5", 0))[0].close_descriptor()
        assert [len(data) for data in said] == [512, 32]
        Door(agent, address_of(agent), "tcp", tmp_path).throw(b"".join(said))
    finally:
        agent.stop()


# -- faulty members
VALID = b"".join(
    bytes(part)
    for control, body in ((b"\x92\x01\x02", Body(b"p" * 40, b"t" * 8, [b"b" * 300])), (b"\x93", Body(b"q", b"", [])))
    for part in encode_frame(1, control, body)[0]
) + b"".join(
    bytes(part)
    for first, chunks in [encode_frame(2, b"c", Body(b"", b"", [bytes(900_000), bytes(140_000)]))]
    for parts in ([first], chunks)
    for group in parts
    for part in (group if isinstance(group, list) else [group])
)


def decode(data: bytes, limits: Limits, pieces: int) -> int:
    """Feed bytes to a decoder; return how many it keeps, or raise its ProtocolError."""
    decoder, kept = Decoder(limits), 0
    while data:
        target = decoder.receive_buffer()
        count = min(len(target), len(data), pieces)
        target[:count] = data[:count]
        for frame in decoder.decode_received(count):
            kept += len(frame.control) + len(frame.body.payload) + sum(len(buffer) for buffer in frame.body.buffers)
        data = data[count:]
    return kept


@settings(max_examples=300, derandomize=True)
@given(bits=st.lists(st.integers(0, 8 * 600), max_size=3), end=st.integers(0, 2000), size=st.sampled_from([1, 7, 4096]))
def test_frames_with_changed_bits_are_decoded_or_refused(bits: list[int], end: int, size: int) -> None:
    data = VALID[:end]
    for bit in bits:
        data = flipped(data, bit) if data else data
    with contextlib.suppress(ProtocolError):
        assert decode(data, SMALL, size) <= len(data)


@settings(max_examples=300, derandomize=True)
@given(data=st.binary(max_size=300))
def test_random_bytes_cause_only_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data, SMALL, 64)


@pytest.mark.parametrize("make", [world, far_world])
@pytest.mark.parametrize(
    "data",
    [random.Random(0).randbytes(4096), b"\xff" * 4096, b"\x01" + b"\xff" * 200, VALID[40:200]],
    ids=["random", "ones", "a huge size", "the middle of a frame"],
)
def test_a_member_that_sends_invalid_data_is_removed(make: Any, data: bytes, tmp_path: Path) -> None:
    with make(tmp_path, 3) as agents:
        (mad,) = entries(agents[1], agents[0])
        mad._stream.write(
            [memoryview(data)], True
        )  # without hanging up: a new connection would be accepted before this one is read
        until(lambda: len(agents[0].members()) == 2)
        assert agents[0].call(2, max, (1, 2)).wait() == 2


@pytest.mark.parametrize("make", [world, far_world])
@pytest.mark.parametrize("lengths", [[2 << 30], [64 << 10] * (16 << 10)], ids=["one buffer", "many"])
def test_bytes_that_are_announced_and_never_come_take_no_memory(make: Any, lengths: list[int], tmp_path: Path) -> None:
    with make(tmp_path, 3) as agents:
        (faulty,), (here,) = entries(agents[1], agents[0]), entries(agents[0], agents[1])
        numbers = struct.pack(f"<{len(lengths)}Q", *lengths)
        before = psutil.Process().memory_info().rss
        faulty._stream.write([HEAD.pack(1, 1, len(lengths), 7, 0, 0, 0) + numbers], True)
        until(lambda: 7 in here._decoder._streams, "the announcement to be read")
        assert psutil.Process().memory_info().rss - before < 256 << 20
        assert agents[0].call(1, max, (1, 2)).wait() == 2, "its other messages still come"


def test_a_message_for_which_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Memory, size: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(Memory, "allocate_buffer", fail)
    with pytest.raises(ProtocolError, match="announces 300 bytes, for which there is no memory"):
        decode(VALID, SMALL, 4096)


@pytest.mark.parametrize("make", [world, far_world])
@pytest.mark.parametrize("seed", range(8))
def test_damaged_frames_of_a_member_harm_no_other_one(make: Any, seed: int, tmp_path: Path) -> None:
    """Bits are flipped, lengths replaced, frames left out, repeated and sent in another order; also sheer noise."""
    chance = random.Random(seed)
    with make(tmp_path, 3) as agents:
        (faulty,), before = entries(agents[1], agents[0]), psutil.Process().memory_info().rss
        with recorded(faulty) as frames:
            for size in (10, 400_000):
                agents[1].call(0, torch.neg, (torch.ones(size),)).wait()
            agents[1].get(agents[1].create(0, torch.ones, (3,)))
        for data in damaged(frames, chance):
            with contextlib.suppress(OSError):  # the other side has ended the connection
                faulty._stream.write([memoryview(data)], True)
        assert agents[0].call(2, max, (1, 2)).wait() == agents[2].call(0, max, (1, 2)).wait() == 2
        assert psutil.Process().memory_info().rss - before < 256 << 20


@contextlib.contextmanager
def recorded(connection: StreamConnection) -> Iterator[list[bytes]]:
    """Collect what is written to a connection."""
    write, frames = connection._stream.write, list[bytes]()

    def listen(parts: Any, may_wait: bool) -> None:
        frames.extend(map(bytes, parts))
        write(parts, may_wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection._stream, "write", listen)
        yield frames


def damaged(frames: list[bytes], chance: random.Random) -> list[bytes]:
    small = [frame for frame in frames if HEAD.size < len(frame) < 5000]
    body = bytearray(chance.choice(small))
    body[chance.randrange(HEAD.size, len(body))] ^= 1 << chance.randrange(8)
    length = bytearray(chance.choice(small))
    place = chance.choice([4, 8, 12, 20])  # of a field of the head
    length[place : place + 4] = chance.randbytes(4)
    flips = b"".join(frames)
    for _ in range(3):
        flips = flipped(flips, chance.randrange(8 * 2000))
    kinds = [bytes(body), bytes(length), b"".join(chance.choices(frames, k=9)), flips, chance.randbytes(3000)]
    chance.shuffle(kinds)
    return kinds


def test_a_member_that_is_removed_sees_its_connection_end_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it could dial again and be accepted before its loss is known."""
    with world(tmp_path, 3) as agents:
        (mad,), reunion = entries(agents[1], agents[0]), agents[0].links.peers._reconnector
        ended: list[bool] = []
        over = reunion.connection_ended

        def watched(entry: Any, ending: Any) -> None:
            ended.append(entry.connection.ended)
            over(entry, ending)

        monkeypatch.setattr(reunion, "connection_ended", watched)
        mad._stream.write([memoryview(b"\x01" + b"\xff" * 200)], True)
        until(lambda: len(agents[0].members()) == 2)
        assert ended[0] is False


# -- messages over the limit
@pytest.mark.parametrize("make", [world, far_world])
def test_a_message_over_the_limit_fails_before_anything_is_sent(make: Any, tmp_path: Path) -> None:
    with make(tmp_path, 2) as agents:
        for here, there in ((0, 1), (1, 0)):
            (entry,) = entries(agents[here], agents[there])
            entry._limits = SMALL
        with pytest.raises(MessageTooLarge, match="over the limit"):
            agents[0].call(1, torch.neg, (torch.zeros(1 << 20),)).wait()
        with pytest.raises(Exception, match="over the limit"):
            agents[0].call(1, torch.zeros, (1 << 20,)).wait()
        assert torch.equal(agents[0].call(1, torch.neg, (torch.ones(1000),)).wait(), -torch.ones(1000))
        assert len(agents[0].members()) == 2


def test_a_connection_with_a_message_over_the_limit_is_ended(tmp_path: Path) -> None:
    with world(tmp_path, 3) as agents:
        agents[0].links.peers._limits = SMALL
        stream, _ = Opener(SECRET).dial_peer(address_of(agents[0]), _as(agents[1]))
        before = psutil.Process().memory_info().rss
        first, _ = encode_frame(1, b"x", Body(b"", b"", [bytes(1)]))
        head = bytearray(b"".join(bytes(part) for part in first))
        head[-1 - 1 - 8 : -2] = (7 << 30).to_bytes(8, "little")  # the length of its one buffer: 7 GiB
        stream.write([memoryview(bytes(head))], True)
        with contextlib.suppress(OSError):
            assert stream.read_into(memoryview(bytearray(1))) in (0, 1)
        stream.close_descriptor()
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert agents[0].call(2, max, (1, 2)).wait() == 2


def _as(agent: Agent) -> Identity:
    return agent.links.peers.own_identity


def test_a_stranger_that_stops_in_the_middle_of_a_handshake_is_disconnected(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_impatient(monkeypatch)
    stream = door.knock()
    stream.set_time_limit(10.0)
    answer = 512 if door.kind in ("unix", "tcp") else 0
    stream.write([memoryview(hello() if answer else make_preamble(SECRET)[:40])], True)
    heard = 0
    with contextlib.suppress(ConnectionResetError):
        while count := stream.read_into(memoryview(bytearray(512))):
            heard += count
    assert heard == answer
    stream.close_descriptor()


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_renewed_connections_of_strangers_are_logged_and_take_no_thread_and_no_member_waits_for_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RPCBENCH_TRANSPORT", "tcp")
    monkeypatch.setattr(lobby, "_MOST", 50)
    far = {"remote": "tls://127.0.0.1:0"} if kind == "tls" else {}
    leader = start_agent(config(tmp_path, 0, **far))
    place = leader.machine.read_node(lambda node: node.members.me.remote or node.members.me.address).partition("://")[2]
    refusals, threads = leader.links.peers.acceptor.refusals, threading.active_count()
    with strangers_at(place, 200):
        until(lambda: refusals.count > 400, "the first to be displaced")
        assert threading.active_count() <= threads + 1
        fields = {"leader": f"tls://{place}", "remote": "tls://127.0.0.1:0"} if kind == "tls" else {}
        directory = tmp_path
        if kind == "tls":
            monkeypatch.setenv("RPCBENCH_HOST_ID", "elsewhere")
            directory = tmp_path / "elsewhere"
            directory.mkdir()
        start_agent(config(directory, 1, **fields), timeout=20.0).stop()
    leader.stop()
    assert "most of them from 127.0.0.9, and do not prove" in caplog.text
    assert "from 127.0.0.9 did not prove" in refusals.describe_strangers()


@contextlib.contextmanager
def strangers_at(place: str, count: int) -> Iterator[None]:
    """Hold connections from another address, on which nothing is sent, and renew those that end."""
    over, selector = threading.Event(), selectors.DefaultSelector()

    def hold() -> None:
        while not over.is_set():
            while len(selector.get_map()) < count:
                sock = socket.socket()
                sock.bind(("127.0.0.9", 0))
                sock.setblocking(False)
                sock.connect_ex(listeners.split_address(place))
                selector.register(sock, selectors.EVENT_READ)
            for key, _ in selector.select(0.1):  # nothing is ever sent to them: they have ended
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        selector.close()

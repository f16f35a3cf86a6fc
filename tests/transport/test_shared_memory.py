"""Memory shared by the ends of a unix socket: which files and offsets are accepted, and what is kept at the end."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from streams import spawn
from worlds import PATIENCE

from rpcbench.base.errors import ProtocolError
from rpcbench.transport import shared_memory
from rpcbench.transport.shared_memory import SHARED, SIZE, BufferStore

DATA = memoryview(os.urandom(3 * SHARED))
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")


@pytest.fixture
def sockets(no_leaks: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def stores(sockets: tuple[socket.socket, socket.socket]) -> tuple[BufferStore, BufferStore]:
    found: list[BufferStore] = []
    deadline = time.monotonic() + PATIENCE
    other = spawn(lambda: found.append(shared_memory.exchange_memory(sockets[1], deadline, True)))
    one = shared_memory.exchange_memory(sockets[0], deadline, False)
    other.join(PATIENCE)
    return one, found[0]


def put(store: BufferStore, *buffers: memoryview) -> list[int]:
    places = store.copy_buffers(buffers)
    assert places is not None
    return places


def test_a_shared_buffer_reaches_the_peer_as_a_private_copy_and_is_reused(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    one, other = stores(sockets)
    source = bytearray(DATA)
    first, empty = put(one, memoryview(source), memoryview(b""))
    (second,) = put(one, memoryview(source))
    here, also = other.borrow_buffer(first, len(DATA)), other.borrow_buffer(second, len(DATA))
    assert bytes(here) == DATA and bytes(other.borrow_buffer(empty, 0)) == b""
    here[:] = bytes(len(here))
    assert bytes(also) == DATA and source == DATA, "writes are private to the receiver"
    del here
    gc.collect()
    assert sorted(other.blocks_to_return()) == sorted([first, empty])
    one.free_block(first)
    assert put(one, DATA) == [first], "returned memory is reused first, as it is in the cache"


def test_both_ends_can_share_buffers_at_once(sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = stores(sockets)
    assert bytes(other.borrow_buffer(*put(one, DATA), len(DATA))) == DATA
    assert bytes(one.borrow_buffer(*put(other, DATA[:SHARED]), SHARED)) == DATA[:SHARED]


def test_a_store_without_room_takes_no_buffer(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SIZE", 4 * SHARED)
    one, other = stores(sockets)
    assert one.copy_buffers([DATA[:100]]) is None, "the buffer is too small for shared memory"
    kept = other.borrow_buffer(*put(one, DATA[: 2 * SHARED]), 2 * SHARED)
    assert one.copy_buffers([DATA[:SHARED], DATA]) is None
    assert put(one, DATA[:SHARED], DATA[:SHARED]), "the buffers that did not fit have reserved nothing"
    assert bytes(kept) == DATA[: 2 * SHARED]


def test_invalid_offsets_from_the_peer_are_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = stores(sockets)
    (place,) = put(one, DATA)
    for wrong, size in ((SIZE, 1), (0, SIZE + 1), (1 << 63, 1), (0, 1 << 63)):
        with pytest.raises(ProtocolError, match="not its own"):
            other.borrow_buffer(wrong, size)
    with pytest.raises(ProtocolError, match="does not have"):
        one.free_block(place + 1)
    for nothing in (lambda: BufferStore().free_block(0), lambda: BufferStore().borrow_buffer(0, 1)):
        with pytest.raises(ProtocolError):
            nothing()


# -- files from the peer
@contextlib.contextmanager
def unsealed(seals: int = 0, size: int = SIZE) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    yield descriptor
    os.close(descriptor)


@contextlib.contextmanager
def on_disk() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        yield file.fileno()


FULL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRONG: dict[str, Callable[[], contextlib.AbstractContextManager[int]]] = {
    "could be cut": unsealed,
    "could grow": lambda: unsealed(fcntl.F_SEAL_SHRINK),
    "on disk": on_disk,
    "of nothing": lambda: unsealed(FULL, 0),
    "no whole pages": lambda: unsealed(FULL, 100),
    "larger than any": lambda: unsealed(FULL, 1 << 40),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_memory_file_of_the_peer_that_is_unsafe_is_refused(
    sockets: tuple[socket.socket, socket.socket], what: str
) -> None:
    with WRONG[what]() as descriptor:
        socket.send_fds(sockets[1], [b"m"], [descriptor])
        with pytest.raises(ProtocolError, match="truncated, or is no memfd"):
            shared_memory.exchange_memory(sockets[0], time.monotonic() + PATIENCE, False)


def test_an_announced_memory_file_must_arrive(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].send(b"m")
    with pytest.raises(ProtocolError, match="sent none"):
        shared_memory.exchange_memory(sockets[0], time.monotonic() + PATIENCE, False)


def test_a_process_without_free_descriptors_works_without_shared_memory(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    with unsealed(FULL) as descriptor:
        socket.send_fds(sockets[1], [b"m"], [descriptor])
    sockets[1].send(b"n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        store = shared_memory.exchange_memory(sockets[0], time.monotonic() + PATIENCE, False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert store.copy_buffers([DATA]) is None and sockets[1].recv(2) == b"nn"


def test_the_exchange_ends_at_its_deadline_or_with_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        shared_memory.exchange_memory(sockets[0], time.monotonic() + 0.05, False)
    sockets[1].close()
    with pytest.raises(ConnectionError):
        shared_memory.exchange_memory(sockets[0], time.monotonic() + PATIENCE, False)


def test_a_side_does_not_finish_the_exchange_before_the_other_can_no_longer_fail(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side that decides is late, as on a busy machine."""
    heard, go, found = shared_memory._receive_word, threading.Event(), list[BufferStore]()

    def late(sock: socket.socket, deadline: float) -> tuple[bytes, list[int], bool]:
        said = heard(sock, deadline)
        if sock is sockets[1] and not said[1]:  # the verdict, which arrives without a file
            assert go.wait(PATIENCE)
        return said

    monkeypatch.setattr(shared_memory, "_receive_word", late)
    deadline = time.monotonic() + PATIENCE
    sides = [
        spawn(lambda n=n: found.append(shared_memory.exchange_memory(sockets[n], deadline, n == 1))) for n in (0, 1)
    ]  # type: ignore[misc]
    sides[0].join(0.2)
    assert not found, "it could send on a connection that the other side may still give up"
    go.set()
    for side in sides:
        side.join(PATIENCE)
    assert len(found) == 2


# -- systems without shared memory
@contextlib.contextmanager
def small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_files(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("not here")

    patch.setattr(os, "memfd_create", refuse)


def no_maps(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("too little memory")

    patch.setattr(shared_memory.mmap, "mmap", refuse)


LACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "switched off": lambda patch: patch.setenv("RPCBENCH_SHARED_MEMORY", "0"),
    "another system": lambda patch: patch.delattr(os, "memfd_create"),
    "no files": no_files,
    "no maps": no_maps,
}


@pytest.mark.parametrize("what", LACKS)
def test_a_system_without_shared_memory_takes_no_buffers(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    LACKS[what](monkeypatch)
    assert [store.copy_buffers([DATA]) for store in stores(sockets)] == [None, None]


def test_a_limit_on_file_size_switches_shared_memory_off(sockets: tuple[socket.socket, socket.socket]) -> None:
    with small_files():
        assert [store.copy_buffers([DATA]) for store in stores(sockets)] == [None, None]


def test_memory_that_the_peer_cannot_map_is_not_used(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].send(b"nn")  # no memory there, and it cannot map ours
    assert shared_memory.exchange_memory(sockets[0], time.monotonic() + PATIENCE, False).copy_buffers([DATA]) is None
    _, descriptors, _, _ = socket.recv_fds(sockets[1], 2, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[0], 0)
    for descriptor in descriptors:
        os.close(descriptor)


# -- the end
def test_buffers_in_use_outlive_the_connection_and_all_other_memory_is_returned(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    one, other = stores(sockets)
    places = put(one, DATA, DATA, DATA)
    kept = np.frombuffer(other.borrow_buffer(places[1], len(DATA)), np.uint8)
    assert other._theirs is not None
    memory = other._theirs.memory
    one.release_memory()
    other.release_memory()
    del one, other
    gc.collect()
    assert kept.tobytes() == DATA
    kept[:] = 7
    assert not any(memory[places[0] : places[0] + len(DATA)]) and not any(memory[places[2] : places[2] + len(DATA)])

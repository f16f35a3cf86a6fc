"""Memory for the large buffers of a connection: shared with the peer, or of this process alone and reused.

Guarantees
- No thread waits for room: a buffer that finds none goes through the socket, or into memory that is used once.
- A block belongs to one buffer at a time. A `BorrowedBuffer` detects the end of a buffer through all objects made from
  it: tensors, arrays, views of views.
- Memory that is not needed between two calls of `free_idle_memory` is returned to the system.
- Offsets received from a peer are validated: an invalid one raises ProtocolError.
- A tensor keeps its memory after the connection or the peer has ended.
"""

# Theory of operation
#
# Two processes on one host exchange one sealed memfd each, once, after the handshake. A memfd has no name, so nothing
# of it outlives the two; its seals stop either process from truncating it under the other. Each process writes to its
# own file and reads the peer's:
#
#     sender                                     receiver
#     Arena.take: a free block of its own file
#     copies the buffer into the block
#     frame LENT: the block's offset     ──────► BorrowedBuffers.borrow_block: tensors over the block, without a copy
#                                                ... the last reference to them ends
#     Arena.give_back: the block is free ◄────── frame RETURNED, beside the next message or at `free_idle_memory`
#
# Without memfds, or with RPCBENCH_SHARED_MEMORY=0, buffers go through the socket into a `BufferPool`. The first touch
# of fresh memory costs more than copying into it: so the pool reuses memory, and an arena uses low blocks first.

from __future__ import annotations

import bisect
import contextlib
import fcntl
import math
import mmap
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rpcbench.base.conditions import time_left
from rpcbench.base.errors import ProtocolError
from rpcbench.wire.framing import Memory

SIZE = 1 << 30  # bytes of a mapping: address space only, until a block is first written to
Bytes = NDArray[np.uint8]


def _round_to_pages(size: int) -> int:
    """Return the size in bytes of a block for `size` bytes: whole pages, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class Arena:
    """An allocator of blocks of a mapping, from any thread. `forget`: the madvise that returns memory to the system."""

    def __init__(self, memory: mmap.mmap, forget: int) -> None:
        self.memory = memory
        self._forget = forget
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]  # (start, stop), sorted; neighbours are merged
        self._taken: dict[int, int] = {}  # start → stop
        self._needed = 0  # end of the highest block taken since the last `free_idle_memory`
        self._touched = 0  # no byte from here on has been written

    def reserve_block(self, size: int) -> int | None:
        """Reserve `size` bytes and return their offset; None where no free block is large enough."""
        size = _round_to_pages(size)
        with self._lock:
            for index, (start, stop) in enumerate(self._free):  # first fit: low memory is likely to be warm
                if stop - start >= size:
                    self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                    self._taken[start] = start + size
                    self._needed = max(self._needed, start + size)
                    self._touched = max(self._touched, start + size)
                    return start
        return None

    def free_block(self, start: int) -> None:
        """Free the block at `start`. KeyError where none begins there."""
        with self._lock:
            self._insert_free_block(start, self._taken.pop(start))

    def _insert_free_block(self, start: int, stop: int) -> None:
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]  # merge with the free block after it, and below with the one before it
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def free_idle_memory(self) -> None:
        """Return to the system the memory that was not needed since the last call."""
        idle = self._set_aside()
        for start, stop in idle:  # without the lock: madvise may take long, and these blocks cannot be taken meanwhile
            self.memory.madvise(self._forget, start, stop - start)
        with self._lock:
            for start, stop in idle:
                self._insert_free_block(start, stop)

    def _set_aside(self) -> list[tuple[int, int]]:
        """Remove the free ranges that hold data and were not needed from the free list, and return them."""
        with self._lock:
            idle, kept = [], []
            for start, stop in self._free:
                first, last = max(start, self._needed), min(stop, self._touched)  # below: warm; above: never written
                if first < last:
                    idle.append((first, last))
                    kept += [(a, b) for a, b in ((start, first), (last, stop)) if a < b]
                else:
                    kept.append((start, stop))
            self._free = kept
            self._touched = max(self._needed, max(self._taken.values(), default=0))
            self._needed = 0
            return idle


class BorrowedBuffer(weakref.ref[Bytes]):
    """A weak reference to a borrowed buffer; it puts itself into a queue when the last user of the block ends."""

    __slots__ = ("start", "stop")

    start: int
    stop: int


class BorrowedBuffers:
    """The blocks of a mapping that are in use in this process, as exclusive buffers."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._lock = threading.Lock()  # guards the three below
        self._starts: list[int] = []  # of the blocks in use, sorted
        self._loans: dict[int, BorrowedBuffer] = {}  # by start
        self._ended = False
        # Reentrant, as weakref callbacks may run anywhere.
        self._ended_loans: queue.SimpleQueue[BorrowedBuffer] = queue.SimpleQueue()
        # whether `pop_unused_blocks` would return an empty list
        self.none_ended: Callable[[], bool] = self._ended_loans.empty

    def borrow_block(self, start: int, size: int) -> memoryview:
        """Return `size` bytes of the block at `start`. ValueError for a place that is no block, for a block in use, or
        after the end."""
        stop = start + _round_to_pages(size)
        if not 0 <= start < stop <= len(self.memory) or start % mmap.PAGESIZE:
            raise ValueError(f"{size} bytes at {start} are not there")
        piece: Bytes = np.ndarray(size, np.uint8, self.memory, start)  # every view of an array keeps the array alive,
        loan = BorrowedBuffer(piece, self._ended_loans.put)  # whereas a view of a memoryview outlives that memoryview
        loan.start, loan.stop = start, stop
        with self._lock:
            at = bisect.bisect_left(self._starts, stop)  # only the last block that begins before `stop` can overlap
            if not self._ended and (not at or self._loans[self._starts[at - 1]].stop <= start):
                self._starts.insert(at, start)
                self._loans[start] = loan
                return piece.data
        del loan  # before `piece` ends, else its callback would report the block, which another buffer may use
        raise ValueError("the connection has ended" if self._ended else f"{size} bytes at {start} are in use")

    def pop_unused_blocks(self) -> list[int]:
        """Return the offsets of the blocks whose use has ended; each is returned once."""
        starts = []
        while not self._ended_loans.empty():
            try:
                start = self._ended_loans.get_nowait().start
            except queue.Empty:  # another thread took it in between
                break
            with self._lock:
                del self._loans[start], self._starts[bisect.bisect_left(self._starts, start)]
            starts.append(start)
        return starts

    def release_unused(self) -> None:
        """Return the memory between the blocks in use to the system; from now on no block can be borrowed."""
        with self._lock:
            self._ended = True
            ends = [0, *(self._loans[start].stop for start in self._starts)]
            starts = [*self._starts, len(self.memory)]
        for start, stop in zip(ends, starts, strict=True):
            if start < stop:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)


SMALL = 256 << 10
"""Bytes. Smaller buffers come from malloc, which is as fast for them."""


class BufferPool:
    """Receive buffers that are reused, from any thread. Without memory or madvise, each buffer is used once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False  # one attempt: a mapping that failed once is likely to fail again
        self._arena: Arena | None = None
        self._loans: BorrowedBuffers | None = None

    def allocate_buffer(self, size: int) -> memoryview:
        """Return an exclusive buffer of `size` bytes with undefined content. Untouched, it needs no memory yet: a peer
        that announces bytes which never come must not fill this process."""
        if size >= SMALL:
            self._create_mapping()
            self._take_back()
            place = self._arena.reserve_block(size) if self._arena is not None else None
            if place is not None and self._loans is not None:
                return self._loans.borrow_block(place, size)
        return np.empty(size, np.uint8).data

    def _create_mapping(self) -> None:
        """Create the mapping, at the first large buffer: most processes never need one."""
        with self._lock:
            if self._tried:
                return
            self._tried = True
            with contextlib.suppress(AttributeError, OSError):  # Windows has no madvise; a memory limit may forbid it
                memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._arena, self._loans = Arena(memory, mmap.MADV_DONTNEED), BorrowedBuffers(memory)
                memory.madvise(mmap.MADV_HUGEPAGE)

    def _take_back(self) -> None:
        if self._arena is not None and self._loans is not None:
            for place in self._loans.pop_unused_blocks():
                self._arena.free_block(place)

    def free_idle_memory(self) -> None:
        self._take_back()
        if self._arena is not None:
            self._arena.free_idle_memory()


SHARED = 16 << 10
"""Bytes. Messages with less than this in buffers go through the socket."""


class BufferStore(Memory):
    """The buffer memory of one connection, from any thread. Where two processes share memory, `ours` is lent to the
    peer and `theirs` is lent by it."""

    def __init__(self, ours: Arena | None = None, theirs: BorrowedBuffers | None = None) -> None:
        self._ours = ours
        self._theirs = theirs
        # Whether no block has to be returned to the peer; a plain attribute, as every send calls it.
        self.none_to_return: Callable[[], bool] = theirs.none_ended if theirs is not None else lambda: True
        self._reused = BufferPool()

    # -- sending
    def copy_buffers(self, buffers: Sequence[memoryview]) -> list[int] | None:
        """Copy byte buffers to shared memory and return their offsets; None where they must go through the socket."""
        ours = self._ours
        if ours is None or sum(buffer.nbytes for buffer in buffers) < SHARED:
            return None
        places: list[int] = []
        for buffer in buffers:
            place = ours.reserve_block(buffer.nbytes)
            if place is None:  # all buffers of a message or none: a frame is either LENT or MESSAGE
                for taken in places:
                    ours.free_block(taken)
                return None
            places.append(place)
        for place, buffer in zip(places, buffers, strict=True):
            here = np.ndarray(buffer.nbytes, np.uint8, ours.memory, place)
            np.copyto(here, np.ndarray(buffer.nbytes, np.uint8, buffer))  # numpy releases the GIL while it copies
            self.lent += buffer.nbytes
        return places

    def free_block(self, place: int) -> None:
        """Free a block that the peer has returned."""
        if self._ours is None:
            return super().free_block(place)
        try:
            self._ours.free_block(place)
        except KeyError:
            raise ProtocolError(f"the peer gives back memory at {place}, which it does not have") from None

    # -- receiving
    def allocate_buffer(self, size: int) -> memoryview:
        return self._reused.allocate_buffer(size)

    def borrow_buffer(self, place: int, size: int) -> memoryview:
        if self._theirs is None:
            return super().borrow_buffer(place, size)
        try:
            found = self._theirs.borrow_block(place, size)
            self.borrowed += size
            return found
        except ValueError as error:
            raise ProtocolError(f"the peer lends memory that is not its own: {error}") from error

    def blocks_to_return(self) -> list[int]:
        """Return the offsets of the peer's blocks that must be returned to it."""
        return self._theirs.pop_unused_blocks() if self._theirs is not None else []

    # -- both
    def free_idle_memory(self) -> None:
        self._reused.free_idle_memory()
        if self._ours is not None:
            self._ours.free_idle_memory()

    def release_memory(self) -> None:
        """Release all shared memory after the connection has ended, except for buffers in use in this process."""
        theirs, self._ours, self._theirs = self._theirs, None, None
        if theirs is not None:
            theirs.release_unused()


_LARGEST = 64 << 30  # bytes of a peer's file that this process maps at most
_NOTHING, _MEMORY = b"n", b"m"  # the words of the exchange: one byte, with or without descriptors


def exchange_memory(sock: socket.socket, deadline: float, last: bool) -> BufferStore:
    """Send this process's memory to the peer and receive the peer's, each where both sides can use it. `last`: whether
    this side sends the last word, as exactly one of the two does. ProtocolError for a file that could do harm, OSError
    past the deadline or where the peer closes the socket."""
    ours = _offer_memory(sock, deadline)
    theirs = _receive_memory(sock, deadline)
    verdict = _NOTHING if theirs is None else _MEMORY
    if not last:
        _send_word(sock, deadline, verdict)
    accepted = _receive_word(sock, deadline)[0] == _MEMORY
    if last:  # no deadline: the other side returns once it has this, so this side must not give up after that
        _send_word(sock, math.inf, verdict)
    arena = Arena(ours, mmap.MADV_REMOVE) if ours is not None and accepted else None
    return BufferStore(arena, BorrowedBuffers(theirs) if theirs is not None else None)


def _offer_memory(sock: socket.socket, deadline: float) -> mmap.mmap | None:
    """Offer memory to the peer and return the mapping; None where not possible."""
    descriptor = _create_memfd()
    try:
        ours = _map_file(descriptor, SIZE)
        if ours is None or descriptor is None:
            _send_word(sock, deadline, _NOTHING)
            return None
        _send_word(sock, deadline, _MEMORY, descriptor)
        return ours
    finally:
        if descriptor is not None:
            os.close(descriptor)  # the mapping keeps the file


def _create_memfd() -> int | None:
    """Return a sealed memfd, which takes no memory until it is written to; None where the system has none."""
    if os.environ.get("RPCBENCH_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("rpcbench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # no memory, no descriptors, or the system forbids it
        return None
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)  # and no seal can be added later
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


# Reading a mapping beyond the end of a truncated file kills the process with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


def _map_file(descriptor: int | None, size: int) -> mmap.mmap | None:
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):
        return mmap.mmap(descriptor, size)
    return None


def _receive_memory(sock: socket.socket, deadline: float) -> mmap.mmap | None:
    """Receive and map the peer's memory; None where it offers none, or it cannot be used here."""
    word, descriptors, cut = _receive_word(sock, deadline)
    try:
        if word == _NOTHING or cut or os.environ.get("RPCBENCH_SHARED_MEMORY") == "0":
            return None
        if not descriptors:
            raise ProtocolError("the peer announced shared memory, and sent none")
        return _map_file(descriptors[0], _sealed_size(descriptors[0]))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _sealed_size(descriptor: int) -> int:
    """Return the size of a file that is sealed against truncation. ProtocolError for any other file."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not 0 < size <= _LARGEST or size % mmap.PAGESIZE:
        raise ProtocolError("the peer sent a file as shared memory that could be truncated, or is no memfd")
    return size


def _send_word(sock: socket.socket, deadline: float, word: bytes, *descriptors: int) -> None:
    sock.settimeout(_seconds_left(deadline))
    socket.send_fds(sock, [word], descriptors)


_CLOSED_IN_CHILDREN = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # macOS lacks it, and sends no descriptors


def _receive_word(sock: socket.socket, deadline: float) -> tuple[bytes, list[int], bool]:
    """Return a word, the descriptors received with it, and whether some were lost (this process is at its limit)."""
    sock.settimeout(_seconds_left(deadline))
    word, descriptors, flags, _ = socket.recv_fds(sock, 1, 1, _CLOSED_IN_CHILDREN)
    if not word:
        raise ConnectionResetError("the peer closed the connection before it had announced its memory")
    return word, descriptors, bool(flags & socket.MSG_CTRUNC)


def _seconds_left(deadline: float) -> float | None:
    left = time_left(deadline, "the peer took too long to announce its memory")
    return None if left == math.inf else left

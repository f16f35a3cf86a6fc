"""Where the two ends of a connection put large buffers: memory of this process, or memory that both processes share.

    sender                                        receiver
    takes a piece of its own arena, copies the
    buffer into it, and says where it is  ──────► makes tensors of the piece: no copy
    has the piece again                   ◄────── says so, once nothing there refers to the piece

Each of two processes on one host hands the other one an anonymous file, once, with an event to wake it by. Neither file
has a name, so nothing of it outlives the two. It goes only to a peer that has proved its identity, and is sealed, so
that no process can cut it short under the other. Where a system has no such files, or does not let them be mapped, or
RPCBENCH_SHARED_MEMORY is 0, everything goes through the socket, into memory of the receiver that is used again
(`BufferPool`): the first touch of fresh memory costs more than copying into it. So pieces of an `Arena` are given out
lowest first, which is likely to be warm.

Guarantees
- Nobody waits for room: what finds none goes through the socket, or into memory that is not used again.
- A piece belongs to one buffer at a time. A `Loan` notices the end of a buffer whatever has been made of it: tensors,
  arrays, views of views.
- What nothing has needed from one `tidy` to the next goes back to the system.
- What a peer says about places is checked: nonsense is a ProtocolError.
- A tensor keeps its memory, also when the connection or the peer is gone.
"""

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
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rpcbench.base.errors import ProtocolError
from rpcbench.transport import shared_ring
from rpcbench.transport.shared_ring import POSSIBLE, Consumer, EventReceiver, EventSender, Producer
from rpcbench.wire.framing import Memory

SIZE = 1 << 30
Bytes = NDArray[np.uint8]


def _pages(size: int) -> int:
    """The size of a piece for so many bytes."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class Arena:
    """Which pieces of a mapping are free. `forget`: the advice that gives a piece back to the system."""

    def __init__(self, memory: mmap.mmap, forget: int) -> None:
        self.memory = memory
        self._forget = forget
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]
        self._taken: dict[int, int] = {}  # start → stop
        self._needed = 0  # up to where pieces were taken since the last `tidy`
        self._touched = 0  # nothing has been put beyond

    def take(self, size: int) -> int | None:
        """Where `size` bytes are free, which are the caller's from now on; None where there are not so many."""
        size = _pages(size)
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                    self._taken[start] = start + size
                    self._needed = max(self._needed, start + size)
                    self._touched = max(self._touched, start + size)
                    return start
        return None

    def give_back(self, start: int) -> None:
        """KeyError where no piece begins there."""
        with self._lock:
            self._insert(start, self._taken.pop(start))

    def _insert(self, start: int, stop: int) -> None:
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def tidy(self) -> None:
        """Give the system what was not needed since the last time."""
        idle = self._set_aside()
        for start, stop in idle:
            self.memory.madvise(self._forget, start, stop - start)
        with self._lock:
            for start, stop in idle:
                self._insert(start, stop)

    def _set_aside(self) -> list[tuple[int, int]]:
        """Free pieces with something in them that nobody has needed: not to be taken until they are empty."""
        with self._lock:
            idle, kept = [], []
            for start, stop in self._free:
                first, last = max(start, self._needed), min(stop, self._touched)
                if first < last:
                    idle.append((first, last))
                    kept += [(a, b) for a, b in ((start, first), (last, stop)) if a < b]
                else:
                    kept.append((start, stop))
            self._free = kept
            self._touched = max(self._needed, max(self._taken.values(), default=0))
            self._needed = 0
            return idle


class Loan(weakref.ref[Bytes]):
    """Puts itself into a queue when its piece is used no more."""

    __slots__ = ("start", "stop")

    start: int
    stop: int


class Loans:
    """Pieces of a mapping that are in use here, as buffers that nobody else has."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._loans: dict[int, Loan] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._over: queue.SimpleQueue[Loan] = queue.SimpleQueue()
        self.none_over: Callable[[], bool] = self._over.empty  # whether `over` would tell of none

    def lend(self, start: int, size: int) -> memoryview:
        """The bytes from `start` on. ValueError for what is no part of the mapping, or in use, and at the end."""
        if not 0 <= start <= start + size <= len(self.memory) or start in self._loans:
            raise ValueError(f"{size} bytes at {start} are not there, or in use")
        piece: Bytes = np.ndarray(size, np.uint8, self.memory, start)  # not a memoryview: a view of it outlives it
        loan = Loan(piece, self._over.put)
        loan.start, loan.stop = start, start + _pages(size)
        with self._lock:
            if self._ended:
                raise ValueError("the connection has ended")
            self._loans[start] = loan
        return piece.data

    def over(self) -> list[int]:
        """Where pieces begin that are used no more; each is told once."""
        starts = []
        while not self._over.empty():
            try:
                start = self._over.get_nowait().start
            except queue.Empty:  # another thread has it
                break
            del self._loans[start]
            starts.append(start)
        return starts

    def forget_rest(self) -> None:
        """Give the system what lies between the pieces that are in use. None is lent any more."""
        with self._lock:
            self._ended = True
            used = sorted((loan.start, loan.stop) for loan in list(self._loans.values()))
        ends = [0, *(stop for _, stop in used)]
        for start, stop in zip(ends, [*(start for start, _ in used), len(self.memory)], strict=True):
            if start < stop:
                self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)


SMALL = 256 << 10
"""Smaller buffers are made by malloc, which is as quick there."""


class BufferPool:
    """From any thread. Where memory is short, or cannot be advised here, buffers are used once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._arena: Arena | None = None
        self._loans: Loans | None = None

    def room(self, size: int) -> memoryview | bytearray:
        """A buffer of `size` bytes that nobody else has, whatever is in it."""
        if size >= SMALL:
            self._make()
            self._take_back()
            place = self._arena.take(size) if self._arena is not None else None
            if place is not None and self._loans is not None:
                return self._loans.lend(place, size)
        return bytearray(size)

    def _make(self) -> None:
        """A mapping, at the first large buffer: most processes never need one."""
        with self._lock:
            if self._tried:
                return
            self._tried = True
            with contextlib.suppress(AttributeError, OSError):  # Windows has no advice; a limit may be in the way
                memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._arena, self._loans = Arena(memory, mmap.MADV_DONTNEED), Loans(memory)
                memory.madvise(mmap.MADV_HUGEPAGE)

    def _take_back(self) -> None:
        if self._arena is not None and self._loans is not None:
            for place in self._loans.over():
                self._arena.give_back(place)

    def tidy(self) -> None:
        """Give back to the system what has not been needed for some time."""
        self._take_back()
        if self._arena is not None:
            self._arena.tidy()


SHARED = 16 << 10
"""Messages with less than this many bytes in buffers go through the socket."""


class BufferStore(Memory):
    """For one connection, from any thread. `ours` is lent to the peer and `theirs` by it, where they share memory; they
    may then have lanes, too: with the `ear` that the peer wakes us at, and its `bell`."""

    def __init__(
        self,
        ours: Arena | None = None,
        theirs: Loans | None = None,
        ear: EventReceiver | None = None,
        bell: EventSender | None = None,
    ) -> None:
        self._ours = ours
        self._theirs = theirs
        self.ear, self._bell = ear, bell
        self._lanes: dict[int, Producer] = {}
        self.owes_nothing: Callable[[], bool] = theirs.none_over if theirs is not None else lambda: True
        self._reused = BufferPool()

    # -- sending
    def put(self, buffers: Sequence[memoryview]) -> list[int] | None:
        """Copy buffers, of bytes, to where the peer finds them: the places. None where they have to go another way."""
        ours = self._ours
        if ours is None or sum(buffer.nbytes for buffer in buffers) < SHARED:
            return None
        places: list[int] = []
        for buffer in buffers:
            place = ours.take(buffer.nbytes)
            if place is None:
                for taken in places:
                    ours.give_back(taken)
                return None
            places.append(place)
        for place, buffer in zip(places, buffers, strict=True):
            here = np.ndarray(buffer.nbytes, np.uint8, ours.memory, place)
            np.copyto(here, np.ndarray(buffer.nbytes, np.uint8, buffer))  # lets other threads run
            self.lent += buffer.nbytes
        return places

    def returned(self, place: int) -> None:
        """The peer needs a buffer no more, or a lane."""
        if self._ours is None:
            return super().returned(place)
        if (given := self._lanes.pop(place, None)) is not None:
            given.end()
        try:
            self._ours.give_back(place)
        except KeyError:
            raise ProtocolError(f"the peer gives back memory at {place}, which it does not have") from None

    # -- receiving
    def room(self, size: int) -> memoryview | bytearray:
        """A buffer for what comes through the socket."""
        return self._reused.room(size)

    def borrow(self, place: int, size: int) -> memoryview:
        """A buffer that the peer has put there."""
        if self._theirs is None:
            return super().borrow(place, size)
        try:
            found = self._theirs.lend(place, size)
            self.borrowed += size
            return found
        except ValueError as error:
            raise ProtocolError(f"the peer lends memory that is not its own: {error}") from error

    def owed(self) -> list[int]:
        """Places of buffers of the peer's that are needed no more: to be told to it."""
        return self._theirs.over() if self._theirs is not None else []

    # -- lanes
    def open_lane(self, name: int) -> tuple[int, Producer] | None:
        """A new lane to the peer, and its place, by which the peer finds it there. None where they cannot have one.

        It is over as soon as the peer needs it no more, or the connection ends.
        """
        ours, bell = self._ours, self._bell
        if ours is None or bell is None or (place := ours.take(shared_ring.SIZE)) is None:
            return None
        made = Producer(memoryview(ours.memory)[place : place + shared_ring.SIZE], name, bell, self)
        self._lanes[place] = made
        if self._ours is None:  # by now
            made.end()
        return place, made

    def lane_from(self, place: int, name: int) -> Consumer | None:
        """The lane that the peer has opened; None where that was on another connection."""
        theirs = self._theirs
        if theirs is None or self.ear is None or not shared_ring.is_there(theirs.memory, place, name):
            return None
        with contextlib.suppress(ValueError):  # it was told of twice
            return Consumer(theirs.lend(place, shared_ring.SIZE), self.ear, self)
        return None

    # -- both
    def tidy(self) -> None:
        """Give back to the system what has not been needed for some time."""
        self._reused.tidy()
        if self._ours is not None:
            self._ours.tidy()

    def end(self) -> None:
        """The connection has ended: only buffers that are in use here keep their memory."""
        theirs, self._ours, self._theirs = self._theirs, None, None
        for given in list(self._lanes.values()):
            given.end()
        if theirs is not None:
            theirs.forget_rest()

    def forked(self) -> None:
        """In a forked child: nobody else is here to have taken a lock."""
        for one in (self._bell, self.ear):
            if one is not None:
                one.forked()

    def close(self) -> None:
        """Give descriptors back, once nobody reads here."""
        if self.ear is not None:
            self.ear.close()
        if self._bell is not None:
            self._bell.close()


_LARGEST = 64 << 30
_NOTHING, _MEMORY = b"n", b"m"


def exchange(sock: socket.socket, deadline: float, last: bool) -> BufferStore:
    """Hand our memory to the peer and take its own, as it does at this moment; each only where both can.

    last: whether this side has the last word, as one of the two does. Where the other side returns, this one waits for
    nothing any more, so it does not give up what the other takes for done.

    ProtocolError for a file that could do harm, OSError past the deadline, or where the peer hangs up.
    """
    with contextlib.ExitStack() as undo:
        ours, ear = _offered(sock, deadline, undo)
        theirs, bell = _taken(sock, deadline, undo)
        verdict = _NOTHING if theirs is None else _MEMORY
        if not last:
            _say(sock, deadline, verdict)
        accepted = _heard(sock, deadline)[0] == _MEMORY
        if last:
            _say(sock, math.inf, verdict)
        undo.pop_all()  # the store's own from now on
    arena = Arena(ours, mmap.MADV_REMOVE) if ours is not None and accepted else None
    return BufferStore(arena, Loans(theirs) if theirs is not None else None, ear, bell)


def _offered(
    sock: socket.socket, deadline: float, undo: contextlib.ExitStack
) -> tuple[mmap.mmap | None, EventReceiver | None]:
    """Our memory, and the ear of the bell that the peer gets with it; neither where the peer was told of none."""
    descriptor = _file()
    try:
        ours = _mapped(descriptor, SIZE)
        if ours is None or descriptor is None:
            _say(sock, deadline, _NOTHING)
            return None, None
        ear = _ear()
        if ear is not None:
            undo.callback(ear.close)
        _say(sock, deadline, _MEMORY, descriptor, *(() if ear is None else (ear.descriptor,)))
        return ours, ear
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _ear() -> EventReceiver | None:
    """None where lanes are not possible, or there are no descriptors for one."""
    if not POSSIBLE:
        return None
    with contextlib.suppress(OSError):
        return EventReceiver()
    return None


def _file() -> int | None:
    """A sealed file that takes no memory until it is written to."""
    if os.environ.get("RPCBENCH_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("rpcbench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # no memory, no descriptors, or the system forbids it
        return None
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


def _mapped(descriptor: int | None, size: int) -> mmap.mmap | None:
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):
        return mmap.mmap(descriptor, size)
    return None


def _taken(
    sock: socket.socket, deadline: float, undo: contextlib.ExitStack
) -> tuple[mmap.mmap | None, EventSender | None]:
    """The peer's memory, and its bell; None where it has none for us, or it cannot be used here."""
    word, descriptors, cut = _heard(sock, deadline)
    try:
        if word == _NOTHING or cut or os.environ.get("RPCBENCH_SHARED_MEMORY") == "0":
            return None, None
        if not descriptors:
            raise ProtocolError("the peer announced shared memory, and sent none")
        memory = _mapped(descriptors[0], _size(descriptors[0]))
        if len(descriptors) == 1 or memory is None or not POSSIBLE:
            return memory, None
        _check_bell(descriptors[1])
        bell = EventSender(descriptors.pop())
        undo.callback(bell.close)
        return memory, bell
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check_bell(descriptor: int) -> None:
    """ProtocolError for a file that is none: what is written to it would do something else."""
    if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != "anon_inode:[eventfd]":
        raise ProtocolError("the peer sent something else as a bell")


def _size(descriptor: int) -> int:
    """Of a file that keeps it whatever the peer does. ProtocolError for another one."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no file in memory
        seals = 0
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not 0 < size <= _LARGEST or size % mmap.PAGESIZE:
        raise ProtocolError("the peer sent a file as shared memory that could be cut short, or is none")
    return size


def _say(sock: socket.socket, deadline: float, word: bytes, *descriptors: int) -> None:
    _limit(sock, deadline)
    socket.send_fds(sock, [word], descriptors)


def _heard(sock: socket.socket, deadline: float) -> tuple[bytes, list[int], bool]:
    """A word, what came with it, and whether that had no room: this process may open no more files."""
    _limit(sock, deadline)
    word, descriptors, flags, _ = socket.recv_fds(sock, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError("the peer hung up before it had told of its memory")
    return word, descriptors, bool(flags & socket.MSG_CTRUNC)


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the peer took too long to tell of its memory")
    sock.settimeout(None if left == math.inf else left)

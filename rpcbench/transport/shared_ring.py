"""A ring of small values in memory that two processes share, from one to the other, without a message for each.

    producer ──give──► [3][4][ ][ ] ──take──► consumer   a ring of places, each with a few whole numbers and some bytes;
             event ◄── what the consumer is at           and the consumer's word for what it is at

The consumer says what it is at: `WORKS` (it will look), `LISTENS` (it waits at its event), `AWAY` (it waits for
messages, or has not come yet). So no system call is made for a value that is not waited for yet.

Guarantees
- A value is seen whole or not at all, and in order. Nobody waits for room: a producer that finds none sends a message.
- No value is missed: the consumer looks after it has changed its word, and the producer reads that word after the value
  is there. For that all cores must see the stores of one in its order, as they do on x86; there are no rings elsewhere.
  Only a load may overtake a store before it: between these two, on both sides, a lock is given back, which is a
  barrier.
- What the other side has written is checked: nonsense is a ProtocolError.
- Nothing is written to a ring that is `over`: its memory may be used for something else.
- An event that is sent is received once, whether before or after the consumer waits; several may be received as one.
  It wakes the consumer on a core of its own, if one is free; what a socket wakes gets the core of the writer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rpcbench.base.errors import ProtocolError, counted
from rpcbench.wire.framing import Memory


class EventSender:
    """The end that rings; `descriptor` came from whoever hears it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Harmless once it is closed."""
        with self._lock:
            if self._descriptor >= 0:
                _ring(self._descriptor)

    def forked(self) -> None:
        """In a forked child: a thread that was about to ring is not here."""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class EventReceiver:
    """The end that hears. Who waits there has its `turn`: of two, one would hear what is for the other."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.closed = False
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def wait_while(self, waiting: Callable[[], bool], seconds: float) -> None:
        """Wait until that ends, or nothing has rung for so many seconds; not at all where somebody else waits."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            while waiting() and not self.closed and self._poll.poll(seconds * 1000):
                self.heard()
        finally:
            self.turn.release()

    def heard(self) -> None:
        """What has rung until now has been heard."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def ring(self) -> None:
        """As its bell does, from this process. Harmless once it is closed."""
        with self._lock:
            if not self.closed:
                _ring(self.descriptor)

    def forked(self) -> None:
        """In a forked child: a thread that waited, or rang, is not here."""
        self.turn, self._lock = threading.Lock(), threading.Lock()

    def close(self) -> None:
        """Once nobody waits at it."""
        with self.turn, self._lock:
            if not self.closed:
                self.closed = True
                os.close(self.descriptor)


def _ring(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):  # rung 2**64 times, and will be heard
        os.eventfd_write(descriptor, 1)


POSSIBLE = hasattr(os, "eventfd") and Path("/proc/self/fd").is_dir() and platform.machine() in ("x86_64", "AMD64")
AWAY, WORKS, LISTENS = range(3)
PLACES, ROOM = 16, 128 << 10
"""So many values, of so many bytes: larger ones have a copy to pay for that a message hardly adds to."""
NUMBERS = 16
"""So many whole numbers go with each."""
_HEAD, _WORD = struct.Struct(f"{NUMBERS}q"), struct.Struct("q")
_GIVEN, _TAKEN, _AT, _NAME = range(0, 32, 8)  # words, each in a cache line of its own
_HEADS = 32 * 8
_PAGE = 4096
SIZE = _PAGE + PLACES * ROOM


def is_there(memory: mmap.mmap, place: int, name: int) -> bool:
    """Whether a lane of this name begins there."""
    fits = 0 <= place <= len(memory) - SIZE and not place % mmap.PAGESIZE
    return fits and _WORD.unpack_from(memory, place + 8 * _NAME) == (name,)


class _Ring:
    """What both sides have of it."""

    def __init__(self, memory: memoryview, traffic: Memory) -> None:
        self._memory, self._traffic = memory, traffic
        self._words = memory[:_HEADS].cast("q")
        self.places = [memory[_PAGE + at * ROOM : _PAGE + (at + 1) * ROOM] for at in range(PLACES)]


class Producer(_Ring):
    """`name`: a number that no other lane of this process has; `bell`: the one that the taker listens at; `traffic`
    counts what is lent."""

    def __init__(self, memory: memoryview, name: int, bell: EventSender, traffic: Memory) -> None:
        super().__init__(memory, traffic)
        memory[:_HEADS] = bytes(_HEADS)  # a piece may have been used before
        self.over = False
        self.lock = threading.Lock()
        """Held from `room` to `give`."""
        self._words[_NAME], self._given, self._bell = name, 0, bell

    def room(self) -> int | None:
        """The place for the next value; None where that is to go as a message."""
        words = self._words
        if self.over or words[_AT] == AWAY or self._given - words[_TAKEN] >= PLACES:
            return None
        return self._given % PLACES

    def give(self, head: Sequence[int], size: int) -> None:
        """So many bytes are in the place, and these numbers go with them. `tell` comes next."""
        self._traffic.lent += size
        _HEAD.pack_into(self._memory, _HEADS + self._given % PLACES * _HEAD.size, *head)
        self._given += 1
        self._words[_GIVEN] = self._given

    def tell(self, message: Callable[[], object]) -> None:
        """Wake who waits for what was given. `message`: sends it one, if it does not listen any more.

        After `lock` was given back, which is a barrier: either its word is seen here, or it sees the value.
        """
        at = self._words[_AT]
        if at == LISTENS:
            self._bell.ring()
        elif at == AWAY:
            message()

    def end(self) -> None:
        """Nobody takes here any more."""
        with self.lock:
            self.over = True


class Consumer(_Ring):
    """One thread's."""

    def __init__(self, memory: memoryview, ear: EventReceiver, traffic: Memory) -> None:
        super().__init__(memory, traffic)
        self.at, self._taken, self._ear = AWAY, 0, ear
        self._barrier = threading.Lock()

    def lies(self) -> bool:
        """Whether there is one."""
        return self._words[_GIVEN] != self._taken

    def next(self) -> tuple[int, tuple[int, ...]] | None:
        """The place of the next value and its numbers, if there is one. `done` comes next."""
        count = self._words[_GIVEN] - self._taken
        if not count:
            return None
        if not 0 < count <= PLACES:
            raise ProtocolError(f"a peer says that {counted(count, 'value')} lie in {PLACES} places")
        place = self._taken % PLACES
        return place, _HEAD.unpack_from(self._memory, _HEADS + place * _HEAD.size)

    def done(self, size: int) -> None:
        """So many bytes have been taken; the place is free again."""
        self._traffic.borrowed += size
        self._taken += 1
        self._words[_TAKEN] = self._taken

    def be(self, at: int) -> EventReceiver | None:
        """What the taker is at from now on; it looks once more before it waits. The ear to listen at, if it is one.

        A lane whose connection has ended is not heard of any more, so who takes has to wait for messages."""
        if at == LISTENS and self._ear.closed:
            at = AWAY
        if at != self.at:
            self._words[_AT] = self.at = at
            with self._barrier:
                pass
        return self._ear if at == LISTENS else None

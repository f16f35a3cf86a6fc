"""A single-producer, single-consumer ring buffer of small values in memory that two processes share.

Guarantees
- Values arrive whole and in order. The producer never waits for room: a value that finds none goes as a message.
- The consumer misses no value, and no system call is made for a value that it does not wait for yet.
- Counts that the other process has written are validated: an impossible one raises ProtocolError.
- No value is written to a ring that is `over`: its memory may be used for something else.
- An event that is sent is received once, whether before or after the consumer waits; several may be received as one.
  It wakes the consumer on a core of its own, if one is free; a wake-up by a socket gets the core of the writer.
"""

# Theory of operation
#
#     page 0    given │ taken │ consumer's state │ name        a cache line each; then PLACES heads of NUMBERS integers
#     page 1 …  [value 3][value 4][        ][        ] ...     PLACES slots of ROOM bytes
#                ▲ taken           ▲ given                     both count values; slot = count % SLOTS
#
# The consumer publishes its state: POLLING (the ring, before it waits), WAITING (it waits for its event) or AWAY
# (it waits for messages, or has not come yet). The producer sends an event or a message only if the state asks for it:
#
#     producer                                     consumer
#     store the value, then `given`                store the state
#     barrier                                      barrier
#     load the state: wake the consumer?           load `given`: is there a value?
#
# Each stores before it loads, so at least one of them sees the store of the other and no wake-up is lost. That needs
# cores that see the stores of one core in its order, as x86 has them; other machines have no rings. x86 lets only a
# load overtake an earlier store: on each side a lock is released between the two, which is a full barrier.

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
    """An end of an eventfd, which it owns. `descriptor` was received from the process that waits for its events."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._lock = threading.Lock()  # so that no event goes to a descriptor that `close` has freed

    def ring(self) -> None:
        """Send an event; has no effect after `close`."""
        # BlockingIOError: the counter is at its limit, 2**64 - 2, so an event is pending anyway.
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self.closed:
                os.eventfd_write(self.descriptor, 1)

    def forked(self) -> None:
        """Replace the locks in a forked child: the threads that held them exist in the parent only."""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(OSError):  # a program that closes all descriptors has closed it
                    os.close(self.descriptor)


class EventReceiver(EventSender):
    """The receiving end of an eventfd. The waiting thread holds `turn`: of two, one could consume the other's event."""

    def __init__(self) -> None:
        super().__init__(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.turn = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def wait_while(self, waiting: Callable[[], bool], seconds: float) -> None:
        """Wait while `waiting()`, at most until no event has come for `seconds`; not while another thread waits."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            while waiting() and not self.closed and self._poll.poll(seconds * 1000):
                self.heard()
        finally:
            self.turn.release()

    def heard(self) -> None:
        """Consume all events up to now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def forked(self) -> None:
        super().forked()
        self.turn = threading.Lock()

    def close(self) -> None:
        """Close the descriptor, once no thread waits for it."""
        with self.turn:
            super().close()


SUPPORTED = hasattr(os, "eventfd") and Path("/proc/self/fd").is_dir() and platform.machine() in ("x86_64", "AMD64")
AWAY, POLLING, WAITING = range(3)  # the consumer's states; AWAY is 0, as in a new ring
SLOTS, SLOT_BYTES = 16, 128 << 10
"""Slots, and bytes of each. The copy of a larger value costs so much that a message adds little to it."""
NUMBERS = 16
"""Integers that go with each value."""
_HEAD, _WORD = struct.Struct(f"{NUMBERS}q"), struct.Struct("q")
_PUSHED, _POPPED, _STATE, _NAME = range(0, 32, 8)  # indices of words, each in a cache line of its own
_HEADS = 32 * 8  # bytes before the heads
SIZE = mmap.PAGESIZE + SLOTS * SLOT_BYTES  # the slots begin at a page of their own


def is_ring_at(memory: mmap.mmap, place: int, name: int) -> bool:
    """Return whether a ring of this name begins at `place`."""
    fits = 0 <= place <= len(memory) - SIZE and not place % mmap.PAGESIZE
    return fits and _WORD.unpack_from(memory, place + 8 * _NAME) == (name,)


class _Ring:
    """The memory of a ring, as both sides see it."""

    def __init__(self, memory: memoryview, traffic: Memory) -> None:
        self._memory, self._traffic = memory, traffic
        self._words = memory[:_HEADS].cast("q")
        self.places = [memory[at : at + SLOT_BYTES] for at in range(mmap.PAGESIZE, SIZE, SLOT_BYTES)]


class Producer(_Ring):
    """The producer's side. `name` is unique here, `event_sender` wakes the consumer, `traffic` counts lent bytes."""

    def __init__(self, memory: memoryview, name: int, event_sender: EventSender, traffic: Memory) -> None:
        super().__init__(memory, traffic)
        memory[:_HEADS] = bytes(_HEADS)  # the block may have been used before
        self.over = False
        self.lock = threading.Lock()
        """Held from `room` to `give`: one producer at a time, and `end` waits for it."""
        self._words[_NAME], self._pushed_count, self._event_sender = name, 0, event_sender

    def room(self) -> int | None:
        """Return the slot for the next value; None if the value must go as a message."""
        words = self._words
        if self.over or words[_STATE] == AWAY or self._pushed_count - words[_POPPED] >= SLOTS:
            return None
        return self._pushed_count % SLOTS

    def give(self, head: Sequence[int], size: int) -> None:
        """Publish the value of `size` bytes in the slot, with its numbers. The caller calls `tell` next."""
        self._traffic.lent += size
        _HEAD.pack_into(self._memory, _HEADS + self._pushed_count % SLOTS * _HEAD.size, *head)
        self._pushed_count += 1
        self._words[_PUSHED] = self._pushed_count  # last: from here on the consumer reads the slot

    def tell(self, message: Callable[[], object]) -> None:
        """Wake a waiting consumer, by an event or by `message()`. Call it after the release of `lock`, the barrier."""
        at = self._words[_STATE]
        if at == WAITING:
            self._event_sender.ring()
        elif at == AWAY:
            message()

    def end(self) -> None:
        """End the ring: the consumer reads it no more."""
        with self.lock:
            self.over = True


class Consumer(_Ring):
    """The consumer's side, for one thread."""

    def __init__(self, memory: memoryview, event_receiver: EventReceiver, traffic: Memory) -> None:
        super().__init__(memory, traffic)
        self.at, self._popped_count, self._event_receiver = AWAY, 0, event_receiver
        self._barrier = threading.Lock()

    def lies(self) -> bool:
        """Return whether a value is in the ring."""
        return self._words[_PUSHED] != self._popped_count

    def next(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the slot of the next value and its numbers; None if there is none. The caller calls `done` next."""
        count = self._words[_PUSHED] - self._popped_count
        if not count:
            return None
        if not 0 < count <= SLOTS:
            raise ProtocolError(f"a peer reports {counted(count, 'value')} in a ring of {SLOTS} slots")
        place = self._popped_count % SLOTS
        return place, _HEAD.unpack_from(self._memory, _HEADS + place * _HEAD.size)

    def done(self, size: int) -> None:
        """Free the slot of the value that was read, of `size` bytes."""
        self._traffic.borrowed += size
        self._popped_count += 1
        self._words[_POPPED] = self._popped_count

    def be(self, at: int) -> EventReceiver | None:
        """Publish the consumer's state; for WAITING, return the event receiver. The caller polls again, then waits."""
        if at == WAITING and self._event_receiver.closed:  # the connection has ended: no event comes, but messages may
            at = AWAY
        if at != self.at:
            self._words[_STATE] = self.at = at
            with self._barrier:  # its release is the barrier between this store and the caller's next load
                pass
        return self._event_receiver if at == WAITING else None

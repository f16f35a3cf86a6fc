"""Values in a ring: whole, in order, none missed, and none written to a ring that has ended."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import select
import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from rpcbench.base.errors import ProtocolError
from rpcbench.transport import shared_ring
from rpcbench.transport.shared_ring import (
    AWAY,
    NUMBERS,
    POLLING,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    WAITING,
    Consumer,
    EventReceiver,
    EventSender,
    Producer,
    is_ring_at,
)
from rpcbench.wire.framing import Memory

pytestmark = pytest.mark.skipif(not shared_ring.SUPPORTED, reason="no lanes here")
NAME = 1 << 60


class Ends(NamedTuple):
    giver: Producer
    taker: Consumer
    event_receiver: EventReceiver
    memory: mmap.mmap


@contextlib.contextmanager
def made() -> Iterator[Ends]:
    """A ring, with both ends in this process."""
    memory, event_receiver = mmap.mmap(-1, SIZE), EventReceiver()
    memory[:SIZE] = os.urandom(SIZE)  # other data was here before
    event_sender = EventSender(os.dup(event_receiver.descriptor))
    giver = Producer(memoryview(memory), NAME, event_sender, Memory())
    yield Ends(giver, Consumer(memoryview(memory), event_receiver, Memory()), event_receiver, memory)
    event_sender.close()
    event_receiver.close()


@pytest.fixture
def ends(no_leaks: None) -> Iterator[Ends]:
    with made() as found:
        yield found


def head(number: int) -> tuple[int, ...]:
    return (number, -number, *range(NUMBERS - 2))


def lay(giver: Producer, number: int) -> bool:
    """Give a value, with its number in each of its parts."""
    with giver.lock:
        place = giver.room()
        if place is None:
            return False
        giver.places[place][:8] = giver.places[place][-8:] = struct.pack("q", number)
        giver.give(head(number), 8)
    return True


def taken(taker: Consumer) -> int | None:
    found = taker.next()
    if found is None:
        return None
    place, numbers = found
    (first,), (last,) = (struct.unpack("q", taker.places[place][part]) for part in (slice(8), slice(-8, None)))
    taker.done(8)
    assert numbers == head(first) and first == last
    return int(first)


def rung(event_receiver: EventReceiver) -> bool:
    return bool(select.select([event_receiver.descriptor], [], [], 0)[0])


def test_values_arrive_whole_and_in_order(ends: Ends) -> None:
    giver, taker, _, _ = ends
    taker.be(POLLING)
    assert taken(taker) is None and len(giver.places[0]) == SLOT_BYTES
    for begin in range(0, 10 * SLOTS, 3):
        assert all(lay(giver, begin + more) for more in range(3))
        assert [taken(taker) for _ in range(4)] == [begin, begin + 1, begin + 2, None]


def test_both_ends_count_the_bytes_of_values(ends: Ends) -> None:
    giver, taker, _, _ = ends
    taker.be(POLLING)
    for number in range(3):
        lay(giver, number)
    assert taken(taker) == 0 and (giver._traffic.lent, taker._traffic.borrowed) == (24, 8)


def test_a_ring_accepts_values_only_with_a_present_consumer_and_a_free_slot(ends: Ends) -> None:
    giver, taker, _, _ = ends
    assert not lay(giver, 0), "there is no consumer yet"
    taker.be(POLLING)
    assert [lay(giver, number) for number in range(SLOTS + 1)] == [True] * SLOTS + [False]
    assert taken(taker) == 0 and lay(giver, SLOTS) and not lay(giver, 99)
    assert taken(taker) == 1
    taker.be(AWAY)
    assert not lay(giver, 99)
    assert [taken(taker) for _ in range(SLOTS)] == [*range(2, SLOTS + 1), None], "the other values are still there"


@pytest.mark.parametrize(("at", "told"), [(POLLING, (False, 0)), (WAITING, (True, 0)), (AWAY, (False, 1))])
def test_a_producer_wakes_a_waiting_consumer_and_sends_a_message_to_an_absent_one(
    ends: Ends, at: int, told: tuple[bool, int]
) -> None:
    giver, taker, event_receiver, _ = ends
    messages: list[None] = []
    taker.be(POLLING)
    assert lay(giver, 1)
    taker.be(at)
    giver.tell(lambda: messages.append(None))
    assert (rung(event_receiver), len(messages)) == told


def test_a_waiting_consumer_gets_the_event_receiver_unless_that_is_closed(ends: Ends) -> None:
    taker = ends.taker
    assert taker.be(POLLING) is None and taker.be(WAITING) is ends.event_receiver and taker.be(AWAY) is None
    ends.event_receiver.close()
    assert taker.be(WAITING) is None and taker.at == AWAY


def test_a_producer_writes_nothing_to_a_ring_that_has_ended(ends: Ends) -> None:
    ends.taker.be(POLLING)
    ends.giver.end()
    before = bytes(ends.memory)
    assert not lay(ends.giver, 1) and bytes(ends.memory) == before


def test_a_ring_is_recognised_by_its_name_and_place(ends: Ends) -> None:
    memory = ends.memory
    assert is_ring_at(memory, 0, NAME) and not is_ring_at(memory, 0, NAME + 1)
    for place in (-mmap.PAGESIZE, 8, mmap.PAGESIZE, 1 << 62):
        assert not is_ring_at(memory, place, NAME)


@pytest.mark.parametrize("count", [-1, SLOTS + 1])
def test_an_invalid_count_from_the_peer_is_refused(ends: Ends, count: int) -> None:
    struct.pack_into("q", ends.memory, 0, count)
    with pytest.raises(ProtocolError, match="16 slots"):
        ends.taker.next()


# -- no value is missed, in any order of the steps of both ends
Step = Callable[[], object]


def missed(then: int, look_again: bool = True) -> bool:
    """Return whether some order leaves a value in the ring and its consumer in state `then` without a wake-up."""
    for turns in sorted(set(itertools.permutations("ggttt"))):
        for before in (POLLING, WAITING, AWAY):
            with made() as ends:
                if _misses(ends, "".join(turns), before, then, look_again):
                    return True
    return False


def _misses(ends: Ends, turns: str, before: int, then: int, look_again: bool) -> bool:
    giver, taker, event_receiver, _ = ends
    given: list[bool] = []
    messages: list[None] = []
    found: list[int | None] = []

    def look() -> None:
        if 1 not in found:
            found.append(taken(taker))

    def tell() -> None:
        if given[0]:
            giver.tell(lambda: messages.append(None))

    gives: list[Step] = [lambda: given.append(lay(giver, 1)), tell]
    takes: list[Step] = [look, lambda: taker.be(then)]
    takes.insert(2 if look_again else 0, look)
    taker.be(before)
    for turn in turns:
        (gives if turn == "g" else takes).pop(0)()
    return given[0] and 1 not in found and not messages and not (then == WAITING and rung(event_receiver))


@pytest.mark.parametrize("then", [WAITING, AWAY])
def test_no_value_is_missed_in_any_order_of_steps(then: int) -> None:
    assert not missed(then)


@pytest.mark.parametrize("then", [WAITING, AWAY])
def test_a_consumer_that_does_not_look_again_misses_values(then: int) -> None:
    """This shows that the test above can fail."""
    assert missed(then, look_again=False)


def test_no_value_is_missed_between_two_threads(ends: Ends) -> None:
    """As with stages: the consumer polls, waits, or is away, and gets all values in each of these states."""
    giver, taker, event_receiver, _ = ends
    count, draw = 5000, random.Random(0)
    room = threading.Event()
    found: list[int] = []

    def give() -> None:
        for number in range(count):
            while not lay(giver, number):
                assert room.wait(20)
                room.clear()
            giver.tell(lambda: None)

    def look() -> bool:
        if (number := taken(taker)) is not None:
            found.append(number)
        return number is not None

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    while len(found) < count:
        taker.be(POLLING)
        room.set()
        if look():
            continue
        if draw.random() < 0.9:
            taker.be(WAITING)
            if not look():
                assert select.select([event_receiver.descriptor], [], [], 20)[0], (
                    f"{len(found)} values found, and no wake event"
                )
            event_receiver.heard()
        else:
            taker.be(AWAY)
            look()  # later values wait until the consumer polls again
    thread.join(20)
    assert found == list(range(count))

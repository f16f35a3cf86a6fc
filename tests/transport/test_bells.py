"""A bell wakes who waits at it, says nothing, and is never another file."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Iterator

import pytest

from rpcbench.transport.shared_ring import EventReceiver, EventSender

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="this system has no bells")


@pytest.fixture
def pair(no_leaks: None) -> Iterator[tuple[EventSender, EventReceiver]]:
    ear = EventReceiver()
    bell = EventSender(os.dup(ear.descriptor))
    yield bell, ear
    bell.close()
    ear.close()


def rings(ear: EventReceiver) -> bool:
    return bool(select.select([ear.descriptor], [], [], 0)[0])


def test_it_rings_until_it_is_heard(pair: tuple[EventSender, EventReceiver]) -> None:
    bell, ear = pair
    assert not rings(ear)
    ear.heard()  # of nothing: nobody waits
    for _ in range(3):
        bell.ring()
    assert rings(ear)
    ear.heard()
    assert not rings(ear), "several are heard as one"
    bell.ring()
    assert rings(ear)


def test_who_rings_too_often_does_not_wait(pair: tuple[EventSender, EventReceiver]) -> None:
    bell, ear = pair
    os.eventfd_write(ear.descriptor, 2**64 - 2)  # as much as it holds
    bell.ring()
    assert rings(ear)


def test_a_bell_that_is_closed_rings_no_other_file(pair: tuple[EventSender, EventReceiver]) -> None:
    bell, _ = pair
    number = bell._descriptor
    bell.close()
    ear = EventReceiver()
    if ear.descriptor != number:  # what a closed one frees is the next one's, as a rule
        os.dup2(ear.descriptor, number)
    bell.ring()
    bell.close()
    assert not rings(ear)
    if ear.descriptor != number:
        os.close(number)
    ear.close()
    ear.close()


def test_in_a_forked_child_nobody_waits_for_who_was_about_to_ring(pair: tuple[EventSender, EventReceiver]) -> None:
    bell, _ = pair
    bell._lock.acquire()
    bell.forked()
    bell.close()


def test_who_waits_goes_on_until_it_has_what_it_waits_for(pair: tuple[EventSender, EventReceiver]) -> None:
    bell, ear = pair
    looks: queue.SimpleQueue[bool] = queue.SimpleQueue()
    over: list[bool] = []

    def waits() -> bool:
        looks.put(True)
        return not over

    thread = threading.Thread(target=ear.wait_while, args=(waits, 60), daemon=True)
    thread.start()
    looks.get(timeout=20)
    bell.ring()  # of something else
    looks.get(timeout=20)
    over.append(True)
    ear.ring()
    thread.join(20)
    assert not thread.is_alive() and not rings(ear)
    ear.wait_while(lambda: True, 0)  # nothing rings
    assert ear.turn.acquire(blocking=False)
    ear.turn.release()


def test_nobody_waits_where_another_one_does_nor_where_nothing_rings_any_more(
    pair: tuple[EventSender, EventReceiver],
) -> None:
    _, ear = pair
    with ear.turn:
        ear.wait_while(pytest.fail, 60)
        closing = threading.Thread(target=ear.close, daemon=True)
        closing.start()
        closing.join(0.1)
        assert not ear.closed, "somebody may wait at its descriptor"
    closing.join(20)
    assert ear.closed
    ear.wait_while(lambda: True, 60)
    other = EventReceiver()
    if other.descriptor != ear.descriptor:
        os.dup2(other.descriptor, ear.descriptor)
    ear.ring()
    assert not rings(other)
    if other.descriptor != ear.descriptor:
        os.close(ear.descriptor)
    other.close()


def test_in_a_forked_child_nobody_waits_for_who_has_waited(pair: tuple[EventSender, EventReceiver]) -> None:
    _, ear = pair
    ear.turn.acquire()
    ear._lock.acquire()
    ear.forked()
    ear.ring()
    ear.close()

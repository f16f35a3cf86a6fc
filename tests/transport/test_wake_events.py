"""A wake event wakes the thread that waits for it, carries no data, and never writes to another file."""

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
    event_receiver = EventReceiver()
    event_sender = EventSender(os.dup(event_receiver.descriptor))
    yield event_sender, event_receiver
    event_sender.close()
    event_receiver.close()


def rings(event_receiver: EventReceiver) -> bool:
    return bool(select.select([event_receiver.descriptor], [], [], 0)[0])


def test_a_wake_event_stays_set_until_it_is_received(pair: tuple[EventSender, EventReceiver]) -> None:
    event_sender, event_receiver = pair
    assert not rings(event_receiver)
    event_receiver.heard()  # without an event: does not block
    for _ in range(3):
        event_sender.ring()
    assert rings(event_receiver)
    event_receiver.heard()
    assert not rings(event_receiver), "several events are received as one"
    event_sender.ring()
    assert rings(event_receiver)


def test_a_sender_does_not_block_on_a_full_wake_event(pair: tuple[EventSender, EventReceiver]) -> None:
    event_sender, event_receiver = pair
    os.eventfd_write(event_receiver.descriptor, 2**64 - 2)  # the largest value that it holds
    event_sender.ring()
    assert rings(event_receiver)


def test_a_closed_sender_does_not_write_to_a_reused_descriptor(pair: tuple[EventSender, EventReceiver]) -> None:
    event_sender, _ = pair
    number = event_sender.descriptor
    event_sender.close()
    event_receiver = EventReceiver()
    if event_receiver.descriptor != number:  # the number of a closed descriptor is usually the next one
        os.dup2(event_receiver.descriptor, number)
    event_sender.ring()
    event_sender.close()
    assert not rings(event_receiver)
    if event_receiver.descriptor != number:
        os.close(number)
    event_receiver.close()
    event_receiver.close()


def test_a_forked_child_can_close_a_sender_whose_lock_was_held(pair: tuple[EventSender, EventReceiver]) -> None:
    event_sender, _ = pair
    event_sender._lock.acquire()
    event_sender.forked()
    event_sender.close()


def test_a_waiting_thread_waits_until_its_condition_ends(pair: tuple[EventSender, EventReceiver]) -> None:
    event_sender, event_receiver = pair
    looks: queue.SimpleQueue[bool] = queue.SimpleQueue()
    over: list[bool] = []

    def waits() -> bool:
        looks.put(True)
        return not over

    thread = threading.Thread(target=event_receiver.wait_while, args=(waits, 60), daemon=True)
    thread.start()
    looks.get(timeout=20)
    event_sender.ring()  # an event for another condition
    looks.get(timeout=20)
    over.append(True)
    event_receiver.ring()
    thread.join(20)
    assert not thread.is_alive() and not rings(event_receiver)
    event_receiver.wait_while(lambda: True, 0)  # no event: the timeout ends it
    assert event_receiver.turn.acquire(blocking=False)
    event_receiver.turn.release()


def test_a_thread_does_not_wait_beside_another_or_at_a_closed_receiver(
    pair: tuple[EventSender, EventReceiver],
) -> None:
    _, event_receiver = pair
    with event_receiver.turn:
        event_receiver.wait_while(pytest.fail, 60)
        closing = threading.Thread(target=event_receiver.close, daemon=True)
        closing.start()
        closing.join(0.1)
        assert not event_receiver.closed, "a thread may wait at its descriptor"
    closing.join(20)
    assert event_receiver.closed
    event_receiver.wait_while(lambda: True, 60)
    other = EventReceiver()
    if other.descriptor != event_receiver.descriptor:
        os.dup2(other.descriptor, event_receiver.descriptor)
    event_receiver.ring()
    assert not rings(other)
    if other.descriptor != event_receiver.descriptor:
        os.close(event_receiver.descriptor)
    other.close()


def test_a_forked_child_can_close_a_receiver_whose_locks_were_held(pair: tuple[EventSender, EventReceiver]) -> None:
    _, event_receiver = pair
    event_receiver.turn.acquire()
    event_receiver._lock.acquire()
    event_receiver.forked()
    event_receiver.ring()
    event_receiver.close()

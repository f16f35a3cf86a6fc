"""A connection from a member to itself: copied and ordered as on a socket, and received on another thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rpcbench.transport.base import MemoryConnection
from rpcbench.wire.framing import Frame
from rpcbench.wire.messages import Body

PATIENCE = 20.0


def spawn(job: Callable[[], None]) -> None:
    threading.Thread(target=job, daemon=True).start()


def test_messages_are_delivered_in_order_by_one_job_at_a_time() -> None:
    received: list[bytes] = []
    jobs: list[Callable[[], None]] = []
    connection = MemoryConnection(lambda frame: received.append(frame.control), jobs.append)
    for label in (b"a", b"b", b"c"):
        connection.send(label, Body(b"", b"", []), False)
    assert received == [], "the sending thread delivers nothing"
    assert len(jobs) == 1, "two jobs at a time could overtake each other"
    jobs.pop()()
    connection.send(b"d", Body(b"", b"", []), False)
    jobs.pop()()
    assert received == [b"a", b"b", b"c", b"d"]


def test_a_received_message_shares_no_memory_with_the_sent_one() -> None:
    received: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    connection = MemoryConnection(received.put, spawn)
    buffer = bytearray(b"before")
    connection.send(b"control", Body(b"payload", b"tensors", [memoryview(buffer)]), True)
    buffer[:] = b"after!"
    frame = received.get(timeout=PATIENCE)
    assert frame == Frame(b"control", Body(b"payload", b"tensors", [b"before"]))
    frame.body.buffers[0][:] = b"other!"  # type: ignore[index]
    assert buffer == b"after!"


def test_the_sender_does_not_wait_for_the_receiver() -> None:
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    go = threading.Event()

    def receive(frame: Frame) -> None:
        assert go.wait(PATIENCE)
        received.put(frame.control)

    connection = MemoryConnection(receive, spawn)
    for label in (b"a", b"b"):
        connection.send(label, Body(b"", b"", []), True)
    assert received.empty()
    go.set()
    assert [received.get(timeout=PATIENCE) for _ in range(2)] == [b"a", b"b"]


def test_a_receiver_that_fails_once_still_gets_the_next_message(monkeypatch) -> None:
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.set())

    def receive(frame: Frame) -> None:
        if frame.control == b"bad":
            raise ValueError("bad")
        received.put(frame.control)

    connection = MemoryConnection(receive, spawn)
    for label in (b"bad", b"good"):
        connection.send(label, Body(b"", b"", []), True)
    assert received.get(timeout=PATIENCE) == b"good" and failed.wait(PATIENCE)

"""Interceptors between the node and the wire: messages held, repeated and dropped there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from worlds import config, nothing_left, until

from rpcbench.rpc import remote
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.transport.base import Link
from rpcbench.wire.messages import Call, Message


class Holding(Link):
    """Holds calls while `hold` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, int, Message, bool]] = []
        self.hold = threading.Event()

    def handle_outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        if self.hold.is_set() and isinstance(message, Call):
            self.held.append((to, seq, message, may_wait))
        else:
            super().handle_outgoing(to, seq, message, may_wait)


class Repeating(Link):
    """Delivers every message twice."""

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        super().handle_incoming(source, seq, message)
        super().handle_incoming(source, seq, message)


_runs: list[int] = []


def run() -> int:
    _runs.append(1)
    return len(_runs)


def two(directory: Path, first: Link, second: Link) -> Any:
    return start_agent(config(directory, 0), first), start_agent(config(directory, 1), second)


def test_a_link_can_hold_calls_and_send_them_in_another_order(tmp_path: Path) -> None:
    link = Holding()
    here, there = two(tmp_path, link, Link())
    try:
        link.hold.set()
        futures = [here.call(1, divmod, (number, 3)) for number in range(4)]
        assert len(link.held) == 4 and not any(future.done() for future in futures)
        link.hold.clear()
        for held in reversed(link.held):
            Link.handle_outgoing(link, *held)
        assert [future.wait() for future in futures] == [divmod(number, 3) for number in range(4)]
    finally:
        there.stop()
        here.stop()


def test_a_message_that_arrives_twice_is_handled_once(tmp_path: Path) -> None:
    _runs.clear()
    here, there = two(tmp_path, Repeating(), Repeating())
    try:
        assert [here.call(1, run).wait() for _ in range(3)] == [1, 2, 3]
        with current.use_agent(here):
            rref = remote("worker1", run)
            assert rref.to_here() == 4
            del rref
        nothing_left([here, there])
        until(lambda: len(_runs) == 4)
    finally:
        there.stop()
        here.stop()


class Noting(Link):
    """Notes the messages that pass."""

    def __init__(self, name: str, notes: list[str], lossy: bool = False) -> None:
        super().__init__()
        self.name, self.notes, self.lossy = name, notes, lossy

    def handle_outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        self.notes.append(f"{self.name} out {seq}")
        super().handle_outgoing(to, seq, message, may_wait)

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        self.notes.append(f"{self.name} in {seq}")
        super().handle_incoming(source, seq, message)


def test_links_are_passed_in_order_and_a_removed_link_is_bypassed() -> None:
    notes: list[str] = []
    first, second = Noting("first", notes), Noting("second", notes, lossy=True)
    changes: list[bool] = []
    links = Interceptors(
        first,
        lambda to, seq, *_: notes.append(f"sent {seq}"),
        lambda *came: notes.append(f"had {came[1]}"),
        lambda: changes.append(links.is_lossy),
    )
    links.add_link(second)
    links.near.handle_outgoing(1, 5, None, False)
    links.far.handle_incoming(1, 6, None)
    assert notes == ["first out 5", "second out 5", "sent 5", "second in 6", "first in 6", "had 6"]
    notes.clear()
    links.remove_link(first)
    links.remove_link(first)
    first.handle_outgoing(1, 7, None, False)  # its messages pass without the other links
    first.handle_incoming(1, 8, None)
    links.near.handle_outgoing(1, 9, None, False)
    assert notes == ["first out 7", "sent 7", "first in 8", "had 8", "second out 9", "sent 9"]
    links.remove_link(second)
    assert [type(link) for link in links.all] == [Link] and changes == [True, True, True, False]

"""The seam between machines and wire: messages held, repeated and dropped there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from worlds import config, nothing_left, until

from rpcbench.agent import current
from rpcbench.rpc import remote
from rpcbench.rpc.start import start_agent
from rpcbench.transport.base import Link
from rpcbench.wire.messages import Call, Message


class Holding(Link):
    """Keeps calls back until told."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, int, Message, bool]] = []
        self.hold = threading.Event()

    def outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        if self.hold.is_set() and isinstance(message, Call):
            self.held.append((to, seq, message, may_wait))
        else:
            super().outgoing(to, seq, message, may_wait)


class Repeating(Link):
    """Delivers every message twice."""

    def incoming(self, source: int, seq: int, message: Message) -> None:
        super().incoming(source, seq, message)
        super().incoming(source, seq, message)


_runs: list[int] = []


def run() -> int:
    _runs.append(1)
    return len(_runs)


def two(directory: Path, first: Link, second: Link) -> Any:
    return start_agent(config(directory, 0), first), start_agent(config(directory, 1), second)


def test_a_link_may_hold_calls_and_let_them_go_in_another_order(tmp_path: Path) -> None:
    link = Holding()
    here, there = two(tmp_path, link, Link())
    try:
        link.hold.set()
        futures = [here.call(1, divmod, (number, 3)) for number in range(4)]
        assert len(link.held) == 4 and not any(future.done() for future in futures)
        link.hold.clear()
        for held in reversed(link.held):
            Link.outgoing(link, *held)
        assert [future.wait() for future in futures] == [divmod(number, 3) for number in range(4)]
    finally:
        there.stop()
        here.stop()


def test_what_comes_twice_happens_once(tmp_path: Path) -> None:
    _runs.clear()
    here, there = two(tmp_path, Repeating(), Repeating())
    try:
        assert [here.call(1, run).wait() for _ in range(3)] == [1, 2, 3]
        with current.using(here):
            rref = remote("worker1", run)
            assert rref.to_here() == 4
            del rref
        nothing_left([here, there])
        until(lambda: len(_runs) == 4)
    finally:
        there.stop()
        here.stop()

"""The keeper's own clock: what is held goes soon, and idle memory in a while, whatever the link's clock does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import PATIENCE, until

from rpcbench.runtime import timers
from rpcbench.runtime.handles import ReleaseToken
from rpcbench.runtime.timers import Deadlines, MaintenanceThread

MACHINE: Any = None


class Peers:
    def __init__(self) -> None:
        self.flushed, self.tidied = threading.Semaphore(0), threading.Semaphore(0)

    def flush(self) -> None:
        self.flushed.release()

    def tidy(self) -> None:
        self.tidied.release()


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def kept(peers: Peers) -> Iterator[MaintenanceThread]:
    made = MaintenanceThread("test", MACHINE, Deadlines(), lambda: 0.0, peers)
    made.start()
    yield made
    made.stop()


def test_what_is_held_is_flushed_each_time_though_the_clock_stands_still(peers: Peers, kept: MaintenanceThread) -> None:
    for _ in range(2):
        kept.flush_soon()
        assert peers.flushed.acquire(timeout=PATIENCE)
    kept.stop()
    assert not peers.flushed.acquire(blocking=False)


def test_memory_is_looked_after_again_and_again_though_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, peers: Peers
) -> None:
    monkeypatch.setattr(timers, "TIDY_SECONDS", 0.01)
    made = MaintenanceThread("test", MACHINE, Deadlines(), lambda: 0.0, peers)
    made.start()
    assert all(peers.tidied.acquire(timeout=PATIENCE) for _ in range(3))
    made.stop()


class Released:
    """A machine that hears of what is released, and counts how often it is asked."""

    def __init__(self) -> None:
        self.forks: list[Any] = []
        self.asked = 0

    def feed(self, event: Any) -> None:
        self.asked += 1
        node = SimpleNamespace(
            rrefs=SimpleNamespace(release=lambda fork: [fork]), outcome=lambda outcome: self.forks.extend(outcome[1])
        )
        event(node)


class Thing:
    pass


def _let_go(kept: MaintenanceThread, fork: Any) -> None:
    """As a handle does when its last reference goes."""
    thing: Any = Thing()
    hold = ReleaseToken(thing, kept.released.put)
    hold.fork = fork
    kept.holds.add(hold)


def test_what_is_let_go_of_in_a_loop_does_not_wake_it_each_time(peers: Peers) -> None:
    """It would take Python's lock from the loop, and a `remote` would take twice as long."""
    heard: Any = Released()
    kept = MaintenanceThread("test", heard, Deadlines(), lambda: 0.0, peers)
    kept.start()
    for fork in range(100):
        _let_go(kept, fork)
        time.sleep(0.0001)  # let it, if it wants
    until(lambda: len(heard.forks) == 100, "all are released")
    kept.stop()
    assert heard.forks == list(range(100)) and not kept.holds and heard.asked < 50


def test_while_the_clock_stands_just_before_a_deadline_it_sleeps(peers: Peers) -> None:
    at, looks = [0.9999], threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return at[0]

    expired = threading.Semaphore(0)
    machine: Any = SimpleNamespace(feed=lambda event: expired.release())
    deadlines = Deadlines()
    kept = MaintenanceThread("test", machine, deadlines, clock, peers)
    deadlines.set(7, 1.0)
    kept.start()
    try:
        assert looks.acquire(timeout=PATIENCE) and looks.acquire(timeout=PATIENCE)
        assert not looks.acquire(timeout=0.3) and not expired.acquire(blocking=False)
        at[0] = 1.1
        kept.released.put(None)  # as who lets the clock go on does
        assert expired.acquire(timeout=PATIENCE)
    finally:
        kept.stop()

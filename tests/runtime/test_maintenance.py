"""The maintenance thread: it flushes held messages soon and tidies idle memory later, for any clock of the link."""

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

    def flush_connections(self) -> None:
        self.flushed.release()

    def free_idle_memory(self) -> None:
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


def test_held_messages_are_flushed_each_time_even_if_the_clock_stands_still(
    peers: Peers, kept: MaintenanceThread
) -> None:
    for _ in range(2):
        kept.flush_soon()
        assert peers.flushed.acquire(timeout=PATIENCE)
    kept.stop()
    assert not peers.flushed.acquire(blocking=False)


def test_idle_memory_is_tidied_repeatedly_without_other_events(monkeypatch: pytest.MonkeyPatch, peers: Peers) -> None:
    monkeypatch.setattr(timers, "TIDY_SECONDS", 0.01)
    made = MaintenanceThread("test", MACHINE, Deadlines(), lambda: 0.0, peers)
    made.start()
    assert all(peers.tidied.acquire(timeout=PATIENCE) for _ in range(3))
    made.stop()


class Released:
    """A machine that collects the released forks, and counts how often it is fed."""

    def __init__(self) -> None:
        self.forks: list[Any] = []
        self.asked = 0

    def feed_event(self, event: Any) -> None:
        self.asked += 1
        node = SimpleNamespace(
            rrefs=SimpleNamespace(release_fork=lambda fork: [fork]),
            process_outcome=lambda outcome: self.forks.extend(outcome[1]),
        )
        event(node)


class Thing:
    pass


def _let_go(kept: MaintenanceThread, fork: Any) -> None:
    """Release a fork, as a handle does when its last reference is dropped."""
    thing: Any = Thing()
    hold = ReleaseToken(thing, kept.released.put)
    hold.fork = fork
    kept.holds.add(hold)


def test_releases_in_a_loop_do_not_wake_the_maintenance_thread_each_time(peers: Peers) -> None:
    """Each wake-up would take the GIL from the loop, and a `remote` would take twice as long."""
    heard: Any = Released()
    kept = MaintenanceThread("test", heard, Deadlines(), lambda: 0.0, peers)
    kept.start()
    began = time.monotonic()
    for fork in range(100):
        _let_go(kept, fork)
        time.sleep(0.0001)  # a chance for the maintenance thread to wake
    until(lambda: len(heard.forks) == 100, "all are released")
    kept.stop()
    assert heard.forks == list(range(100)) and not kept.holds
    assert heard.asked <= (time.monotonic() - began) / timers._NAP_SECONDS + 2


def test_the_maintenance_thread_sleeps_while_the_clock_stands_before_a_deadline(peers: Peers) -> None:
    at, looks = [0.9999], threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return at[0]

    expired = threading.Semaphore(0)
    machine: Any = SimpleNamespace(feed_event=lambda event: expired.release())
    deadlines = Deadlines()
    kept = MaintenanceThread("test", machine, deadlines, clock, peers)
    deadlines.set_deadline(7, 1.0)
    kept.start()
    try:
        assert looks.acquire(timeout=PATIENCE) and looks.acquire(timeout=PATIENCE)
        assert not looks.acquire(timeout=0.3) and not expired.acquire(blocking=False)
        at[0] = 1.1
        kept.released.put(None)  # as the stepper does when it lets the clock go on
        assert expired.acquire(timeout=PATIENCE)
    finally:
        kept.stop()

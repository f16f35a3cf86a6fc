"""The keeper's own clock: what is held goes soon, and idle memory in a while, whatever the link's clock does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from worlds import PATIENCE

from rpcbench.agent import keeper
from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.keeper import Keeper

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
def kept(peers: Peers) -> Iterator[Keeper]:
    made = Keeper("test", MACHINE, Deadlines(), lambda: 0.0, peers)
    made.start()
    yield made
    made.stop()


def test_what_is_held_is_flushed_each_time_though_the_clock_stands_still(peers: Peers, kept: Keeper) -> None:
    for _ in range(2):
        kept.flush_soon()
        assert peers.flushed.acquire(timeout=PATIENCE)
    kept.stop()
    assert not peers.flushed.acquire(blocking=False)


def test_memory_is_looked_after_again_and_again_though_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, peers: Peers
) -> None:
    monkeypatch.setattr(keeper, "TIDY_SECONDS", 0.01)
    made = Keeper("test", MACHINE, Deadlines(), lambda: 0.0, peers)
    made.start()
    assert all(peers.tidied.acquire(timeout=PATIENCE) for _ in range(3))
    made.stop()

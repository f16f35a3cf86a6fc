"""The keeper's own clock: what is held goes soon, whatever the link's clock does."""

from __future__ import annotations

import threading
from typing import Any

from worlds import PATIENCE

from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.keeper import Keeper

MACHINE: Any = None


def test_what_is_held_is_flushed_each_time_though_the_clock_stands_still() -> None:
    flushed = threading.Semaphore(0)
    keeper = Keeper("test", MACHINE, Deadlines(), lambda: 0.0, flushed.release)
    keeper.start()
    try:
        for _ in range(2):
            keeper.flush_soon()
            assert flushed.acquire(timeout=PATIENCE)
    finally:
        keeper.stop()
    assert not flushed.acquire(blocking=False)

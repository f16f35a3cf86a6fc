"""With RPCBENCH_EAGER=1, a thread that waits for a peer looks again and again for a moment before it sleeps.

To wake up takes longer than a short call: 20 to 50 us each way on many machines, and what has slept runs slowly at
first. So who waits looks for `MOMENT` seconds, but only where that is likely to pay:
- where the last wait was a short one; after a long one, such as an idle hour, it sleeps at once;
- not for a while after somebody else has wanted this core, or Python's lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MOMENT = 0.0005
_TAKEN = 0.00005
"""Seconds between two looks only where something else has run meanwhile."""
_PAUSE = 64
"""Waits without a look after that."""


def asked_for() -> bool:
    """Whether the environment asks for it. By default nobody spins: a core may have something better to do."""
    return os.environ.get("RPCBENCH_EAGER", "0") not in ("", "0")


class Eager:
    """For one thread at a time. `there()`: whether what is waited for has come; takes a microsecond."""

    def __init__(self, there: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._there = there
        self._clock = clock
        self._short = True
        self._pause = 0
        self._since = 0.0

    def soon(self) -> bool:
        """Whether it comes within a moment; False as well where it is not worth while to look."""
        self._since = now = self._clock()
        if self._pause:
            self._pause -= 1
            return False
        if not self._short:
            return False
        until = now + MOMENT
        while not self._there():
            os.sched_yield()
            before, now = now, self._clock()
            if now - before > _TAKEN:
                self._pause = _PAUSE
            if self._pause or now > until:
                return False
        return True

    def came(self) -> None:
        """After `soon` was False, and the thread has slept: it has come, or will not."""
        self._short = self._clock() - self._since < MOMENT

"""Jobs at their times, on one thread that is there while any wait."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from rpcbench.base.conditions import Changes

_Job = tuple[float, int, Callable[[], None]]
"""When, in which order, what."""


class Later:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = Changes()
        self._jobs: list[_Job] = []
        self._order = count()
        self._running = False

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` when so much time has passed. It must not raise."""
        with self._lock:
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._order), job))
            running, self._running = self._running, True
        if running:
            self._changes.tell()
        else:
            threading.Thread(target=self._run, name="rpcbench-testing-later", daemon=True).start()

    def clear(self) -> None:
        """What still waits is forgotten."""
        with self._lock:
            self._jobs.clear()
        self._changes.tell()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return None
                first = self._jobs[0]
                if first[0] <= time.monotonic():
                    return heapq.heappop(self._jobs)[2]
            self._changes.wait_for(partial(self._has_gone, first), first[0] - time.monotonic())

    def _has_gone(self, first: _Job) -> bool:
        """Whether this is not the first any more."""
        with self._lock:
            return self._jobs[:1] != [first]

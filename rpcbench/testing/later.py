"""Jobs at their times, on one thread that is there while any wait."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Later:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._running = False

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` when so much time has passed. It must not raise."""
        with self._changed:
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._order), job))
            self._changed.notify()
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="rpcbench-testing-later", daemon=True).start()

    def clear(self) -> None:
        """What still waits is forgotten."""
        with self._changed:
            self._jobs.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._jobs:
                wait = self._jobs[0][0] - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(wait)
            self._running = False
            return None

"""A launcher's hold on the warm starter, on behalf of its run directory.

Guarantees
- The starter in hand has been told of the directory, so that it goes with this process. One that is lost or hangs is
  replaced; one that hangs keeps its workers until `end`.
- After `shut` nobody gets it any more; after `end` no worker of the directory is left, and the starter stays warm.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from rpcbench.base.errors import ShutdownError
from rpcbench.launch import starters
from rpcbench.launch.starter import Starter


def ended() -> ShutdownError:
    """What a launcher says that is closed."""
    return ShutdownError("this launcher is closed and starts no workers; make a new cluster")


class Lease:
    """`take` takes a starter; `told` is called with each one that is taken."""

    def __init__(
        self, directory: Path, take: Callable[[], Starter], told: Callable[[Starter], object] = lambda starter: None
    ) -> None:
        self.closed = False
        self._directory, self._take, self._told = directory, take, told
        self._lock = threading.Lock()
        self._starter: Starter | None = None
        self._hang: list[Starter] = []

    def starter(self) -> Starter:
        """The starter. ShutdownError once it is shut."""
        with self._lock:
            if self.closed:
                raise ended()
            if self._starter is not None and self._starter.lost:
                starters.give_back(self._starter)
                self._starter = None
            elif self._starter is not None and self._starter.hangs:
                self._hang.append(self._starter)
                self._starter = None
            if self._starter is None:
                self._starter = self._take()
                self._starter.enter(self._directory)
                self._told(self._starter)
            return self._starter

    def shut(self) -> None:
        """No more workers."""
        with self._lock:
            self.closed = True

    def end(self) -> None:
        """End the workers (SIGTERM, SIGKILL after 0.5 s), and give the starter back. May be called again."""
        with self._lock:
            self.closed = True
            held, self._starter, self._hang = [*self._hang, self._starter], None, []
        with contextlib.ExitStack() as every:
            for starter in filter(None, held):
                every.callback(starters.give_back, starter)
                every.callback(starter.leave, self._directory)

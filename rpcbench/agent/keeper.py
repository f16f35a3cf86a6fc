"""One thread per agent for what is due: forks that finalizers have given up, deadlines of calls, ticks of the node,
messages that connections hold, memory that nobody has needed for some seconds.

Finalizers, and whoever sets a deadline earlier than all others, only put a note into `released`, which wakes it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.handles import Hold
from rpcbench.agent.machine import Machine

TICK = -1
"""Stands among the deadlines of calls for the next tick of the node."""
_HELD_SECONDS = 0.02
"""How long a message may be held, on the wall clock: a link may stop its own."""
TIDY_SECONDS = 5.0
"""How long memory that nobody needs is kept, at least."""


class Keeps(Protocol):
    """What has something to do from time to time. Neither takes long."""

    def flush(self) -> None: ...

    def tidy(self) -> None: ...


class Keeper:
    def __init__(
        self,
        name: str,
        machine: Machine,
        deadlines: Deadlines,
        clock: Callable[[], float],
        peers: Keeps,
    ) -> None:
        self.holds: set[Hold] = set()
        self.released: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._machine = machine
        self._deadlines = deadlines
        self._clock = clock
        self._peers = peers
        self._flush_at: float | None = None
        self._tidy_at = time.monotonic() + TIDY_SECONDS
        self._running = True
        self._thread = threading.Thread(target=self._keep, name=f"rpcbench-{name}-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._running = False
        self.released.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def wake_at(self, call: int, at: float) -> None:
        """Call `expired` of the node for this call (`tick` for TICK) at a time of the clock."""
        if self._deadlines.set(call, at):
            self.released.put(None)

    def flush_soon(self) -> None:
        """A message is held: see to it that it goes in a moment."""
        if self._flush_at is None:
            self._flush_at = time.monotonic() + _HELD_SECONDS
            self.released.put(None)

    def _keep(self) -> None:
        pause: float | None = self._appointments()
        while self._running:
            try:
                item = self.released.get(timeout=pause)
            except queue.Empty:
                item = None
            if isinstance(item, Hold):
                self._release(item)
            del item
            due, pause = self._deadlines.pop_due(self._clock())
            for call in due:
                self._due(call)
            pause = min(self._appointments(), math.inf if pause is None else pause)

    def _appointments(self) -> float:
        """Do what is due on the clock of this process; seconds until something is again."""
        now = time.monotonic()
        if self._flush_at is not None and self._flush_at <= now:
            self._flush_at = None  # before: what is held from now on asks for a flush of its own
            self._peers.flush()
        if self._tidy_at <= now:
            self._tidy_at = now + TIDY_SECONDS
            self._peers.tidy()
        at = self._flush_at
        return (self._tidy_at if at is None else min(at, self._tidy_at)) - now

    def _release(self, hold: Hold) -> None:
        self.holds.discard(hold)
        self._machine.feed(lambda node: node.outcome(([], node.rrefs.release(hold.fork))))

    def _due(self, call: int) -> None:
        self._machine.feed(lambda node: node.tick() if call == TICK else node.expired(call))

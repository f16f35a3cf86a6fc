"""One thread per agent for what is due: forks that finalizers have given up, deadlines of calls, ticks of the node,
messages that connections hold, memory that nobody has needed for some seconds.

Finalizers, and whoever sets a deadline earlier than all others, only put a note into `released`, which wakes it. When
it has released something it sleeps for a moment, whatever comes: where RRefs come and go in a loop, a keeper that woke
for each of them would take Python's lock from the loop each time.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.handles import Hold
from rpcbench.agent.machine import Machine
from rpcbench.base.conditions import Flag

TICK = -1
"""Stands among the deadlines of calls for the next tick of the node."""
_HELD_SECONDS = 0.02
"""How long a message may be held, on the wall clock: a link may stop its own."""
_NAP_SECONDS = 0.02
_MOST = 1000
"""So many notes are read before it looks at the clock again."""
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
        self._stopped = Flag()
        self._thread = threading.Thread(target=self._keep, name=f"rpcbench-{name}-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.released.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def wake_in(self, call: int, now: float, seconds: float | None) -> None:
        """Call `expired` of the node for this call (`tick` for TICK) in some seconds, if ever."""
        if seconds is not None and self._deadlines.set(call, now + seconds):
            self.released.put(None)

    def flush_soon(self) -> None:
        """A message is held: see to it that it goes in a moment."""
        if self._flush_at is None:
            self._flush_at = time.monotonic() + _HELD_SECONDS
            self.released.put(None)

    def _keep(self) -> None:
        pause: float | None = self._appointments()
        before = math.nan
        while not self._stopped.is_set():
            if self._settle(self._notes(pause)):
                self._stopped.wait(min(_NAP_SECONDS, self._appointments()))
            now = self._clock()
            due, pause = self._deadlines.pop_due(now)
            for call in due:
                self._due(call)
            if pause is None or now == before:  # a clock that stands: who lets it go on wakes this thread
                pause = math.inf
            pause, before = min(self._appointments(), pause), now

    def _notes(self, pause: float | None) -> list[Any]:
        """The notes that have come in, once there is one or `pause` seconds have passed."""
        notes: list[Any] = []
        with contextlib.suppress(queue.Empty):
            notes.append(self.released.get(timeout=pause))
            while len(notes) < _MOST:
                notes.append(self.released.get_nowait())
        return notes

    def _settle(self, notes: list[Any]) -> bool:
        """Release what the notes say; whether they say anything. What else they bring is freed with them."""
        if holds := [note for note in notes if isinstance(note, Hold)]:
            self.holds.difference_update(holds)
            self._machine.feed(
                lambda node: node.outcome(([], [one for hold in holds for one in node.rrefs.release(hold.fork)]))
            )
        return any(note is not None for note in notes)

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

    def _due(self, call: int) -> None:
        self._machine.feed(lambda node: node.tick() if call == TICK else node.expired(call))

"""What an agent does by the clock: deadlines of calls, the maintenance thread, heartbeats, and memory that is kept.

The maintenance thread, one per agent, does what is due: forks that finalizers have given up, deadlines of calls, ticks
of the node, messages that connections hold, memory that nothing has needed for some seconds. A finalizer, and a thread
that sets a deadline earlier than all others, only puts a note into `released`, which wakes it. When it has released
something it sleeps for a moment, whatever comes: where RRefs come and go in a loop, a thread that woke for each of them
would take Python's lock from the loop each time.

A deadline is cheap to set and to take back, and found when due to within a twentieth of a second. Calls that end in
time, nearly all, leave nothing behind; so the table is as large as the calls in flight. It has no lock: each step on it
is one of Python's, and `pop_due` looks only after it has asked to be told of what comes. It looks at a copy: to list
the items of the table itself takes many steps, as the garbage collector may run between.

The heartbeat thread says "I am here" to members on other hosts, and listens whether they are. It does nothing else, so
it goes on whatever users' functions do. In a world on one host there is none: there the end of a process is always
told, and silence means nothing.

Memory that a training step frees stays with the process for its next step. glibc's malloc maps large blocks and unmaps
them when they are freed, and gives back what is free at the heap's end. It learns how large: a mapped block that is
freed makes its size the bound for the next ones, and twice that for the heap's end (mallopt(3), M_MMAP_THRESHOLD).
Gradients of a megabyte leave it in between, where each step pays anew for the first touch of every page: up to a third
of its time. So malloc is shown one block of 16 MB, which nothing touches. It then keeps up to 32 MB of what was freed,
for each of its arenas: threads that allocate at the same time have one each. Where the user has set
`MALLOC_TRIM_THRESHOLD_` or its like, malloc learns nothing, and other allocators never do.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.base.conditions import Flag
from rpcbench.base.config import WorldConfig
from rpcbench.protocol.membership import FailureDetector, Sound, Verdict
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.handles import ReleaseToken
from rpcbench.runtime.locked_node import LockedNode

_BLOCK = 16 << 20
"""Bytes. malloc learns up to 32 MB, but eight threads would then keep 300 MB of what they have freed."""


def keep_what_is_freed() -> None:
    """For this process, from now on. Takes some microseconds, and no memory."""
    bytes(_BLOCK)


_TICK = 0.05


class Deadlines:
    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._next = math.inf  # who sets an earlier one is told so

    def set(self, call: int, at: float) -> bool:
        """True if this is now the earliest deadline, so that whoever sleeps until the next one must wake."""
        self._at[call] = at
        if at >= self._next:
            return False
        self._next = at
        return True

    def clear(self, call: int) -> None:
        """The call has ended. Harmless if it has no deadline."""
        self._at.pop(call, None)

    def pop_due(self, now: float) -> tuple[list[int], float | None]:
        """Calls whose deadline has passed, and seconds until there is something to look at again."""
        self._next = math.inf
        known = self._at.copy().items()
        due = [call for call, at in known if at <= now and self._at.pop(call, None) is not None]
        first = min((at for _, at in known if at > now), default=None)
        if first is None:
            return due, None
        self._next = first
        return due, (int(first / _TICK) + 1) * _TICK - now

    def __len__(self) -> int:
        return len(self._at)


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


class MaintenanceThread:
    def __init__(
        self,
        name: str,
        machine: LockedNode,
        deadlines: Deadlines,
        clock: Callable[[], float],
        peers: Keeps,
    ) -> None:
        self.holds: set[ReleaseToken] = set()
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
        if holds := [note for note in notes if isinstance(note, ReleaseToken)]:
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


class Heartbeat:
    """`judged` is called with every change of mind about a peer, on this thread."""

    def __init__(
        self,
        config: WorldConfig,
        peers: ConnectionManager,
        clock: Callable[[], float],
        judged: Callable[[Verdict], None],
    ) -> None:
        self._life = FailureDetector(config.suspect_seconds, config.lost_seconds, config.stuck_seconds)
        self._peers = peers
        self._clock = clock
        self._judged = judged
        self._stop = Flag()
        self._thread = threading.Thread(target=self._run, name=f"rpcbench-{config.name}-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._life.period):
            sounds: dict[int, Sound] = {}
            for id_, connections in self._peers.far().items():
                for connection in connections:
                    connection.beat()
                silences = [silence for connection in connections if (silence := connection.silence()) is not None]
                sounds[id_] = Sound(sum(c.heard for c in connections), min(silences, default=None))
            for verdict in self._life.tick(self._clock(), sounds):
                self._judged(verdict)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)

"""The timed work of an agent: deadlines of calls, the maintenance thread, heartbeats, and memory kept for reuse.

Guarantees
- The maintenance thread, one per agent, does the work that is due: it releases forks that finalizers have given up,
  expires calls, ticks the node, flushes connections, and frees memory unused for some seconds.
- A deadline is cheap to set and to clear, and is found within a twentieth of a second after it is due. Calls that end
  in time, nearly all, leave nothing behind, so the table is as large as the number of calls in flight.
- The heartbeat thread sends heartbeats to members on other hosts and runs the failure detector. It does nothing else,
  so users' functions cannot delay it. A world on one host has none: there the end of a process is always reported.
- Memory that a training step frees stays with the process for the next step (`keep_freed_memory`).
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rpcbench.base.conditions import Event
from rpcbench.base.config import WorldConfig
from rpcbench.protocol.membership import FailureDetector, SignsOfLife
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.handles import ReleaseToken
from rpcbench.runtime.locked_node import LockedNode

_BLOCK = 16 << 20
"""Bytes. malloc accepts up to 32 MB, but eight threads would then keep 300 MB of freed memory."""


def keep_freed_memory() -> None:
    """Raise malloc's thresholds for this process, from now on. Takes some microseconds, and no memory."""
    # glibc's malloc maps large blocks, unmaps them when they are freed, and returns free memory at the heap's end. It
    # adapts its bounds: a mapped block that is freed makes its size the bound for mapping, and twice that the bound for
    # the heap's end (mallopt(3), M_MMAP_THRESHOLD). Gradients of a megabyte leave it in between, where each step pays
    # anew for the first touch of every page: up to a third of its time. So malloc is shown one block of 16 MB, which
    # nothing touches. It then keeps up to 32 MB of freed memory for each of its arenas; threads that allocate at the
    # same time have one each. If the user has set `MALLOC_TRIM_THRESHOLD_` or the like, malloc does not adapt; other
    # allocators never do.
    bytes(_BLOCK)


_TICK = 0.05  # seconds: deadlines are checked at multiples of it


class Deadlines:
    """The deadlines of calls, by call. Any thread sets and clears them; the maintenance thread takes due ones."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}  # no lock: each step is one of Python's
        self._next = math.inf  # earliest known; a thread that sets an earlier one must wake the maintenance thread

    def set_deadline(self, call: int, at: float) -> bool:
        """Set a deadline; return True if it is now the earliest, so the maintenance thread must wake."""
        self._at[call] = at
        if at >= self._next:
            return False
        self._next = at
        return True

    def clear_deadline(self, call: int) -> None:
        self._at.pop(call, None)

    def pop_due_calls(self, now: float) -> tuple[list[int], float | None]:
        """Remove and return the calls that are due; and the seconds until the next look, None if none is needed."""
        self._next = math.inf  # first: a deadline set from here on wakes the thread again
        # A list of keys is atomic. Making a copy may collect garbage, whose finalizers let other threads run.
        known = [(call, at) for call in [*self._at] if (at := self._at.get(call)) is not None]
        due = [call for call, at in known if at <= now and self._at.pop(call, None) is not None]
        first = min((at for _, at in known if at > now), default=None)
        if first is None:
            return due, None
        self._next = first
        return due, (int(first / _TICK) + 1) * _TICK - now

    def __len__(self) -> int:
        return len(self._at)


TICK = -1
"""The key of the next tick of the node, among the deadlines of calls."""
_HELD_SECONDS = 0.02
"""How long a message may be held, by this process's clock: that of an interceptor may stand still."""
_NAP_SECONDS = 0.02  # pause after releases, see `_maintenance_loop`
_MOST = 1000
"""The number of notes that are read before the clock is checked again."""
TIDY_SECONDS = 5.0
"""How long unused memory is kept, at least."""


class MaintenanceThread:
    """The maintenance thread. Other threads, and finalizers, only put a note into `released`, which wakes it."""

    def __init__(
        self,
        name: str,
        machine: LockedNode,
        deadlines: Deadlines,
        clock: Callable[[], float],
        peers: ConnectionManager,
    ) -> None:
        self.holds: set[ReleaseToken] = set()  # keeps the tokens of live handles alive
        self.released: queue.SimpleQueue[Any] = queue.SimpleQueue()  # tokens, freed values, None to wake
        self._machine = machine
        self.deadlines = deadlines
        self._clock = clock
        self._peers = peers
        self._flush_at: float | None = None  # monotonic; None: no message is held
        self._tidy_at = time.monotonic() + TIDY_SECONDS
        self._stopped = Event()
        self._thread = threading.Thread(target=self._maintenance_loop, name=f"rpcbench-{name}-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.released.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def schedule_wakeup(self, call: int, now: float, seconds: float | None) -> None:
        """Expire this call (TICK: tick the node) in `seconds` from `now`; None: never."""
        if seconds is not None and self.deadlines.set_deadline(call, now + seconds):
            self.released.put(None)

    def flush_soon(self) -> None:
        """Flush the connections in a moment: a message is held."""
        if self._flush_at is None:
            self._flush_at = time.monotonic() + _HELD_SECONDS
            self.released.put(None)

    def _maintenance_loop(self) -> None:
        pause: float | None = self._run_due()
        before = math.nan
        while not self._stopped.is_set():
            # After a release it sleeps for a moment whatever comes: if RRefs are made and dropped in a loop, a thread
            # that woke for each would take the GIL from that loop each time.
            if self._release_forks(self._receive_notes(pause)):
                self._stopped.wait(min(_NAP_SECONDS, self._run_due()))
            now = self._clock()
            due, pause = self.deadlines.pop_due_calls(now)
            for call in due:
                self._deadline_passed(call)
            if pause is None or now == before:  # a stopped clock: the thread that starts it again wakes this one
                pause = math.inf
            pause, before = min(self._run_due(), pause), now

    def _receive_notes(self, pause: float | None) -> list[Any]:
        """Return the notes that have arrived, once there is one or `pause` seconds have passed."""
        notes: list[Any] = []
        with contextlib.suppress(queue.Empty):
            notes.append(self.released.get(timeout=pause))
            while len(notes) < _MOST:
                notes.append(self.released.get_nowait())
        return notes

    def _release_forks(self, notes: list[Any]) -> bool:
        """Release the forks in the notes; return whether there were any notes but wake-ups."""
        if holds := [note for note in notes if isinstance(note, ReleaseToken)]:
            self.holds.difference_update(holds)
            self._machine.feed_event(
                lambda node: node.process_outcome(
                    ([], [one for hold in holds for one in node.rrefs.release_fork(hold.fork)])
                )
            )
        return any(note is not None for note in notes)  # values in the notes are freed here, with the list

    def _run_due(self) -> float:
        """Do the work that is due by this process's clock; return the seconds until the next."""
        now = time.monotonic()
        if self._flush_at is not None and self._flush_at <= now:
            self._flush_at = None  # before the flush: messages held from now on need another one
            self._peers.flush_connections()
        if self._tidy_at <= now:
            self._tidy_at = now + TIDY_SECONDS
            self._peers.free_idle_memory()
        at = self._flush_at
        return (self._tidy_at if at is None else min(at, self._tidy_at)) - now

    def _deadline_passed(self, call: int) -> None:
        self._machine.feed_event(lambda node: node.tick_delivery() if call == TICK else node.call_expired(call))


class Heartbeat:
    """The heartbeat thread. It gives lost members up; `suspected(kind, member, reason)` gets other changed verdicts of
    the failure detector."""

    def __init__(
        self,
        config: WorldConfig,
        peers: ConnectionManager,
        clock: Callable[[], float],
        suspected: Callable[[str, int, str], None],
    ) -> None:
        self._failure_detector = FailureDetector(config.suspect_seconds, config.lost_seconds, config.stuck_seconds)
        self._peers = peers
        self._clock = clock
        self._suspected = suspected
        self._stop = Event()
        self._thread = threading.Thread(
            target=self._heartbeat_loop, name=f"rpcbench-{config.name}-heartbeat", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def _heartbeat_loop(self) -> None:
        while not self._stop.wait(self._failure_detector.period):
            sounds: dict[int, SignsOfLife] = {}
            for id_, connections in self._peers.remote_connections().items():
                for connection in connections:
                    connection.send_heartbeat()
                silences = [silence for connection in connections if (silence := connection.silence()) is not None]
                sounds[id_] = SignsOfLife(sum(c.bytes_received for c in connections), min(silences, default=None))
            for verdict in self._failure_detector.judge_peers(self._clock(), sounds):
                if verdict.kind == "lost":
                    self._peers.give_up_member(verdict.peer, verdict.reason)
                else:
                    self._suspected(verdict.kind, verdict.peer, verdict.reason)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)

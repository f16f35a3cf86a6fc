"""What happens on this worker, for whoever looks: a ring of events, and snapshots of the tables behind them.

Nobody listens: no event is made. Somebody listens: events go into a bounded ring; the oldest are dropped, and
counted, rather than hold the runtime up. A snapshot and the number of the last event in it belong together.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from rpcbench.words.changes import Flag
from rpcbench.words.events import Event, Row, Table, Tables

CAPACITY = 20_000


class Bus:
    def __init__(self) -> None:
        self.listening = False
        self.filled = Flag()  # there are events to drain
        self._lock = threading.Lock()
        self._ring: collections.deque[Event] = collections.deque()
        self._seq = 0
        self._dropped = 0
        self._tables: dict[str, Callable[[], Table]] = {}

    def register(self, name: str, provider: Callable[[], Table]) -> None:
        """A table of a feature; `provider` must not block."""
        self._tables[name] = provider

    def note(self, kind: str, table: str, key: str, row: Row | None) -> None:
        """One change. Free of cost while nobody listens; never blocks for long."""
        if not self.listening:
            return
        with self._lock:
            self._seq += 1
            if len(self._ring) >= CAPACITY:
                self._ring.popleft()
                self._dropped += 1
            self._ring.append(Event(self._seq, time.monotonic(), kind, table, key, row))
            if len(self._ring) == 1:
                self.filled.set()

    def drain(self, most: int) -> tuple[list[Event], int]:
        """The oldest events, and how many were dropped since last asked."""
        with self._lock:
            events = [self._ring.popleft() for _ in range(min(most, len(self._ring)))]
            dropped, self._dropped = self._dropped, 0
            if not self._ring:
                self.filled.clear()
        return events, dropped

    def restart(self) -> int:
        """Forget waiting events, which a snapshot taken now contains; the number of the last one."""
        with self._lock:
            self._ring.clear()
            self._dropped = 0
            self.filled.clear()
            return self._seq

    def feature_tables(self) -> Tables:
        return {name: provider() for name, provider in self._tables.items()}

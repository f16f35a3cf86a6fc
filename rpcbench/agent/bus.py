"""What happens on this worker, for whoever looks: a ring of events, and snapshots of the tables behind them; and a
ring of the messages that go and come.

Nobody listens: no event is made. Somebody listens: events go into a bounded ring; the oldest are dropped, and
counted, rather than hold the runtime up. A snapshot and the number of the last event in it belong together.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from rpcbench.agent.traced import Traced, traced
from rpcbench.wire.messages import Message, Notice
from rpcbench.words.changes import Flag
from rpcbench.words.events import Event, Row, Table, Tables

CAPACITY = 20_000
MESSAGES_KEPT = 10_000


class Bus:
    def __init__(self) -> None:
        self.listening = False
        self.filled = Flag()  # there are events or messages to drain
        self.hidden: set[str] = set()  # channels whose notices are not told of: those that carry all this
        self._lock = threading.Lock()
        self._ring: collections.deque[Event] = collections.deque()
        self._seq = 0
        self._dropped = 0
        self._messages: collections.deque[Traced] = collections.deque()
        self._missed = 0
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

    def tell(self, what: str, peer: int, seq: int, message: Message) -> None:
        """One message has gone, come, or been lost; asked of nobody unless somebody listens for messages."""
        if type(message) is Notice and message.channel in self.hidden:
            return
        row = traced(what, peer, seq, time.monotonic(), message)
        with self._lock:
            if len(self._messages) >= MESSAGES_KEPT:
                self._messages.popleft()
                self._missed += 1
            self._messages.append(row)
            if len(self._messages) == 1:
                self.filled.set()

    def drain(self, most: int) -> tuple[list[Event], int]:
        """The oldest events, and how many were dropped since last asked."""
        with self._lock:
            events = [self._ring.popleft() for _ in range(min(most, len(self._ring)))]
            dropped, self._dropped = self._dropped, 0
            self._clear_if_empty()
        return events, dropped

    def drain_messages(self, most: int) -> tuple[list[Traced], int]:
        """The same of messages."""
        with self._lock:
            rows = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            missed, self._missed = self._missed, 0
            self._clear_if_empty()
        return rows, missed

    def _clear_if_empty(self) -> None:
        if not self._ring and not self._messages:
            self.filled.clear()

    def restart(self) -> int:
        """Forget waiting events, which a snapshot taken now contains; the number of the last one."""
        with self._lock:
            self._ring.clear()
            self._dropped = 0
            self._clear_if_empty()
            return self._seq

    def forget_messages(self) -> None:
        """Nobody listens for them any more."""
        with self._lock:
            self._messages.clear()
            self._missed = 0
            self._clear_if_empty()

    def feature_tables(self) -> Tables:
        return {name: provider() for name, provider in self._tables.items()}

"""What happens on this worker, for whoever looks: the rows that have changed, and snapshots of the tables behind them;
and a ring of the messages that go and come.

Nobody listens: nothing is kept. Somebody listens: a row that has changed is kept once, however often it changes before
it is told; of too many the oldest are dropped, and counted, rather than hold the runtime up. A snapshot and the number
of the last batch in it belong together.

A message is told of as a row of plain values that says what it was about, and holds nothing of a user's data. It is
made under the protocol's lock while somebody listens, so it looks at fields and no more.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rpcbench.base.conditions import Flag
from rpcbench.base.events import Batch, Made, Row, Table, Tables
from rpcbench.wire.messages import Body, Message, Notice


class MessageRow(NamedTuple):
    """One half of a message, as one of its ends tells of it. `bytes`: of users' data; `context`: 0 for none."""

    what: str
    peer: int
    seq: int
    time: float
    kind: str
    call: int | None
    rrefs: list[str]
    context: int
    label: str
    bytes: int


def message_row(what: str, peer: int, seq: int, time: float, message: Message) -> MessageRow:
    """`what`: "sent", "received" or "lost"; `peer` is the other end, `time` in monotonic seconds."""
    scope = getattr(message, "scope", None)
    context = scope.context if scope is not None else getattr(message, "context", 0)
    rrefs = [str(fork.rref) for fork in getattr(message, "forks", ())]
    if (about := getattr(message, "rref", None)) is not None:
        rrefs.insert(0, str(about))
    label = message.channel if type(message) is Notice else getattr(message, "label", "")
    call, kind = getattr(message, "call", None), type(message).__name__
    return MessageRow(what, peer, seq, time, kind, call, rrefs, context, label, _size(message))


def _size(message: Message) -> int:
    if type(message) is Notice:
        return len(message.data)
    body: Body | None = getattr(message, "body", None)
    if body is None:
        return 0
    return len(body.payload) + len(body.tensors) + sum(memoryview(buffer).nbytes for buffer in body.buffers)


CAPACITY = 20_000
MESSAGES_KEPT = 10_000


class EventLog:
    def __init__(self) -> None:
        self.listening = self.telling = False  # of changes, and of each message
        self.filled = Flag()  # there are changes or messages to drain
        self.hidden: set[str] = set()  # channels whose notices are not told of: those that carry all this
        self._lock = threading.Lock()
        self._changed: dict[tuple[str, str], Made] = {}
        self._number = 0
        self._dropped = 0
        self._messages: collections.deque[MessageRow] = collections.deque()
        self._missed = 0
        self._tables: dict[str, Callable[[], Table]] = {}

    def register(self, name: str, provider: Callable[[], Table]) -> None:
        """A table of a feature; `provider` must not block."""
        self._tables[name] = provider

    def note(self, kind: str, table: str, key: str, row: Made) -> None:
        """One change. Free of cost while nobody listens; never blocks for long."""
        if not self.listening:
            return
        with self._lock:
            self._changed[table, key] = row
            if len(self._changed) > CAPACITY:
                del self._changed[next(iter(self._changed))]
                self._dropped += 1
            if not self.filled.is_set():
                self.filled.set()

    def tell(self, what: str, peer: int, seq: int, message: Message) -> None:
        """One message has gone, come, or been lost; asked of nobody unless somebody listens for messages."""
        if type(message) is Notice and message.channel in self.hidden:
            return
        row = message_row(what, peer, seq, time.monotonic(), message)
        with self._lock:
            if len(self._messages) >= MESSAGES_KEPT:
                self._messages.popleft()
                self._missed += 1
            self._messages.append(row)
            if not self.filled.is_set():
                self.filled.set()

    def drain(self, most: int) -> Batch:
        """The rows that changed first, as they are now; under the machine's lock, as rows of machines are its own."""
        with self._lock:
            keys = list(itertools.islice(self._changed, most))
            made = [(key, self._changed.pop(key)) for key in keys]
            dropped, self._dropped = self._dropped, 0
            self._number += bool(made)
            number = self._number
            self._clear_if_empty()
        rows: dict[str, dict[str, Row | None]] = {}
        for (table, key), row in made:
            rows.setdefault(table, {})[key] = row()
        return Batch(number, rows, dropped)

    def drain_messages(self, most: int) -> tuple[list[MessageRow], int]:
        """The same of messages."""
        with self._lock:
            rows = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            missed, self._missed = self._missed, 0
            self._clear_if_empty()
        return rows, missed

    def _clear_if_empty(self) -> None:
        if not self._changed and not self._messages:
            self.filled.clear()

    def restart(self) -> int:
        """Forget waiting changes, which a snapshot taken now contains; the number of the last batch."""
        with self._lock:
            self._changed.clear()
            self._dropped = 0
            self._clear_if_empty()
            return self._number

    def forget_messages(self) -> None:
        """Nobody listens for them any more."""
        with self._lock:
            self._messages.clear()
            self._missed = 0
            self._clear_if_empty()

    def feature_tables(self) -> Tables:
        return {name: provider() for name, provider in self._tables.items()}

"""The events of this member for its watchers: rows that have changed, snapshots of tables, and a ring of messages.

Guarantees
- Without a watcher nothing is kept.
- With a watcher, a changed row is kept once, however often it changes before it is sent. Of too many rows the oldest
  are dropped and counted; the runtime is never delayed.
- A snapshot and the number of the last batch in it belong together.
- A message is recorded as a row of plain values, without user data; it is made under the node's lock, from fields only.
- An error of a watcher's code that runs within the program is logged and ends in its `Bystander`.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from rpcbench.base.conditions import Condition
from rpcbench.base.ids import ChangedRows, Made, Row, Table, Tables
from rpcbench.wire.messages import Body, Message, Notice

_log = logging.getLogger(__name__)
PARTS_KEPT = 1000
"""Ended parts of collectives that a member keeps."""


class MessageRow(NamedTuple):
    """One half of a message, as seen at one of its ends. `bytes`: of user data; `context`: 0 for none."""

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


def make_message_row(what: str, peer: int, seq: int, time: float, message: Message) -> MessageRow:
    """Make a row. `what`: "sent", "received" or "lost"; `peer`: the other end; `time`: monotonic seconds."""
    scope = getattr(message, "scope", None)
    context = scope.context if scope is not None else getattr(message, "context", 0)
    rrefs = [str(fork.rref) for fork in getattr(message, "forks", ())]
    if (about := getattr(message, "rref", None)) is not None:
        rrefs.insert(0, str(about))
    label = message.channel if type(message) is Notice else getattr(message, "label", "")
    call, kind = getattr(message, "call", None), type(message).__name__
    return MessageRow(what, peer, seq, time, kind, call, rrefs, context, label, _message_size(message))


def _message_size(message: Message) -> int:
    if type(message) is Notice:
        return len(message.data)
    body: Body | None = getattr(message, "body", None)
    if body is None:
        return 0
    return len(body.payload) + len(body.tensors) + sum(memoryview(buffer).nbytes for buffer in body.buffers)


CAPACITY = 20_000  # changed rows
MESSAGES_KEPT = 10_000


class EventLog:
    def __init__(self) -> None:
        self.listening = False  # whether a watcher asks for changes
        self.on_watch: list[Callable[[], object]] = []  # called after a watch has begun or ended; may block briefly
        self.filled = False  # there are changes or messages to drain
        self.changes_ready = Condition()  # notified when it is filled, and at the end of the last watch or of the agent
        self._hidden: set[str] = set()  # channels left out: those that carry the events themselves
        self._lock = threading.Lock()  # guards the five below
        self._changed: dict[tuple[str, str], Made] = {}  # (table, key), oldest first
        self._number = 0  # of the last batch
        self._dropped = 0  # rows, since the last batch
        self._messages: collections.deque[MessageRow] = collections.deque()
        self._missed = 0  # messages, likewise
        self._tables: dict[str, Callable[[], Table]] = {}  # of features

    def hide(self, *channels: str) -> None:
        """Leave the messages of these channels out."""
        self._hidden.update(channels)

    def register_table(self, name: str, provider: Callable[[], Table]) -> None:
        """Add a table of a feature; `provider` must not block."""
        self._tables[name] = provider

    def record_change(self, kind: str, table: str, key: str, row: Made) -> None:
        """Record a change. Costs nothing without a watcher; never blocks for long."""
        if not self.listening:
            return
        with self._lock:
            self._changed[table, key] = row
            if len(self._changed) > CAPACITY:
                del self._changed[next(iter(self._changed))]
                self._dropped += 1
            self._mark_filled()

    def record_message(self, what: str, peer: int, seq: int, message: Message) -> None:
        """Record that a message was sent, received or lost; called only while a watcher asks for messages."""
        if type(message) is Notice and message.channel in self._hidden:
            return
        row = make_message_row(what, peer, seq, time.monotonic(), message)
        with self._lock:
            if len(self._messages) >= MESSAGES_KEPT:
                self._messages.popleft()
                self._missed += 1
            self._messages.append(row)
            self._mark_filled()

    def drain_changes(self, most: int) -> ChangedRows:
        """Return the rows that changed first, with their current values; under the node's lock, as it owns the rows."""
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
        return ChangedRows(number, rows, dropped)

    def drain_messages(self, most: int) -> tuple[list[MessageRow], int]:
        """Return up to `most` message rows, and how many were dropped since the last call."""
        with self._lock:
            rows = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            missed, self._missed = self._missed, 0
            self._clear_if_empty()
        return rows, missed

    def _mark_filled(self) -> None:
        if not self.filled:
            self.filled = True
            self.changes_ready.notify_all()

    def _clear_if_empty(self) -> None:
        if not self._changed and not self._messages:
            self.filled = False

    def restart_batches(self) -> int:
        """Drop waiting changes, which a snapshot taken now contains; return the number of the last batch."""
        with self._lock:
            self._changed.clear()
            self._dropped = 0
            self._clear_if_empty()
            return self._number

    def forget_messages(self) -> None:
        with self._lock:
            self._messages.clear()
            self._missed = 0
            self._clear_if_empty()

    def feature_tables(self) -> Tables:
        tables = self._tables.copy()  # a feature may begin meanwhile, on another thread
        return {name: provider() for name, provider in tables.items()}


_FAILED = (
    "the watcher of %s has failed. The program goes on as if nobody watched, but rows of panels and traces may be "
    "missing or wrong. Later failures of this watcher are not logged"
)


class Bystander(contextlib.ContextDecorator):
    """`with` it around code that a watcher runs within the program; it also decorates functions that return nothing.

    An exception ends there, as looking must not change what the program does; Ctrl-C, which is the user's, passes. The
    first one is logged with its traceback: later ones would say the same, perhaps once for each operation.
    `of`: the things watched, for the log.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._has_logged = False

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_logged:
            self._has_logged = True
            _log.error(_FAILED, self._of, exc_info=error)
        return True

"""Identifiers that several processes share, the rules for worker names, and the rows of tables that events change.

An `Id` is unique over the life of a world: it has the worker that made it, its incarnation (a restarted worker never
inherits its predecessor's ids) and a counter. Ids that users see have the form of torch's ids.

The runtime's events: each is the change of one row of one table. Every panel and picture is drawn from these tables.

A row is a small dict of plain values (numbers, strings, lists). An event holds a function that makes the row when it is
read, or None after the row's end. So a row that changes often is made once for all readers, and a copy of the tables
plus the changed rows equals the later tables.

Tables; `rpcbench.telemetry.record_schema` has their fields
    owned     RRefs this worker owns                key "0.3"
    users     forks this worker holds               key "0.4"
    contexts  autograd contexts                     key "281…"
    calls     calls in flight from here             key "17"
    graphs    the local part of a context           key "281…"; see `rpcbench.autograd.graph_events`
    steps     a worker's part of a step             key "s3.w1"
    ops       pipeline operations                   key "s3.w1.5"
    collectives  its part of a collective operation key "0f….0.7"
    cells     cells that were sent, or run here     key "8"
    jobs      maps and training loops               key "7"
    metrics   what its program logs                 key "0.12"
    health    its state at the last request         key "1"; figures: `rpcbench.telemetry.worker_columns`
    launched  processes this member started         key "1"
    actions   requests by clicks in panels          key "scale 3"

Messages have no table on a worker, which keeps no record of them. Each is reported when it is sent and when it is
received (`MessageObserver`) to observers of messages, which match the two (`rpcbench.telemetry.message_views`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

_TOMBSTONES = 4096  # the most ids that are remembered after their object has gone
# torch's form of an id is worker (16 bits), counter (48 bits); here the counter is incarnation (16 bits), serial (32).


COUNTER_BITS = 48
OWN = 1 << COUNTER_BITS - 1
"""A bit in the number of a call: this package makes the call itself, such as a cell's, and no user's program."""
_NAME = re.compile(r"[A-Za-z0-9_:.\-]*")
_LONGEST_NAME = 128


class Id(NamedTuple):
    """The identity of an RRef, a fork, or a backward pass."""

    worker: int
    serial: int
    incarnation: int = 0

    def __str__(self) -> str:
        again = f".{self.incarnation}" if self.incarnation else ""
        return f"{self.worker}.{self.serial}{again}"


def global_id(worker: int, serial: int) -> int:
    """Return a 64-bit id in torch's form: 16 bits worker, 48 bits counter."""
    return worker << COUNTER_BITS | serial


def worker_of(number: int) -> int:
    """Return the worker that made a 64-bit id."""
    return number >> COUNTER_BITS


_SERIAL_BITS = 32
_LIVES = (1 << COUNTER_BITS - _SERIAL_BITS) - 1


def first_serial(incarnation: int) -> int:
    """Return the first value of a counter for 64-bit ids, so that they differ from those of other incarnations."""
    return (incarnation & _LIVES) << _SERIAL_BITS


def origin_of(number: int) -> int:
    """Return the process (worker and incarnation) that made a 64-bit id, if its counter began at `first_serial`."""
    return number >> _SERIAL_BITS


def make_origin(worker: int, incarnation: int) -> int:
    """Return `origin_of` all ids that a process makes."""
    return origin_of(global_id(worker, first_serial(incarnation)))


class Tombstones(dict[object, None]):
    """Ids of objects that have gone: the latest ones."""

    def add_tombstone(self, key: object) -> None:
        self[key] = None
        if len(self) > _TOMBSTONES:
            del self[next(iter(self))]  # the oldest: dicts keep the order of insertion


class Counter:
    """A thread-safe counter: `first`, `first` + 1, ..."""

    def __init__(self, first: int = 0) -> None:
        self.next: Callable[[], int] = itertools.count(first).__next__  # atomic: one step of the interpreter


def check_name(name: str) -> str:
    """Return a worker's name if it is valid; else raise TypeError, or RuntimeError with torch's wording."""
    if not isinstance(name, str):
        raise TypeError(f"worker name must be a str, not {type(name).__name__}")
    if not name or len(name) >= _LONGEST_NAME or not _NAME.fullmatch(name):
        raise RuntimeError(
            "Worker name must match ^[A-Za-z0-9-_:.]*$, and must be non-empty and shorter than "
            f"{_LONGEST_NAME} chars, but got {name!r}"
        )
    return name


K = TypeVar("K")
V = TypeVar("V")
Row = dict[str, Any]
Table = dict[str, Row]
Tables = dict[str, Table]


class ChangedRows(NamedTuple):
    """The rows that have changed since the batch before, in their present state."""

    number: int  # counts a worker's batches without gaps
    rows: dict[str, dict[str, Row | None]]  # table → key → row; None: it has ended
    dropped: int  # changed rows that are left out


Made = Callable[[], "Row | None"]
"""Returns a row in its present state, None after its end; called later, under the node's lock."""

Note = Callable[[str, str, str, Made], None]
"""(kind, table, key, row): reports a change, and is called only while there is an observer. `kind` is a past-tense name
("ForkAdded") for observers of the history rather than the state."""

MessageObserver = Callable[[str, int, int, Any], None]
"""("sent" | "received" | "lost", peer, sequence number, message): reports a message, only while there is an observer of
messages."""

QUIET, CHANGES, MESSAGES = 0, 1, 2
"""The level of observation: nothing; every change; every message, too, which makes each message slower."""


def make_row(entries: Mapping[K, V], key: K, row: Callable[[K, V], Row | None]) -> Row | None:
    """Return the row of an entry in its present state, None after its end; a `Made` with these arguments bound."""
    entry = entries.get(key)
    return None if entry is None else row(key, entry)


def apply_change(tables: Tables, table: str, key: str, row: Row | None) -> None:
    """Apply one change to a copy of the tables."""
    rows = tables.setdefault(table, {})
    if row is None:
        rows.pop(key, None)
    else:
        rows[key] = row

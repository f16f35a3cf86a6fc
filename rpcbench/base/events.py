"""What the runtime says about itself: one kind of event, a change of one row of one table.

A table's rows are small dicts of plain values (numbers, strings, lists). Who tells of a change says how to make the row
as it is by then, or None where it is gone: so a row that changes often is made once for all who look, and tables plus
the rows that have changed equal later tables. Every picture is drawn from tables.

Tables
    owned     RRefs this worker owns           key "0.3"      forks, ready, type, made, size, cell
    users     forks this worker holds          key "0.4"      rref, owner, parent, state, children
    contexts  autograd contexts                key "281…"     known, sends, recvs, passes, gradients
    calls     calls in flight from here        key "17"       to, label
    graphs    what is local of a context       key "281…"     leaves (name, shape, bytes), more, passes (regions, ran)
    steps     a worker's part of a step        key "s3.w1"    step, worker, workers, plan, ideal, state
    ops       pipeline operations              key "s3.w1.5"  step, worker, stage, op, microbatch, begin, end, bytes,
                                                               held, failed
    collectives  its part of what members do together  key "0f….0.7"  group, number, op, members, shape, bytes, begin,
                                                               end, failed
    health    how this member was when asked   key "1"        question, pid, host, cpu, memory, busy, waiting, queued,
                                                               cells, peers
    launched  processes this member started    key "1"        name, pid, incarnation, state, log
    actions   what clicks have asked for       key "scale 3"  action, target, state, error

Messages are no table of a worker, as nothing of them is kept there: each is told of as it goes and as it comes
(`Told`), to whoever listens for that besides. Whoever watches puts them together (`rpcbench.telemetry.message_views`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]
Table = dict[str, Row]
Tables = dict[str, Table]


class Batch(NamedTuple):
    """The rows that have changed since the batch before, as they are now. `number` counts a worker's batches without
    gaps; `dropped` rows had changed, too, and are left out."""

    number: int
    rows: dict[str, dict[str, Row | None]]
    dropped: int


Made = Callable[[], "Row | None"]
"""A row as it is now, None where it is gone; called later, under the machine's lock."""

Note = Callable[[str, str, str, Made], None]
"""(kind, table, key, row): how machines tell of a change, called only while somebody listens. `kind` is a past-tense
name ("ForkAdded") for those who tell the story rather than the state."""


Told = Callable[[str, int, int, Any], None]
"""("sent" | "received" | "lost", the other member, number, message): how delivery tells of every message, the same
way."""

QUIET, CHANGES, MESSAGES = 0, 1, 2
"""How much somebody listens for: nothing; every change; and every message, too, which costs each of them."""


def apply(tables: Tables, table: str, key: str, row: Row | None) -> None:
    """Carry one change out on a copy of the tables."""
    rows = tables.setdefault(table, {})
    if row is None:
        rows.pop(key, None)
    else:
        rows[key] = row

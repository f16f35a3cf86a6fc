"""Every message between members: gathered from what both of its ends tell, and as a view.

A message is told of in halves, by who sent it and by who got it, each by its own clock. `gather` keeps them as rows of
a table "messages" for each member that told, the latest `KEPT`; `messages_view` joins the halves on our clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rpcbench.base.events import Row, Table
from rpcbench.base.ids import COUNTER_BITS, Id
from rpcbench.runtime.events import MessageRow
from rpcbench.telemetry.clocks import SHARED, Clock
from rpcbench.telemetry.collectives import collectives_view
from rpcbench.telemetry.views import View, World, everybody

KEPT = 10_000
_COUNTER = (1 << COUNTER_BITS) - 1
_ANSWERS = frozenset(("Result", "Failure"))


def gather(rows: Table, member: int, told: Iterable[Sequence[Any]]) -> int:
    """Put what a member has told of messages into its rows; the oldest beyond `KEPT` go, and how many is returned."""
    for one in told:
        half = MessageRow(*one)
        source, to = (half.peer, member) if half.what == "received" else (member, half.peer)
        key = f"{source}>{to}.{half.seq:x}"
        rows[key] = _joined(rows.get(key), half, source, to)
    too_many = max(0, len(rows) - KEPT)
    for key in list(itertools.islice(rows, too_many)):
        del rows[key]
    return too_many


def _joined(row: Row | None, half: MessageRow, source: int, to: int) -> Row:
    row = row or _row(half, source, to)
    if half.what == "sent":
        return {**row, "sent": half.time if row["sent"] is None else row["sent"], "tries": row["tries"] + 1}
    return {**row, half.what: half.time}


def _row(half: MessageRow, source: int, to: int) -> Row:
    caller = to if half.kind in _ANSWERS else source
    call = "" if half.call is None else str(Id(caller, half.call & _COUNTER, half.call >> COUNTER_BITS))
    about = {"kind": half.kind, "from": source, "to": to, "label": half.label, "call": call, "rrefs": half.rrefs}
    context = str(half.context) if half.context else ""
    return {**about, "context": context, "bytes": half.bytes, "tries": 0, "sent": None, "received": None, "lost": None}


def messages_view(world: World) -> View:
    """Every message, in the order in which they were sent, and what members do together. Sections: workers, messages,
    clocks; collectives and entries, as in `collectives_view`.

    A message is `received`, `under way`, `lost` (for certain, or with one of its ends), or `untold`: of what its
    receiver told some was left out. `sent` and `received` are seconds of our clock, None where that end did not tell.
    An answer has the label of its call. `clocks` says for members on other hosts how wrong their times may be. Of more
    than `KEPT` messages the latest are shown, and the others counted as left out.
    """
    joined: Table = {}
    for member, state in world.items():
        clock = Clock(*state.get("clock", SHARED))
        for key, half in state["tables"].get("messages", {}).items():
            other = joined.get(key)
            mine = _on_our_clock(half, member, clock)
            joined[key] = mine if other is None else _both(other, mine)
    order = sorted(joined, key=lambda key: _time(joined[key]))
    cut = Counter(joined[key]["from"] for key in order[:-KEPT])
    order = order[-KEPT:]
    labels = {row["call"]: row["label"] for row in joined.values() if row["label"] and row["call"]}
    shown = {key: _shown(joined[key], labels, world) for key in order}
    mentioned = {row[end] for row in shown.values() for end in ("from", "to")}
    return {
        **collectives_view(world),
        "workers": {key: _all_left_out(row, world, cut) for key, row in everybody(world, mentioned).items()},
        "messages": shown,
    }


def _all_left_out(worker: Row, world: World, cut: Counter[int]) -> Row:
    trimmed = world.get(worker["id"], {}).get("trimmed", 0)
    return {**worker, "left_out": worker["left_out"] + trimmed + cut[worker["id"]]}


def _on_our_clock(half: Row, member: int, clock: Clock) -> Row:
    if not clock.ahead:
        return half
    times = {name: half[name] - clock.ahead for name in ("sent", "received", "lost") if half[name] is not None}
    return {**half, **times}


def _both(one: Row, other: Row) -> Row:
    """Two halves of a message; what both say is what it was when it was sent."""
    sender, receiver = (one, other) if one["sent"] is not None else (other, one)
    return {**sender, "received": receiver["received"] if sender["received"] is None else sender["received"]}


def _time(row: Row) -> float:
    times = (row["sent"], row["received"], row["lost"])  # what was told of it first may be that it is lost
    return float(next(time for time in times if time is not None))


def _shown(row: Row, labels: dict[str, str], world: World) -> Row:
    return {**row, "label": row["label"] or labels.get(row["call"], ""), "state": _state(row, world)}


def _state(row: Row, world: World) -> str:
    if row["received"] is not None:
        return "received"
    ends = [world[end] for end in (row["from"], row["to"]) if end in world]
    if row["lost"] is not None or len(ends) < 2 or any(end["state"] in ("lost", "left") for end in ends):
        return "lost"
    receiver = world[row["to"]]
    return "untold" if receiver.get("missed") or receiver.get("trimmed") else "under way"

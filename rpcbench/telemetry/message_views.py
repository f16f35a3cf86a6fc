"""Every message between members: gathered from what both of its ends tell, and as a view.

A message is told of in halves, by who sent it and by who got it, each by its own clock. `gather` keeps them as rows of
a table "messages" for each member that told, the latest `KEPT`; `messages_view` joins the halves on our clock.

Collectives are a view, too: which members have entered, which are missing, which came last, and how long the others
waited for it. Each member tells of its own part; parts of one collective have one key.

Members on one host share a clock. For others the way there and the way back are not known, only both together: half of
what they took is how wrong the estimate of a clock may be. Of several estimates the quickest is the best.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rpcbench.base.events import Row, Table
from rpcbench.base.ids import COUNTER_BITS, Id
from rpcbench.runtime.events import MessageRow
from rpcbench.runtime.members import GONE
from rpcbench.telemetry.views import View, World, everybody, rows_of


class Clock(NamedTuple):
    """Seconds that a member's clock is ahead of ours, and by how much that may be wrong."""

    ahead: float
    error: float


SHARED = Clock(0.0, 0.0)


def estimate(asked: float, heard: float, said: float, told: float) -> Clock:
    """We asked and were told by our clock; it heard that and said its answer by its own."""
    way = max(0.0, (told - asked) - (said - heard))
    return Clock(((heard - asked) + (said - told)) / 2, way / 2)


def better(old: Clock | None, new: Clock) -> Clock:
    """The one that is less wrong."""
    return new if old is None or new.error <= old.error else old


class Straggler(NamedTuple):
    """A member that came last in so many collectives; `seconds`: how long, all in all, the first had waited by then."""

    worker: int
    seconds: float
    collectives: int


def collectives_view(world: World) -> View:
    """What members do together, in the order in which it began. Sections: workers, collectives, entries, clocks.

    A collective is `done`, `open` or `failed`. `members` are the names of all who are to come, `missing` of those who
    have not, or have not told of it, as long as nobody is through. Once all have come, `last` is the id of the one that
    came last, and `waited` how many seconds the first had waited by then; None before. `begin` and `end` are those of
    the first in and the last out, in seconds of our clock. `entries` (key `collective/worker`): when each came and
    went, and how long it waited for the last one, None as long as that is not known.
    """
    found: dict[str, Table] = {}
    for worker, key, row in rows_of(world, "collectives"):
        found.setdefault(key, {})[str(worker)] = _part_on_our_clock(row, Clock(*world[worker].get("clock", SHARED)))
    shown = {key: _collective(parts, world) for key, parts in found.items()}
    order = sorted(shown, key=lambda key: float(shown[key]["begin"]))
    return {
        "workers": everybody(world, ()),
        "collectives": {key: shown[key] for key in order},
        "entries": {f"{key}/{id_}": row for key in order for id_, row in _entries(key, shown[key], found[key])},
        "clocks": clocks(world),
    }


def clocks(world: World) -> Table:
    """How wrong the times of members on other hosts may be, in seconds."""
    errors = {str(member): Clock(*state.get("clock", SHARED)).error for member, state in world.items()}
    return {member: {"error": error} for member, error in errors.items() if error}


def began_since(member: dict[str, Any], began: float) -> dict[str, Any]:
    """A member without the collectives that were over for it by then, in seconds of our clock."""
    rows: Table = member["tables"].get("collectives", {})
    then = began + Clock(*member.get("clock", SHARED)).ahead
    kept = {key: row for key, row in rows.items() if row["end"] is None or row["end"] >= then}
    return {**member, "tables": {**member["tables"], "collectives": kept}} if len(kept) < len(rows) else member


def stragglers(collectives: Iterable[Row]) -> list[Straggler]:
    """Who came last, as rows of the view say it; who cost most first."""
    sums: dict[int, tuple[float, int]] = {}
    for row in collectives:
        if row["last"] is not None:
            seconds, count = sums.get(row["last"], (0.0, 0))
            sums[row["last"]] = seconds + row["waited"], count + 1
    found = [Straggler(worker, *each) for worker, each in sums.items()]
    return sorted(found, key=lambda one: -one.seconds)


def _part_on_our_clock(row: Row, clock: Clock) -> Row:
    end = None if row["end"] is None else row["end"] - clock.ahead
    return {**row, "begin": row["begin"] - clock.ahead, "end": end}


def _collective(parts: Table, world: World) -> Row:
    rows = list(parts.values())
    last = max(parts, key=lambda id_: float(parts[id_]["begin"]))
    begin, told = min(row["begin"] for row in rows), {world[int(id_)]["name"] for id_ in parts}
    missing = [name for name in rows[0]["members"] if name not in told]
    known = not missing and len(rows) > 1
    through = any(row["end"] is not None and not row["failed"] for row in rows)
    ends = [row["end"] for row in rows if row["end"] is not None]
    state = _collective_state(parts, world)
    return {
        **{name: rows[0][name] for name in ("group", "number", "op", "shape", "bytes")},
        "members": list(rows[0]["members"]),
        "missing": [] if through else missing,  # nobody gets through before all have come
        "state": state,
        "begin": begin,
        "end": None if state == "open" else max(ends, default=None),
        "last": int(last) if known else None,
        "waited": parts[last]["begin"] - begin if known else None,
    }


def _collective_state(parts: Table, world: World) -> str:
    """What a member had under way when it was lost has failed with it."""
    there = {id_: row["end"] is None and world[int(id_)]["state"] not in GONE for id_, row in parts.items()}
    if any(there.values()):
        return "open"
    return "failed" if any(row["failed"] or row["end"] is None for row in parts.values()) else "done"


def _entries(key: str, collective: Row, parts: Table) -> Iterable[tuple[str, Row]]:
    came = None if collective["last"] is None else parts[str(collective["last"])]["begin"]
    for id_, row in parts.items():
        waited = None if came is None else came - row["begin"]
        times = {"begin": row["begin"], "end": row["end"], "waited": waited, "failed": row["failed"]}
        yield id_, {"collective": key, "worker": int(id_), **times}


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

"""Collectives as a view: who has entered, who is missing, who came last, and how long the others waited for it.

Each member tells of its own part, by its own clock; parts of one collective have one key. Here they are put together on
our clock. Where hosts differ, `clocks` says how wrong that may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rpcbench.base.events import Row, Table
from rpcbench.runtime.members import GONE
from rpcbench.telemetry.clocks import SHARED, Clock
from rpcbench.telemetry.views import View, World, everybody, rows_of


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
        found.setdefault(key, {})[str(worker)] = _on_our_clock(row, Clock(*world[worker].get("clock", SHARED)))
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


def _on_our_clock(row: Row, clock: Clock) -> Row:
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
    state = _state(parts, world)
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


def _state(parts: Table, world: World) -> str:
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

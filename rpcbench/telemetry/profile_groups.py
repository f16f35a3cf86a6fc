"""The communication of each member by process group: the table `by="group"` of a profile.

Guarantees
- Every collective that has ended counts, in the group that the trace says, else in a row that says that it does not.
- Seconds of a group are a union: two of its collectives at once count once. Exposed is the part of it during which the
  member computes nothing, as the table by kind has it. Of two groups that communicate at once each has its own seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import format_bytes
from rpcbench.base.ids import Row, Table
from rpcbench.runtime.operator_kinds import Spans, merge_spans, subtract_spans, sum_spans
from rpcbench.telemetry.profile_tables import Members, ProfileTable, describe_part, share_of
from rpcbench.telemetry.views import World

UNSAID = "not said by the trace"
"""The group of collectives that have none in any field of the trace, as with gloo."""


class GroupPart(NamedTuple):
    """A member's part of a collective."""

    group: str
    members: tuple[str, ...]  # of the group; () where they are unknown
    size: int  # bytes; 0 where they are unknown
    begin: float  # on the clock of the member's operators
    end: float


Parts = Mapping[str, Sequence[GroupPart]]
"""The parts of each member, by its name."""


def list_parts(world: World) -> dict[str, list[GroupPart]]:
    """Return the parts of collectives that members have reported, by the name of the member."""
    return {member["name"]: [*_read_parts(member["tables"].get("collectives", {}))] for member in world.values()}


def _read_parts(rows: Table) -> Iterator[GroupPart]:
    for row in rows.values():
        if row["end"] is not None:
            yield GroupPart(row["group"], tuple(row["members"]), row["bytes"], row["begin"], row["end"])


def tabulate_groups(members: Members, parts: Parts) -> ProfileTable:
    """Return a row for each group of each member, the groups with the most seconds first."""
    rows = [row for name, one in members.items() for row in _sum_groups(name, parts.get(name, ()), one.computed)]
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row["group"]] = seconds.get(row["group"], 0.0) + row["seconds"]
        kinds = members[row["worker"]].kinds
        row["span"] = kinds.span if kinds is not None else 0.0
    places = {name: place for place, name in enumerate(members)}
    rows.sort(key=lambda row: (-seconds[row["group"]], row["group"], places[row["worker"]]))
    shares = [share_of(row["seconds"], row["span"]) for row in rows]
    return ProfileTable(rows, [_HEAD, *map(_group_cells, rows)], shares, "No collective has ended.")


_MEMBERS_LENGTH = 40  # of their names in a cell
_HEAD = "group", "worker", "members", "collectives", "bytes", "time", "exposed"


def _sum_groups(worker: str, parts: Sequence[GroupPart], computed: Spans | None) -> Iterator[Row]:
    groups: dict[tuple[str, tuple[str, ...]], list[GroupPart]] = {}
    for part in parts:
        groups.setdefault((part.group, part.members), []).append(part)
    for (group, listed), own in groups.items():
        spans = merge_spans(np.array([part.begin for part in own]), np.array([part.end for part in own]))
        exposed = None if computed is None else sum_spans(subtract_spans(spans, computed))
        known = [part.size for part in own if part.size]
        yield {
            "group": group, "worker": worker, "members": [*listed], "collectives": len(own),
            "bytes": sum(known) if known else None, "all_bytes": len(known) == len(own),
            "seconds": sum_spans(spans), "exposed": exposed,
        }  # fmt: skip


def _group_cells(row: Row) -> tuple[str, ...]:
    size = "?" if row["bytes"] is None else f"{'' if row['all_bytes'] else '≥ '}{format_bytes(row['bytes'])}"
    times = [describe_part(row["seconds"], row["span"])]
    times.append("?" if row["exposed"] is None else describe_part(row["exposed"], row["span"]))
    names = shorten_words(", ".join(row["members"]), _MEMBERS_LENGTH) or "?"
    return row["group"], row["worker"], names, str(row["collectives"]), size, *times

"""The time of members by part of the model: the table `by="module"` of a profile.

Guarantees
- Rows are in the order of a tree: a part, then those within it, the longest first. Operators without a part have
  the last row, which says how parts get names.
- Sums are over members. A row that has parts within it that are deeper than shown ends with `…`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rpcbench.base.charts import shorten_words
from rpcbench.base.ids import Row
from rpcbench.runtime.operator_columns import CPU
from rpcbench.telemetry.profile_tables import NAME_LENGTH, Members, ProfileTable, format_seconds, share_of

_INDENT = "\u00a0\u00a0"  # spaces that HTML keeps
_SECONDS = "seconds", "own", "backward", "communication", "on_device"
_HEAD = "part", "runs", "time", "of it own", "backward", "communication"
PartPath = tuple[str, ...]


def tabulate_modules(members: Members, depth: int, name_parts: str) -> ProfileTable:
    """Return a row for each part, down to a depth. `name_parts`: the sources of names, for the row of the rest."""
    if depth < 1:
        raise ValueError(f"a table by module of depth {depth} has no rows: give 1 or more")
    found = _sum_over_members(members)
    outside = found.pop((), None)
    inner = _list_inner(found)
    rows = [_add_name(found[path], f"{path[-1]} …" if len(path) == depth and path in inner else path[-1])
            for path in _walk_tree(inner, (), depth)]  # fmt: skip
    if outside is not None:
        rows.append(_add_name(outside, f"not named ({name_parts})"))
    device = next((each.device for one in members.values() for each in one.sums if each.device != CPU), "")
    names = [*members] if len(members) > 1 else []
    whole = sum(row["own"] for row in [*found.values(), *([outside] if outside else [])])
    head = (*_HEAD, *([f"on {device}"] if device else []), *names)
    cells = [_part_cells(row, bool(device), names) for row in rows]
    return ProfileTable(
        rows, [head, *cells], [share_of(row["own"], whole) for row in rows], "No operator of torch ran."
    )


def _sum_over_members(members: Members) -> dict[PartPath, Row]:
    rows: dict[PartPath, Row] = {}
    for name, one in members.items():
        for part in one.parts:
            new_row = {"path": part.path, "runs": 0, **dict.fromkeys(_SECONDS, 0.0), "workers": {}}
            row = rows.setdefault(part.path, new_row)
            row["runs"] += part.runs
            for key in _SECONDS:
                row[key] += getattr(part, key)
            row["workers"][name] = part.seconds
    return rows


def _list_inner(found: Mapping[PartPath, Row]) -> dict[PartPath, list[PartPath]]:
    """Return the parts that lie directly within each part, the longest first."""
    inner: dict[PartPath, list[PartPath]] = {}
    for path in sorted(found, key=lambda path: -found[path]["seconds"]):
        inner.setdefault(path[:-1], []).append(path)
    return inner


def _walk_tree(inner: Mapping[PartPath, list[PartPath]], outer: PartPath, depth: int) -> Iterator[PartPath]:
    for path in inner.get(outer, ()) if len(outer) < depth else ():
        yield path
        yield from _walk_tree(inner, path, depth)


def _add_name(row: Row, name: str) -> dict[str, Any]:
    return {"part": name, **row}


def _part_cells(row: Row, on_device: bool, members: list[str]) -> tuple[str, ...]:
    name = _INDENT * (len(row["path"]) - 1) + shorten_words(row["part"], NAME_LENGTH)
    times = [format_seconds(row[key]) if row[key] else "" for key in (_SECONDS if on_device else _SECONDS[:-1])]
    each = [format_seconds(row["workers"][one]) if row["workers"].get(one) else "" for one in members]
    return name, str(row["runs"]), *times, *each

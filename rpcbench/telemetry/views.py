"""What a panel shows, as plain data: pure functions from the world's tables to small dicts.

A view is `{section: {key: row}}`; rows are flat dicts that JSON can carry, numbers below 2**53 or strings. Panels, the
command line and saved pictures all draw these same dicts. `diff` and `patch` move a view forward in small messages:
`patch(old, diff(old, new)) == new`, and rows that did not change are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rpcbench.base.events import Row, Table

World = dict[int, dict[str, Any]]
View = dict[str, Table]
Delta = dict[str, "dict[str, Any] | None"]


def rref_view(world: World) -> View:
    """Who owns and who uses each RRef. Sections: workers, rrefs, forks.

    An RRef is `ready`, `computing`, `failed`, `unlisted` (its users know it, its owner does not: a message is on its
    way) or `lost` (its owner is gone). `size` are the bytes of its tensors as they were made, `made` seconds since
    1970, `cell` and `number` the notebook's cell that made it, while worker `by` ran it; None or empty where that is
    not known. A fork is `pending`, `confirmed`, `deleting` or `listed` (only its owner knows it: the holder let it go,
    or has not got it yet). `parent` is the worker that gave the fork. What a worker that is gone had said no longer
    counts.
    """
    forks: Table = {}
    types: dict[str, str] = {}
    up = living(world)
    for worker, key, row in rows_of(up, "owned"):
        for fork in row["forks"]:
            forks[fork["fork"]] = _fork(fork["fork"], key, worker, fork["holder"], None, "listed")
    for worker, _, row in rows_of(up, "users"):
        for child in row["children"]:
            forks[child["fork"]] = _fork(child["fork"], row["rref"], row["owner"], child["to"], worker, "pending")
    for worker, key, row in rows_of(up, "users"):
        forks[key] = _fork(key, row["rref"], row["owner"], worker, row["parent"], row["state"])
        types.setdefault(row["rref"], row["type"])
    rrefs = {key: _rref(key, world[worker], row) for worker, key, row in rows_of(up, "owned")}
    for fork in forks.values():
        if fork["rref"] not in rrefs:
            rrefs[fork["rref"]] = _unlisted(fork["rref"], fork["owner"], types.get(fork["rref"], ""), world)
        rrefs[fork["rref"]]["forks"] += 1
    mentioned = {fork[end] for fork in forks.values() for end in ("owner", "holder", "parent")} - {None}
    return {"workers": everybody(world, mentioned), "rrefs": rrefs, "forks": forks}


def _fork(fork: str, rref: str, owner: int, holder: int, parent: int | None, state: str) -> Row:
    return {"fork": fork, "rref": rref, "owner": owner, "holder": holder, "parent": parent, "state": state}


def _rref(rref: str, owner: Row, row: Row) -> Row:
    state = "failed" if row["failed"] else "ready" if row["ready"] else "computing"
    epoch = owner.get("epoch")
    made = round(epoch + row["made"], 1) if epoch is not None and row["made"] else None
    known = {"size": row["size"], "made": made, "cell": row["cell"], "number": row["number"], "by": _maker(rref)}
    return {"rref": rref, "owner": owner["id"], "type": row["type"], "state": state, "forks": 0, **known}


def _unlisted(rref: str, owner: int, kind: str, world: World) -> Row:
    state = "unlisted" if is_up(world, owner) else "lost"
    unknown = {"size": None, "made": None, "cell": "", "number": None, "by": _maker(rref)}
    return {"rref": rref, "owner": owner, "type": kind, "state": state, "forks": 0, **unknown}


def _maker(rref: str) -> int:
    """Who gave it its id."""
    return int(rref.partition(".")[0])


def rows_of(world: World, table: str) -> Iterator[tuple[int, str, Row]]:
    """(worker, key, row) of one table, over all workers."""
    for worker, state in world.items():
        for key, row in state["tables"].get(table, {}).items():
            yield worker, key, row


def living(world: World) -> World:
    """What members say that are up."""
    return {worker: state for worker, state in world.items() if state["state"] == "up"}


def is_up(world: World, worker: int) -> bool:
    return worker in world and world[worker]["state"] == "up"


def everybody(world: World, mentioned: Iterable[int]) -> Table:
    """Section `workers`: all members, and a row for each that is mentioned but not (or no longer) one of them."""
    fields = ("id", "name", "state", "incarnation", "left_out")
    strangers = {str(i): dict(zip(fields, (i, f"id {i}", "unknown", 0, 0), strict=True)) for i in mentioned}
    return strangers | {str(i): {field: state[field] for field in fields} for i, state in world.items()}


def diff(old: View, new: View) -> Delta:
    """What turns `old` into `new`: `{section: {"set": rows, "drop": keys}}`, or None for a section that is gone."""
    delta: Delta = dict.fromkeys(old.keys() - new.keys())
    for section, rows in new.items():
        before = old.get(section, {})
        changed = {key: row for key, row in rows.items() if key not in before or before[key] != row}
        dropped = sorted(before.keys() - rows.keys())
        if changed or dropped or section not in old:
            delta[section] = {"set": changed, "drop": dropped}
    return delta


def patch(old: View, delta: Delta) -> View:
    """`old` moved forward by `delta`; `old` itself is left as it is."""
    new = dict(old)
    for section, change in delta.items():
        if change is None:
            new.pop(section, None)
            continue
        gone = set(change["drop"])
        kept = {key: row for key, row in old.get(section, {}).items() if key not in gone}
        new[section] = {**kept, **change["set"]}
    return new

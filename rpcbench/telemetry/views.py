"""What a panel shows, as plain data: pure functions from the world's tables to small dicts.

A view is `{section: {key: row}}`; rows are flat dicts that JSON can carry, numbers below 2**53 or strings. Panels, the
command line and saved pictures all draw these same dicts. `diff` and `patch` move a view forward in small messages:
`patch(old, diff(old, new)) == new`, and rows that did not change are not copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from rpcbench.pipeline.timeline import idle_share
from rpcbench.words.events import Row, Table

World = dict[int, dict[str, Any]]
View = dict[str, Table]
Delta = dict[str, "dict[str, Any] | None"]

STEPS_DRAWN = 2
STEPS_LISTED = 8


def rref_view(world: World) -> View:
    """Who owns and who uses each RRef. Sections: workers, rrefs, forks.

    An RRef is `ready`, `computing`, `failed`, `unlisted` (its users know it, its owner does not: a message is on its
    way) or `lost` (its owner is gone). A fork is `pending`, `confirmed`, `deleting` or `listed` (only its owner knows
    it: the holder let it go, or has not got it yet). `parent` is the worker that gave the fork. What a worker that is
    gone had said no longer counts.
    """
    forks: Table = {}
    types: dict[str, str] = {}
    up = _living(world)
    for worker, key, row in _rows(up, "owned"):
        for fork in row["forks"]:
            forks[fork["fork"]] = _fork(fork["fork"], key, worker, fork["holder"], None, "listed")
    for worker, _, row in _rows(up, "users"):
        for child in row["children"]:
            forks[child["fork"]] = _fork(child["fork"], row["rref"], row["owner"], child["to"], worker, "pending")
    for worker, key, row in _rows(up, "users"):
        forks[key] = _fork(key, row["rref"], row["owner"], worker, row["parent"], row["state"])
        types.setdefault(row["rref"], row["type"])
    rrefs = {key: _rref(key, worker, row) for worker, key, row in _rows(up, "owned")}
    for fork in forks.values():
        if fork["rref"] not in rrefs:
            rrefs[fork["rref"]] = _unlisted(fork["rref"], fork["owner"], types.get(fork["rref"], ""), world)
        rrefs[fork["rref"]]["forks"] += 1
    mentioned = {fork[end] for fork in forks.values() for end in ("owner", "holder", "parent")} - {None}
    return {"workers": _workers(world, mentioned), "rrefs": rrefs, "forks": forks}


def _fork(fork: str, rref: str, owner: int, holder: int, parent: int | None, state: str) -> Row:
    return {"fork": fork, "rref": rref, "owner": owner, "holder": holder, "parent": parent, "state": state}


def _rref(rref: str, owner: int, row: Row) -> Row:
    state = "failed" if row["failed"] else "ready" if row["ready"] else "computing"
    return {"rref": rref, "owner": owner, "type": row["type"], "state": state, "forks": 0}


def _unlisted(rref: str, owner: int, kind: str, world: World) -> Row:
    state = "unlisted" if _up(world, owner) else "lost"
    return {"rref": rref, "owner": owner, "type": kind, "state": state, "forks": 0}


def autograd_view(world: World) -> View:
    """What each distributed-autograd context has recorded. Sections: workers, contexts, members, links, passes.

    `members` (key `context/worker`): sends, recvs and gradients of one worker. `links` (`context/from>to`): messages
    `sent` and `received` between two workers, `open` how many lack the other half; `state` is `paired`, `open` (the
    other half will come) or `lost` (its worker is gone). `passes`
    (`context/pass/worker`): gradients `needed`, `arrived` and still `left`. Context ids are strings, as JavaScript's
    numbers are too small for them.
    """
    contexts: Table = {}
    members: Table = {}
    passes: Table = {}
    sent: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    received: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    up = _living(world)
    for worker, key, row in _rows(up, "contexts"):
        members[f"{key}/{worker}"] = _member(key, worker, row)
        for send in row["sends"]:
            sent[key, worker, send["to"]].add(send["message"])
        for recv in row["recvs"]:
            received[key, recv["from"], worker].add(recv["message"])
        for one in row["passes"]:
            passes[f"{key}/{one['pass']}/{worker}"] = _pass(key, worker, one)
        _count(contexts.setdefault(key, _context(key)), row)
    pairs = {pair: (sent[pair], received[pair]) for pair in sent.keys() | received.keys()}
    links = {f"{key}/{a}>{b}": _link(key, a, b, *halves, world) for (key, a, b), halves in pairs.items()}
    for link in links.values():
        contexts[link["context"]]["open"] += link["open"] if link["state"] == "open" else 0
    workers = _workers(world, {end for _, *ends in pairs for end in ends})
    return {"workers": workers, "contexts": contexts, "members": members, "links": links, "passes": passes}


def _context(key: str) -> Row:
    return {"context": key, "workers": 0, "sends": 0, "recvs": 0, "open": 0, "gradients": 0, "passes": 0}


def _count(context: Row, row: Row) -> None:
    """Add one worker's part of a context to its totals."""
    context["workers"] += 1
    context["sends"] += len(row["sends"])
    context["recvs"] += len(row["recvs"])
    context["gradients"] += row["gradients"]
    context["passes"] = max(context["passes"], len(row["passes"]))


def _member(key: str, worker: int, row: Row) -> Row:
    counts = {"sends": len(row["sends"]), "recvs": len(row["recvs"]), "gradients": row["gradients"]}
    return {"context": key, "worker": worker, **counts}


def _pass(key: str, worker: int, one: Row) -> Row:
    counts = {name: one[name] for name in ("state", "needed", "arrived", "waiting")}
    left = max(0, one["needed"] - one["arrived"])
    return {"context": key, "pass": one["pass"], "worker": worker, **counts, "left": left}


def _link(key: str, source: int, to: int, sent: set[int], received: set[int], world: World) -> Row:
    halves = len(sent ^ received)
    state = "paired" if not halves else "open" if _up(world, source) and _up(world, to) else "lost"
    counts = {"sent": len(sent), "received": len(received), "open": halves}
    return {"context": key, "from": source, "to": to, "state": state, **counts}


def pipeline_view(world: World) -> View:
    """Where each micro-batch is. Sections: workers, steps, lanes, ops.

    `steps` lists the latest steps with their `idle` share (None before an op has ended) and `state`, `running` or
    `complete`; `lanes` (`step/worker`) says which stages a worker runs and how `busy` it was; `ops` holds the latest
    two steps, times in monotonic seconds, `end` None while an op runs. Steps are ordered by when they began, as a new
    pipeline counts from 0 again.
    """
    by_step: dict[int, Table] = defaultdict(dict)
    for _, key, row in _rows(world, "ops"):
        by_step[row["step"]][key] = row
    order = sorted(by_step, key=lambda step: min(row["begin"] for row in by_step[step].values()))
    steps = {str(step): _step(step, by_step[step].values()) for step in order[-STEPS_LISTED:]}
    drawn = order[-STEPS_DRAWN:]
    return {
        "workers": _workers(world, ()),
        "steps": steps,
        "lanes": {key: lane for step in drawn for key, lane in _lanes(steps[str(step)], by_step[step].values())},
        "ops": {key: row for step in drawn for key, row in by_step[step].items()},
    }


def _step(step: int, ops: Iterable[Row]) -> Row:
    rows = list(ops)
    ended = [row for row in rows if row["end"] is not None]
    begin = min(row["begin"] for row in rows)
    end = max([row["begin"] for row in rows] + [row["end"] for row in ended])
    idle = idle_share(ended) if ended else None
    state = "complete" if len(ended) == len(rows) and not _owing(rows) else "running"
    return {"step": step, "state": state, "begin": begin, "end": end, "ops": len(rows), "idle": idle}


def _owing(rows: list[Row]) -> bool:
    """Whether a forward still waits for its backward; a step of forwards alone owes none."""
    forwards = {(row["stage"], row["microbatch"]) for row in rows if row["op"] == "F"}
    backwards = {(row["stage"], row["microbatch"]) for row in rows if row["op"] == "B"}
    return bool(backwards) and not forwards <= backwards


def _lanes(step: Row, ops: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    span = step["end"] - step["begin"]
    by_worker: dict[int, list[Row]] = defaultdict(list)
    for row in ops:
        by_worker[row["worker"]].append(row)
    for worker, rows in by_worker.items():
        time = sum(row["end"] - row["begin"] for row in rows if row["end"] is not None)
        stages = sorted({row["stage"] for row in rows})
        busy = time / span if span > 0 else None
        yield f"{step['step']}/{worker}", {"step": step["step"], "worker": worker, "stages": stages, "busy": busy}


def _rows(world: World, table: str) -> Iterator[tuple[int, str, Row]]:
    """(worker, key, row) of one table, over all workers."""
    for worker, state in world.items():
        for key, row in state["tables"].get(table, {}).items():
            yield worker, key, row


def _living(world: World) -> World:
    return {worker: state for worker, state in world.items() if state["state"] == "up"}


def _up(world: World, worker: int) -> bool:
    return worker in world and world[worker]["state"] == "up"


def _workers(world: World, mentioned: Iterable[int]) -> Table:
    """All members, and a row for each worker that is mentioned but not (or no longer) one of them."""
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

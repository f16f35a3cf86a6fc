"""Distributed autograd as a view: what each context has recorded, how far its passes are, and who holds which gradient.

Context ids are strings, as JavaScript's numbers are too small for them.
"""

from __future__ import annotations

from collections import defaultdict

from rpcbench.base.events import Row, Table
from rpcbench.telemetry.views import View, World, everybody, is_up, living, rows_of


def autograd_view(world: World) -> View:
    """What each distributed-autograd context has recorded. Sections: workers, contexts, members, links, passes, leaves.

    `members` (key `context/worker`): sends, recvs and gradients of one worker. `links` (`context/from>to`): messages
    `sent` and `received` between two workers, `open` how many lack the other half; `state` is `paired`, `open` (the
    other half will come) or `lost` (its worker is gone). `passes` (`context/pass/worker`): gradients `needed`,
    `arrived` and still `left`, and how many of the worker's `regions` have run (None before it has cut its graph).
    `leaves` (`context/worker/place`): name (or ""), shape and bytes of each leaf whose gradient a worker holds, as far
    as it lists them.
    """
    contexts: Table = {}
    members: Table = {}
    passes: Table = {}
    leaves: Table = {}
    sent: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    received: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    up = living(world)
    graphs = {(worker, key): row for worker, key, row in rows_of(up, "graphs")}
    for worker, key, row in rows_of(up, "contexts"):
        graph = graphs.get((worker, key))
        members[f"{key}/{worker}"] = _member(key, worker, row)
        for send in row["sends"]:
            sent[key, worker, send["to"]].add(send["message"])
        for recv in row["recvs"]:
            received[key, recv["from"], worker].add(recv["message"])
        for one in row["passes"]:
            passes[f"{key}/{one['pass']}/{worker}"] = _pass(key, worker, one, graph)
        for place, leaf in enumerate(graph["leaves"] if graph else ()):
            leaves[f"{key}/{worker}/{place}"] = {"context": key, "worker": worker, "place": place, **leaf}
        _count(contexts.setdefault(key, _context(key)), row)
    pairs = {pair: (sent[pair], received[pair]) for pair in sent.keys() | received.keys()}
    links = {f"{key}/{a}>{b}": _link(key, a, b, *halves, world) for (key, a, b), halves in pairs.items()}
    for link in links.values():
        contexts[link["context"]]["open"] += link["open"] if link["state"] == "open" else 0
    workers = everybody(world, {end for _, *ends in pairs for end in ends})
    found = {"workers": workers, "contexts": contexts, "members": members, "links": links, "passes": passes}
    return {**found, "leaves": leaves}


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


def _pass(key: str, worker: int, one: Row, graph: Row | None) -> Row:
    counts = {name: one[name] for name in ("state", "needed", "arrived", "waiting")}
    left = max(0, one["needed"] - one["arrived"])
    known = [cut for cut in (graph["passes"] if graph else ()) if cut["pass"] == one["pass"]]
    regions, ran = (known[0]["regions"], known[0]["ran"]) if known else (None, None)
    return {
        "context": key, "pass": one["pass"], "worker": worker, **counts, "left": left, "regions": regions, "ran": ran,
    }  # fmt: skip


def _link(key: str, source: int, to: int, sent: set[int], received: set[int], world: World) -> Row:
    halves = len(sent ^ received)
    state = "paired" if not halves else "open" if is_up(world, source) and is_up(world, to) else "lost"
    counts = {"sent": len(sent), "received": len(received), "open": halves}
    return {"context": key, "from": source, "to": to, "state": state, **counts}

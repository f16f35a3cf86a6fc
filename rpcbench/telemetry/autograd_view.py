"""The view of autograd contexts, joined from the reports of all members.

Members report at different times, so a view may have the end of something without its begin. A gradient counts as in
flight only while a pass runs and nothing later is known of it: see `_find_returned`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rpcbench.base.ids import COUNTER_BITS, Row, Table
from rpcbench.telemetry.views import View, World, is_up, living_members, rows_of, worker_rows

CONTEXTS_DRAWN = 4  # latest contexts with messages and parts
MESSAGES_DRAWN = 64  # of one worker in one context
_UNSEEN: Row = {  # a row of the table "graphs" of a context that nobody watched
    "leaves": [], "gradients": 0, "passes": [], "made": None, "ended": None, "sends": [], "recvs": [], "parts": [],
    "step": None, "stages": {},
}  # fmt: skip


def autograd_view(world: World) -> View:
    """Return the records of autograd contexts. Sections: workers, contexts, members, links, messages, parts, passes,
    leaves.

    `contexts`: their totals; `ended` is None while it is open; a released one stays for a while, with its last numbers
    and nothing in flight (`open`). `step`: that of its pipeline. `members` (key `context/worker`): sends, recvs and
    gradients of one worker. `links` (`context/from>to`): messages `sent` and `received` between two workers, `open`:
    how many lack the other half; `state` is `paired`, `open` (the other half will come) or `lost` (it will not).
    `messages` (`context/message`): those of the latest contexts, with the number `fired` of gradients that were sent
    back and `back` of those that came (the others are in flight); in a pipeline one row for all micro-batches.
    `parts` (`context/worker/place`): operations of the local graph, see `rpcbench.autograd.graph_events`; `state` is
    empty, `runs`, `ran` or `failed`, and `begin` and `seconds` are None before. `passes` (`context/pass/worker`):
    gradients `needed`, `arrived` and `left`, and how many of the worker's `regions` have run (None before it has cut
    its graph). `leaves` (`context/worker/place`): name (or ""), shape and bytes of each leaf whose gradient a worker
    holds and lists.
    """
    contexts: Table = {}
    members: Table = {}
    passes: Table = {}
    leaves: Table = {}
    sent: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    received: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    up = living_members(world)
    graphs = {(worker, key): {**_UNSEEN, **row} for worker, key, row in rows_of(up, "graphs")}
    context_rows = {(worker, key): row for worker, key, row in rows_of(up, "contexts")}
    over = {pair: {**row, "passes": []} for pair, row in graphs.items() if row["ended"] is not None}
    for (worker, key), row in {**over, **context_rows}.items():
        graph = graphs.get((worker, key), _UNSEEN)
        counts = {"sends": len(row["sends"]), "recvs": len(row["recvs"]), "gradients": row["gradients"]}
        members[f"{key}/{worker}"] = {"context": key, "worker": worker, **counts}
        for send in row["sends"]:
            sent[key, worker, send["to"]].add(send["message"])
        for recv in row["recvs"]:
            received[key, recv["from"], worker].add(recv["message"])
        for one in row["passes"]:
            passes[f"{key}/{one['pass']}/{worker}"] = _pass_row(key, worker, one, graph)
        for place, leaf in enumerate(graph["leaves"]):
            leaves[f"{key}/{worker}/{place}"] = {"context": key, "worker": worker, "place": place, **leaf}
        _add_to_totals(contexts.setdefault(key, _new_context_row(key)), row)
        _add_times(contexts[key], graph, _clock_offset(world, worker))
    for key in {known for _, known in context_rows}:
        if (int(key) >> COUNTER_BITS, key) not in over:
            contexts[key]["ended"] = None  # its maker holds it, or is not here to tell
    pairs = {pair: (sent[pair], received[pair]) for pair in sent.keys() | received.keys()}
    links = {f"{key}/{a}>{b}": _link_row(contexts[key], a, b, *halves, world) for (key, a, b), halves in pairs.items()}
    for link in links.values():
        context = contexts[link["context"]]
        context["sends"] += link["sent"]  # not those of the rows: a worker that is gone has sent what others received
        context["recvs"] += link["received"]
        context["open"] += link["open"] if link["state"] == "open" else 0
    workers = worker_rows(world, {end for _, *ends in pairs for end in ends})
    latest = sorted(contexts, key=lambda key: float(contexts[key]["made"] or 0))[-CONTEXTS_DRAWN:]
    drawn = {pair: row for pair, row in graphs.items() if pair[1] in latest and row["made"] is not None}
    runs = {
        pair for pair, row in context_rows.items() if row["passes"] or graphs.get(pair, _UNSEEN)["step"] is not None
    }
    parts = {key: row for pair, graph in drawn.items() for key, row in _part_rows(world, *pair, graph, pair in runs)}
    running = {row["context"] for row in passes.values() if contexts[row["context"]]["ended"] is None}
    messages = _message_rows(drawn, received, parts, running)
    found = {"workers": workers, "contexts": contexts, "members": members, "links": links, "messages": messages}
    return {**found, "parts": parts, "passes": passes, "leaves": leaves}


def _new_context_row(key: str) -> Row:
    counts = {"workers": 0, "sends": 0, "recvs": 0, "open": 0, "gradients": 0, "passes": 0}
    return {"context": key, **counts, "made": None, "ended": None, "step": None}


def _add_to_totals(context: Row, row: Row) -> None:
    context["workers"] += 1
    context["gradients"] += row["gradients"]
    context["passes"] = max(context["passes"], len(row["passes"]))


def _add_times(context: Row, graph: Row, ahead: float) -> None:
    """Add when a worker has made a context and released it, in seconds of our clock, and its pipeline's step."""
    if graph["made"] is not None:
        context["made"] = min(graph["made"] - ahead, context["made"] or math.inf)
    if graph["ended"] is not None:
        context["ended"] = max(graph["ended"] - ahead, context["ended"] or -math.inf)
    context["step"] = context["step"] if graph["step"] is None else graph["step"]


def _clock_offset(world: World, worker: int) -> float:
    return float((*world[worker].get("clock", ()), 0.0)[0])


def _pass_row(key: str, worker: int, one: Row, graph: Row) -> Row:
    counts = {name: one[name] for name in ("state", "needed", "arrived", "waiting")}
    left = max(0, one["needed"] - one["arrived"])
    known = [cut for cut in graph["passes"] if cut["pass"] == one["pass"]]
    regions, ran = (known[0]["regions"], known[0]["ran"]) if known else (None, None)
    return {
        "context": key, "pass": one["pass"], "worker": worker, **counts, "left": left, "regions": regions, "ran": ran,
    }  # fmt: skip


def _link_row(context: Row, source: int, to: int, sent: set[int], received: set[int], world: World) -> Row:
    # A worker forgets its old contexts at a time of its own, so the sender's row may be gone; all received was sent.
    sent = sent | received
    halves = len(sent - received)
    comes = context["ended"] is None and is_up(world, source) and is_up(world, to)
    state = "paired" if not halves else "open" if comes else "lost"
    counts = {"sent": len(sent), "received": len(received), "open": halves}
    return {"context": context["context"], "from": source, "to": to, "state": state, **counts}


def _part_rows(world: World, worker: int, key: str, graph: Row, lives: bool) -> Iterator[tuple[str, Row]]:
    """Yield the parts of one worker's graph; of a pipeline's step one for each stage, with its operations' times."""
    rows = graph["parts"] if graph["step"] is None else _stage_rows(world[worker], graph)
    for place, part in enumerate(rows):
        begin, end = (*part["ran"], None, None)[:2]
        state = "" if begin is None else "ran" if end is not None else "runs" if lives else "failed"
        names = {name: [str(message) for message in part[name]] for name in ("sends", "recvs")}
        yield f"{key}/{worker}/{place}", {
            "stage": None, "done": 0, "times": 1, "seconds": end - begin if state == "ran" else None, **part, **names,
            "context": key, "worker": worker, "place": place, "state": state,
            "ran": [time - _clock_offset(world, worker) for time in part["ran"]],
        }  # fmt: skip


def _stage_rows(member: dict[str, Any], graph: Row) -> Iterator[Row]:
    ops = [op for op in member["tables"].get("ops", {}).values() if op["step"] == graph["step"]]
    for stage, names in graph["stages"].items():
        own = [op for op in ops if op["stage"] == int(stage)]
        back = [op for op in own if op["op"] in ("B", "I", "W")]
        done, times = (sum(op["end"] is not None for op in own if op["op"] in kinds) for kinds in ("BI", "F"))
        ran = [min(op["begin"] for op in back)] if back else []
        ran += [max(op["end"] for op in back)] if 0 < times == done and all(op["end"] for op in back) else []
        seconds = sum(op["end"] - op["begin"] for op in back) if len(ran) == 2 else None
        yield {
            "stage": int(stage), "sends": [], "recvs": [], "ops": names, "count": len(names), "done": done,
            "times": times, "ran": ran, "seconds": seconds,
        }  # fmt: skip


_Message = tuple[str, str]  # its context, and its number


def _find_returned(graphs: dict[tuple[int, str], Row], parts: Table, fired: set[_Message]) -> set[_Message]:
    """Return the messages whose gradients have come back. Of those that were `fired`, a later event may say so before
    their own worker does: a part that leads to a message begins only once its gradients are there. And it has run if
    the gradient of a message that it received is known to have come."""
    returned = {
        (key, str(s["message"])) for (_, key), row in graphs.items() for s in row["sends"] if s["back"] is not None
    }
    while True:
        began = [
            row for row in parts.values() if row["ran"] or any((row["context"], n) in returned for n in row["recvs"])
        ]
        new = {(row["context"], send) for row in began for send in row["sends"]} & fired - returned
        if not new:
            return returned
        returned |= new


def _message_rows(
    graphs: dict[tuple[int, str], Row],
    received: dict[tuple[str, int, int], set[int]],
    parts: Table,
    running: set[str],
) -> Table:
    """Return the messages of contexts, with the gradients that came back for them. `running`: contexts with a pass; in
    others no gradient is in flight."""
    fired = {(row["context"], recv) for row in parts.values() if row["state"] == "ran" for recv in row["recvs"]}
    returned = _find_returned(graphs, parts, fired)
    sent = {message for message in fired if message[0] in running} | returned
    done = {(row["context"], row["worker"], row["stage"]): row["done"] for row in parts.values()}
    found: Table = {}
    for (worker, key), graph in graphs.items():
        for send in graph["sends"][:MESSAGES_DRAWN]:
            message, to = str(send["message"]), send["to"]
            stage = None if graph["step"] is None else _stage_in(send["label"])
            name = message if stage is None else f"{worker}>{to} stage {stage}"
            row = found.setdefault(f"{key}/{name}", {
                "context": key, "message": name, "from": worker, "to": to, "label": send["label"],
                "shape": send["shape"], "stage": stage, "bytes": 0, "sent": 0,
                "received": 0, "fired": 0, "back": 0,
            })  # fmt: skip
            row["bytes"] += send["bytes"]
            row["sent"] += 1
            row["received"] += send["message"] in received[key, worker, to]
            row["fired"] += (key, message) in sent
            row["back"] += (key, message) in returned
            if stage is not None:  # a stage's gradients are those of its operations
                row["fired"] = row["back"] = min(row["sent"], done.get((key, to, stage), 0))
    return found


def _stage_in(label: str) -> int | None:
    """Return the stage that a message of a pipeline is for, see `rpcbench.pipeline.exchange.Slot`."""
    number = label.rpartition(" stage ")[2]
    return int(number) if number.isdecimal() and len(number) < 9 else None

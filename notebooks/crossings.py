"""Where the graph of an autograd context crosses from worker to worker, as a table and as a picture, for lesson 11."""

from __future__ import annotations

import contextvars
from typing import Any

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.collector import current_collector
from rpcbench.telemetry.svg import Snapshot

Row = dict[str, Any]


def crossings(context_id: int) -> None:
    """Print what each member has recorded: the members that it knows, its sends, its recvs and its gradients.

    The first message that worker1 sent in this context is called worker1#1. A received message says which others lie
    behind it.
    """
    names = ["notebook", *rpcbench.cluster().workers]
    rows = {name: row for name in names if (row := _ask(name, context_id)) is not None}
    titles = _titles(names, rows)
    for name, row in rows.items():
        known = ", ".join(names[number] for number in row["known"])
        print(f"{name} knows {known or 'no other'}{_gradients(row['gradients'])}")
        for send in row["sends"]:
            print(f"    send {titles[send['message']]} to {names[send['to']]}")
        for recv in row["recvs"]:
            behind = [titles[message] for message in row["behind"][recv["message"]]]
            print(f"    recv {titles[recv['message']]} from {names[recv['from']]}{_listed(sorted(behind))}")


def graph(context_id: int) -> Snapshot:
    """A picture of the graph of one context, which must have begun while an autograd panel was open."""
    collector = current_collector()
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        view = autograd_view(collector.world())
    finally:
        stop()
    key = str(context_id)
    contexts = {"contexts": {key: view["contexts"][key]}, "workers": view["workers"]}
    others = {
        section: {name: row for name, row in rows.items() if row["context"] == key}
        for section, rows in view.items()
        if section not in contexts
    }
    return Snapshot({**contexts, **others})


def _ask(name: str, context_id: int) -> Row | None:
    """A member's own row. Asked outside the context, for a call inside would be recorded too."""
    found: Row | None = contextvars.Context().run(rpc.rpc_sync, name, own, (context_id,))
    return found


def own(context_id: int) -> Row | None:
    """The row of the member that runs this, and for each of its recvs the other sends behind it."""
    agent = rpc._get_current_rpc_agent()
    row: Row | None = agent.tables()["contexts"].get(str(context_id))
    if row is None:
        return None
    recvs = agent.machine.read_node(lambda node: dict(node.contexts.contexts[context_id].recvs))
    return {**row, "behind": {m: [other for other in recv.behind or () if other != m] for m, recv in recvs.items()}}


def _titles(names: list[str], rows: dict[str, Row]) -> dict[int, str]:
    """Names for messages, which have numbers of 64 bits."""
    titles = {}
    for name in names:
        sends = rows.get(name, {}).get("sends", [])
        titles.update({send["message"]: f"{name}#{place}" for place, send in enumerate(sends, 1)})
    return titles


def _listed(behind: list[str]) -> str:
    return f"; behind it {', '.join(behind)}" if behind else ""


def _gradients(count: int) -> str:
    return f"; holds {count} gradient{'s' if count > 1 else ''}" if count else ""

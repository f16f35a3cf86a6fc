"""How all workers are, as plain data: a pure function from the world's tables to small dicts, as those in `views`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rpcbench.base.events import Row, Table
from rpcbench.telemetry.views import View, World

PERIOD = 0.5
"""Seconds between two questions of `Pulse`."""
_SILENT = 4
"""So many questions that others have answered meanwhile make a member silent."""
_FIGURES = ("pid", "host", "cpu", "memory", "busy", "queued", "cells")


def workers_view(world: World) -> View:
    """How each member is. Sections: workers, links, logs, actions.

    `workers`: `state` is `up`, `suspect`, `stopped`, `starts`, `lost` or `left`; `doing` says in a word what it does:
    `cell`, `busy`, `waits`, `idle`, or `silent` for `silent` seconds; `ended` how its process ended. `cpu` is a share
    of one core, `memory` bytes; `busy` functions run, `waiting` ones wait for something of ours, `queued` calls have
    not begun, `cells` run or wait; `calls` of other members wait for it. All are None until it has told. `sent` and
    `received` are sums of bytes, `links` (`worker/peer`) those of each pair as the worker counts them. `logs` are the
    last lines that it wrote outside cells and calls. `actions` run, or have failed. Who left in good order is not
    listed, unless the whole world is over.
    """
    launched = {key: row for member in world.values() for key, row in _table(member, "launched").items()}
    there = _listed(world) | {
        int(key): _absent(int(key), row) for key, row in launched.items() if int(key) not in world
    }
    asked = max((_health(member).get("question", 0) for member in there.values()), default=0)
    calls = Counter(row["to"] for member in there.values() for row in _table(member, "calls").values())
    return {
        "workers": {
            str(i): _worker(member, launched.get(str(i), {}), asked, calls[i]) for i, member in sorted(there.items())
        },
        "links": {
            f"{i}/{peer}": {"worker": i, "peer": int(peer), "sent": count[0], "received": count[1]}
            for i, member in there.items()
            for peer, count in _health(member).get("peers", {}).items()
        },
        "logs": {key: {"worker": int(key), "text": row["log"]} for key, row in launched.items() if int(key) in there},
        "actions": {key: row for member in there.values() for key, row in _table(member, "actions").items()},
    }


def _listed(world: World) -> World:
    over = bool(world) and all(member["state"] == "left" for member in world.values())
    return {i: member for i, member in world.items() if over or member["state"] != "left"}


def _absent(id_: int, process: Row) -> dict[str, Any]:
    """A process that is no member: it is about to be one, or was lost before anybody looked."""
    state = "starts" if process["state"] in ("serves", "stopped") else "lost"
    own = {"id": id_, "name": process["name"], "incarnation": process["incarnation"]}
    return {**own, "state": state, "tables": {}, "left_out": 0}


def _worker(member: dict[str, Any], process: Row, asked: int, calls: int) -> Row:
    told = _health(member) if member["state"] in ("up", "suspect") else {}
    behind = asked - told.get("question", asked)
    silent = round(behind * PERIOD) if behind >= _SILENT else 0
    stopped = member["state"] == "up" and process.get("state") == "stopped"
    peers = told.get("peers", {}).values()
    cells = told.get("cells") or 0
    figures = {name: told.get(name) for name in _FIGURES}
    waiting = max(0, told["waiting"] - cells) if told else None  # the threads that wait for a cell's end aside
    figures["pid"] = figures["pid"] or process.get("pid")
    own = {name: member[name] for name in ("id", "name", "incarnation", "left_out")}
    return {
        **own, **figures,
        "state": "stopped" if stopped else member["state"],
        "doing": _doing(told, waiting or 0, bool(silent)),
        "waiting": waiting, "calls": calls, "silent": silent,
        "ended": process.get("state", "") if member["state"] == "lost" else "",
        "sent": sum(count[0] for count in peers), "received": sum(count[1] for count in peers),
    }  # fmt: skip


def _doing(told: Row, waiting: int, silent: bool) -> str:
    if not told:
        return ""
    if silent:
        return "silent"
    return "cell" if told["cells"] else "busy" if told["busy"] else "waits" if waiting else "idle"


def _health(member: dict[str, Any]) -> Row:
    """What it has told of itself, the present process."""
    row = _table(member, "health").get(str(member["id"]))
    return {} if row is None else row


def _table(member: dict[str, Any], name: str) -> Table:
    table: Table = member["tables"].get(name, {})
    return table

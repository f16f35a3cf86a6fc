"""A world as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: all members on one clock.

A member is a process with these tracks: calls it has made and calls it has run, as far as their messages were traced
(a cell on a worker is such a call), its part of collectives, operations of pipelines, and messages out and in, each
joined by an arrow with its other end. Times begin with the first of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpcbench.base.events import Row, Table
from rpcbench.pipeline.slices import TRACK, Event, in_microseconds, slice_of
from rpcbench.telemetry.clocks import SHARED, Clock
from rpcbench.telemetry.messages import messages_view
from rpcbench.telemetry.text_file import save_text
from rpcbench.telemetry.views import View, World

OUT, IN = 1, 2
TRACKS = {OUT: "messages out", IN: "messages in", TRACK: "pipeline"}
SHORTEST = 1e-6
"""A message takes no time at either end; it is shown as long as this, in seconds."""
_ASKS, _ANSWERS = ("Call", "Create", "Fetch"), ("Result", "Failure")


def save(world: World, path: str | Path) -> Path:
    """Write the trace of a world into a file; its path."""
    return save_text(path, json.dumps(chrome(world)))


def chrome(world: World) -> dict[str, Any]:
    """The trace as what JSON can carry, in the format of Chrome's trace events."""
    view = messages_view(world)
    messages = view["messages"]
    events = [*_ops(world), *_calls(messages), *_messages(messages), *_collectives(view)]
    began = min((event["ts"] for event in events), default=0.0)
    for event in events:
        in_microseconds(event, began)
    left_out = {member["name"]: member["left_out"] for member in world.values() if member["left_out"]}
    return {"traceEvents": [*_names(world), *events], "displayTimeUnit": "ms", "otherData": {"left_out": left_out}}


def _names(world: World) -> Iterator[Event]:
    for id_, member in world.items():
        yield {"ph": "M", "name": "process_name", "pid": id_, "args": {"name": member["name"]}}
        for track, name in TRACKS.items():
            yield {"ph": "M", "name": "thread_name", "pid": id_, "tid": track, "args": {"name": name}}


def _ops(world: World) -> Iterator[Event]:
    """Operations that have ended."""
    for id_, member in world.items():
        ahead = Clock(*member.get("clock", SHARED)).ahead
        for row in member["tables"].get("ops", {}).values():
            if row["end"] is not None:
                yield slice_of(row, id_, ahead)


def _calls(messages: Table) -> Iterator[Event]:
    """Each call that was answered, as its caller and as its callee saw it; calls overlap, so they are no slices."""
    answers = {row["call"]: row for row in messages.values() if row["kind"] in _ANSWERS}
    for ask in messages.values():
        answer = answers.get(ask["call"])
        if ask["kind"] in _ASKS and answer is not None:
            yield from _span(ask, "calls made", ask["from"], ask["sent"], answer["received"])
            yield from _span(ask, "calls run", ask["to"], ask["received"], answer["sent"])


def _span(ask: Row, kind: str, member: int, begin: float | None, end: float | None) -> Iterator[Event]:
    if begin is None or end is None:
        return
    about = {"name": ask["label"] or ask["kind"], "cat": kind, "pid": member, "tid": 0, "id": f"{kind} {ask['call']}"}
    yield {"ph": "b", **about, "ts": begin, "args": {"call": ask["call"], "rrefs": ask["rrefs"]}}
    yield {"ph": "e", **about, "ts": max(begin, end)}


def _collectives(view: View) -> Iterator[Event]:
    """A member's part of each, and in it how long it waited for the last one; they may overlap as calls do."""
    for key, entry in view["entries"].items():
        row, end = view["collectives"][entry["collective"]], entry["end"]
        if end is None:
            continue
        at = {"cat": "collectives", "pid": entry["worker"], "tid": 0, "id": f"collective {key}"}
        args = {field: row[field] for field in ("group", "number", "shape", "bytes", "members", "state")}
        yield {"ph": "b", "name": row["op"], **at, "ts": entry["begin"], "args": args}
        if entry["waited"]:
            waits = {"name": f"waits for {view['workers'][str(row['last'])]['name']}", **at}
            yield {"ph": "b", **waits, "ts": entry["begin"]}
            yield {"ph": "e", **waits, "ts": min(end, entry["begin"] + entry["waited"])}
        yield {"ph": "e", "name": row["op"], **at, "ts": end}


def _messages(messages: Table) -> Iterator[Event]:
    for key, row in messages.items():
        name = f"{row['kind']} {row['label']}".rstrip()
        args = {field: row[field] for field in ("call", "rrefs", "context", "bytes", "state", "tries")}
        ends = ((row["sent"], row["from"], OUT), (row["received"], row["to"], IN))
        for when, member, track in ends:
            if when is not None:
                at = {"pid": member, "tid": track, "ts": when, "dur": SHORTEST}
                yield {"ph": "X", "name": name, "cat": "message", **at, "args": args}
        if row["sent"] is not None and row["received"] is not None:
            for phase, (when, member, track) in zip(("s", "f"), ends, strict=True):
                at = {"pid": member, "tid": track, "ts": when}
                yield {"ph": phase, "bp": "e", "name": "message", "cat": "message", "id": key, **at}

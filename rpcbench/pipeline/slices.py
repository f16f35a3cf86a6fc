"""Operations as Chrome trace events, for Perfetto: made once, for a step alone and for a world with all else in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rpcbench.base.events import Row
from rpcbench.pipeline.ops import Kind, Op

Event = dict[str, Any]
TRACK = 3
"""The track of operations within a member."""
_TOLD = ("step", "stage", "op", "microbatch", "bytes", "held")


def trace(rows: Iterable[Row], names: Mapping[int, str]) -> dict[str, Any]:
    """A trace of these rows of the `ops` table as what JSON can carry; times begin with the first of them."""
    ended = [row for row in rows if row["end"] is not None]
    began = min((row["begin"] for row in ended), default=0.0)
    events = [slice_of(row, row["worker"], began) for row in ended]
    for event in events:
        in_microseconds(event)
    workers = sorted({row["worker"] for row in ended})
    heads = [head for id_ in workers for head in _heads(id_, names.get(id_, f"worker{id_}"))]
    return {"traceEvents": [*heads, *events], "displayTimeUnit": "ms"}


def slice_of(row: Row, member: int, since: float) -> Event:
    """One operation that has ended, times in seconds after `since`; with its bytes sent, and held by its stage."""
    args = {name: row[name] for name in _TOLD if name in row}
    at = {"pid": member, "tid": TRACK, "ts": row["begin"] - since, "dur": row["end"] - row["begin"]}
    name = Op(row["stage"], Kind(row["op"]), row["microbatch"]).label
    return {"ph": "X", "name": name, "cat": "pipeline", **at, "args": args}


def in_microseconds(event: Event, since: float = 0.0) -> None:
    """Turn its times, in seconds, into the format's microseconds after `since`."""
    event["ts"] = round((event["ts"] - since) * 1e6, 3)
    if "dur" in event:
        event["dur"] = round(event["dur"] * 1e6, 3)


def _heads(id_: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": id_, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": id_, "tid": TRACK, "args": {"name": "pipeline"}}

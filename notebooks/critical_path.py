"""The critical path of a measured pipeline step, the delays of its messages, and the parts of its time: for lesson 32.

`flights` has the times of all messages of a trace, also of programs that are no pipelines.

A row of `result.rows` is an operation: worker, stage, op (F or B), micro-batch, begin and end in seconds.
"""

from __future__ import annotations

import statistics
from typing import Any

import draw

from rpcbench.pipeline import StepResult
from rpcbench.telemetry.trace import Trace

Row = dict[str, Any]


def source(row: Row, made: dict[tuple[int, str, int], Row]) -> Row | None:
    """The operation of the neighbouring stage whose result this one needs."""
    step = -1 if row["op"] == "F" else 1
    return made.get((row["stage"] + step, row["op"], row["microbatch"]))


def waits(result: StepResult) -> list[tuple[Row, Row | None, Row | None]]:
    """Each operation, the one before it on its worker, and the one whose message it needs."""
    rows = sorted(result.rows, key=lambda row: row["begin"])
    made = {(row["stage"], row["op"], row["microbatch"]): row for row in rows}
    latest: dict[int, Row] = {}
    found = []
    for row in rows:
        found.append((row, latest.get(row["worker"]), source(row, made)))
        latest[row["worker"]] = row
    return found


def path(result: StepResult) -> list[Row]:
    """The operations on the critical path, the first one first: each is the last thing that the next one waited for."""
    before = {_name(row): [each for each in (own, came) if each] for row, own, came in waits(result)}
    row: Row | None = max(result.rows, key=lambda row: row["end"])
    found: list[Row] = []
    while row is not None:
        found.insert(0, row)
        row = max(before[_name(row)], key=lambda each: each["end"], default=None)
    return found


def _name(row: Row) -> tuple[int, str, int]:
    return row["stage"], row["op"], row["microbatch"]


def picture(result: StepResult, title: str) -> draw.Drawing:
    """The step as lanes; operations of the critical path have a colour."""
    on_path = {_name(row) for row in path(result)}
    first = min(row["begin"] for row in result.rows)
    lanes: dict[str, list[tuple[float, float, str, str]]] = {}
    for row in sorted(result.rows, key=lambda row: (row["worker"], row["begin"])):
        colour = ("blue" if row["op"] == "F" else "orange") if _name(row) in on_path else "dim"
        bar = (1e3 * (row["begin"] - first), 1e3 * (row["end"] - first), f"{row['op']}{row['microbatch']}", colour)
        lanes.setdefault(result.names[row["worker"]], []).append(bar)
    return draw.lanes(lanes, "ms", title)


def delays(result: StepResult) -> dict[str, float]:
    """For each link the median time, in ms, that a message was under way, where its receiver had nothing else to do."""
    found: dict[str, list[float]] = {}
    for row, own, came in waits(result):
        if came is not None and (own is None or own["end"] < came["end"]):
            link = f"{result.names[came['worker']]} → {result.names[row['worker']]}"
            found.setdefault(link, []).append(1e3 * (row["begin"] - came["end"]))
    return {link: statistics.median(found[link]) for link in sorted(found)}


def flights(seen: Trace) -> dict[str, float]:
    """For each link the median time, in ms, that a message of the trace was under way."""
    view, found = seen.view, dict[str, list[float]]()
    for row in view["messages"].values():
        if row["sent"] is not None and row["received"] is not None:
            sender, receiver = (view["workers"][str(row[end])]["name"] for end in ("from", "to"))
            found.setdefault(f"{sender} → {receiver}", []).append(1e3 * (row["received"] - row["sent"]))
    return {link: statistics.median(found[link]) for link in sorted(found)}


def busy(result: StepResult) -> list[float]:
    """The time, in ms, that each worker spent in operations."""
    sums: dict[int, float] = {}
    for row in result.rows:
        sums[row["worker"]] = sums.get(row["worker"], 0.0) + 1e3 * (row["end"] - row["begin"])
    return [sums[worker] for worker in sorted(sums)]


def parts(result: StepResult) -> dict[str, float]:
    """The time of a step in ms by cause; lesson 32 explains the formulas."""
    microbatches = 1 + max(row["microbatch"] for row in result.rows)
    each, workers = busy(result), len(busy(result))
    mean = sum(each) / workers
    equal = mean * (microbatches + workers - 1) / microbatches
    slowest = sum(each) / microbatches + (microbatches - 1) / microbatches * max(each)
    step = 1e3 * result.timeline.seconds
    return {"computing": mean, "bubble": equal - mean, "imbalance": slowest - equal, "messages": step - slowest}

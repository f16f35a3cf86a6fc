"""Pipeline steps as a view: where each micro-batch is, who waits for what, what stages hold, how idle workers are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rpcbench.base.events import Row, Table
from rpcbench.pipeline.timeline import idle_share
from rpcbench.telemetry.views import View, World, everybody, rows_of

STEPS_DRAWN = 4
STEPS_LISTED = 8
_UNTOLD = "untold"


def pipeline_view(world: World) -> View:
    """Where each micro-batch is. Sections: workers, steps, lanes, ops.

    `steps` lists the latest steps. A step's `state` is `complete` once all workers have said so, `failed` where an
    operation has raised, the step was given up or a worker is lost, else `running`; one that a worker has not told the
    end of before it left is not listed: nobody knows how that was. A complete one has its measured `idle` share;
    `ideal` is what the schedule cannot avoid. `ops` holds the operations of the latest few, times in monotonic seconds,
    `end` None while an op runs, `held` the bytes of activations that its stage holds after it. `lanes` (`step/worker`)
    sum that up for a worker: its stages, of which `replica` where there are several, how many operations are `done` of
    those `planned`, which is `next` while it waits for something, how `busy` it was, bytes `held` now and at `peak`.
    Steps are ordered by when they began, as a new pipeline counts from 0 again.
    """
    found = sorted(_gathered(world).values(), key=lambda step: step.begin)
    known = [(row, step) for step in found if (row := _step(step, world))["state"] != _UNTOLD]
    steps = {str(step.number): row for row, step in known[-STEPS_LISTED:]}
    drawn = known[-STEPS_DRAWN:]
    return {
        "workers": everybody(world, ()),
        "steps": steps,
        "lanes": {key: lane for row, step in drawn for key, lane in _lanes(row, step)},
        "ops": {key: row for _, step in drawn for key, row in step.ops.items()},
    }


@dataclass(slots=True)
class _Step:
    """The rows of one step: of each worker's part, and of operations."""

    number: int
    begin: float = math.inf
    parts: dict[int, Row] = field(default_factory=dict)
    ops: Table = field(default_factory=dict)


def _gathered(world: World) -> dict[int, _Step]:
    """All steps of which an operation is known."""
    steps: dict[int, _Step] = {}
    for _, key, row in rows_of(world, "ops"):
        step = steps.get(row["step"])
        if step is None:
            step = steps[row["step"]] = _Step(row["step"])
        step.ops[key] = row
        step.begin = min(step.begin, row["begin"])
    for worker, _, row in rows_of(world, "steps"):
        if row["step"] in steps:
            steps[row["step"]].parts[worker] = row
    return steps


def _step(step: _Step, world: World) -> Row:
    rows = step.ops.values()
    state = _state(step, world)
    end = max(row["begin"] if row["end"] is None else row["end"] for row in rows)
    return {
        "step": step.number,
        "state": state,
        "begin": step.begin,
        "end": end,
        "ops": len(rows),
        "idle": idle_share(rows) if state == "complete" else None,
        "ideal": next((part["ideal"] for part in step.parts.values()), None),
    }


def _state(step: _Step, world: World) -> str:
    states = {part["state"] for part in step.parts.values()}
    workers = {worker for part in step.parts.values() for worker in part["workers"]}
    if workers and workers <= step.parts.keys() and states == {"done"}:
        return "complete"
    members = {world[worker]["state"] if worker in world else "lost" for worker in workers}
    if "failed" in states or "lost" in members:
        return "failed"
    return _UNTOLD if "left" in members else "running"


def _lanes(row: Row, step: _Step) -> Iterator[tuple[str, Row]]:
    by_worker: dict[int, list[Row]] = defaultdict(list)
    for op in step.ops.values():
        by_worker[op["worker"]].append(op)
    for worker in sorted(step.parts.keys() | by_worker.keys()):
        ops = sorted(by_worker[worker], key=lambda op: float(op["begin"]))
        yield f"{step.number}/{worker}", _lane(row, worker, step.parts.get(worker), ops)


def _lane(step: Row, worker: int, part: Row | None, ops: list[Row]) -> Row:
    plan = part["plan"] if part else []
    span = step["end"] - step["begin"]
    ended = [op for op in ops if op["end"] is not None]
    time = sum(op["end"] - op["begin"] for op in ended)
    waits = step["state"] == "running" and len(ended) == len(ops) < len(plan)
    held, peak = _held(ended)
    return {
        "step": step["step"],
        "worker": worker,
        "stages": sorted({op["stage"] for op in ops}),
        "replica": part.get("replica") if part else None,
        "done": len(ended),
        "planned": len(plan),
        "next": plan[len(ops)] if waits else "",
        "busy": time / span if span > 0 else None,
        "held": held,
        "peak": peak,
    }


def _held(ended: list[Row]) -> tuple[int, int]:
    """Bytes that the stages of a worker hold after these operations, and the most at any time."""
    stages: dict[int, int] = {}
    peak = 0
    for op in ended:
        stages[op["stage"]] = op["held"]
        peak = max(peak, sum(stages.values()))
    return sum(stages.values()), peak

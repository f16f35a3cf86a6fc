"""The views that panels show: pure functions from the tables of all workers to small dicts of plain data.

A view is `{section: {key: row}}`. Rows are flat dicts for JSON, with strings and numbers below 2**53 (JavaScript's
limit, so ids of contexts are strings). Panels, the command line and saved pictures all draw these dicts. `diff_views`
and `patch_view` send changes in small messages: `patch(old, diff(old, new)) == new`, and unchanged rows are not copied.

The views: RRefs and their forks; pipeline steps (place of each micro-batch, waits, memory of stages, idle shares); and
the state of workers. Those of autograd contexts and of messages have files of their own.
"""
# Theory of operation
#     each worker          agent of the notebook            panels, CLI, pictures
#     Publisher ────────>  Collector ── world ──> *_view ── view ──> diff ──> JavaScript: patch
#       rows of tables       {id: {"tables":        pure       │
#                              {name: {key: row}}}}            └──> summary.text, svg.Snapshot
#
# A view joins rows of several workers by globally unique ids. Their reports arrive at different times, so one half of a
# pair may be missing: `listed`, `unlisted` or `open` if it will come, `lost` if its worker is lost.

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rpcbench.base.ids import Row, Table
from rpcbench.pipeline.timeline import idle_share
from rpcbench.runtime.handles import class_of
from rpcbench.runtime.members import GONE
from rpcbench.telemetry.worker_columns import activity_words, read_figures

World = dict[int, dict[str, Any]]  # by id of the worker; see `Collector.world`
View = dict[str, Table]  # section: key: row
Delta = dict[str, "dict[str, Any] | None"]  # see `diff_views`


RREF_STATES = {
    "ready": "ready", "computing": "computing", "failed": "failed", "unlisted": "on its way", "lost": "lost",
}  # fmt: skip
"""The states of RRefs in words; `unlisted`: reported by users but not by its owner, `lost`: its owner is lost."""
TYPE_COLOURS = ("blue", "purple", "green", "olive", "indigo", "teal")


def type_colour(type_: str) -> str:
    """Return the colour of a type of values, by the name of its class alone, whatever other types there are.

    So types may share a colour. The first summand is chosen so that those of lessons and pipelines do not.
    """
    total = 823
    for letter in class_of(type_):
        total = (31 * total + ord(letter)) % 65521
    return TYPE_COLOURS[total % len(TYPE_COLOURS)]


def rref_view(world: World) -> View:
    """Return owner and users of each RRef. Sections: workers, rrefs, forks. Only workers that are up are counted.

    The state of an RRef is one of `RREF_STATES`; `colour`: that of its type in all panels and pictures. `size`: bytes
    of its tensors at creation; `made`: seconds since 1970; `cell` and `number`: the notebook's cell that created it,
    run by worker `by`; None or empty if unknown. The state of a fork is `pending`, `confirmed`, `deleting` or `listed`
    (reported by its owner only: its holder has released it, or has not received it yet). `parent` is the worker that
    created the fork.
    """
    forks: Table = {}
    types: dict[str, str] = {}
    up = living_members(world)
    # In order of authority: each later report of a fork replaces an earlier one, and its holder's own comes last.
    for worker, key, row in rows_of(up, "owned"):
        for fork in row["forks"]:
            forks[fork["fork"]] = _fork_row(fork["fork"], key, worker, fork["holder"], None, "listed")
    for worker, _, row in rows_of(up, "users"):
        for child in row["children"]:
            forks[child["fork"]] = _fork_row(child["fork"], row["rref"], row["owner"], child["to"], worker, "pending")
    for worker, key, row in rows_of(up, "users"):
        forks[key] = _fork_row(key, row["rref"], row["owner"], worker, row["parent"], row["state"])
        types.setdefault(row["rref"], row["type"])
    rrefs = {key: _rref_row(key, world[worker], row) for worker, key, row in rows_of(up, "owned")}
    for fork in forks.values():
        if fork["rref"] not in rrefs:
            rrefs[fork["rref"]] = _unlisted_rref_row(fork["rref"], fork["owner"], types.get(fork["rref"], ""), world)
        rrefs[fork["rref"]]["forks"] += 1
    # Ids without a member (a worker that has left) still need a row, or arrows would have no end.
    mentioned = {fork[end] for fork in forks.values() for end in ("owner", "holder", "parent")} - {None}
    return {"workers": worker_rows(world, mentioned), "rrefs": rrefs, "forks": forks}


def _fork_row(fork: str, rref: str, owner: int, holder: int, parent: int | None, state: str) -> Row:
    return {"fork": fork, "rref": rref, "owner": owner, "holder": holder, "parent": parent, "state": state}


def _rref_row(rref: str, owner: Row, row: Row) -> Row:
    state = "failed" if row["failed"] else "ready" if row["ready"] else "computing"
    epoch = owner.get("epoch")
    made = round(epoch + row["made"], 1) if epoch is not None and row["made"] else None
    known = {
        "size": row["size"],
        "made": made,
        "cell": row["cell"],
        "number": row["number"],
        "by": _creator_of_rref(rref),
    }
    about = {"rref": rref, "owner": owner["id"], "type": row["type"], "colour": type_colour(row["type"])}
    return {**about, "state": state, "forks": 0, **known}


def _unlisted_rref_row(rref: str, owner: int, kind: str, world: World) -> Row:
    state = "unlisted" if is_up(world, owner) else "lost"
    unknown = {"size": None, "made": None, "cell": "", "number": None, "by": _creator_of_rref(rref)}
    about = {"rref": rref, "owner": owner, "type": kind, "colour": type_colour(kind)}
    return {**about, "state": state, "forks": 0, **unknown}


def _creator_of_rref(rref: str) -> int:
    """Return the worker that created the RRef's id."""
    return int(rref.partition(".")[0])


def rows_of(world: World, table: str) -> Iterator[tuple[int, str, Row]]:
    """Yield (worker, key, row) of one table, over all workers."""
    for worker, state in world.items():
        for key, row in state["tables"].get(table, {}).items():
            yield worker, key, row


def living_members(world: World) -> World:
    """Return the members that are up: rows of lost ones are out of date."""
    return {worker: state for worker, state in world.items() if state["state"] == "up"}


def is_up(world: World, worker: int) -> bool:
    return worker in world and world[worker]["state"] == "up"


def worker_rows(world: World, mentioned: Iterable[int]) -> Table:
    """Return section `workers`: all members, and a row for each mentioned id that is not (or no longer) a member."""
    fields = ("id", "name", "state", "incarnation", "left_out")
    strangers = {str(i): dict(zip(fields, (i, f"id {i}", "unknown", 0, 0), strict=True)) for i in mentioned}
    return strangers | {str(i): {field: state[field] for field in fields} for i, state in world.items()}


def diff_views(old: View, new: View) -> Delta:
    """Return the change from `old` to `new`: `{section: {"set": rows, "drop": keys}}`; None for a removed section."""
    delta: Delta = dict.fromkeys(old.keys() - new.keys())
    for section, rows in new.items():
        before = old.get(section, {})
        changed = {key: row for key, row in rows.items() if key not in before or before[key] != row}
        dropped = sorted(before.keys() - rows.keys())
        if changed or dropped or section not in old:
            delta[section] = {"set": changed, "drop": dropped}
    return delta


def patch_view(old: View, delta: Delta) -> View:
    """Return `old` with `delta` applied; `old` itself does not change."""
    new = dict(old)
    for section, change in delta.items():
        if change is None:
            new.pop(section, None)
            continue
        gone = set(change["drop"])
        kept = {key: row for key, row in old.get(section, {}).items() if key not in gone}
        new[section] = {**kept, **change["set"]}
    return new


STEPS_DRAWN = 4  # latest steps with operations and lanes
STEPS_LISTED = 8  # latest steps in the list
_UNTRAINED_DRAWN = 2  # latest evaluations, which do not displace steps that train
_UNTOLD = "untold"  # a worker was gone before it reported the end of the step


def pipeline_view(world: World) -> View:
    """Return the place of each micro-batch. Sections: workers, steps, lanes, ops, remarks (sentences).

    `steps`: the latest steps, of the latest `run` that counts them. The `state` is `complete` once all workers have
    reported so; `failed` where an operation has raised, the step was aborted or a worker was lost before the others had
    ended it; `interrupted` where Ctrl-C has aborted it; else `running`. A step that all others have ended is not listed
    if a worker has left or was lost before it reported its own end.
    `trains`: False for evaluation. `bubble` is the measured idle share of a complete step, and `minimum` the share
    that the schedule cannot avoid. `loss` and `samples` are those of the batch. `ops`: the operations of the latest
    few steps, times in monotonic seconds, `end` None while one runs; `held`: bytes of activations that its stage
    holds after it. `lanes` (`step/worker`): sums for a worker: its stages, their `replica` if there are several,
    number of operations `done` of those `planned`, the `next` one while it waits for input, share `busy`, bytes
    `held` now and at `peak`.
    """
    found = _keep_latest_run(sorted(_gather_steps(world).values(), key=lambda step: step.begin))
    known = [(row, step) for step in found if (row := _step_row(step, world))["state"] != _UNTOLD]
    drawn = [pair for pair in known if pair[0]["trains"]][-STEPS_DRAWN:]
    drawn += [pair for pair in known if not pair[0]["trains"]][-_UNTRAINED_DRAWN:]
    listed = {row["step"]: row for row, _ in (*drawn, *known[-STEPS_LISTED:])}
    return {
        "workers": worker_rows(world, ()),
        "steps": {str(row["step"]): row for row in sorted(listed.values(), key=lambda row: float(row["begin"]))},
        "lanes": {key: worker_row for row, step in drawn for key, worker_row in _step_worker_rows(row, step)},
        "ops": {key: row for _, step in drawn for key, row in step.ops.items()},
        "remarks": remark_rows(world),
    }


def _keep_latest_run(steps: list[_StepRows]) -> list[_StepRows]:
    """Return the steps, by their begin, of the latest run: one of torch's counts anew, so two would mix."""
    return [step for step in steps if step.run == steps[-1].run]


def remark_rows(world: World) -> Table:
    """Return section `remarks`: sentences on what the picture shows, from those that made the world."""
    return {key: row for _, key, row in rows_of(world, "remarks")}


@dataclass(slots=True)
class _StepRows:
    """The rows of one step."""

    number: int
    begin: float = math.inf  # of its first operation, in monotonic seconds
    parts: dict[int, Row] = field(default_factory=dict)  # by worker
    passed: set[int] = field(default_factory=set)  # workers that have begun a later step
    ops: Table = field(default_factory=dict)

    @property
    def run(self) -> str:
        """The run that counts it: "" of this package's pipelines, which have one count."""
        return next((str(part.get("run", "")) for part in self.parts.values()), "")

    def drop_earlier_runs(self) -> None:
        """Drop the rows of runs before the latest, which had a step of this number on other workers."""
        runs = {worker: part.get("run", "") for worker, part in self.parts.items()}
        if len({*runs.values()}) <= 1:
            return
        latest = max(self.ops.values(), key=lambda op: float(op["begin"]))
        kept = {worker for worker, run in runs.items() if run == runs.get(latest["worker"])}
        self.parts = {worker: part for worker, part in self.parts.items() if worker in kept}
        self.ops = {key: op for key, op in self.ops.items() if op["worker"] in kept}
        self.begin = min(op["begin"] for op in self.ops.values())


def _gather_steps(world: World) -> dict[int, _StepRows]:
    """Return all steps of which an operation is known, by number."""
    steps: dict[int, _StepRows] = {}
    for _, key, row in rows_of(world, "ops"):
        step = steps.get(row["step"])
        if step is None:
            step = steps[row["step"]] = _StepRows(row["step"])
        step.ops[key] = row
        step.begin = min(step.begin, row["begin"])
    latest: dict[tuple[str, int], int] = {}  # by run and worker
    for worker, _, row in rows_of(world, "steps"):
        own = str(row.get("run", "")), worker
        latest[own] = max(row["step"], latest.get(own, -1))
        if row["step"] in steps:
            steps[row["step"]].parts[worker] = row
    for step in steps.values():
        step.drop_earlier_runs()
        step.passed = {worker for (run, worker), number in latest.items() if run == step.run and number > step.number}
    return steps


def _step_row(step: _StepRows, world: World) -> Row:
    rows, parts = step.ops.values(), step.parts.values()
    state = _step_state(step, world)
    end = max(row["begin"] if row["end"] is None else row["end"] for row in rows)
    minimum = next((part["ideal"] for part in parts), None)
    losses = [part["loss"] for part in parts if "loss" in part]  # that of each replica is a part of the sum
    return {
        "step": step.number,
        "run": step.run,
        "state": state,
        "trains": minimum is not None or any(row["op"] != "F" for row in rows),
        "begin": step.begin,
        "end": end,
        "ops": len(rows),
        "bubble": idle_share(rows) if state == "complete" else None,
        "minimum": minimum,
        "loss": sum(losses) if state == "complete" and losses and None not in losses else None,
        "samples": next((part["samples"] for part in parts if "samples" in part), None),
    }


def _step_state(step: _StepRows, world: World) -> str:
    states = {part["state"] for part in step.parts.values()}
    workers = {worker for part in step.parts.values() for worker in part["workers"]}
    workers = workers or {op["worker"] for op in step.ops.values()}  # of a step that all have forgotten
    if workers <= step.parts.keys() and states == {"done"}:
        return "complete"
    silent = {worker for worker in workers if not _may_report(step, worker, world)}
    ended = all(step.parts.get(worker, {}).get("state") == "done" for worker in workers - silent)
    was_lost = any(worker not in world or world[worker]["state"] == "lost" for worker in silent)
    if "failed" in states or (was_lost and not ended):
        return "failed"
    if "interrupted" in states:
        return "interrupted"
    # The result can never be known, and one worker cannot say it for all: the step is not listed.
    return _UNTOLD if silent else "running"


def _may_report(step: _StepRows, worker: int, world: World) -> bool:
    """Return whether a worker has reported its part of a step, or may still do so: it is there, has not been started
    again since, and has not begun a later step, as it forgets steps long ago."""
    member = world.get(worker)
    if member is None or member["state"] in GONE:
        return False
    return worker in step.parts or (worker not in step.passed and step.begin >= member.get("since", 0.0))


def _step_worker_rows(row: Row, step: _StepRows) -> Iterator[tuple[str, Row]]:
    by_worker: dict[int, list[Row]] = defaultdict(list)
    for op in step.ops.values():
        by_worker[op["worker"]].append(op)
    for worker in sorted(step.parts.keys() | by_worker.keys()):
        ops = sorted(by_worker[worker], key=lambda op: float(op["begin"]))
        yield f"{step.number}/{worker}", _step_worker_row(row, worker, step.parts.get(worker), ops)


def _step_worker_row(step: Row, worker: int, part: Row | None, ops: list[Row]) -> Row:
    plan = part["plan"] if part else []
    span = step["end"] - step["begin"]
    ended = [op for op in ops if op["end"] is not None]
    time = sum(op["end"] - op["begin"] for op in ended)
    waits = step["state"] == "running" and len(ended) == len(ops) < len(plan)
    held, peak = _held_and_peak(ended)
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


def _held_and_peak(ended: list[Row]) -> tuple[int | None, int | None]:
    """Return the bytes that the stages of a worker hold after these operations, and the maximum over time; None where
    they are not known."""
    if any(op["held"] is None for op in ended):
        return None, None
    stages: dict[int, int] = {}
    peak = 0
    for op in ended:
        stages[op["stage"]] = op["held"]
        peak = max(peak, sum(stages.values()))
    return sum(stages.values()), peak


PERIOD = 0.5
"""Seconds between two requests of `HealthPoller`."""
_SILENT = 4
"""A member is silent after this number of requests that other members have answered."""


def workers_view(world: World) -> View:
    """Return the state of each member. Sections: workers, links, logs, actions.

    `workers`: `now` is the activity in words; `state` is `up`, `suspect`, `stopped`, `starts`, `lost` or `left`;
    `doing` is `cell`, `busy`, `waits`, `idle`, or `silent` for `silent` seconds; `ended`: how its process ended. The
    figures of `worker_columns`, and the numbers of `busy` functions, the cell that runs among them, of `waiting` ones
    (for a future, a reply or the like) and of `cells` that run or wait, are None before its first report. `calls`:
    calls of other members that wait for it; `awaits`: the members that its threads wait for, in words; `under_way`: its
    calls to others that have no reply yet, whether or not a thread waits for them. `sent` and `received`: sums of
    bytes; `links` (`worker/peer`): bytes of each pair, counted by the worker. `logs`: its last output outside cells.
    `actions`: those that run or have failed, and stacks. A member that has left in good order is not listed, unless the
    whole world has ended.
    """
    launched = {key: row for member in world.values() for key, row in _member_table(member, "launched").items()}
    there = _members_to_list(world) | {
        int(key): _absent_member(int(key), row) for key, row in launched.items() if int(key) not in world
    }
    latest_question = max((_health_row(member).get("question", 0) for member in there.values()), default=0)
    calls = Counter(row["to"] for member in there.values() for row in _member_table(member, "calls").values())
    return {
        "workers": {
            str(i): _worker_row(
                member, launched.get(str(i), {}), latest_question, calls[i], _awaited_names(member, there)
            )
            for i, member in sorted(there.items())
        },
        "links": {
            f"{i}/{peer}": {"worker": i, "peer": int(peer), "sent": count[0], "received": count[1]}
            for i, member in there.items()
            for peer, count in _health_row(member).get("peers", {}).items()
        },
        "logs": {key: {"worker": int(key), "text": row["log"]} for key, row in launched.items() if int(key) in there},
        "actions": {key: row for member in there.values() for key, row in _member_table(member, "actions").items()},
    }


def _members_to_list(world: World) -> World:
    over = bool(world) and all(member["state"] == "left" for member in world.values())
    return {i: member for i, member in world.items() if over or member["state"] != "left"}


_LIVES = ("ready", "stopped")
"""The launcher's states of a process that has not ended. It may hear of an end a little later than the members do."""


def _absent_member(id_: int, process: Row) -> dict[str, Any]:
    """Return the row of a process that is not a member: it is about to join, or was lost before anyone subscribed."""
    state = "starts" if process["state"] in _LIVES else "lost"
    own = {"id": id_, "name": process["name"], "incarnation": process["incarnation"]}
    return {**own, "state": state, "tables": {}, "left_out": 0}


def _awaited_names(member: dict[str, Any], there: World) -> str:
    """Return the other members that threads of this one wait for: their names, or how many of many."""
    at = sorted({*_health_row(member).get("awaits", ())} & there.keys() - {member["id"]})
    return f"{len(at)} workers" if len(at) > 2 else ", ".join(str(there[id_]["name"]) for id_ in at)


def _worker_row(member: dict[str, Any], process: Row, latest_question: int, calls: int, awaits: str) -> Row:
    health = _health_row(member) if member["state"] in ("up", "suspect") else {}
    # Compared with the latest answer of any member, not with the clock: if this process stalls, no member seems silent.
    behind = latest_question - health.get("question", latest_question)
    silent = round(behind * PERIOD) if behind >= _SILENT else 0
    stopped = member["state"] == "up" and process.get("state") == "stopped"
    peers = health.get("peers", {}).values()
    cells = health.get("cells") or 0
    # Without the threads that wait for the end of a cell, which runs on the main thread, none of the pool.
    waiting = max(0, health["waiting"] - cells) if health else None
    busy = health["busy"] + (cells > 0) if health.get("busy") is not None else None
    own = {name: member[name] for name in ("id", "name", "incarnation", "left_out")}
    ended = process.get("state", "")
    row = {
        **own, **{name: health.get(name) for name in ("pid", "host", "cells")}, "busy": busy, **read_figures(health),
        "state": "stopped" if stopped else member["state"],
        "doing": _activity_of_member(health, bool(waiting or awaits), bool(silent)),
        "waiting": waiting, "awaits": awaits, "calls": calls, "silent": silent,
        "under_way": sum(row["to"] != member["id"] for row in _member_table(member, "calls").values()),
        "ended": ended if member["state"] == "lost" and ended not in _LIVES else "",
        "sent": sum(count[0] for count in peers), "received": sum(count[1] for count in peers),
    }  # fmt: skip
    return row | {"pid": row["pid"] or process.get("pid"), "now": activity_words(row)}


def _activity_of_member(health: Row, waiting: bool, silent: bool) -> str:
    if not health:
        return ""
    if silent:
        return "silent"
    return "cell" if health["cells"] else "busy" if health["busy"] else "waits" if waiting else "idle"


def _health_row(member: dict[str, Any]) -> Row:
    """Return the latest report of a member's present process, or an empty row."""
    row = _member_table(member, "health").get(str(member["id"]))
    return {} if row is None else row


def _member_table(member: dict[str, Any], name: str) -> Table:
    table: Table = member["tables"].get(name, {})
    return table

"""The view of the progress panel: the jobs and the cells of all members, and its words.

Guarantees
- Times are seconds since 1970; None before a member's clock is known. A row changes only when something has happened:
  pages count the time that passes.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.cells import cell_log
from rpcbench.cells.cell_log import ERROR, LOST, OK
from rpcbench.cells.display import abbreviate_names
from rpcbench.runtime.jobs import DONE, FAILED, INTERRUPTED, RUNS, STOPPED
from rpcbench.simulation.simulated_world import format_seconds
from rpcbench.telemetry.views import View, World, rows_of, worker_rows

JOB_STATES = {
    RUNS: "running", DONE: "done", FAILED: "failed", INTERRUPTED: "interrupted", STOPPED: "stopped early",
}  # fmt: skip
"""The states of jobs in words."""
WAITS = "waits"
CELL_STATES = {
    RUNS: "running", WAITS: "waiting", LOST: "lost", ERROR: "error", cell_log.INTERRUPTED: "interrupted",
    cell_log.STOPPED: "until the stop", OK: "ok",
}  # fmt: skip
"""The states of cells in words: that of a cell on several workers is the first of those that it has there."""
_CUT = (LOST, cell_log.STOPPED)
_LINE = 160  # characters of a line of text


def progress_view(world: World) -> View:
    """Return jobs and cells. Sections: workers, jobs, cells.

    `jobs`: the `kind` ("map" or "fit"), the `name` of the function or model, the `worker` whose program it is, the
    `cell` and `number` of the notebook's cell that began it; how many are `running`, `done` and `failed` of the `total`
    (None: unknown), `ended` in all, and how many were `cancelled`, as they ran when the job ended, in what `unit`; its
    `state`, one of `JOB_STATES`, its `error`, and a `note`; `began`, and `end` or None; `counted`: when an item began
    or ended last; `rate`: items that are done in a second, of the last ones, or in the mean once the job has ended,
    None while none is done.

    `cells`: the `code`, or its beginning (`is_cut`), and its first `line`; the `state`, one of `CELL_STATES`; the
    notebook's `cell` and `number`; when it `began`, which is when it was sent, `since` when it runs, None if it does
    not; how long it `lasted` or None, and how long it `ran`, 0 if it never did; `where` and `how` in words; `parts`:
    [id, name, state, error, seconds that it ran or None, number of the prompt or None] of each worker. A cell waits on
    a worker where an earlier one of this process has not ended.
    """
    jobs = {_key(worker, key): _job_row(world, worker, row) for worker, key, row in rows_of(world, "jobs")}
    return {"workers": worker_rows(world, ()), "jobs": jobs, "cells": _cell_rows(world)}


def _key(worker: int, key: str) -> str:
    return f"{worker}.{key}" if worker else key


def _job_row(world: World, worker: int, row: Row) -> Row:
    epoch = world[worker].get("epoch")
    times = {name: _since_1970(epoch, row[name]) for name in ("began", "end", "counted")}
    lasted = None if row["end"] is None else round(row["end"] - row["began"], 3)
    ended, cancelled = row["done"] + row["failed"], row.get("cancelled", 0)  # older records do not count these apart
    return {**row, **times, "worker": worker, "ended": ended, "cancelled": cancelled, "lasted": lasted}


def _cell_rows(world: World) -> Table:
    rows: Table = {}
    queues: dict[tuple[int, int], _Queue] = {}  # by client and worker
    for worker, key, row in sorted(rows_of(world, "cells"), key=lambda found: (found[0], int(found[2]["order"]))):
        parts, since = [], []
        for part in row["parts"]:
            # A cell of `%%step` goes on on a thread of its own: later ones run here beside it.
            queue = _Queue() if part[0] == worker else queues.setdefault((worker, part[0]), _Queue())
            since.append(max(row["began"], queue.ended))
            parts.append(_part(part, row["began"], queue, is_here=part[0] == worker))
            queue.add(part)
        states = [part[2] for part in parts]
        state = next((each for each in CELL_STATES if each in states), OK)
        ends = [part[4] for part in row["parts"]]
        lasted = None if None in ends or not ends else round(max(ends) - row["began"], 4)
        runs = [at for at, part in zip(since, parts, strict=True) if part[2] == RUNS]
        took = [] if lasted is None else [part[4] for part in parts if part[4] is not None]
        rows[_key(worker, key)] = {
            **row, "worker": worker, "began": _since_1970(world[worker].get("epoch"), row["began"]),
            "line": _first_line(row["code"]), "parts": parts, "state": state, "where": _place_words(parts),
            "how": _end_words(parts), "lasted": lasted, "ran": max(took, default=None),
            "since": _since_1970(world[worker].get("epoch"), min(runs, default=None)),
        }  # fmt: skip
    return rows


class _Queue:
    """The cells of one client on one worker, which runs them one after another, up to one of them."""

    def __init__(self) -> None:
        self.is_busy = False  # one of them runs
        self.ended = -math.inf  # the last end of one
        self.cut = -math.inf  # the last end of one with its worker, or with the cluster: none behind it has begun

    def add(self, part: list[Any]) -> None:
        _, _, state, _, end, *_ = part
        self.is_busy |= state == RUNS
        if end is not None:
            self.ended = max(self.ended, end)
            self.cut = max(self.cut, end) if state in _CUT else self.cut


def _part(part: list[Any], sent: float, queue: _Queue, is_here: bool) -> list[Any]:
    id_, name, state, error, end, number, seconds = part
    if seconds is None and end is not None:
        # A worker reports how long a cell ran that it has begun; of one that was cut, our clock tells it.
        has_run = is_here or (state in _CUT and queue.cut < sent)
        seconds = round(max(0.0, end - max(sent, queue.ended)), 6) if has_run else 0.0
    return [id_, name, WAITS if state == RUNS and queue.is_busy else state, error, seconds, number]


def _first_line(code: str) -> str:
    lines = [line for line in code.splitlines() if line.strip()]
    return shorten_words(lines[0].strip(), _LINE) if lines else ""


def _since_1970(epoch: float | None, at: float | None) -> float | None:
    return None if epoch is None or at is None else round(epoch + at, 2)


# -- text
def progress_text(view: View) -> tuple[str, list[str]]:
    """Return the view as text: a line with counts, and a line for each job, the latest first."""
    jobs = sorted(view["jobs"].values(), key=lambda row: int(row["order"]), reverse=True)
    states = Counter(row["state"] for row in jobs)
    marks = "".join(f", {states[state]} {words}" for state, words in JOB_STATES.items() if states[state])
    cells = sorted(view["cells"].values(), key=lambda row: int(row["order"]), reverse=True)
    running = sum(row["state"] in (RUNS, WAITS) for row in cells)
    tally = f", {count_noun(len(cells), 'cell')}" + (f", {running} not ended" if running else "")
    first = f"{count_noun(len(view['workers']), 'member')}, {count_noun(len(jobs), 'job')}{marks}{tally}"
    lines = [*map(job_words, jobs), *map(cell_words, cells)]
    return first, [shorten_words(f"  {line}", _LINE) for line in lines]


def job_words(row: Row) -> str:
    """Return a job in words: `map score in [5]: 12 of 20 items done, 2 running, 1 failed, 3.1 items/s (running)`."""
    cell = "" if row["number"] is None else f" in [{row['number']}]"
    of = "" if row["total"] is None else f" of {row['total']:,}"
    counts = "".join(f", {row[name]} {name}" for name in ("running", "failed", "cancelled") if row[name])
    rate = "" if row["rate"] is None else f", {row['rate']:.3g} {row['unit']}s/s"
    note = f", {row['note']}" if row["note"] else ""
    state = JOB_STATES.get(row["state"], row["state"])
    how = f"{state}: {row['error']}" if row["error"] else state
    return f"{row['kind']} {row['name']}{cell}: {row['done']:,}{of} {row['unit']}s done{counts}{rate}{note} ({how})"


def cell_words(row: Row) -> str:
    """Return a cell in words: `worker1-2 in [5], 1.2 s (ok): y = x.sum()`."""
    cell = "" if row["number"] is None else f" in [{row['number']}]"
    lasted = "" if row["ran"] is None else f", {format_seconds(row['ran'])}" if row["ran"] else ", never began"
    return f"{row['where']}{cell}{lasted} ({row['how']}): {row['line']}"


def _place_words(parts: list[list[Any]]) -> str:
    """Return where a cell ran: `worker3[8]`, with the number of its prompt there; of several workers the names."""
    if len(parts) == 1 and parts[0][5] is not None:
        return f"{parts[0][1]}[{parts[0][5]}]"
    return abbreviate_names(part[1] for part in parts)


def _end_words(parts: list[list[Any]]) -> str:
    """Return the state of a cell, by worker where they differ: `KeyError: 'x' on worker2, ok on worker1`."""
    ends: dict[str, list[str]] = {}
    for _, name, state, error, *_ in sorted(parts, key=lambda part: [*CELL_STATES].index(part[2])):
        words = CELL_STATES.get(state, state)
        ends.setdefault(error or words, []).append(name)
    if len(ends) == 1:
        return next(iter(ends))
    return ", ".join(f"{end} on {abbreviate_names(iter(names))}" for end, names in ends.items())

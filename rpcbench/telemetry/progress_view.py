"""The view of the progress panel: the jobs of all members, and its words.

Guarantees
- Times are seconds since 1970; None before a member's clock is known. A row changes only when something has happened:
  pages count the time that passes.
"""

from __future__ import annotations

from collections import Counter

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row
from rpcbench.runtime.jobs import DONE, FAILED, INTERRUPTED, RUNS, STOPPED
from rpcbench.telemetry.views import View, World, rows_of, worker_rows

JOB_STATES = {
    RUNS: "running", DONE: "done", FAILED: "failed", INTERRUPTED: "interrupted", STOPPED: "stopped early",
}  # fmt: skip
"""The states of jobs in words."""
_LINE = 160  # characters of a line of text


def progress_view(world: World) -> View:
    """Return jobs. Sections: workers, jobs.

    `jobs`: the `kind` ("map" or "fit"), the `name` of the function or model, the `worker` whose program it is, the
    `cell` and `number` of the notebook's cell that began it; how many are `running`, `done` and `failed` of the `total`
    (None: unknown), `ended` in all, in what `unit`; its `state`, one of `JOB_STATES`, its `error`, and a `note`;
    `began`, and `end` or None; `counted`: when an item began or ended last; `rate`: items that end in a second.
    """
    jobs = {_key(worker, key): _job_row(world, worker, row) for worker, key, row in rows_of(world, "jobs")}
    return {"workers": worker_rows(world, ()), "jobs": jobs}


def _key(worker: int, key: str) -> str:
    return f"{worker}.{key}" if worker else key


def _job_row(world: World, worker: int, row: Row) -> Row:
    epoch = world[worker].get("epoch")
    times = {name: _since_1970(epoch, row[name]) for name in ("began", "end", "counted")}
    lasted = None if row["end"] is None else round(row["end"] - row["began"], 3)
    return {**row, **times, "worker": worker, "ended": row["done"] + row["failed"], "lasted": lasted}


def _since_1970(epoch: float | None, at: float | None) -> float | None:
    return None if epoch is None or at is None else round(epoch + at, 2)


# -- text
def progress_text(view: View) -> tuple[str, list[str]]:
    """Return the view as text: a line with counts, and a line for each job, the latest first."""
    jobs = sorted(view["jobs"].values(), key=lambda row: int(row["order"]), reverse=True)
    states = Counter(row["state"] for row in jobs)
    marks = "".join(f", {states[state]} {words}" for state, words in JOB_STATES.items() if states[state])
    first = f"{count_noun(len(view['workers']), 'member')}, {count_noun(len(jobs), 'job')}{marks}"
    return first, [shorten_words(f"  {job_words(row)}", _LINE) for row in jobs]


def job_words(row: Row) -> str:
    """Return a job in words: `map score in [5]: 12 of 20 items, 2 running, 1 failed, 3.1 items/s (running)`."""
    cell = "" if row["number"] is None else f" in [{row['number']}]"
    of = "" if row["total"] is None else f" of {row['total']:,}"
    counts = "".join(f", {row[name]} {name}" for name in ("running", "failed") if row[name])
    rate = "" if row["rate"] is None else f", {row['rate']:.3g} {row['unit']}s/s"
    note = f", {row['note']}" if row["note"] else ""
    state = JOB_STATES.get(row["state"], row["state"])
    how = f"{state}: {row['error']}" if row["error"] else state
    return f"{row['kind']} {row['name']}{cell}: {row['ended']:,}{of} {row['unit']}s{counts}{rate}{note} ({how})"


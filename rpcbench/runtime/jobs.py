"""The jobs of this process, maps over many items and training loops, as rows of the table "jobs".

Guarantees
- A loop counts its items here once; a row is made of the counts only when a watcher reads it. Without one an item costs
  about a microsecond.
- The last `MOST` jobs are kept, also after their ends. Of more, one that has ended goes first.
- A job that has ended keeps counts and words: no function, item or model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from operator import length_hint
from typing import TYPE_CHECKING, Any

from rpcbench.base.charts import shorten_words
from rpcbench.base.ids import Counter, Row, Table

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

MOST = 50
RUNS, DONE, FAILED, INTERRUPTED, STOPPED = "runs", "done", "failed", "interrupted", "stopped"
"""The states of a job. `STOPPED`: its program needed no more of it, and ended it before it was through."""
_MARK_SECONDS = 1.0  # between two of the moments from which the rate is reckoned
_MARKS = 20
_LONGEST = 300  # characters of a name or an error


def count_items(items: object) -> int | None:
    """Return how many items there are, None if that is not known."""
    try:
        return length_hint(items) or None
    except Exception:  # noqa: BLE001  (a method of the user's)
        return None


def make_bar(total: int | None, unit: str, delay: float = 0.0) -> Any:
    """Return tqdm's bar. In a narrow cell of a notebook its texts stand below it, and it keeps a width."""
    from tqdm.auto import tqdm  # not earlier: its import decides whether this is a notebook

    bar = tqdm(total=total, unit=unit, delay=delay)
    if total and (container := getattr(bar, "container", None)) is not None:
        container.layout.flex_flow = "row wrap"
        layout = container.children[1].layout
        layout.width, layout.flex, layout.min_width, layout.max_width = "auto", "1 1 60px", "60px", "300px"
    return bar


def end_state(error: BaseException) -> tuple[str, str]:
    """Return how a job ends with this error, and the error in words."""
    if isinstance(error, StopIteration | StopAsyncIteration):
        return DONE, ""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return INTERRUPTED, ""
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", [])[-1:])  # say, which item it was
    return FAILED, shorten_words(f"{type(error).__name__}: {error}{notes}", _LONGEST)


class JobCounts:
    """The counts of one job. It is made by `JobLog.begin_job`; its methods may be called on any thread."""

    def __init__(self, about: Row, report_change: Callable[[], object]) -> None:
        self.has_ended = False
        self.describe: Callable[[], str] | None = None  # a few words on it, such as the loss
        self._about = about
        self._report_change = report_change
        self._lock = threading.Lock()  # guards all below, and `has_ended`
        self._running = self._done = self._failed = self._cancelled = 0
        self._state, self._error, self._note = RUNS, "", ""
        self._began = self._counted = time.monotonic()  # start, and the last count
        self._end: float | None = None
        self._marks: deque[tuple[float, int]] = deque([(self._began, 0)], _MARKS)  # time, items that were done

    def begin_item(self) -> None:
        """Count an item that runs."""
        self._count(1, 0, 0)

    def end_item(self, failed: bool = False, begun: bool = True) -> None:
        """Count the end of an item. `begun`: it was counted as running."""
        self._count(-begun, not failed, failed)

    def _count(self, running: int, done: int, failed: int) -> None:
        now = time.monotonic()
        with self._lock:
            if self.has_ended:
                return
            self._running += running
            self._done += done
            self._failed += failed
            self._counted = now
            if now - self._marks[-1][0] >= _MARK_SECONDS:
                self._marks.append((now, self._done))
        self._report_change()

    def end(self, state: str, error: str = "") -> None:
        """End the job, with one of the states above, and its items that run. Only its first end counts."""
        describe = self.describe
        note = describe() if describe is not None else ""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended, self._end = True, time.monotonic()
            if state == STOPPED and self._done == self._about["total"]:
                state = DONE  # nobody asked whether there were more
            self._state, self._error, self._note, self.describe = state, error, note, None
            self._cancelled, self._running = 0 if state == DONE else self._running, 0
        self._report_change()

    def make_row(self) -> Row:
        describe = self.describe
        note = self._note if describe is None else describe()
        with self._lock:
            # Of what has ended the rate is the mean: it stands beside the whole time.
            at, before = self._marks[0] if self._end is None else (self._began, 0)
            seconds = (self._end or self._counted) - at
            return {
                **self._about, "running": self._running, "done": self._done, "failed": self._failed,
                "cancelled": self._cancelled, "state": self._state, "error": self._error, "note": note,
                "began": self._began, "end": self._end, "counted": self._counted,
                "rate": (self._done - before) / seconds if self._done and seconds > 0 else None,
            }  # fmt: skip


class JobLog:
    """The jobs of one agent: `agent.part(JobLog)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards `_jobs`
        self._jobs: dict[str, JobCounts] = {}  # the latest last
        self._numbers = Counter(1)
        agent.links.bus.register_table("jobs", self.table)

    def begin_job(self, kind: str, name: str, total: int | None, unit: str) -> JobCounts:
        """Begin a job, of the cell that runs on this thread. `unit`: what it counts, as "item"; `total`: how many."""
        number, cell = self._numbers.next(), self._agent.calls.values.current_cell()
        about = {
            "order": number, "kind": kind, "name": shorten_words(name, _LONGEST), "total": total, "unit": unit,
            "cell": cell.cell if cell else "", "number": cell.number if cell else None,
        }  # fmt: skip
        key, bus = str(number), self._agent.links.bus

        def report_change() -> None:
            bus.record_change("JobChanged", "jobs", key, job.make_row)

        job = JobCounts(about, report_change)
        dropped = None
        with self._lock:
            self._jobs[key] = job
            if len(self._jobs) > MOST:
                dropped = next((old for old, each in self._jobs.items() if each.has_ended), next(iter(self._jobs)))
                del self._jobs[dropped]
        report_change()
        if dropped is not None:
            bus.record_change("JobForgotten", "jobs", dropped, _no_row)
        return job

    def table(self) -> Table:
        with self._lock:
            jobs: dict[str, Any] = dict(self._jobs)
        return {key: job.make_row() for key, job in jobs.items()}


def _no_row() -> None:
    return None

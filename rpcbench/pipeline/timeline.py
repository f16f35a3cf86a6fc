"""The measured timeline of one pipeline step: its bubble, the idle share of the workers, as text, picture and trace.

It is made from rows of the `ops` table alone, so a live panel, a saved record and the command line show the same. Times
are the workers' own stamps, in seconds of one clock. `idle_ideal` simulates the same ops in the same order with equally
fast stages and transfers that take no time: it is the minimum, the bubble that this schedule cannot avoid.

Rule: operations are also Chrome trace events for Perfetto, for one step alone and within the trace of a world.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rpcbench.base.charts import Chart, write_picture
from rpcbench.base.errors import PipelineError
from rpcbench.base.ids import Row
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.simulate import Span, idle_between, make_chart, simulate

TraceEvent = dict[str, Any]
TRACK = 3
"""The thread id, in a trace, of the track of operations."""
_TOLD = ("step", "stage", "op", "microbatch", "bytes", "held")  # shown as arguments of a trace event


def trace(rows: Iterable[Row], names: Mapping[int, str]) -> dict[str, Any]:
    """Return a trace of these rows of the `ops` table, as plain data for JSON; time 0 is the begin of the first row."""
    ended = [row for row in rows if row["end"] is not None]  # a complete event needs a duration
    began = min((row["begin"] for row in ended), default=0.0)
    events = [trace_slice(row, row["worker"], began) for row in ended]
    for event in events:
        convert_to_microseconds(event)
    workers = sorted({row["worker"] for row in ended})
    metadata = [
        head for id_ in workers for head in metadata_events(id_, names.get(id_, f"worker{id_}"), {TRACK: "pipeline"})
    ]
    return {"traceEvents": [*metadata, *events], "displayTimeUnit": "ms"}


def trace_slice(row: Row, member: int, since: float) -> TraceEvent:
    """Return the event of an operation that has ended, with times in seconds after `since`."""
    args = {name: row[name] for name in _TOLD if name in row}
    at = {"pid": member, "tid": TRACK, "ts": row["begin"] - since, "dur": row["end"] - row["begin"]}
    name = Op(row["stage"], Kind(row["op"]), row["microbatch"]).label
    return {"ph": "X", "name": name, "cat": "pipeline", **at, "args": args}  # X: a complete event


def convert_to_microseconds(event: TraceEvent, since: float = 0.0) -> None:
    """Convert an event's times, in seconds, to the format's microseconds after `since`."""
    event["ts"] = round((event["ts"] - since) * 1e6, 3)
    if "dur" in event:
        event["dur"] = round(event["dur"] * 1e6, 3)


def metadata_events(id_: int, name: str, tracks: Mapping[int, str]) -> Iterator[TraceEvent]:
    """Yield the metadata events that name a member and its tracks."""
    yield {"ph": "M", "name": "process_name", "pid": id_, "args": {"name": name}}
    for track, about in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": id_, "tid": track, "args": {"name": about}}


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The ops of one step, each worker's in order of time. A running op ends at the time the timeline was made. In a
    notebook it is a picture."""

    step: int
    spans: tuple[Span, ...]
    running: frozenset[Span]  # those of `spans` that had not ended
    names: Mapping[int, str]  # of the workers, by id
    rows: tuple[Row, ...]

    @staticmethod
    def of(
        rows: Iterable[Row], step: int | None = None, now: float | None = None, names: Mapping[int, str] | None = None
    ) -> Timeline:
        """Return the timeline of a step, by default of the latest in `rows`. LookupError if `rows` has no op of it.
        `now`, in seconds of the rows' clock, is the end of running ops, by default the latest stamp. `names`: the
        workers' names by id; other workers are called worker1, worker2, …"""
        rows = list(rows)
        if step is None and rows:
            step = max(rows, key=lambda row: float(row["begin"]))["step"]
        rows = [row for row in rows if row["step"] == step]
        if step is None or not rows:
            raise LookupError("no pipeline step was recorded" if step is None else f"step {step} was not recorded")
        if now is None:
            now = max(time for row in rows for time in (row["begin"], row["end"]) if time is not None)
        spans = {_make_span(row, now): row["end"] is None for row in rows}
        ordered = tuple(sorted(spans, key=lambda span: (span.worker, span.begin, span.end)))
        return Timeline(step, ordered, frozenset(span for span in spans if spans[span]), names or {}, tuple(rows))

    @property
    def workers(self) -> list[int]:
        """Ids of the workers that ran an op, in order."""
        return sorted({span.worker for span in self.spans})

    @property
    def seconds(self) -> float:
        """Time from the begin of the first op to the end of the last."""
        return max(span.end for span in self.spans) - min(span.begin for span in self.spans)

    @property
    def idle(self) -> float:
        """Measured share of the workers' time in which no op ran, 0 to 1."""
        return idle_between([(span.begin, span.end) for span in self.spans], len(self.workers))

    @property
    def idle_ideal(self) -> float | None:
        """Idle share of the same ops on equally fast stages; None while rows of other workers are missing."""
        worker_ops = [
            [span.op for span in worker_spans] for _, worker_spans in groupby(self.spans, key=lambda span: span.worker)
        ]
        try:
            return simulate(worker_ops).idle
        except PipelineError:  # an op waits for one whose row has not arrived
            return None

    def text(self, width: int = 100) -> str:
        """Return a drawing of the step, a line per worker, at most `width` columns wide (20 of time at least)."""
        return self.chart.text(width)

    __repr__ = __str__ = text

    def svg(self) -> str:
        """Return the step as an SVG picture."""
        return self.chart.svg()

    def html(self) -> str:
        """Return the picture inside a page, with a description for screen readers."""
        return self.chart.html()

    _repr_html_ = html

    def trace(self) -> dict[str, Any]:
        """Return the step as Chrome trace events, for ui.perfetto.dev, with the bytes that each operation sent."""
        return trace(self.rows, self.names)

    def save(self, path: str | Path) -> Path:
        """Write a file in the format of its ending: .svg, .html, .txt or .json (`trace`). ValueError for others."""
        writers = {".svg": self.svg, ".html": self.html, ".txt": self.text, ".json": lambda: json.dumps(self.trace())}
        return write_picture(path, writers, "a timeline")

    @property
    def chart(self) -> Chart:
        names = {worker: self.names.get(worker, f"worker{worker}") for worker in self.workers}
        minimum = "" if self.idle_ideal is None else f" (minimum {self.idle_ideal:.1%})"
        title = f"step {self.step}: {self.seconds * 1e3:.1f} ms, bubble {self.idle:.1%}{minimum}"
        return make_chart(self.spans, names, title, self.running, " ms", 1e3)


def idle_share(rows: Iterable[Row]) -> float:
    """Return the measured idle share of the ops in `rows` that have ended, over the workers that ran them."""
    ended = [row for row in rows if row["end"] is not None]
    return idle_between([(row["begin"], row["end"]) for row in ended], len({row["worker"] for row in ended}))


def _make_span(row: Row, now: float) -> Span:
    op = Op(row["stage"], Kind(row["op"]), row["microbatch"])
    # An op of another worker may begin after `now`.
    return Span(row["worker"], op, row["begin"], max(now, row["begin"]) if row["end"] is None else row["end"])

"""One pipeline step as it was measured: how much of it the workers were idle, as text, picture and trace.

Made from rows of the `ops` table alone, so a live panel, a saved record and the command line say the same. Times are
the workers' own stamps, in seconds of one clock. `idle_ideal` replays the same ops in the same order as if every stage
took equally long and transfers no time: what this schedule cannot avoid.

Operations are Chrome trace events, too, for Perfetto: for a step alone, and for a world with all else in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rpcbench.base.charts import Chart, written
from rpcbench.base.errors import PipelineError
from rpcbench.base.events import Row
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.simulate import Span, chart, idle_between, simulate
from rpcbench.pipeline.simulate import idle_share as _idle_share

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


@dataclass(frozen=True, slots=True)
class Timeline:
    """The ops of one step, each worker's in order of time; a running op ends at the time the timeline was made."""

    step: int
    spans: tuple[Span, ...]
    running: frozenset[Span]
    names: Mapping[int, str]
    rows: tuple[Row, ...]

    @staticmethod
    def of(
        rows: Iterable[Row], step: int | None = None, now: float | None = None, names: Mapping[int, str] | None = None
    ) -> Timeline:
        """The timeline of a step, by default of the latest in `rows`. LookupError if `rows` has no op of it.

        `now`, in seconds of the rows' clock, is where running ops end: by default the latest stamp there is. `names`
        tells the workers' names by id; the others are called worker1, worker2, …
        """
        rows = list(rows)
        if step is None and rows:
            step = max(rows, key=lambda row: float(row["begin"]))["step"]
        rows = [row for row in rows if row["step"] == step]
        if step is None or not rows:
            raise LookupError("no pipeline step was recorded" if step is None else f"step {step} was not recorded")
        if now is None:
            now = max(time for row in rows for time in (row["begin"], row["end"]) if time is not None)
        spans = {_span(row, now): row["end"] is None for row in rows}
        ordered = tuple(sorted(spans, key=lambda span: (span.worker, span.begin, span.end)))
        return Timeline(step, ordered, frozenset(span for span in spans if spans[span]), names or {}, tuple(rows))

    @property
    def workers(self) -> list[int]:
        """Ids of the workers that ran an op, in order."""
        return sorted({span.worker for span in self.spans})

    @property
    def seconds(self) -> float:
        """From the begin of the first op to the end of the last."""
        return max(span.end for span in self.spans) - min(span.begin for span in self.spans)

    @property
    def idle(self) -> float:
        """Measured share of the workers' time in which no op ran, 0 to 1."""
        return _idle_share(self.spans, len(self.workers))

    @property
    def idle_ideal(self) -> float | None:
        """Idle share of the same ops on equally fast stages; None while rows of other workers are still to come."""
        lanes = [[span.op for span in lane] for _, lane in groupby(self.spans, key=lambda span: span.worker)]
        try:
            return simulate(lanes).idle
        except PipelineError:
            return None

    def text(self, width: int = 100) -> str:
        """The step drawn at most `width` columns wide (20 columns of time at least), a line for each worker."""
        return self.chart.text(width)

    def __str__(self) -> str:
        return self.text()

    def svg(self) -> str:
        """The step as a picture of its own."""
        return self.chart.svg()

    def html(self) -> str:
        """The picture inside a page, with its words for who sees none."""
        return self.chart.html()

    def _repr_html_(self) -> str:
        return self.html()

    def trace(self) -> dict[str, Any]:
        """The step as Chrome trace events, for ui.perfetto.dev, with the bytes that each operation has sent."""
        return trace(self.rows, self.names)

    def save(self, path: str | Path) -> Path:
        """Write it into a file, as its ending says: .svg, .html, .txt, or .json for `trace`. ValueError for others."""
        ways = {".svg": self.svg, ".html": self.html, ".txt": self.text, ".json": self._json}
        return written(path, ways, "a timeline")

    def _json(self) -> str:
        return json.dumps(self.trace())

    @property
    def chart(self) -> Chart:
        names = {worker: self.names.get(worker, f"worker{worker}") for worker in self.workers}
        ideal = "" if self.idle_ideal is None else f" (ideal {self.idle_ideal:.1%})"
        title = f"step {self.step}: {self.seconds * 1e3:.1f} ms, idle {self.idle:.1%}{ideal}"
        return chart(self.spans, names, title, self.running, " ms", 1e3)


def idle_share(rows: Iterable[Row]) -> float:
    """Measured idle share of the ops in `rows` that have ended, over the workers that ran them."""
    ended = [row for row in rows if row["end"] is not None]
    return idle_between([(row["begin"], row["end"]) for row in ended], len({row["worker"] for row in ended}))


def _span(row: Row, now: float) -> Span:
    op = Op(row["stage"], Kind(row["op"]), row["microbatch"])
    return Span(row["worker"], op, row["begin"], max(now, row["begin"]) if row["end"] is None else row["end"])

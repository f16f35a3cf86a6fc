"""One pipeline step as it was measured: how much of it the workers were idle, and a picture of it in text.

Made from rows of the `ops` table alone, so a live panel, a saved record and the command line say the same. Times are
the workers' own stamps, in seconds of one clock. `idle_ideal` replays the same ops in the same order as if every stage
took equally long and transfers no time: what this schedule cannot avoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.simulate import Span, idle_between, simulate
from rpcbench.pipeline.simulate import idle_share as _idle_share
from rpcbench.words.errors import PipelineError
from rpcbench.words.events import Row

FILL = {Kind.FORWARD: "░", Kind.BACKWARD: "▓", Kind.INPUT: "▒", Kind.WEIGHT: "▚", Kind.RECOMPUTE: "▞"}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradients",
    Kind.RECOMPUTE: "recomputed forward",
}
RUNNING = "…"
UNIT = " ms"
TICK = 10
NARROWEST = 20
SHORTEST = 1e-6


@dataclass(frozen=True, slots=True)
class Timeline:
    """The ops of one step, each worker's in order of time; a running op ends at the time the timeline was made."""

    step: int
    spans: tuple[Span, ...]
    running: frozenset[Span]
    names: Mapping[int, str]

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
        return Timeline(step, ordered, frozenset(span for span in spans if spans[span]), names or {})

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
        names = {worker: self.names.get(worker, f"worker{worker}") for worker in self.workers}
        margin = max(map(len, names.values()))
        columns = max(NARROWEST, width - margin - len(" │" + UNIT))
        scale = _Scale(min(span.begin for span in self.spans), max(self.seconds, SHORTEST), columns)
        lanes = [f"{name.rjust(margin)} │{self._lane(worker, scale)}" for worker, name in names.items()]
        return "\n".join([self._title(), *lanes, " " * (margin + 2) + scale.axis(), self._legend()])

    def _title(self) -> str:
        ideal = "" if self.idle_ideal is None else f" (ideal {self.idle_ideal:.1%})"
        return f"step {self.step}: {self.seconds * 1e3:.1f} ms, idle {self.idle:.1%}{ideal}"

    def _lane(self, worker: int, scale: _Scale) -> str:
        own = [span for span in self.spans if span.worker == worker]
        staged = len({span.op.stage for span in own}) > 1
        cells = [" "] * scale.columns
        for span in own:
            begin = min(scale.column(span.begin), scale.columns - 1)
            end = max(scale.column(span.end), begin + 1)
            cells[begin:end] = _block(span.op, end - begin, staged, span in self.running)
        return "".join(cells).rstrip()

    def _legend(self) -> str:
        kinds = {span.op.kind for span in self.spans}
        marks = ", ".join(f"{kind}0{FILL[kind]} {NAMES[kind]}" for kind in Kind if kind in kinds)
        still = f"; {RUNNING} still running" if self.running else ""
        return f"{marks} of micro-batch 0; blank: idle{still}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds to columns of text."""

    begin: float
    seconds: float
    columns: int

    def column(self, time: float) -> int:
        return round((time - self.begin) / self.seconds * self.columns)

    def axis(self) -> str:
        """Round numbers of milliseconds at least ten columns apart, each written where its time begins."""
        wide = self.columns / (self.seconds * 1e3)
        tick = _round_up(TICK / wide)
        line = ["─"] * self.columns
        for number in range(self.columns // TICK):
            at, label = round(number * tick * wide), f"{number * tick:g}"
            if at + len(label) < self.columns:
                line[at : at + len(label)] = label
        return "".join(line) + UNIT


def idle_share(rows: Iterable[Row]) -> float:
    """Measured idle share of the ops in `rows` that have ended, over the workers that ran them."""
    ended = [row for row in rows if row["end"] is not None]
    return idle_between([(row["begin"], row["end"]) for row in ended], len({row["worker"] for row in ended}))


def _span(row: Row, now: float) -> Span:
    op = Op(row["stage"], Kind(row["op"]), row["microbatch"])
    return Span(row["worker"], op, row["begin"], max(now, row["begin"]) if row["end"] is None else row["end"])


def _block(op: Op, width: int, staged: bool, running: bool) -> str:
    """One op, `width` columns wide, with as much of its name as there is room for."""
    labels = [str(op)] * staged + [f"{op.kind}{op.microbatch}", ""]
    block = next(label for label in labels if len(label) <= width).ljust(width, FILL[op.kind])
    return block[:-1] + RUNNING if running else block


def _round_up(number: float) -> float:
    """The next of …, 0.5, 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(number))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= number)

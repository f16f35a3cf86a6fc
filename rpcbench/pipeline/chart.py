"""Ops over time as a picture, of a measured step and of a simulated one: as text for a terminal, as SVG for a notebook.

A line for each worker, blank where it is idle. Kinds of ops are told apart by letter and shade, and by colour in SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.spans import Span
from rpcbench.words.picture import Picture, as_html, short

FILL = {
    Kind.FORWARD: "░",
    Kind.BACKWARD: "▓",
    Kind.INPUT: "▒",
    Kind.WEIGHT: "▚",
    Kind.RECOMPUTE: "▞",
    Kind.UPDATE: "▪",
    Kind.ALL_REDUCE: "◇",
}
COLOURS = {
    Kind.FORWARD: ("blue", "on-blue"),
    Kind.BACKWARD: ("amber", "on-amber"),
    Kind.INPUT: ("amber", "on-amber"),
    Kind.WEIGHT: ("purple", "paper"),
    Kind.RECOMPUTE: ("green", "paper"),
    Kind.UPDATE: ("red", "paper"),
    Kind.ALL_REDUCE: ("orange", "paper"),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradients",
    Kind.RECOMPUTE: "recomputed forward",
    Kind.UPDATE: "update of the weights",
    Kind.ALL_REDUCE: "all-reduce over the replicas",
}
RUNNING = "…"
TICK = 10
NARROWEST = 20
SHORTEST = 1e-6
_LEFT, _WIDE, _TALL, _GAP, _TOP = 120, 660, 34, 6, 44


@dataclass(frozen=True, slots=True)
class Chart:
    """Spans to be drawn: `names` tells the workers' names by id, `running` the ops that have not ended.

    `unit` is written at the time axis, where one unit of the spans' time is `per` of it.
    """

    spans: tuple[Span, ...]
    names: Mapping[int, str]
    title: str
    running: frozenset[Span] = frozenset()
    unit: str = ""
    per: float = 1.0

    @property
    def workers(self) -> list[int]:
        return sorted({span.worker for span in self.spans} | self.names.keys())

    @property
    def begin(self) -> float:
        return min((span.begin for span in self.spans), default=0.0)

    @property
    def length(self) -> float:
        """From the begin of the first op to the end of the last."""
        return max((span.end for span in self.spans), default=0.0) - self.begin

    # -- text
    def text(self, width: int = 100) -> str:
        """At most `width` columns wide (20 columns of time at least)."""
        margin = max(map(len, self.names.values()), default=0)
        columns = max(NARROWEST, width - margin - len(" │" + self.unit))
        scale = _Scale(self.begin, max(self.length, SHORTEST), columns, self.per)
        lanes = [f"{self.names[worker].rjust(margin)} │{self._lane(worker, scale)}" for worker in self.workers]
        return "\n".join([self.title, *lanes, " " * (margin + 2) + scale.axis() + self.unit, self._legend()])

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
        reduces = kinds & {Kind.ALL_REDUCE}
        marks = ", ".join(f"{kind}0{FILL[kind]} {NAMES[kind]}" for kind in Kind if kind in kinds - reduces)
        besides = "".join(f"; {kind}{FILL[kind]} {NAMES[kind]}" for kind in reduces)
        still = f"; {RUNNING} still running" if self.running else ""
        return f"{marks} of micro-batch 0{besides}; blank: idle{still}"

    # -- SVG
    def svg(self) -> str:
        """The picture as one element that may stand alone in a file; what it shows is in it as text, too."""
        picture = Picture(_LEFT + _WIDE + 20, "Pipeline", self.text())
        picture.text(12, 20, "Pipeline", "strong")
        self.draw(picture)
        return picture.svg()

    def html(self) -> str:
        """The picture inside a page, or a cell's output."""
        return as_html(self.svg(), self.text())

    def draw(self, picture: Picture, wide: float = _WIDE) -> None:
        """Lanes `wide` pixels wide, with their workers' names at the left and the title below."""
        workers, per_time = self.workers, wide / max(self.length, SHORTEST)
        for number, worker in enumerate(workers):
            y = _TOP + number * (_TALL + _GAP)
            picture.text(12, y + 21, short(self.names[worker], 15), "strong")
            picture.rect(_LEFT, y, wide, _TALL, "plate")
            own = [span for span in self.spans if span.worker == worker]
            staged = len({span.op.stage for span in own}) > 1
            for span in own:
                _rect(picture, span, _LEFT + (span.begin - self.begin) * per_time, per_time, y, staged)
        below = _TOP + len(workers) * (_TALL + _GAP) + 12
        picture.text(_LEFT, below, self.title, "note")
        _legend(picture, sorted({span.op.kind for span in self.spans}, key=list(Kind).index), below + 18)


def _rect(picture: Picture, span: Span, x: float, per_time: float, y: float, staged: bool) -> None:
    width = max(1.5, per_time * (span.end - span.begin) - 0.8)
    colour, ink = COLOURS[span.op.kind]
    picture.rect(x, y + 2, width, _TALL - 4, f"f-{colour}")
    for words in [str(span.op)] * staged + [span.op.label]:
        if width >= 7 * len(words) + 4:
            picture.text(x + width / 2, y + _TALL / 2 + 4, words, f"middle {ink}")
            return


def _legend(picture: Picture, kinds: list[Kind], y: float) -> None:
    x = float(_LEFT)
    for kind in kinds:
        picture.circle(x + 5, y - 4, 5, f"f-{COLOURS[kind][0]}")
        words = f"{kind} {NAMES[kind]}"
        picture.text(x + 15, y, words, "note")
        x += 30 + 6 * len(words)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Time to columns of text."""

    begin: float
    length: float
    columns: int
    per: float

    def column(self, time: float) -> int:
        return round((time - self.begin) / self.length * self.columns)

    def axis(self) -> str:
        """Round numbers at least ten columns apart, each written where its time begins."""
        wide = self.columns / (self.length * self.per)
        tick = _round_up(TICK / wide)
        line = ["─"] * self.columns
        for number in range(self.columns // TICK):
            at, label = round(number * tick * wide), f"{number * tick:g}"
            if at + len(label) < self.columns:
                line[at : at + len(label)] = label
        return "".join(line)


def _block(op: Op, width: int, staged: bool, running: bool) -> str:
    """One op, `width` columns wide, with as much of its name as there is room for."""
    labels = [str(op)] * staged + [op.label, ""]
    block = next(label for label in labels if len(label) <= width).ljust(width, FILL[op.kind])
    return block[:-1] + RUNNING if running else block


def _round_up(number: float) -> float:
    """The next of …, 0.5, 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(number))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= number)

"""Bars over time as a picture, a lane for each worker: as text for a terminal, as SVG for a notebook.

What bars mean is their maker's to say: a mark tells kinds apart, by a character in text and a colour in SVG. Later bars
cover earlier ones, and none is too short to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rpcbench.words.picture import Picture, as_html, short

RUNNING = "…"
TICK = 10
NARROWEST = 20
SHORTEST = 1e-6
_LEFT, _WIDE, _TALL, _GAP, _TOP = 120, 660, 34, 6, 44


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of bars: the character it is filled with, its colour and that of words on it, and what it means."""

    fill: str
    colour: str
    ink: str
    name: str


@dataclass(frozen=True, slots=True)
class Bar:
    """From `begin` to `end` in a lane. `labels`: what may stand on it, what says most first."""

    lane: int
    begin: float
    end: float
    mark: Mark
    labels: tuple[str, ...] = ()
    running: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars to be drawn: `names` tells the lanes' names, `marks` the kinds in the order of the legend.

    `legend` is that of the text. `unit` is written at the time axis, where one unit of the bars' time is `per` of it.
    """

    bars: tuple[Bar, ...]
    names: Mapping[int, str]
    head: str
    title: str
    marks: tuple[Mark, ...]
    legend: str
    unit: str = ""
    per: float = 1.0

    @property
    def lanes(self) -> list[int]:
        return sorted({bar.lane for bar in self.bars} | self.names.keys())

    @property
    def begin(self) -> float:
        return min((bar.begin for bar in self.bars), default=0.0)

    @property
    def length(self) -> float:
        """From the begin of the first bar to the end of the last."""
        return max((bar.end for bar in self.bars), default=0.0) - self.begin

    # -- text
    def text(self, width: int = 100) -> str:
        """At most `width` columns wide (20 columns of time at least)."""
        margin = max(map(len, self.names.values()), default=0)
        columns = max(NARROWEST, width - margin - len(" │" + self.unit))
        scale = _Scale(self.begin, max(self.length, SHORTEST), columns, self.per)
        lanes = [f"{self.names[lane].rjust(margin)} │{self._lane(lane, scale)}" for lane in self.lanes]
        return "\n".join([self.title, *lanes, " " * (margin + 2) + scale.axis() + self.unit, self.legend])

    def _lane(self, lane: int, scale: _Scale) -> str:
        cells = [" "] * scale.columns
        for bar in self.bars:
            if bar.lane == lane:
                begin = min(scale.column(bar.begin), scale.columns - 1)
                end = max(scale.column(bar.end), begin + 1)
                cells[begin:end] = _block(bar, end - begin)
        return "".join(cells).rstrip()

    # -- SVG
    def svg(self) -> str:
        """The picture as one element that may stand alone in a file; what it shows is in it as text, too."""
        picture = Picture(_LEFT + _WIDE + 20, self.head, self.text())
        picture.text(12, 20, self.head, "strong")
        self.draw(picture)
        return picture.svg()

    def html(self) -> str:
        """The picture inside a page, or a cell's output."""
        return as_html(self.svg(), self.text())

    def draw(self, picture: Picture, wide: float = _WIDE) -> None:
        """Lanes `wide` pixels wide, with their names at the left and the title below."""
        places = {lane: _TOP + number * (_TALL + _GAP) for number, lane in enumerate(self.lanes)}
        per_time = wide / max(self.length, SHORTEST)
        for lane, y in places.items():
            picture.text(12, y + 21, short(self.names[lane], 15), "strong")
            picture.rect(_LEFT, y, wide, _TALL, "plate")
        for bar in self.bars:
            _rect(picture, bar, _LEFT + (bar.begin - self.begin) * per_time, per_time, places[bar.lane])
        below = _TOP + len(places) * (_TALL + _GAP) + 12
        for line in self.title.splitlines():
            picture.text(_LEFT, below, line, "note")
            below += 16
        _legend(picture, self.marks, below + 2)


def _rect(picture: Picture, bar: Bar, x: float, per_time: float, y: float) -> None:
    width = max(1.5, per_time * (bar.end - bar.begin) - 0.8)
    picture.rect(x, y + 2, width, _TALL - 4, f"f-{bar.mark.colour}")
    for words in bar.labels:
        if width >= 7 * len(words) + 4:
            picture.text(x + width / 2, y + _TALL / 2 + 4, words, f"middle {bar.mark.ink}")
            return


def _legend(picture: Picture, marks: tuple[Mark, ...], y: float) -> None:
    x = float(_LEFT)
    for mark in marks:
        picture.circle(x + 5, y - 4, 5, f"f-{mark.colour}")
        picture.text(x + 15, y, mark.name, "note")
        x += 30 + 6 * len(mark.name)


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


def _block(bar: Bar, width: int) -> str:
    """One bar, `width` columns wide, with as much of its name as there is room for."""
    block = next(label for label in (*bar.labels, "") if len(label) <= width).ljust(width, bar.mark.fill)
    return block[:-1] + RUNNING if bar.running else block


def _round_up(number: float) -> float:
    """The next of …, 0.5, 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(number))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= number)

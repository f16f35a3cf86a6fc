"""Static charts: bars over time as text for a terminal, and shapes as SVG for a notebook or a file.

Guarantees
- An SVG follows the light or dark scheme of the reader's screen, and holds neither scripts nor addresses. This module
  alone escapes its text. Its colours are those of the live panels.
- A chart has one lane per worker. A mark distinguishes kinds of bars, by a character in text and a colour in SVG; the
  caller defines their meaning. Later bars cover earlier ones, and every bar is wide enough to be visible.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

LIGHT = {
    "paper": "#ffffff", "plate": "#f3f4f6", "rule": "#dcdfe4", "ink": "#24292f", "dim": "#656d76",
    "blue": "#0072b2", "green": "#008560", "orange": "#c26a00", "amber": "#e69f00", "red": "#c8421a",
    "purple": "#b3588f", "indigo": "#5a4fcf", "olive": "#75690a", "teal": "#0b7a8a",
    "on-blue": "#ffffff", "on-amber": "#1c1400",
}  # fmt: skip
DARK = {
    "paper": "#1b1f24", "plate": "#262b31", "rule": "#3b424a", "ink": "#e6e9ed", "dim": "#a3abb4",
    "blue": "#4fa8dc", "green": "#2fbf91", "orange": "#f0a33a", "amber": "#f0b429", "red": "#ff8a5c",
    "purple": "#dc8cba", "indigo": "#aaa2ff", "olive": "#cdbf4e", "teal": "#55c8d8",
    "on-blue": "#06121b", "on-amber": "#1c1400",
}  # fmt: skip
LETTER, STRONG = 6.9, 7.6  # widths of a character of the text, on average, in pixels
_COLOURED = ("blue", "green", "orange", "amber", "red", "purple", "indigo", "olive", "teal", "dim")  # of shapes
_XMLNS = "http://www.w3.org/2000/svg"


def _style_sheet() -> str:
    light, dark = (";".join(f"--{name}:{value}" for name, value in of.items()) for of in (LIGHT, DARK))
    rules = [  # CSS variables, so that one rule switches the scheme and nothing outside of this element changes
        f"svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}",
        "text{fill:var(--ink);font:13px system-ui,sans-serif}.note{fill:var(--dim)}",
        ".strong{font-weight:600}.code{font-family:ui-monospace,monospace;white-space:pre}",
        ".end{text-anchor:end}.middle{text-anchor:middle}",
        ".paper{fill:var(--paper)}.plate{fill:var(--plate)}.rule{stroke:var(--rule)}.line{fill:none;stroke-width:1.6}",
        ".dashed{stroke-dasharray:5 4}.on-blue{fill:var(--on-blue)}.on-amber{fill:var(--on-amber)}",
    ]
    rules += [f".s-{name}{{stroke:var(--{name})}}.f-{name}{{fill:var(--{name})}}" for name in _COLOURED]
    return "".join(rules)


class Picture:
    """An SVG picture: shapes in the order in which they are drawn; coordinates are pixels."""

    def __init__(self, width: float, title: str, words: str) -> None:
        self.width, self.height = width, 0.0  # the height grows with the shapes
        self._title, self._words = title, words
        self._parts: list[str] = []

    def draw_line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._add_element("line", kind, max(y1, y2), x1=x1, y1=y1, x2=x2, y2=y2)

    def draw_curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        places = " ".join(f"{_format_number(x)},{_format_number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="line {kind}" points="{places}"/>')
        self.height = max(self.height, *(y for _, y in points))

    def draw_rect(self, x: float, y: float, width: float, height: float, kind: str, rx: float = 3) -> None:
        self._add_element("rect", kind, y + height, x=x, y=y, width=max(0.0, width), height=height, rx=rx)

    def draw_circle(self, x: float, y: float, r: float, kind: str) -> None:
        self._add_element("circle", kind, y + r, cx=x, cy=y, r=r)

    def draw_text(self, x: float, y: float, words: object, kind: str = "") -> None:
        at = f'x="{_format_number(x)}" y="{_format_number(y)}"'
        self._parts.append(f'<text {at} class="{kind}">{escape(clean_for_xml(str(words)))}</text>')
        self.height = max(self.height, y + 4)

    def draw_arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        """Draw a line with an arrow head at its end."""
        self.draw_line(x1, y1, x2, y2, f"line s-{colour}")
        dx, dy = x2 - x1, y2 - y1
        length = math.hypot(dx, dy) or 1.0
        parts = (dx / length, dy / length, -dy / length, dx / length, x2, y2)
        matrix = " ".join(map(_format_number, parts))
        self._parts.append(f'<path class="f-{colour}" d="M1 0 L-7 -3.5 L-7 3.5 Z" transform="matrix({matrix})"/>')

    def svg(self) -> str:
        """Return the picture as one SVG element, which is valid as a file of its own."""
        width, height = _format_number(self.width), _format_number(self.height + 8)
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        words = f"<title>{escape(clean_for_xml(self._title))}</title><desc>{escape(clean_for_xml(self._words))}</desc>"
        paper = f'<rect class="paper" width="{width}" height="{height}"/>'
        head = f'<svg xmlns="{_XMLNS}" role="img" {size}>{words}<style>{_style_sheet()}</style>'
        return f"{head}{paper}{''.join(self._parts)}</svg>"

    def _add_element(self, name: str, kind: str, bottom: float, **numbers: float) -> None:
        attributes = " ".join(f'{key}="{_format_number(value)}"' for key, value in numbers.items())
        self._parts.append(f'<{name} class="{kind}" {attributes}/>')
        self.height = max(self.height, bottom)


def shorten_words(words: str, most: int) -> str:
    """Return the words, or their beginning and an ellipsis."""
    return words if len(words) <= most else words[: max(1, most - 1)] + "…"


def clean_for_xml(words: str) -> str:
    """Replace the characters that XML does not allow by spaces."""
    return "".join(c if c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff" else " " for c in words)


def _format_number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def write_picture(path: str | Path, writers: Mapping[str, Callable[[], str]], what: str) -> Path:
    """Write a file in the format of its suffix, by `{".svg": svg}`; return the path. ValueError for other suffixes."""
    target = Path(path)
    if target.suffix not in writers:
        raise ValueError(f"{target.name}: {what} is saved as {', '.join(writers)}")
    target.write_text(writers[target.suffix](), encoding="utf-8")
    return target


def as_html(svg: str, words: str) -> str:
    """Return an `img` element with the picture inside, and its words as `alt` text, for a page or a cell's output."""
    # An image runs no scripts, and its styles do not affect the page.
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{escape(clean_for_xml(words))}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


RUNNING = "…"  # ends a bar of an operation that still runs
TICK = 10  # columns of text between numbers at the axis, at least
NARROWEST = 20  # columns of time
SHORTEST = 1e-6  # length of a chart's time, so that a division by it is safe
_LEFT, _WIDE, _TALL, _GAP, _TOP = 120, 660, 34, 6, 44  # pixels: left margin, lane's width and height, gap, top margin


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of bars."""

    fill: str  # the character that fills a bar in text
    colour: str
    ink: str  # CSS class of the words on a bar
    name: str  # its meaning, in the legend


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from `begin` to `end` in a lane."""

    lane: int
    begin: float
    end: float
    mark: Mark
    labels: tuple[str, ...] = ()  # the first one that fits is drawn
    running: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Chart:
    """A chart of bars over time, one lane per worker. In a notebook it is a picture, else text."""

    bars: tuple[Bar, ...]
    names: Mapping[int, str]  # of the lanes
    head: str  # above the SVG
    title: str  # below the SVG, above the text
    marks: tuple[Mark, ...]  # in the order of the SVG's legend
    legend: str  # of the text
    unit: str = ""  # at the time axis
    per: float = 1.0  # units of the axis in one unit of the bars' time

    @property
    def lanes(self) -> list[int]:
        return sorted({bar.lane for bar in self.bars} | self.names.keys())

    @property
    def begin_time(self) -> float:
        return min((bar.begin for bar in self.bars), default=0.0)

    @property
    def total_time(self) -> float:
        """Return the time from the begin of the first bar to the end of the last."""
        return max((bar.end for bar in self.bars), default=0.0) - self.begin_time

    # -- text
    def text(self, width: int = 100) -> str:
        """Return the chart as text, at most `width` columns wide (with at least 20 columns of time)."""
        margin = max(map(len, self.names.values()), default=0)
        columns = max(NARROWEST, width - margin - len(" │" + self.unit))
        scale = _Scale(self.begin_time, max(self.total_time, SHORTEST), columns, self.per)
        lanes = [f"{self.names[lane].rjust(margin)} │{self._row_text(lane, scale)}" for lane in self.lanes]
        return "\n".join([self.title, *lanes, " " * (margin + 2) + scale.axis_text() + self.unit, self.legend])

    def _row_text(self, lane: int, scale: _Scale) -> str:
        cells = [" "] * scale.columns
        for bar in self.bars:
            if bar.lane == lane:
                begin = min(scale.column_at(bar.begin), scale.columns - 1)
                end = max(scale.column_at(bar.end), begin + 1)
                block = next(label for label in (*bar.labels, "") if len(label) <= end - begin)
                cells[begin:end] = block.ljust(end - begin, bar.mark.fill)
                if bar.running:
                    cells[end - 1] = RUNNING
        return "".join(cells).rstrip()

    # -- SVG
    def svg(self) -> str:
        """Return the chart as one SVG element, which is valid as a file; it contains the chart as text, too."""
        picture = Picture(_LEFT + _WIDE + 20, self.head, self.text())
        picture.draw_text(12, 20, self.head, "strong")
        self._draw(picture)
        return picture.svg()

    def html(self) -> str:
        """Return the chart as an element for a page, or a cell's output."""
        return as_html(self.svg(), self.text())

    _repr_html_ = html
    __repr__ = text

    def _draw(self, picture: Picture) -> None:
        """Draw the lanes with their names at the left and the title below."""
        places = {lane: _TOP + number * (_TALL + _GAP) for number, lane in enumerate(self.lanes)}
        per_time = _WIDE / max(self.total_time, SHORTEST)
        for lane, y in places.items():
            picture.draw_text(12, y + 21, shorten_words(self.names[lane], 14), "strong")
            picture.draw_rect(_LEFT, y, _WIDE, _TALL, "plate")
        for bar in self.bars:
            _draw_bar(picture, bar, _LEFT + (bar.begin - self.begin_time) * per_time, per_time, places[bar.lane])
        below = _TOP + len(places) * (_TALL + _GAP) + 12
        for line in self.title.splitlines():
            picture.draw_text(_LEFT, below, line, "note")
            below += 16
        _draw_legend(picture, self.marks, below + 2)


def _draw_bar(picture: Picture, bar: Bar, x: float, per_time: float, y: float) -> None:
    width = max(1.5, per_time * (bar.end - bar.begin) - 0.8)  # visible, and with a gap to the next bar
    picture.draw_rect(x, y + 2, width, _TALL - 4, f"f-{bar.mark.colour}")
    for words in bar.labels:
        if width >= STRONG * len(words) + 4:
            picture.draw_text(x + width / 2, y + _TALL / 2 + 4, words, f"middle {bar.mark.ink}")
            return


def _draw_legend(picture: Picture, marks: tuple[Mark, ...], y: float) -> None:
    x = float(_LEFT)
    for mark in marks:
        picture.draw_circle(x + 5, y - 4, 5, f"f-{mark.colour}")
        picture.draw_text(x + 15, y, mark.name, "note")
        x += 30 + LETTER * len(mark.name)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The conversion of time to columns of text."""

    begin: float
    length: float
    columns: int
    per: float

    def column_at(self, time: float) -> int:
        return round((time - self.begin) / self.length * self.columns)

    def axis_text(self) -> str:
        """Return the axis: round numbers at least ten columns apart, each at the column where its time begins."""
        wide = self.columns / (self.length * self.per)
        least = TICK / wide
        power = 10.0 ** math.floor(math.log10(least))
        tick = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
        line = ["─"] * self.columns
        for number in range(self.columns // TICK):
            at, label = round(number * tick * wide), f"{number * tick:g}"
            if at + len(label) < self.columns:
                line[at : at + len(label)] = label
        return "".join(line)

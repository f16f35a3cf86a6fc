"""Pictures for the lessons: bars, curves, blocks and lanes of time, each one call that returns a picture to show.

A picture is the last value of a cell, so it is stored with the notebook and seen without a kernel. Its colours are
those of the live panels, and follow the light or dark scheme of the screen: blue, green, orange, purple,
indigo, teal, olive, red, dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpcbench.base.charts import LETTER, STRONG, Picture, as_html

COLOURS = ("blue", "green", "orange", "purple", "indigo", "teal", "olive", "red")
WIDE, LEFT, ROW, TOP = 560, 130, 30, 44  # of the part for data; left of it; a row; above the rows
Cell = str | tuple[str, str] | None  # the words of a block, and its colour


@dataclass(frozen=True)
class Drawing:
    """A picture, and the words that say the same to those who cannot see it."""

    svg: str
    words: str

    def _repr_html_(self) -> str:
        return as_html(self.svg, self.words)

    def __repr__(self) -> str:
        return self.words


def bars(rows: Mapping[str, float | Mapping[str, float]], unit: str = "", title: str = "") -> Drawing:
    """Horizontal bars, one for each row; a row that is a mapping is a bar of several parts.

    >>> bars({"stage 0": {"parameters": 4, "gradients": 4}, "stage 3": {"parameters": 1, "gradients": 1}}, "MB")
    stage 0: parameters 4 MB, gradients 4 MB
    stage 3: parameters 1 MB, gradients 1 MB
    """
    parts = {name: dict(row) if isinstance(row, Mapping) else {"": row} for name, row in rows.items()}
    kinds = list(dict.fromkeys(kind for row in parts.values() for kind in row))
    longest = max((sum(row.values()) for row in parts.values()), default=0) or 1
    end = f" {unit}" if unit else ""
    words = "\n".join(
        f"{name}: " + ", ".join(f"{kind} {size:.4g}{end}".strip() for kind, size in row.items())
        for name, row in parts.items()
    )
    left = _margin(parts)
    picture = Picture(left + WIDE + 90, title, words)
    picture.text(12, 20, title, "strong")
    y: float = TOP
    for name, row in parts.items():
        picture.text(12, y + 16, name)
        x: float = left
        for kind, size in row.items():
            picture.rect(x, y, max(0.0, WIDE * size / longest - 1), ROW - 8, f"f-{_colour(kinds, kind)}")
            x += WIDE * size / longest
        picture.text(x + 6, y + 16, f"{sum(row.values()):.3g}{end}", "note")
        y += ROW
    if kinds != [""]:
        _legend(picture, kinds, left, y + 14)
    return Drawing(picture.svg(), words)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str = "",
    y: str = "",
    title: str = "",
    log: bool = False,
    points: Sequence[str] = (),
) -> Drawing:
    """Lines through points (x, y), one for each series; those named in `points` are drawn as dots.

    Args:
        x, y: The words at the axes, with units.
        log: Both axes are logarithmic; then all numbers must be above 0.
    """
    words = "\n".join(f"{name}: " + ", ".join(f"({a:.4g}, {b:.4g})" for a, b in line) for name, line in series.items())
    spans = [_Axis.of([place[axis] for line in series.values() for place in line], log) for axis in (0, 1)]
    high, left = 240, 80
    picture = Picture(left + WIDE + 60, title, words)
    picture.text(12, 20, title, "strong")
    picture.text(left, TOP - 6, y, "note")
    for mark in spans[1].marks():
        level = TOP + high * (1 - spans[1].share(mark))
        picture.line(left, level, left + WIDE, level, "rule")
        picture.text(left - 8, level + 4, f"{mark:g}", "note end")
    for mark in spans[0].marks():
        picture.text(left + WIDE * spans[0].share(mark), TOP + high + 18, f"{mark:g}", "note middle")
    picture.text(left + WIDE, TOP + high + 36, x, "note end")
    for name, line in series.items():
        places = [(left + WIDE * spans[0].share(a), TOP + high * (1 - spans[1].share(b))) for a, b in line]
        colour = _colour(list(series), name)
        if name in points:
            for place in places:
                picture.circle(*place, 4, f"f-{colour}")
        else:
            for (x1, y1), (x2, y2) in itertools.pairwise(places):
                picture.line(x1, y1, x2, y2, f"line s-{colour}")
    _legend(picture, list(series), left, TOP + high + 36)
    return Drawing(picture.svg(), words)


def blocks(rows: Mapping[str, Sequence[Cell]], columns: Sequence[str], title: str = "", wide: int = 90) -> Drawing:
    """A table of coloured blocks: which rank has which piece. A cell is its words, or (words, colour); None: empty.

    >>> blocks({"W": [("rows 0, 1", "blue"), ("rows 2, 3", "green")]}, ["rank 0", "rank 1"])
    W: rank 0 rows 0, 1; rank 1 rows 2, 3
    """
    told = {
        name: [("" if cell is None else cell if isinstance(cell, str) else cell[0]) for cell in row]
        for name, row in rows.items()
    }
    words = "\n".join(
        f"{name}: " + "; ".join(f"{column} {cell}" for column, cell in zip(columns, row, strict=True) if cell)
        for name, row in told.items()
    )
    left = _margin(rows)
    picture = Picture(left + wide * len(columns) + 20, title, words)
    picture.text(12, 20, title, "strong")
    for place, column in enumerate(columns):
        picture.text(left + wide * (place + 0.5), TOP, column, "note middle")
    for line, (name, row) in enumerate(rows.items()):
        y = TOP + 10 + ROW * line
        picture.text(12, y + 18, name)
        for place, cell in enumerate(row):
            if cell is not None:
                text, colour = (cell, "dim") if isinstance(cell, str) else cell
                picture.rect(left + wide * place, y, wide - 4, ROW - 4, f"f-{colour}")
                picture.text(left + wide * (place + 0.5) - 2, y + 18, text, "middle on-blue")
    return Drawing(picture.svg(), words)


def lanes(rows: Mapping[str, Sequence[tuple[float, float, str, str]]], unit: str = "ms", title: str = "") -> Drawing:
    """A timeline: for each lane bars of (begin, end, words, colour), drawn on one axis of time."""
    words = "\n".join(
        f"{name}: " + ", ".join(f"{text} {begin:.4g} to {end:.4g} {unit}" for begin, end, text, _ in row)
        for name, row in rows.items()
    )
    axis = _Axis.of([0.0, *(end for row in rows.values() for _, end, _, _ in row)], log=False)
    left = _margin(rows)
    picture = Picture(left + WIDE + 40, title, words)
    picture.text(12, 20, title, "strong")
    y: float = TOP - 8
    for name, row in rows.items():
        picture.text(12, y + 20, name)
        picture.rect(left, y, WIDE, ROW, "plate")
        for begin, end, text, colour in row:
            x, width = left + WIDE * axis.share(begin), WIDE * (axis.share(end) - axis.share(begin))
            picture.rect(x, y + 2, max(1.5, width - 1), ROW - 4, f"f-{colour}")
            if width > LETTER * len(text) + 4:
                picture.text(x + width / 2, y + 20, text, "middle on-blue")
        y += ROW + 5
    for mark in axis.marks():
        picture.text(left + WIDE * axis.share(mark), y + 14, f"{mark:g}", "note middle")
    picture.text(left + WIDE + 8, y + 14, unit, "note")
    return Drawing(picture.svg(), words)


def _margin(names: Mapping[str, object]) -> float:
    return max(LEFT, 24 + LETTER * max(map(len, names), default=0))


def _colour(kinds: Sequence[str], kind: str) -> str:
    return COLOURS[kinds.index(kind) % len(COLOURS)]


def _legend(picture: Picture, kinds: Sequence[str], x: float, y: float) -> None:
    for kind in kinds:
        picture.circle(x + 5, y - 4, 5, f"f-{_colour(kinds, kind)}")
        picture.text(x + 15, y, kind, "note")
        x += 34 + STRONG * len(kind)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool

    @staticmethod
    def of(values: Sequence[float], log: bool) -> _Axis:
        low, high = (min(values, default=1.0), max(values, default=1.0)) if log else (0.0, max(values, default=1.0))
        return _Axis(low, high if high > low else low + 1, log)

    def share(self, value: float) -> float:
        """Where the value lies between the ends, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Round numbers."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        step = 10.0 ** math.floor(math.log10(self.high))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if self.high / s <= 6)
        return [step * number for number in range(int(self.high / step) + 1)]

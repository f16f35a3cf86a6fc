"""Pictures for the lessons: bars, curves, blocks, tables, matrices and lanes of time, each one call that returns a
picture to show.

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
    _text(picture, 12, 20, title, "strong")
    y: float = TOP
    for name, row in parts.items():
        picture.draw_text(12, y + 16, name)
        x: float = left
        for kind, size in row.items():
            picture.draw_rect(x, y, max(0.0, WIDE * size / longest - 1), ROW - 8, f"f-{_colour(kinds, kind)}")
            x += WIDE * size / longest
        _text(picture, x + 6, y + 16, f"{_short(sum(row.values()))}{end}", "note")
        y += ROW
    if kinds != [""]:
        _legend(picture, [(kind, _colour(kinds, kind)) for kind in kinds], left, y + 14)
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
    _text(picture, 12, 20, title, "strong")
    _text(picture, left, TOP - 6, y, "note")
    for mark in spans[1].marks():
        level = TOP + high * (1 - spans[1].share(mark))
        picture.draw_line(left, level, left + WIDE, level, "rule")
        picture.draw_text(left - 8, level + 4, f"{mark:g}", "note end")
    for mark in spans[0].marks():
        picture.draw_text(left + WIDE * spans[0].share(mark), TOP + high + 18, f"{mark:g}", "note middle")
    picture.draw_text(left + WIDE, TOP + high + 36, x, "note end")
    for name, line in series.items():
        places = [(left + WIDE * spans[0].share(a), TOP + high * (1 - spans[1].share(b))) for a, b in line]
        colour = _colour(list(series), name)
        if name in points:
            for place in places:
                picture.draw_circle(*place, 4, f"f-{colour}")
        else:
            for (x1, y1), (x2, y2) in itertools.pairwise(places):
                picture.draw_line(x1, y1, x2, y2, f"line s-{colour}")
    crowded = sum(34 + STRONG * len(name) for name in series) > WIDE - STRONG * len(x)
    coloured = [(name, _colour(list(series), name)) for name in series]
    _legend(picture, coloured, left, TOP + high + (58 if crowded else 36))
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
    _text(picture, 12, 20, title, "strong")
    for place, column in enumerate(columns):
        picture.draw_text(left + wide * (place + 0.5), TOP, column, "note middle")
    for line, (name, row) in enumerate(rows.items()):
        y = TOP + 10 + ROW * line
        picture.draw_text(12, y + 18, name)
        for place, cell in enumerate(row):
            if cell is not None:
                text, colour = (cell, "dim") if isinstance(cell, str) else cell
                picture.draw_rect(left + wide * place, y, wide - 4, ROW - 4, f"f-{colour}")
                picture.draw_text(left + wide * (place + 0.5) - 2, y + 18, text, "middle on-blue")
    return Drawing(picture.svg(), words)


def tables(
    parts: Mapping[str, Sequence[Sequence[Cell]]],
    rows: Sequence[str],
    title: str = "",
    wide: int = 44,
    line: int = 4,
    columns: Sequence[str] = (),
) -> Drawing:
    """Small tables of coloured blocks, all with the same rows, `line` of them side by side: before and after, or step
    by step. A row may be shorter than others; None: empty; `columns` stand above each table.

    >>> tables({"before": [["1", "2"], ["3", "4"]], "after": [["4", "6"], ["4", "6"]]}, ["rank 0", "rank 1"])
    before: rank 0 has 1, 2; rank 1 has 3, 4
    after: rank 0 has 4, 6; rank 1 has 4, 6
    """
    told = {
        name: [["-" if cell is None else cell if isinstance(cell, str) else cell[0] for cell in row] for row in table]
        for name, table in parts.items()
    }
    words = "\n".join(
        f"{name}: " + "; ".join(f"{row} has {', '.join(cells) or 'nothing'}" for row, cells in zip(rows, table))
        for name, table in told.items()
    )
    left, gap, head = 24 + LETTER * max(map(len, rows), default=0), 28, 28 if columns else 10
    widths = {name: max(wide * max(map(len, table), default=1), STRONG * len(name)) for name, table in parts.items()}
    lines = [list(parts)[begin : begin + line] for begin in range(0, len(parts), line)]
    picture = Picture(max(left + sum(widths[name] + gap for name in names) for names in lines), title, words)
    _text(picture, 12, 20, title, "strong")
    y: float = TOP if title else 20
    for names in lines:
        for number, row in enumerate(rows):
            picture.draw_text(12, y + head + ROW * number + 18, row)
        x: float = left
        for name in names:
            picture.draw_text(x, y, name, "note")
            for place, column in enumerate(columns):
                picture.draw_text(x + wide * (place + 0.5) - 2, y + 18, column, "note middle")
            for number, cells in enumerate(parts[name]):
                for place, cell in enumerate(cells):
                    if cell is not None:
                        text, colour = (cell, "dim") if isinstance(cell, str) else cell
                        top = y + head + ROW * number
                        picture.draw_rect(x + wide * place, top, wide - 4, ROW - 4, f"f-{colour}")
                        picture.draw_text(x + wide * (place + 0.5) - 2, top + 18, text, "middle on-blue")
            x += widths[name] + gap
        y += ROW * len(rows) + 30 + head
    return Drawing(picture.svg(), words)


@dataclass(frozen=True)
class Matrix:
    """A matrix of `matrices`, and how it is cut over the ranks: by "columns" or "rows", "sum" (each rank has a part
    of a sum), or "" (whole on each rank)."""

    name: str
    rows: int
    columns: int
    cut: str = ""


def matrices(parts: Sequence[Matrix | str], ranks: int = 2, title: str = "", side: int = 15) -> Drawing:
    """A formula of matrices, each in the colours of the ranks that have its pieces.

    >>> matrices([Matrix("x", 4, 6), "@", Matrix("W", 6, 8, "columns"), "=", Matrix("y", 4, 8, "columns")])
    x: 4 by 6, whole on each rank
    W: 6 by 8, cut by columns
    y: 4 by 8, cut by columns
    """
    cuts = {"": "whole on each rank", "sum": "a part of the sum on each rank"}
    known = [part for part in parts if isinstance(part, Matrix)]
    words = "\n".join(
        f"{part.name}: {part.rows} by {part.columns}, {cuts.get(part.cut, f'cut by {part.cut}')}" for part in known
    )
    high = side * max(part.rows for part in known)
    width = sum(side * part.columns + 14 if isinstance(part, Matrix) else 22 + LETTER * len(part) for part in parts)
    picture = Picture(max(width + 30, 420), title, words)
    _text(picture, 12, 20, title, "strong")
    top_of_parts = TOP + 12  # there is a name above each matrix
    middle, x = top_of_parts + high / 2, 12.0
    for part in parts:
        if isinstance(part, str):
            picture.draw_text(x + 8 + LETTER * len(part) / 2, middle + 5, part, "middle")
            x += 22 + LETTER * len(part)
            continue
        wide, tall = side * part.columns, side * part.rows
        y = middle - tall / 2
        for rank in range(ranks if part.cut else 1):
            colour = COLOURS[rank] if part.cut else "dim"
            left, top, across, down = x, y, float(wide), float(tall)
            if part.cut == "columns":
                left, across = x + wide * rank / ranks, wide / ranks
            elif part.cut == "rows":
                top, down = y + tall * rank / ranks, tall / ranks
            elif part.cut == "sum":  # sheets that lie on each other
                left, top = x + 7 * rank, y + 7 * (rank - (ranks - 1) / 2)
                across = wide - 7 * (ranks - 1)
            picture.draw_rect(left, top, across - 2, down - 2, f"f-{colour}")
        picture.draw_text(x + wide / 2, y - 9, part.name, "middle strong")
        picture.draw_text(x + wide / 2, top_of_parts + high + 18, f"{part.rows} by {part.columns}", "note middle")
        x += wide + 14
    shown = [(f"rank {rank}", COLOURS[rank]) for rank in range(ranks)]
    shown += [("whole on each rank", "dim")] if any(not part.cut for part in known) else []
    _legend(picture, shown, 12, top_of_parts + high + 42)
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
    _text(picture, 12, 20, title, "strong")
    y: float = TOP - 8
    for name, row in rows.items():
        picture.draw_text(12, y + 20, name)
        picture.draw_rect(left, y, WIDE, ROW, "plate")
        for begin, end, text, colour in row:
            x, width = left + WIDE * axis.share(begin), WIDE * (axis.share(end) - axis.share(begin))
            picture.draw_rect(x, y + 2, max(1.5, width - 1), ROW - 4, f"f-{colour}")
            if width > LETTER * len(text) + 4:
                picture.draw_text(x + width / 2, y + 20, text, "middle on-blue")
        y += ROW + 5
    end = left + WIDE + 3
    for mark in axis.marks():
        x = left + WIDE * axis.share(mark)
        picture.draw_text(x, y + 14, f"{mark:g}", "note middle")
        end = max(end, x + LETTER * len(f"{mark:g}") / 2)
    _text(picture, end + 5, y + 14, unit, "note")
    return Drawing(picture.svg(), words)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _margin(names: Mapping[str, object]) -> float:
    return max(LEFT, 24 + LETTER * max(map(len, names), default=0))


def _colour(kinds: Sequence[str], kind: str) -> str:
    return COLOURS[kinds.index(kind) % len(COLOURS)]


def _legend(picture: Picture, coloured: Sequence[tuple[str, str]], x: float, y: float) -> None:
    for name, colour in coloured:
        picture.draw_circle(x + 5, y - 4, 5, f"f-{colour}")
        _text(picture, x + 15, y, name, "note")
        x += 34 + STRONG * len(name)


def _text(picture: Picture, x: float, y: float, words: str, kind: str) -> None:
    """Words that begin at x, and a picture that is wide enough for them."""
    picture.draw_text(x, y, words, kind)
    letter = STRONG if kind == "strong" else LETTER
    picture.width = max(picture.width, math.ceil(x + letter * len(words) + 6))


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
            powers = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            found = [mark for power in powers if self.low <= (mark := 10.0**power) <= self.high]
            if len(found) >= 3:
                return found
            return [m for p in powers for n in (1, 2, 5) if self.low <= (m := float(f"{n}e{p}")) <= self.high]
        step = 10.0 ** math.floor(math.log10(self.high))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if self.high / s <= 6)
        return [step * number for number in range(int(self.high / step) + 1)]

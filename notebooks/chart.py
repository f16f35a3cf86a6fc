"""Sequence charts: who sent what to whom, when it arrived, and what happened meanwhile; as SVG and as text.

Time goes down. An arrow begins where its message was sent and ends where it arrived, so messages that overtake each
other cross. A message that is still on its way has no end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, ROW, HEAD = 250, 120, 26, 46
PAPER, INK, DIM, BLUE, ORANGE, RED = "#ffffff", "#24292f", "#8c959f", "#0072b2", "#c26a00", "#c8421a"
BAD = ("frees the value", "too early!")


@dataclass(eq=False)
class Arrow:
    """A message. `sent` and `arrives` are rows of the chart; None: it is on its way."""

    source: int
    to: int
    text: str
    sent: int
    arrives: int | None = None


@dataclass
class Note:
    """Something that a member does by itself."""

    member: int
    text: str
    at: int


def tell(names: Sequence[str], history: Sequence[Arrow | Note]) -> str:
    """The history as lines of text, in order of time."""
    lines: list[tuple[int, str]] = []
    for item in history:
        if isinstance(item, Note):
            lines.append((item.at, f"{names[item.member]} {item.text}"))
        else:
            way = f"{item.text} {names[item.source]} → {names[item.to]}"
            lines.append((item.sent, f"    sent     {way}"))
            lines += [(item.arrives, f"    arrives  {way}")] if item.arrives else []
    return "\n".join(text for _, text in sorted(lines))


def draw(names: Sequence[str], history: Sequence[Arrow | Note]) -> str:
    """The history as an SVG picture."""
    rows = _rows(history)
    width, height = 2 * LEFT + WIDTH * (len(names) - 1), HEAD + ROW * (len(rows) + 1)
    parts = [_lifeline(member, name, height) for member, name in enumerate(names)]
    parts += [_arrow(item, rows, height) for item in history if isinstance(item, Arrow)]
    parts += [_note(item, rows) for item in history if isinstance(item, Note)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="{PAPER}"/>'
        f"{''.join(parts)}</svg>"
    )


def _rows(history: Sequence[Arrow | Note]) -> dict[int, int]:
    """Moments in which something happens, closed up."""
    times = {item.at for item in history if isinstance(item, Note)}
    times |= {time for item in history if isinstance(item, Arrow) for time in (item.sent, item.arrives) if time}
    return {time: row for row, time in enumerate(sorted(times))}


def _x(member: int) -> int:
    return LEFT + WIDTH * member


def _y(row: int) -> int:
    return HEAD + ROW * row


def _lifeline(member: int, name: str, height: int) -> str:
    x = _x(member)
    line = f'<line x1="{x}" x2="{x}" y1="30" y2="{height - 8}" stroke="{DIM}" stroke-dasharray="2 3"/>'
    return f'{line}<text x="{x}" y="20" text-anchor="middle" font-weight="600" fill="{INK}">{escape(name)}</text>'


def _arrow(arrow: Arrow, rows: dict[int, int], height: int) -> str:
    x1, y1, x2 = _x(arrow.source), _y(rows[arrow.sent]), _x(arrow.to)
    way = 1 if x2 > x1 else -1
    if arrow.arrives is None:
        colour, (x2, y2) = ORANGE, (x1 + way * WIDTH // 2, min(y1 + ROW // 2, height - 8))
    else:
        colour, y2 = BLUE, _y(rows[arrow.arrives])
    style = f'stroke="{colour}" stroke-width="1.5"' + (' stroke-dasharray="5 4"' if arrow.arrives is None else "")
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>'
    tip = "" if arrow.arrives is None else _tip(x1, y1, x2, y2, colour)
    near, anchor = x1 + way * 12, "start" if way > 0 else "end"
    label = f'<text x="{near}" y="{y1 - 5}" text-anchor="{anchor}" fill="{colour}">{escape(arrow.text)}</text>'
    return line + tip + label


def _tip(x1: int, y1: int, x2: int, y2: int, colour: str) -> str:
    """The head of an arrow, along its line."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    a = f"{x2 - 9 * dx + 4 * dy:.1f},{y2 - 9 * dy - 4 * dx:.1f}"
    b = f"{x2 - 9 * dx - 4 * dy:.1f},{y2 - 9 * dy + 4 * dx:.1f}"
    return f'<polygon points="{x2},{y2} {a} {b}" fill="{colour}"/>'


def _note(note: Note, rows: dict[int, int]) -> str:
    x, y = _x(note.member), _y(rows[note.at])
    colour = RED if note.text in BAD else INK
    wide = 7 * len(note.text) + 14
    box = f'<rect x="{x - wide // 2}" y="{y - 10}" width="{wide}" height="20" rx="5" fill="{PAPER}" stroke="{colour}"/>'
    return f'{box}<text x="{x}" y="{y + 4}" text-anchor="middle" fill="{colour}">{escape(note.text)}</text>'

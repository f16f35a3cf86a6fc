"""Sequence charts: which member sent what to which other, when it arrived, and what happened meanwhile.

Time goes down. An arrow begins where its message was sent and ends where it arrived, so messages that overtake each
other cross. A message that is still in flight has no end. `Chart` is a picture for a cell, `of(trace)` the chart of
what `rpcbench.trace()` has seen, and `rows(trace)` the same messages as plain tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rpcbench.base.charts import LETTER, Picture, as_html
from rpcbench.telemetry.trace import Trace

WIDTH, LEFT, ROW, HEAD = 250, 120, 32, 50
BAD = ("frees the value", "too early!")


@dataclass(eq=False)
class Arrow:
    """A message. `sent` and `arrives` are times, which become rows of the chart; None: it is in flight."""

    source: int
    to: int
    text: str
    sent: float
    arrives: float | None = None
    colour: str = "blue"


@dataclass
class Note:
    """Something that a member does by itself."""

    member: int
    text: str
    at: float


@dataclass(frozen=True)
class Chart:
    """A history as a picture, and as text where no picture is shown."""

    names: Sequence[str]
    history: Sequence[Arrow | Note]
    title: str = ""

    def _repr_html_(self) -> str:
        return as_html(draw(self.names, self.history, self.title), tell(self.names, self.history))

    def __repr__(self) -> str:
        return tell(self.names, self.history)


class Row(NamedTuple):
    """A message of a trace. Times are in seconds, by the clock of this process."""

    kind: str
    sender: str
    receiver: str
    bytes: int
    sent: float
    received: float | None


def rows(trace: Trace, kinds: Iterable[str]) -> list[Row]:
    """The messages of these kinds, in the order of sending."""
    view, wanted = trace.view, set(kinds)
    names = {worker["id"]: worker["name"] for worker in view["workers"].values()}
    found = [row for row in view["messages"].values() if row["kind"] in wanted]
    return [
        Row(row["kind"], names[row["from"]], names[row["to"]], row["bytes"], row["sent"], row["received"])
        for row in found
    ]


def of(trace: Trace, kinds: Iterable[str], title: str = "") -> Chart:
    """The chart of these kinds of messages."""
    found = rows(trace, kinds)
    names = sorted({name for row in found for name in (row.sender, row.receiver)})  # notebook, worker1, worker2
    colours = {"Result": "green", "Failure": "red", "Gradients": "orange"}
    arrows = [
        Arrow(
            names.index(row.sender), names.index(row.receiver), row.kind, row.sent, row.received,
            colours.get(row.kind, "blue"),
        )
        for row in found
    ]  # fmt: skip
    return Chart(names, arrows, title)


def tell(names: Sequence[str], history: Sequence[Arrow | Note]) -> str:
    """The history as lines of text, in order of time."""
    lines: list[tuple[float, str]] = []
    for item in history:
        if isinstance(item, Note):
            lines.append((item.at, f"{names[item.member]} {item.text}"))
        else:
            way = f"{item.text} {names[item.source]} → {names[item.to]}"
            lines.append((item.sent, f"    sent     {way}"))
            lines += [(item.arrives, f"    arrives  {way}")] if item.arrives is not None else []
    return "\n".join(text for _, text in sorted(lines))


def draw(names: Sequence[str], history: Sequence[Arrow | Note], title: str = "") -> str:
    """The history as an SVG picture."""
    times = _rows(history)
    picture = Picture(2 * LEFT + WIDTH * (len(names) - 1), title, tell(names, history))
    top = HEAD + (24 if title else 0)
    if title:
        picture.draw_text(12, 20, title, "strong")
    bottom = top + ROW * len(times)
    for member, name in enumerate(names):
        picture.draw_text(_x(member), top - 26, name, "strong middle")
        picture.draw_line(_x(member), top - 16, _x(member), bottom, "rule dashed")
    for item in history:
        if isinstance(item, Arrow):
            _arrow(picture, item, {time: top + ROW * row for time, row in times.items()}, bottom)
    for item in history:
        if isinstance(item, Note):
            _note(picture, item, top + ROW * times[item.at])
    return picture.svg()


def _rows(history: Sequence[Arrow | Note]) -> dict[float, int]:
    """Moments in which something happens, closed up."""
    times = {item.at for item in history if isinstance(item, Note)}
    arrows = [item for item in history if isinstance(item, Arrow)]
    times |= {time for item in arrows for time in (item.sent, item.arrives) if time is not None}
    return {time: row for row, time in enumerate(sorted(times))}


def _x(member: int) -> int:
    return LEFT + WIDTH * member


def _arrow(picture: Picture, arrow: Arrow, y: dict[float, float], bottom: float) -> None:
    x1, y1, x2 = _x(arrow.source), y[arrow.sent], _x(arrow.to)
    way = 1 if x2 > x1 else -1
    if arrow.arrives is None:
        end = (x1 + way * WIDTH / 2, min(y1 + ROW / 2, bottom))
        picture.draw_line(x1, y1, *end, "line s-orange dashed")
    else:
        picture.draw_arrow(x1, y1, x2, y[arrow.arrives], arrow.colour)
    picture.draw_text(x1 + way * 12, y1 - 5, arrow.text, "note" if way > 0 else "note end")


def _note(picture: Picture, note: Note, y: float) -> None:
    colour = "red" if note.text in BAD else "dim"
    wide = LETTER * len(note.text) + 16
    picture.draw_rect(_x(note.member) - wide / 2, y - 11, wide, 22, f"f-{colour}", 5)
    picture.draw_text(_x(note.member), y + 4, note.text, "middle on-blue")

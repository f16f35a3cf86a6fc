"""Static SVG pictures of views, for committed notebooks and static books.

They are drawn in Python, as nbclient and scripts have no browser. A view without a drawing is shown as its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from rpcbench.base.charts import (
    CODE,
    LETTER,
    STRONG,
    Columns,
    Picture,
    as_html,
    draw_heads,
    layout_columns,
    shorten_words,
)
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row
from rpcbench.pipeline.timeline import Timeline
from rpcbench.telemetry.message_views import FAMILY_COLOURS, MESSAGE_STATES
from rpcbench.telemetry.recording import save_text
from rpcbench.telemetry.shard_pictures import draw_shards
from rpcbench.telemetry.summary import row_time, rref_sort_key, step_line, summarize_view
from rpcbench.telemetry.views import RREF_STATES, View
from rpcbench.telemetry.worker_columns import Column, columns_of, figure_words, format_value

# All lengths are in pixels of the picture.
_TOP, _ROW, _LINE = 58, 24, 15  # first row; height of a row; of a line below it
_WIDE = {  # of a column without its bar, by its kind; those of other kinds are not drawn
    "name": 138, "activity": 144, "share": 54, "bytes": 74, "count": 50, "text": 120, "threads": 100, "traffic": 136,
}  # fmt: skip
_BAR, _GAP, _SQUARES = 40, 6, 6  # width of a bar; to its text; squares for threads, at most


def draw_workers(picture: Picture, view: View, _at: Columns) -> None:
    """Draw a row for each worker with the last line of its log, and the actions that have failed."""
    there = columns_of(view["workers"])
    drawn = [column for column in there if column.kind in _WIDE and not column.is_optional]
    edges = list(accumulate((_WIDE[column.kind] + (_BAR + _GAP) * bool(column.curve) for column in drawn), initial=12))
    picture.width = max(picture.width, edges[-1])
    places, below = list(zip(drawn, edges, strict=False)), edges[1]
    for column, x in places:
        picture.draw_text(x, _TOP - 12, column.head, "note")
    rows = sorted(view["workers"].values(), key=lambda row: int(row["id"]))
    y: float = _TOP
    for row in rows:
        picture.draw_rect(4, y - 4, picture.width - 8, 1, "plate")
        for column, x in places:
            _draw_cell(picture, column, row, rows, x, y + 12)
        y += _ROW
        if words := figure_words(row, (column for column in there if column.is_optional)):
            picture.draw_text(below, y + 4, words, "note")
            y += _LINE
        if last := view["logs"].get(str(row["id"]), {}).get("text", "").rpartition("\n")[2]:
            picture.draw_text(below, y + 4, shorten_words(last, 80), "note code")
            y += _LINE
    for key, action in view["actions"].items():
        if action["state"] == "failed":
            picture.draw_text(edges[0], y + 14, shorten_words(f"{key} failed: {action['error']}", 110), "note")
            y += _LINE


def _draw_cell(picture: Picture, column: Column, row: Row, rows: list[Row], x: float, y: float) -> None:
    words = format_value(column, row)
    if column.kind == "name":
        again = f" (start {row['incarnation'] + 1})" if row["incarnation"] else ""
        picture.draw_text(x, y, shorten_words(row["name"] + again, 17), "strong")
    elif column.kind == "activity":
        picture.draw_text(x, y, shorten_words(row["now"], 60 if row["busy"] is None else 20))
    elif column.kind == "threads" and words:
        _draw_threads(picture, row["busy"], row["waiting"] or 0, x, y)
    elif column.curve and words:
        full = 1.0 if column.kind == "share" else max(other[column.key] or 0 for other in rows)
        _draw_bar(picture, x, y, row[column.key] / max(1, full), words)
    else:
        picture.draw_text(x, y, words)


def _draw_bar(picture: Picture, x: float, y: float, share: float, words: str) -> None:
    picture.draw_rect(x, y - 8, _BAR, 8, "plate")
    picture.draw_rect(x, y - 8, _BAR * min(1.0, share), 8, "f-blue")
    picture.draw_text(x + _BAR + _GAP, y, words)


def _draw_threads(picture: Picture, busy: int, waiting: int, x: float, y: float) -> None:
    """Draw a full square for each running thread, and a hollow one for each that waits."""
    marks = ["f-green"] * busy + ["line s-green"] * waiting
    for n, mark in enumerate(marks[:_SQUARES]):
        picture.draw_rect(x + n * 11, y - 8, 8, 8, mark, 1)
    if len(marks) > _SQUARES:
        picture.draw_text(x + _SQUARES * 11, y, f"+{len(marks) - _SQUARES}", "note")
    if not marks:
        picture.draw_text(x, y, "none busy", "note")


ROW = 22  # height of a row
MOST = 60
"""Rows that a picture has at most: a committed notebook stores it as text."""


def draw_left_out(picture: Picture, rows: int, drawn: int, y: float) -> None:
    """Draw the number of rows that are left out, if any."""
    if rows > drawn:
        picture.draw_text(12, y + 15, f"… and {rows - drawn} more, not drawn", "note")


def draw_messages(picture: Picture, view: View, at: Columns) -> None:
    """Draw an arrow for each message except notices, and dots for each collective, in the order of time."""
    draw_heads(picture, view["workers"], at)
    rows = [row for row in view["messages"].values() if row["kind"] != "Notice"]
    rows = sorted([*rows, *_collective_rows(view)], key=row_time)
    drawn, (slots, last) = rows[:MOST], _assign_slots(rows[:MOST])
    for worker in view["workers"].values():
        x = at.x(int(worker["id"]))
        picture.draw_line(x, at.top, x, at.top + (last + 1) * ROW, "rule")
    began = row_time(rows[0]) if rows else 0.0
    for n, row in enumerate(drawn):
        y1, y2 = (at.top + (slot + 0.5) * ROW for slot in slots[n])
        picture.draw_text(66, y1 + 4, _format_seconds(row_time(row) - began), "note end")
        # The label ends before the first lifeline.
        picture.draw_text(76, y1 + 4, shorten_words(row["words"], int((at.left + at.step / 2 - 84) / LETTER)))
        (_draw_collective if "came" in row else _draw_message)(picture, row, at, y1, y2)
    draw_left_out(picture, len(rows), len(drawn), at.top + (last + 1) * ROW)


def _format_seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.1f} ms"


def _collective_rows(view: View) -> list[Row]:
    """Return collectives as rows like messages; `entered_members` and `missing` are ids of members."""
    ids = {str(worker["name"]): int(worker["id"]) for worker in view["workers"].values()}
    entered_members: dict[str, list[int]] = {}
    for entry in view["entries"].values():
        entered_members.setdefault(entry["collective"], []).append(entry["worker"])
    return [
        {
            **row, "kind": "", "words": f"{row['op']} #{row['number']}", "sent": row["begin"], "received": None,
            "came": entered_members[key], "missing": [ids[name] for name in row["missing"] if name in ids],
        }
        for key, row in view["collectives"].items()
    ]  # fmt: skip


def _draw_collective(picture: Picture, row: Row, at: Columns, y: float, _: float) -> None:
    """Draw a dot for each member that has entered, red with a ring for the last, and a ring for each missing one."""
    # The ring marks the last one for readers who cannot see the colour.
    places = [at.x(id_) for id_ in (*row["came"], *row["missing"])]
    picture.draw_line(min(places), y, max(places), y, "line s-amber" + " dashed" * (row["state"] != "done"))
    for id_ in row["came"]:
        picture.draw_circle(at.x(id_), y, 5, "f-red" if id_ == row["last"] else "f-amber")
    for id_ in row["missing"]:
        picture.draw_circle(at.x(id_), y, 5, "paper")
        picture.draw_circle(at.x(id_), y, 5, "line s-amber")
    if row["last"] is not None:
        picture.draw_circle(at.x(row["last"]), y, 7.5, "line s-red")
    outcome = row["state"] if row["state"] != "done" else _format_seconds(row["end"] - row["begin"])
    picture.draw_text(at.width - 12, y + 4, outcome, "note end")


def _draw_message(picture: Picture, row: Row, at: Columns, y1: float, y2: float) -> None:
    x1, x2, colour = at.x(row["from"]), at.x(row["to"]), FAMILY_COLOURS.get(row["family"], "dim")
    if x1 == x2:  # a message to itself is a hook at its lifeline
        low = max(y2, y1 + 7)
        picture.draw_path(f"M{x1} {y1 - 3} h16 V{low} H{x1 + 2}", f"line s-{colour}")
        picture.draw_arrow_head(x1 + 1, low, -1, 0, colour)
    elif row["state"] == "received":
        # Level until the last gap, as in panels/messages.js: so it touches no end of another message.
        far = y1 != y2 and abs(x2 - x1) > 1.5 * at.step
        bend = x2 - math.copysign(0.6 * at.step, x2 - x1) if far else x1
        if far:
            picture.draw_line(x1, y1, bend, y1, f"line s-{colour}")
        picture.draw_arrow(bend, y1, x2, y2, colour)
    else:  # lost or in transit: the arrow ends short of the receiver
        end = x1 + 0.72 * (x2 - x1)
        picture.draw_arrow(x1, y1, end, y2, colour, "dashed")
        picture.draw_text(at.width - 12, y1 + 4, MESSAGE_STATES[row["state"]], "note end")


def _assign_slots(rows: Iterable[Row]) -> tuple[list[list[int]], int]:
    """Return for each message the slots of sending and receipt (equal if nothing happens in between), and the last."""
    # Slots, not times: on a true scale the messages of a burst would hide each other.
    moments = []
    for n, row in enumerate(rows):
        moments.append((row_time(row), n, 0))
        if row["sent"] is not None and row["received"] is not None:
            moments.append((max(row["sent"], row["received"]), n, 1))
    found: list[list[int]] = [[0, 0] for _ in {n for _, n, _ in moments}]
    slot, before = -1, -1
    for _, n, end in sorted(moments, key=lambda moment: (moment[0], moment[2], moment[1])):
        slot += not (end and before == n)
        found[n] = [found[n][0], slot] if end else [slot, slot]
        before = n
    return found, max(0, slot)


_TITLE, _LINES = 20, 16


class Snapshot:
    """A view at one moment: displayed as a picture, printed as text."""

    def __init__(self, view: View) -> None:
        self.text = summarize_view(view)
        self.svg = _draw_view(view, self.text)
        self.html = as_html(self.svg, self.text)

    def save(self, path: str | Path) -> Path:
        """Write it to a file that ends in .svg or .html, and return its path. Raises ValueError for other endings."""
        target = Path(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target.name}: a snapshot is saved as .svg or .html")
        page = f'<!doctype html><meta charset="utf-8"><title>rpcbench</title>{self.html}'
        return save_text(target, self.svg if target.suffix == ".svg" else page)

    def _repr_mimebundle_(self, **keys: Any) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}

    def __str__(self) -> str:
        return self.text


def _draw_view(view: View, words: str) -> str:
    title, draw = next((found for section, found in _DRAWINGS.items() if section in view), ("Held messages", None))
    at = layout_columns(view.get("workers", {}), 290 if "messages" in view else 176)
    picture = Picture(at.width, title, words)
    picture.draw_text(12, _TITLE, title, "strong")
    if draw is None:
        for n, line in enumerate(words.splitlines()):
            picture.draw_text(12, 2.4 * _TITLE + n * _LINES, line, "code")
    else:
        beside = 30 + STRONG * len(title)
        picture.draw_text(
            beside, _TITLE, shorten_words(words.partition("\n")[0], int((at.width - beside) / LETTER)), "note"
        )
        draw(picture, view, at)
    return picture.svg()


# -- RRefs
def _draw_rrefs(picture: Picture, view: View, at: Columns) -> None:
    draw_heads(picture, view["workers"], at)
    keys = sorted(view["rrefs"], key=rref_sort_key)
    forks: dict[str, list[Row]] = {}
    for fork in view["forks"].values():
        forks.setdefault(fork["rref"], []).append(fork)
    for n, key in enumerate(keys[:MOST]):
        rref = view["rrefs"][key]
        _draw_rref(picture, rref, forks.get(key, []), at, at.top + n * ROW)
    draw_left_out(picture, len(keys), MOST, at.top + MOST * ROW)


def _draw_rref(picture: Picture, rref: Row, forks: list[Row], at: Columns, y: float) -> None:
    middle, owner = y + ROW / 2, at.x(rref["owner"])
    beside = 22 + 9 * CODE
    picture.draw_text(12, middle + 4, shorten_words(rref["rref"], 9), "code strong")
    room = int((at.left + at.step / 2 - beside - 20) / LETTER)  # to the first column's mark
    picture.draw_text(beside, middle + 4, shorten_words(rref["type"] or "type unknown", room), "note")
    for fork in forks:
        if fork["state"] == "confirmed":
            picture.draw_line(owner, middle, at.x(fork["holder"]), middle, "line s-dim")
        elif fork["holder"] != rref["owner"] and fork["state"] in _WAYS:
            picture.draw_arrow(at.x(fork["holder"]), middle, owner, middle, _WAYS[fork["state"]], "dashed")
    own = {"failed": "red", "lost": "dim", "unlisted": "dim"}.get(rref["state"], rref["colour"])
    picture.draw_rect(owner - 7, middle - 7, 14, 14, f"f-{own}")
    for fork in forks:  # after the owner's square, which is wider; a fork of the owner itself is beside it
        beside = 16 if fork["holder"] == rref["owner"] else 0
        picture.draw_circle(at.x(fork["holder"]) + beside, middle, 6, _FORKS.get(fork["state"], f"f-{rref['colour']}"))
    picture.draw_text(at.width - 12, middle + 4, RREF_STATES[rref["state"]], "note end")


_WAYS = {"pending": "orange", "deleting": "dim"}  # messages to the owner that are in transit
_FORKS = {"listed": "f-dim", "pending": "paper line s-orange", "deleting": "paper line s-dim"}


# -- autograd contexts
def _draw_contexts(picture: Picture, view: View, at: Columns) -> None:
    draw_heads(picture, view["workers"], at)
    y = at.top
    for context in list(view["contexts"].values())[:MOST]:
        y = _draw_context(picture, view, context["context"], at, y)
    draw_left_out(picture, len(view["contexts"]), MOST, y)


def _draw_context(picture: Picture, view: View, key: str, at: Columns, y: float) -> float:
    def of(section: str) -> list[Row]:
        return [row for row in view[section].values() if row["context"] == key]

    picture.draw_rect(4, y, at.width - 8, 1, "plate")
    picture.draw_text(12, y + 18, key, "code strong")
    if view["contexts"][key]["ended"] is not None:
        picture.draw_text(12, y + 34, "released", "note")
    for member in of("members"):
        held = count_noun(member["gradients"], "gradient")
        fits = LETTER * len(held) < at.step
        picture.draw_text(at.x(member["worker"]), y + 18, held if fits else member["gradients"], "note middle")
    y += ROW + 4
    y += ROW * max([_draw_operations(picture, rows, at, y) for rows in _by_worker(of("parts"))], default=0)
    for link in of("links"):
        x1, x2, state = at.x(link["from"]), at.x(link["to"]), link["state"]
        count = f"{link['sent']} sent, {link['received']} received"
        colour, line, note = ("blue", "", "") if state == "paired" else ("blue", "dashed", f" ({state})")
        picture.draw_text(12, y + 15, count + note, "note")
        picture.draw_arrow(x1, y + 11, x2, y + 11, colour, line)
        ends = link["from"], link["to"]
        if back := sum(message["back"] for message in of("messages") if (message["from"], message["to"]) == ends):
            y += ROW
            picture.draw_text(12, y + 15, f"{count_noun(back, 'gradient')} back", "note")
            picture.draw_arrow(x2, y + 11, x1, y + 11, "orange")
        y += ROW
    return y + 6


_MOST_PARTS = 4  # of one worker


def _by_worker(parts: list[Row]) -> list[list[Row]]:
    found: dict[int, list[Row]] = {}
    for part in parts:
        found.setdefault(part["worker"], []).append(part)
    return list(found.values())


def _draw_operations(picture: Picture, parts: list[Row], at: Columns, y: float) -> int:
    """Draw the operations of a worker, filled if they have run backward; return the number of rows."""
    wide = at.step - 8
    for n, part in enumerate(parts[:_MOST_PARTS]):
        ran, top = part["state"] == "ran", y + n * ROW
        names = ", ".join(op.partition(" ")[0] for op in part["ops"]) or "passed on"
        if n == _MOST_PARTS - 1 and len(parts) > _MOST_PARTS:
            names, ran = f"… {len(parts) - n} more parts", False
        picture.draw_rect(at.x(part["worker"]) - wide / 2, top + 2, wide, 17, "f-amber" if ran else "plate")
        ink = "on-amber middle" if ran else "middle"
        picture.draw_text(at.x(part["worker"]), top + 15, shorten_words(names, int(wide / LETTER)), ink)
    return min(len(parts), _MOST_PARTS)


# -- pipeline
def _draw_steps(picture: Picture, view: View, at: Columns) -> None:
    drawn = {row["step"] for row in view["ops"].values()}
    if not drawn:
        return
    steps = sorted((row for row in view["steps"].values() if row["step"] in drawn), key=lambda row: float(row["begin"]))
    # The last finished step that trains, as in the panel; else the last complete one.
    ended = [row for row in steps if row["state"] != "running"]
    step = next((row for row in reversed(ended) if row["trains"]), [*steps[-1:], *ended][-1])
    names = {int(worker["id"]): str(worker["name"]) for worker in view["workers"].values()}
    timeline = Timeline.of(view["ops"].values(), step["step"], now=step["end"], names=names)
    replace(timeline.chart, title=step_line(step)).draw(picture, at.width - 140)


# One section that only this view has, its title, and the function that draws it; see `summary.summarize_view`.
_DRAWINGS: dict[str, tuple[str, Callable[[Picture, View, Columns], None]]] = {
    "rrefs": ("RRefs", _draw_rrefs),
    "contexts": ("Autograd contexts", _draw_contexts),
    "steps": ("Pipeline", _draw_steps),
    "messages": ("Messages", draw_messages),
    "pieces": ("Sharding", draw_shards),
    "logs": ("Workers", draw_workers),
}

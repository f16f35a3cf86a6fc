"""The still picture of messages, and of what members do together: in their order, as in the live panel."""

from __future__ import annotations

from collections.abc import Iterable

from rpcbench.base.charts import Columns, Picture, heads, short
from rpcbench.base.events import Row
from rpcbench.telemetry.views import View

ROW = 22
MOST = 60
"""So many rows of a still picture are drawn."""


def rest(picture: Picture, rows: int, drawn: int, y: float) -> None:
    """How many are not drawn, if any."""
    if rows > drawn:
        picture.text(12, y + 15, f"… and {rows - drawn} more, not drawn", "note")


def draw_messages(picture: Picture, view: View, at: Columns) -> None:
    """An arrow for each message but notices, dots for each collective."""
    heads(picture, view["workers"], at)
    rows = [row for row in view["messages"].values() if row["kind"] != "Notice"]
    rows = sorted([*rows, *_meetings(view)], key=_sent)
    drawn, (slots, last) = rows[:MOST], _slots(rows[:MOST])
    for worker in view["workers"].values():
        x = at.x(int(worker["id"]))
        picture.line(x, at.top, x, at.top + (last + 1) * ROW, "rule")
    began = _sent(rows[0]) if rows else 0.0
    for n, row in enumerate(drawn):
        y1, y2 = (at.top + (slot + 0.5) * ROW for slot in slots[n])
        picture.text(66, y1 + 4, f"{(_sent(row) - began) * 1e3:.1f} ms", "note end")
        words = f"{row['kind']} {row['label']}".strip()
        picture.text(76, y1 + 4, short(words, int((at.left + at.step / 2 - 84) / 6.4)))
        (_meeting if "came" in row else _message)(picture, row, at, y1, y2)
    rest(picture, len(rows), len(drawn), at.top + (last + 1) * ROW)


def _meetings(view: View) -> list[Row]:
    """Collectives as rows among messages: `came` and `missing` are ids of members."""
    ids = {str(worker["name"]): int(worker["id"]) for worker in view["workers"].values()}
    came: dict[str, list[int]] = {}
    for entry in view["entries"].values():
        came.setdefault(entry["collective"], []).append(entry["worker"])
    return [
        {
            **row, "kind": "", "label": f"{row['op']} #{row['number']}", "sent": row["begin"], "received": None,
            "came": came[key], "missing": [ids[name] for name in row["missing"] if name in ids],
        }
        for key, row in view["collectives"].items()
    ]  # fmt: skip


def _meeting(picture: Picture, row: Row, at: Columns, y: float, _: float) -> None:
    """A dot where each has come, red with a ring for the last; a ring alone where one is missing."""
    places = [at.x(id_) for id_ in (*row["came"], *row["missing"])]
    picture.line(min(places), y, max(places), y, "line s-amber" + " dashed" * (row["state"] != "done"))
    for id_ in row["came"]:
        picture.circle(at.x(id_), y, 5, "f-red" if id_ == row["last"] else "f-amber")
    for id_ in row["missing"]:
        picture.circle(at.x(id_), y, 5, "paper")
        picture.circle(at.x(id_), y, 5, "line s-amber")
    if row["last"] is not None:
        picture.circle(at.x(row["last"]), y, 7.5, "line s-red")
    took = row["state"] if row["state"] != "done" else f"{(row['end'] - row['begin']) * 1e3:.1f} ms"
    picture.text(at.width - 12, y + 4, took, "note end")


def _message(picture: Picture, row: Row, at: Columns, y1: float, y2: float) -> None:
    x1, x2, colour = at.x(row["from"]), at.x(row["to"]), _KINDS.get(row["kind"], "dim")
    if x1 == x2:
        low = max(y2, y1 + 7)
        picture.path(f"M{x1} {y1 - 3} h16 V{low} H{x1 + 2}", f"line s-{colour}")
        picture.tip(x1 + 1, low, -1, 0, colour)
    elif row["state"] == "received":
        picture.arrow(x1, y1, x2, y2, colour)
    else:
        end = x1 + 0.72 * (x2 - x1)
        picture.arrow(x1, y1, end, y2, colour, "dashed")
        picture.text(at.width - 12, y1 + 4, row["state"], "note end")


_KINDS = {
    **dict.fromkeys(("Call", "Create", "Fetch", "Parcel"), "blue"),
    "Result": "green",
    **dict.fromkeys(("Failure", "Cancel", "WalkFailed", "Forget", "Fate"), "red"),
    **dict.fromkeys(("ForkRequest", "ForkAccept", "ChildAccept", "UserDelete", "Uncreated"), "orange"),
    **dict.fromkeys(("Discover", "Discovered", "Gradients", "Settled", "ReleaseContext", "Attending"), "purple"),
}


def _sent(row: Row) -> float:
    return float(row["received"] if row["sent"] is None else row["sent"])


def _slots(rows: Iterable[Row]) -> tuple[list[list[int]], int]:
    """For each message the slots where it goes and where it comes: one slot, where nothing happens in between."""
    moments = []
    for n, row in enumerate(rows):
        moments.append((_sent(row), n, 0))
        if row["sent"] is not None and row["received"] is not None:
            moments.append((max(row["sent"], row["received"]), n, 1))
    found: list[list[int]] = [[0, 0] for _ in {n for _, n, _ in moments}]
    slot, before = -1, -1
    for _, n, end in sorted(moments, key=lambda moment: (moment[0], moment[2], moment[1])):
        slot += not (end and before == n)
        found[n] = [found[n][0], slot] if end else [slot, slot]
        before = n
    return found, max(0, slot)

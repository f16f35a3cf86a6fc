"""The still picture of how workers are: a row for each, as in the live panel, in words as well as bars."""

from __future__ import annotations

from rpcbench.base.charts import Columns, Picture, short
from rpcbench.base.events import Row
from rpcbench.telemetry.views import View

_TOP, _ROW, _LINE = 58, 24, 15
_NAME, _NOW, _CPU, _MEMORY, _THREADS, _QUEUE, _BYTES = 12, 150, 270, 370, 490, 590, 640
_HEADS = {
    _NAME: "worker", _NOW: "now", _CPU: "cpu", _MEMORY: "memory", _THREADS: "threads", _QUEUE: "queue",
    _BYTES: "sent, received",
}  # fmt: skip
_BAR, _SQUARES = 40, 6
_DOING = {"cell": "runs a cell", "busy": "runs a call", "waits": "waits", "idle": "idle", "": "not heard of yet"}


def draw_workers(picture: Picture, view: View, _at: Columns) -> None:
    """Rows of all workers, the last words of those that wrote any, and what has failed."""
    for x, head in _HEADS.items():
        picture.text(x, _TOP - 12, head, "note")
    rows = sorted(view["workers"].values(), key=lambda row: int(row["id"]))
    largest = max((row["memory"] or 0 for row in rows), default=0)
    y: float = _TOP
    for row in rows:
        picture.rect(4, y - 4, picture.width - 8, 1, "plate")
        _worker(picture, row, largest, y + 12)
        y += _ROW
        if last := view["logs"].get(str(row["id"]), {}).get("text", "").rpartition("\n")[2]:
            picture.text(_NOW, y + 4, short(last, 90), "note code")
            y += _LINE
    for key, action in view["actions"].items():
        if action["state"] == "failed":
            picture.text(_NAME, y + 14, short(f"{key} failed: {action['error']}", 110), "note")
            y += _LINE


def _worker(picture: Picture, row: Row, largest: int, y: float) -> None:
    again = f" (start {row['incarnation'] + 1})" if row["incarnation"] else ""
    picture.text(_NAME, y, short(row["name"] + again, 19), "strong")
    picture.text(_NOW, y, short(now(row), 60 if row["cpu"] is None else 18))
    if row["cpu"] is not None:
        _bar(picture, _CPU, y, row["cpu"], f"{row['cpu']:.0%}")
    if row["memory"] is not None:
        _bar(picture, _MEMORY, y, row["memory"] / max(1, largest), f"{row['memory'] / 1e6:.0f} MB")
    if row["busy"] is not None:
        _threads(picture, row["busy"], row["waiting"] or 0, y)
        picture.text(_QUEUE, y, row["queued"])
        picture.text(_BYTES, y, f"{row['sent'] / 1e6:.1f} MB, {row['received'] / 1e6:.1f} MB")


def now(row: Row) -> str:
    """What a worker does, or what became of it, in a few words."""
    if row["state"] == "lost":
        return f"lost: {row['ended']}" if row["ended"] else "lost"
    if row["state"] != "up":
        return str(row["state"])
    return f"silent for {row['silent']} s" if row["doing"] == "silent" else _DOING[row["doing"]]


def _bar(picture: Picture, x: float, y: float, share: float, words: str) -> None:
    picture.rect(x, y - 8, _BAR, 8, "plate")
    picture.rect(x, y - 8, _BAR * min(1.0, share), 8, "f-blue")
    picture.text(x + _BAR + 6, y, words)


def _threads(picture: Picture, busy: int, waiting: int, y: float) -> None:
    """Full squares run, hollow ones wait."""
    marks = ["f-green"] * busy + ["line s-green"] * waiting
    for n, mark in enumerate(marks[:_SQUARES]):
        picture.rect(_THREADS + n * 11, y - 8, 8, 8, mark, 1)
    if len(marks) > _SQUARES:
        picture.text(_THREADS + _SQUARES * 11, y, f"+{len(marks) - _SQUARES}", "note")
    if not marks:
        picture.text(_THREADS, y, "none busy", "note")

"""Still pictures of views, for notebooks that are committed and for static books: `snapshot(view)`.

They are drawn here, from the same small dicts as the live panels and simpler than those, as they must come about where
no browser is: in nbclient, in a script. What has no drawing here is shown by its words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpcbench.base.charts import Columns, Picture, as_html, columns, heads, short
from rpcbench.base.events import Row
from rpcbench.pipeline.timeline import Timeline
from rpcbench.telemetry.still_messages import MOST, ROW, draw_messages, rest
from rpcbench.telemetry.still_workers import draw_workers
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.text_file import save_text
from rpcbench.telemetry.views import View

_TITLE, _LINES = 20, 16


class Snapshot:
    """A view as it was: displayed it is a picture, printed it is text. `save` takes a path ending in .svg or .html."""

    def __init__(self, view: View) -> None:
        self.text = text(view)
        self.svg = _drawn(view, self.text)
        self.html = as_html(self.svg, self.text)

    def save(self, path: str | Path) -> Path:
        """Write it into a file of its own; its path. ValueError for another ending."""
        target = Path(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target.name}: a snapshot is saved as .svg or .html")
        page = f'<!doctype html><meta charset="utf-8"><title>rpcbench</title>{self.html}'
        return save_text(target, self.svg if target.suffix == ".svg" else page)

    def _repr_mimebundle_(self, **keys: Any) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}

    def __str__(self) -> str:
        return self.text


def _drawn(view: View, words: str) -> str:
    title, draw = next((found for section, found in _DRAWINGS.items() if section in view), ("Members", None))
    at = columns(view["workers"])
    picture = Picture(at.width, title, words)
    picture.text(12, _TITLE, title, "strong")
    if draw is None:
        for n, line in enumerate(words.splitlines()):
            picture.text(12, 2.4 * _TITLE + n * _LINES, line, "code")
    else:
        picture.text(26 + 8 * len(title), _TITLE, words.partition("\n")[0], "note")
        draw(picture, view, at)
    return picture.svg()


# ---- RRefs


def _rrefs(picture: Picture, view: View, at: Columns) -> None:
    heads(picture, view["workers"], at)
    keys = sorted(view["rrefs"], key=lambda key: [int(part) for part in key.split(".")])
    forks: dict[str, list[Row]] = {}
    for fork in view["forks"].values():
        forks.setdefault(fork["rref"], []).append(fork)
    for n, key in enumerate(keys[:MOST]):
        _rref(picture, view["rrefs"][key], forks.get(key, []), at, at.top + n * ROW)
    rest(picture, len(keys), MOST, at.top + MOST * ROW)


def _rref(picture: Picture, rref: Row, forks: list[Row], at: Columns, y: float) -> None:
    middle, owner = y + ROW / 2, at.x(rref["owner"])
    picture.text(12, middle + 4, short(rref["rref"], 9), "code strong")
    picture.text(78, middle + 4, short(rref["type"] or "type unknown", int((at.left + at.step / 2 - 98) / 6.8)), "note")
    for fork in forks:
        if fork["state"] == "confirmed":
            picture.line(owner, middle, at.x(fork["holder"]), middle, "line s-dim")
        elif fork["holder"] != rref["owner"] and fork["state"] in _WAYS:
            picture.arrow(at.x(fork["holder"]), middle, owner, middle, _WAYS[fork["state"]], "dashed")
    colour = {"failed": "red", "lost": "dim", "unlisted": "dim"}.get(rref["state"], "blue")
    picture.rect(owner - 7, middle - 7, 14, 14, f"f-{colour}")
    for fork in forks:
        beside = 16 if fork["holder"] == rref["owner"] else 0
        picture.circle(at.x(fork["holder"]) + beside, middle, 6, _FORKS.get(fork["state"], "f-dim"))
    picture.text(at.width - 12, middle + 4, rref["state"], "note end")


_WAYS = {"pending": "orange", "deleting": "dim"}
_FORKS = {"confirmed": "f-green", "pending": "paper line s-orange", "deleting": "paper line s-dim"}


# ---- autograd contexts


def _contexts(picture: Picture, view: View, at: Columns) -> None:
    heads(picture, view["workers"], at)
    y = at.top
    for context in list(view["contexts"].values())[:MOST]:
        y = _context(picture, view, context["context"], at, y)
    rest(picture, len(view["contexts"]), MOST, y)


def _context(picture: Picture, view: View, key: str, at: Columns, y: float) -> float:
    def of(section: str) -> list[Row]:
        return [row for row in view[section].values() if row["context"] == key]

    picture.rect(4, y, at.width - 8, 1, "plate")
    picture.text(12, y + 18, key, "code strong")
    for member in of("members"):
        picture.text(at.x(member["worker"]), y + 18, f"{member['gradients']} gradients", "note middle")
    y += ROW + 4
    for link in of("links"):
        x1, x2, state = at.x(link["from"]), at.x(link["to"]), link["state"]
        count = f"{link['sent']} sent, {link['received']} received"
        picture.text(12, y + 15, count if state == "paired" else f"{count} ({state})", "note")
        picture.arrow(
            x1, y + 11, x2, y + 11, "blue" if state == "paired" else "orange", "" if state == "paired" else "dashed"
        )
        y += ROW
    for one in of("passes"):
        x, share = at.x(one["worker"]), one["arrived"] / max(1, one["needed"])
        picture.rect(x - 30, y + 7, 60, 7, "plate")
        picture.rect(x - 30, y + 7, 60 * min(1.0, share), 7, "f-purple")
    if of("passes"):
        picture.text(12, y + 15, "gradients arrived", "note")
        y += ROW
    return y + 6


# ---- pipeline


def _steps(picture: Picture, view: View, at: Columns) -> None:
    drawn = {row["step"] for row in view["ops"].values()}
    if not drawn:
        return
    steps = sorted((row for row in view["steps"].values() if row["step"] in drawn), key=lambda row: float(row["begin"]))
    step = next((row for row in reversed(steps) if row["state"] == "complete"), steps[-1])
    names = {int(worker["id"]): str(worker["name"]) for worker in view["workers"].values()}
    timeline = Timeline.of(view["ops"].values(), step["step"], now=step["end"], names=names)
    idle = "" if step["idle"] is None else f", idle {step['idle']:.1%}"
    title = f"step {step['step']} ({step['state']}): {timeline.seconds * 1e3:.1f} ms{idle}"
    replace(timeline.chart, title=title).draw(picture, at.width - 140)


_DRAWINGS: dict[str, tuple[str, Callable[[Picture, View, Columns], None]]] = {
    "rrefs": ("RRefs", _rrefs),
    "contexts": ("Autograd contexts", _contexts),
    "steps": ("Pipeline", _steps),
    "messages": ("Messages", draw_messages),
    "logs": ("Workers", draw_workers),
}

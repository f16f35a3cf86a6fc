"""A record played in a panel: no worker, no cluster. A slider, a play button, steps, and any of the panels below.

Beside the widget stands the same record as a page of its own (`panels.replay`), which needs no kernel either.

The page: the panel's own drawing code, and what it is to draw at each frame.
- It asks nothing of any server, which its own policy forbids it, and runs in a frame apart from whatever shows it.
- What workers have said is data, never markup: it stands in JSON without a `<`, and the panel makes text of it.
- Its size is bounded: of a long record, frames are left out evenly, never one that has a name; then those at the end.
  How many is said below the panel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from rpcbench.panels.base import Panel, piece
from rpcbench.telemetry.recording import Player, Record, load
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, diff

MOST_FRAMES = 300
MOST_ROWS = 400_000  # looked at, over all frames: views of many rows take their time
MOST_BYTES = 4_000_000
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_DEFAULT = "export default "
_OPENS = "(d => { d.open = !d.closest('div.jp-Notebook') })(document.currentScript.parentElement)"  # nbconvert: a body


_DISTRUSTED = (
    "This notebook is not trusted here, so it may play nothing: Trust Notebook, in JupyterLab's palette of commands."
)


def folded(record: Record, kind: type[Panel]) -> str:
    """The page inside another one: open where no notebook runs, else to be opened by a click, below the live panel.

    Jupyter leaves frames out of notebooks that are not trusted, but not the words in them, which browsers do not show.
    """
    frame = f'sandbox="allow-scripts" style="width:100%;height:620px;border:0" srcdoc="{escape(page(record, kind))}"'
    inside, script = f"<iframe {frame}>{_DISTRUSTED}</iframe>", f"<script>{_OPENS}</script>"
    return f"<details><summary>The record, played without a kernel</summary>{inside}{script}</details>"


def page(record: Record, kind: type[Panel]) -> str:
    """The page as one HTML document."""
    drawing, driver = str(kind._esm), piece("player", ".js")
    assert drawing.count(_DEFAULT) == 1 and "</script" not in drawing + driver
    data = json.dumps(played(record, kind)).replace("<", "\\u003c")
    styles = f"{kind._css}\n{piece('player', '.css')}"
    start = "play(JSON.parse(document.getElementById('record').textContent), made_(), document.body);"
    code = f"{drawing.replace(_DEFAULT, 'const made_ = ')}\n{{\n{driver}\n{start}\n}}"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    body = f'<script type="application/json" id="record">{data}</script><script type="module">{code}</script>'
    head += f"<title>rpcbench</title><style>{styles}</style>"
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>'


def played(record: Record, kind: type[Panel]) -> dict[str, Any]:
    """`seconds`, `note` (what is left out, or "") and `frames`, each `time`, `name` and the `delta` of its view."""
    frames: list[dict[str, Any]] = []
    size, before = 0, View()
    for at, view in _views(record, kind, _chosen(record)):
        seconds, _, name = record.frames[at]
        delta, before = diff(before, view), view
        size += len(json.dumps(delta))
        if size > MOST_BYTES and frames:
            break
        frames.append({"time": round(seconds, 3), "name": name, "delta": delta})
    if not frames:
        frames.append({"time": 0.0, "name": "empty", "delta": diff({}, kind.look({}))})
    count = len(record.frames)
    left_out = max(0, count - len(frames))
    note = f"{left_out} of {count} frames are left out here; rpcbench.replay plays all." if left_out else ""
    return {"seconds": round(record.seconds, 3), "note": note, "frames": frames}


def _views(record: Record, kind: type[Panel], wanted: list[int]) -> Iterator[tuple[int, View]]:
    player = Player(record)
    for at in wanted:
        player.go(at)
        yield at, kind.look(player.world())


def _chosen(record: Record) -> list[int]:
    """Which frames there is room for: evenly many, besides those with a name, the first and the last."""
    count = len(record.frames)
    rows = sum(len(change["set"]) for _, delta, _ in record.frames for change in delta.values() if change)
    most = min(MOST_FRAMES, max(2, MOST_ROWS // max(1, rows)))
    stride = max(1, -(-count // most))
    named = {at for at, (_, _, name) in enumerate(record.frames) if name}
    return sorted({*range(0, count, stride), *named, *([count - 1] if count else [])})


_MILLISECONDS = 200
_ALONE = "The same record, played by a browser alone."
_SENTENCE = "A record, played while this notebook's kernel runs. Run the cell to see it."


class Replay(ipywidgets.VBox):  # type: ignore[misc]
    """Made by `replay`. `go(frame)` and `step(by)` move it, as its buttons do; `print` says what its panel shows."""

    def __init__(self, record: Record, kinds: dict[str, type[Panel]], panel: str) -> None:
        self.player = Player(record)
        self._kinds = kinds
        last = max(0, len(record.frames) - 1)
        self._play = ipywidgets.Play(min=0, max=last, interval=_MILLISECONDS)
        self._slider = ipywidgets.IntSlider(min=0, max=last, description="frame", readout=True)
        ipywidgets.jslink((self._play, "value"), (self._slider, "value"))
        self._back = ipywidgets.Button(description="Step back")
        self._on = ipywidgets.Button(description="Step")
        self._which = ipywidgets.Dropdown(options=list(kinds), value=panel, description="panel")
        self._said = ipywidgets.Label()
        self.panel = kinds[panel](self.player)
        controls = ipywidgets.HBox([self._play, self._slider, self._back, self._on, self._which])
        self._above = (controls, self._said)
        super().__init__([*self._above, self.panel])
        self._slider.observe(lambda change: self.go(change["new"]), "value")
        self._back.on_click(lambda _: self.step(-1))
        self._on.on_click(lambda _: self.step(1))
        self._which.observe(lambda change: self._show(change["new"]), "value")
        self._tell()

    def go(self, frame: int) -> None:
        """Show that frame, or the nearest one."""
        self.player.go(frame)
        self._slider.value = max(0, self.player.at)
        self._tell()

    def step(self, by: int = 1) -> None:
        """So many frames on, or back."""
        self.go(self.player.at + by)

    def snapshot(self) -> Snapshot:
        """What is shown now, as a picture and text that need no kernel."""
        return self.panel.snapshot()

    def _show(self, name: str) -> None:
        before, self.panel = self.panel, self._kinds[name](self.player)
        self.children = (*self._above, self.panel)
        before.close()

    def _tell(self) -> None:
        frames, at = self.player.record.frames, self.player.at
        seconds, _, name = frames[at] if frames else (0.0, {}, "empty")
        self._said.value = f"{seconds:.2f} s of {self.player.record.seconds:.2f} s{f', {name}' if name else ''}"

    def close(self) -> None:
        """Remove it and its parts."""
        if hasattr(self, "panel"):  # also called by ipywidgets' finalizer, perhaps on a half-made one
            self.panel.close()
        super().close()

    def __str__(self) -> str:
        return text(type(self.panel).look(self.player.world()))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]
        alone = {"text/html": folded(self.player.record, self._kinds[self._which.value]), "text/plain": _ALONE}
        display(alone, raw=True)  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(self, **keys: Any) -> Any:
        return {**super()._repr_mimebundle_(**keys), "text/plain": _SENTENCE}


def replay(path: str | Path, panel: str = "rrefs") -> Replay:
    """Play a record that `%record` has made, in one of the panels. ValueError for a file that is no record."""
    from rpcbench.panels import PANELS

    if panel not in PANELS:
        raise ValueError(f"no panel is called {panel!r}: there are {', '.join(PANELS)}")
    return Replay(load(path), PANELS, panel)

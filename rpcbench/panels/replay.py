"""Plays a record in a panel without workers: a slider, a play button, steps, and any of the panels.

Both the widget and the page open at the last frame, so that a reader who does not play it sees the whole record.

Below the widget it shows the same record as an HTML page, which needs no kernel. The page has the panel's own drawing
code, and the delta of each frame. Guarantees
- The page sends no request to a server, which its content security policy forbids, and runs in a sandboxed frame.
- Values from workers are data, never markup: they are in JSON without a `<`, and the panel turns them into text.
- The size of the page is bounded. Frames of a long record are left out evenly, except those with a name, and then those
  at the end. A note below the panel gives their number.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import ipywidgets

from rpcbench.panels.base import HIDE_ERROR, Panel
from rpcbench.telemetry.drawing import package_text
from rpcbench.telemetry.job_files import RECORD, Files, identify_files, make_record
from rpcbench.telemetry.recording import Player, Record
from rpcbench.telemetry.summary import LINES
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, diff_views

MOST_FRAMES = 300
MOST_ROWS = 400_000  # computed over all frames: views of many rows take long
MOST_BYTES = 4_000_000  # of JSON
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_DEFAULT = "export default "
# Opens the page unless it is in a notebook that runs: JupyterLab has the class on a div, nbconvert on the body.
_OPENS = "(d => { d.open = !d.closest('div.jp-Notebook') })(document.currentScript.parentElement)"

# The text in the frame. Jupyter strips frames, but not the text in them, from notebooks that are not trusted.
_DISTRUSTED = (
    "This notebook is not trusted here, so it may play nothing: Trust Notebook, in JupyterLab's palette of commands."
)


def folded_page(record: Record, kind: type[Panel]) -> str:
    """Return the page for embedding: open where no notebook runs, otherwise opened by a click, below the live panel."""
    frame = (
        f'sandbox="allow-scripts" style="width:100%;height:620px;border:0" srcdoc="{escape(html_page(record, kind))}"'
    )
    inside, script = f"<iframe {frame}>{_DISTRUSTED}</iframe>", f"<script>{_OPENS}</script>"
    head = f'<details class="rb-instead"><summary>The record, played without a kernel</summary>{HIDE_ERROR}'
    return f"{head}{inside}{script}</details>"


def html_page(record: Record, kind: type[Panel]) -> str:
    """Return the page as one HTML document."""
    drawing, driver = str(kind._esm), package_text("player", ".js")
    assert drawing.count(_DEFAULT) == 1 and "</script" not in drawing + driver
    # Without a `<` in it, the data cannot end the script element.
    data = json.dumps(playback_data(record, kind), separators=(",", ":")).replace("<", "\\u003c")
    styles = f"{kind._css}\n{package_text('player', '.css')}"
    start = "play(JSON.parse(document.getElementById('record').textContent), made_(), document.body);"
    code = f"{drawing.replace(_DEFAULT, 'const made_ = ')}\n{{\n{driver}\n{start}\n}}"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    body = f'<script type="application/json" id="record">{data}</script><script type="module">{code}</script>'
    head += f"<title>rpcbench</title><style>{styles}</style>"
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>'


def playback_data(record: Record, kind: type[Panel]) -> dict[str, Any]:
    """Return `seconds`, `note` (on frames left out, or "") and `frames`: each `time`, `name`, `delta` of the view."""
    frames: list[dict[str, Any]] = []
    size, before, player = 0, View(), Player(record)
    for at in _choose_frames(record):
        player.go_to_frame(at)
        view = kind.look(player.world())
        seconds, _, name = record.frames[at]
        delta, before = diff_views(before, view), view
        size += len(json.dumps(delta))
        if size > MOST_BYTES and frames:
            break
        frames.append({"time": round(seconds, 3), "name": name, "delta": delta})
    if not frames:
        frames.append({"time": 0.0, "name": "empty", "delta": diff_views({}, kind.look({}))})
    count = len(record.frames)
    left_out = max(0, count - len(frames))
    note = f"{left_out} of {count} frames are left out here; rpcbench.replay plays all." if left_out else ""
    return {"seconds": round(record.seconds, 3), "note": note, "frames": frames}


def _choose_frames(record: Record) -> list[int]:
    """Choose the frames within the limits: evenly spaced ones, those with a name, the first and the last."""
    count = len(record.frames)
    rows = sum(len(change["set"]) for _, delta, _ in record.frames for change in delta.values() if change)
    most = min(MOST_FRAMES, max(2, MOST_ROWS // max(1, rows)))
    stride = max(1, -(-count // most))
    named = {at for at, (_, _, name) in enumerate(record.frames) if name}
    return sorted({*range(0, count, stride), *named, *([count - 1] if count else [])})


_MILLISECONDS = 200  # per frame while it plays
_ALONE = "The same record, played by a browser alone."
_SENTENCE = "A record, played while this notebook's kernel runs. Run the cell to see it."


def format_moment(seconds: float) -> str:
    """Return a time in a record as the page writes it: 1.50 s, 2:03.50 min."""
    minutes, hundredths = divmod(round(seconds * 100), 6000)
    return f"{minutes}:{hundredths / 100:05.2f} min" if minutes else f"{seconds:.2f} s"


class Replay(ipywidgets.VBox):  # type: ignore[misc]
    """The widget that `replay` makes. `go(frame)` and `step(by)` move it, like its buttons; `print` shows text."""

    def __init__(self, record: Record, kinds: dict[str, type[Panel]], panel: str) -> None:
        self.player = Player(record)  # the source of the panel
        self._kinds = kinds
        last = max(0, len(record.frames) - 1)
        self.player.go_to_frame(last)
        self._play = ipywidgets.Play(min=0, max=last, value=last, interval=_MILLISECONDS)  # at the end it begins anew
        self._slider = ipywidgets.IntSlider(min=0, max=last, value=last, description="frame", readout=True)
        ipywidgets.jslink((self._play, "value"), (self._slider, "value"))
        self._back = ipywidgets.Button(description="Step back")
        self._on = ipywidgets.Button(description="Step")
        self._which = ipywidgets.Dropdown(options=list(kinds), value=panel, description="panel")
        self._said = ipywidgets.Label()
        self.panel = kinds[panel](self.player)
        controls = _wrap_controls(self._play, self._slider, self._back, self._on, self._which)
        self._above = (controls, self._said)
        super().__init__([*self._above, self.panel])
        self._slider.observe(lambda change: self.go(change["new"]), "value")
        self._back.on_click(lambda _: self.step(-1))
        self._on.on_click(lambda _: self.step(1))
        self._which.observe(lambda change: self._show_panel(change["new"]), "value")
        self._update_label()

    def go(self, frame: int) -> None:
        """Show a frame, or the nearest one."""
        self.player.go_to_frame(frame)
        self._slider.value = max(0, self.player.at)
        self._update_label()

    def step(self, by: int = 1) -> None:
        """Move by a number of frames, back if it is negative."""
        self.go(self.player.at + by)

    def snapshot(self) -> Snapshot:
        """Return the present view as a picture and text that need no kernel."""
        return self.panel.snapshot()

    def _show_panel(self, name: str) -> None:
        before, self.panel = self.panel, self._kinds[name](self.player)
        self.children = (*self._above, self.panel)
        before.close()  # after the change: the box never shows a closed widget

    def _update_label(self) -> None:
        frames, at = self.player.record.frames, self.player.at
        seconds, _, name = frames[at] if frames else (0.0, {}, "empty")
        whole = format_moment(self.player.record.seconds)
        self._said.value = f"{format_moment(seconds)} of {whole}{f', {name}' if name else ''}"

    def close(self) -> None:
        """Remove the widget and its panel."""
        if hasattr(self, "panel"):  # also called by ipywidgets' finalizer, perhaps on a half-constructed widget
            self.panel.close()
        super().close()

    def text(self, lines: int | None = LINES) -> str:
        """Return the frame that is shown as text, as `Panel.text` does."""
        return self.panel.text(lines)

    def json(self) -> dict[str, Any]:
        """Return the frame that is shown as a dict of plain values, as `Panel.json` does."""
        return self.panel.json()

    def __str__(self) -> str:
        return self.text()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]
        alone = {"text/html": folded_page(self.player.record, self._kinds[self._which.value]), "text/plain": _ALONE}
        display(alone, raw=True)  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(self, **keys: Any) -> Any:
        return {**super()._repr_mimebundle_(**keys), "text/plain": _SENTENCE}


def _wrap_controls(*controls: ipywidgets.Widget) -> ipywidgets.HBox:
    """Return the controls in a row, or in several where there is no room: none is narrower than its content."""
    for control in controls:
        control.layout.flex, control.layout.max_width = "none", "100%"
    return ipywidgets.HBox(controls, layout={"flex_flow": "row wrap"})


def replay(files: Files, panel: str | None = None) -> Replay:
    """Play a record of `%record` or `rpcbench.record`, without workers. It opens at its end.

    Traces of torch.profiler, and dumps of torch's flight recorder, play the collectives of their job.

    Args:
        files: the file of the record; or the traces or dumps of all ranks: a pattern, a folder, or several files.
        panel: the panel to begin with, as in `rpcbench.panel`; by default "rrefs", and "messages" for a job.

    Returns:
        A widget to display.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a file is damaged or of another kind, or there is no such panel.
    """
    from rpcbench.panels import PANELS

    if panel is not None and panel not in PANELS:
        raise ValueError(f"no panel is called {panel!r}: there are {', '.join(PANELS)}")
    is_record = identify_files(files) == RECORD
    return Replay(make_record(files), PANELS, panel or ("rrefs" if is_record else "messages"))

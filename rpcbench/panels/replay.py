"""A record played in a panel: no worker, no cluster. A slider, a play button, steps, and any of the panels below.

Beside the widget stands the same record as a page of its own (`panels.page`), which needs no kernel either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets

from rpcbench.panels.base import Panel
from rpcbench.panels.page import folded
from rpcbench.telemetry.record import Player, Record, load
from rpcbench.telemetry.stills import Snapshot
from rpcbench.telemetry.summary import text

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

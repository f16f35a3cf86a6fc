"""`%%remote all --tabs`: the output of each worker in a tab of its own.

Guarantees
- A tab shows all that its worker shows, as a cell of its own would: displays change, `clear_output` is obeyed.
- Where no widgets are shown (an exported notebook, a terminal) the same stands below each other as text, once the cell
  is through: each line begins with its worker's name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rpcbench.launch.screen import Pane, Screen, plain
from rpcbench.notebook.needs import needs

Output = dict[str, Any]
_numbers = itertools.count(1)


def in_tabs(screen: Screen, workers: Sequence[str], labelled: bool) -> list[Pane]:
    """A tab for each worker, shown at once. UsageError where ipywidgets is missing."""
    with needs("--tabs", "ipywidgets"):
        import ipywidgets

    outputs = [ipywidgets.Output() for _ in workers]
    tabs = ipywidgets.Tab(children=outputs, titles=tuple(workers))
    view = tabs._repr_mimebundle_() or {}  # none where nobody could draw it
    identity = {"display_id": f"rpcbench-tabs-{next(_numbers)}"}

    def show(text: str, update: bool = False) -> None:
        data = {**view, "text/plain": text}
        screen.display({"data": data, "metadata": {}, "transient": identity}, update=update)

    def finished(worker: str) -> None:
        running.discard(worker)
        if not running:
            show(_as_text(workers, sheets), update=True)

    running = set(workers)
    sheets = [_Sheet(screen, output) for output in outputs]
    show(f"In tabs: {', '.join(workers)}.")
    return [_Tab(sheet, worker, finished) for sheet, worker in zip(sheets, workers, strict=True)]


class _Sheet:
    """One tab, as a surface."""

    def __init__(self, screen: Screen, widget: Any) -> None:
        self.outputs: list[Output] = []
        self._screen = screen
        self._widget = widget
        self._ids: list[str | None] = []
        self._stale = False

    def text(self, stream: str, text: str) -> None:
        self._clear_stale()
        last = self.outputs[-1] if self.outputs else {}
        if last.get("name") == stream:
            self.outputs[-1] = {**last, "text": last["text"] + text}
        else:
            self._add({"output_type": "stream", "name": stream, "text": text}, None)
        self._put()

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        shown = {"output_type": "display_data", "data": bundle["data"], "metadata": bundle["metadata"]}
        name = bundle.get("transient", {}).get("display_id")
        if update:
            self.outputs = [shown if own == name else old for own, old in zip(self._ids, self.outputs, strict=True)]
        else:
            self._clear_stale()
            self._add(shown, name)
        self._put()

    def clear(self, wait: bool) -> None:
        self._stale = True
        if not wait:
            self._clear_stale()
            self._put()

    def _clear_stale(self) -> None:
        if self._stale:
            self.outputs, self._ids, self._stale = [], [], False

    def _add(self, output: Output, name: str | None) -> None:
        self.outputs.append(output)
        self._ids.append(name)

    def _put(self) -> None:
        self._screen.within(lambda: setattr(self._widget, "outputs", tuple(self.outputs)))


class _Tab(Pane):
    """A worker's pane on a sheet of its own; says when it is finished."""

    def __init__(self, sheet: _Sheet, worker: str, told: Callable[[str], object]) -> None:
        super().__init__(sheet, worker)
        self._told = told

    def finish(self) -> None:
        super().finish()
        self._told(self._worker)


def _as_text(workers: Sequence[str], sheets: Sequence[_Sheet]) -> str:
    """All tabs below each other; the line of one without output is empty."""
    return "\n".join(
        f"[{worker}] {line}"
        for worker, sheet in zip(workers, sheets, strict=True)
        for line in "".join(_lines(sheet.outputs)).splitlines() or [""]
    )


def _lines(outputs: Sequence[Output]) -> Iterator[str]:
    for output in outputs:
        yield output["text"] if "text" in output else f"{plain(output)}\n"

"""Equal outputs of several workers shown once, under the names of all of them: `[worker1-3] …`.

Guarantees
- All is held back until every worker is through or given up; then it is shown in the order of the workers. What only
  one of them wrote begins with its name, as ever.
- Nothing is lost: who writes more than `MOST` characters is shown from there on as it comes, and is equal to nobody.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rpcbench.launch.screen import Pane, Screen

MOST = 1 << 22
_NUMBERED = re.compile(r"(.*?)(\d+)")

_Item = tuple[str, str]


def collapsed(screen: Screen, workers: Sequence[str], labelled: bool) -> list[Pane]:
    """Panes that hold back what they are given, until all of them are finished."""
    if len(workers) == 1:
        return [Pane(screen, workers[0], workers[0] if labelled else "")]
    together = _Together(screen)
    together.panes = [_Held(screen, worker, together) for worker in workers]
    return [*together.panes]


class _Together:
    """The panes of one cell, and the lock for all of them."""

    def __init__(self, screen: Screen) -> None:
        self.lock = threading.RLock()
        self.panes: list[_Held] = []
        self._screen = screen

    def show(self) -> None:
        """Once every pane is finished: those with equal items as one."""
        held = [pane for pane in self.panes if pane.items is not None]
        if not all(pane.finished for pane in held):
            return
        groups: dict[str, list[_Held]] = {}
        for pane in held:
            groups.setdefault(json.dumps(_comparable(pane.items or [])), []).append(pane)
        for group in groups.values():
            if len(group) == 1:
                group[0].release()
            else:
                self._show_once(group)

    def _show_once(self, group: list[_Held]) -> None:
        first = group[0]
        as_one = Pane(self._screen, first.worker, in_short(pane.worker for pane in group))
        for kind, content in first.items or []:
            as_one.show(kind, content)
        as_one.finish()
        for pane in group:
            pane.items = []
            pane.release()


class _Held(Pane):
    """One worker's part, held back."""

    def __init__(self, screen: Screen, worker: str, together: _Together) -> None:
        super().__init__(screen, worker, worker)
        self.worker = worker
        self.items: list[_Item] | None = []
        self.finished = False
        self._together = together
        self._size = 0

    def show(self, kind: str, content: str) -> None:
        with self._together.lock:
            if self.items is None:
                super().show(kind, content)
                return
            self.items.append((kind, content))
            self._size += len(content)
            if self._size > MOST:
                self.release()

    def finish(self) -> None:
        with self._together.lock:
            self.finished = True
            self._together.show()
            if self.items is None:
                super().finish()

    def release(self) -> None:
        """Show what was held back, and whatever comes from now on as it comes."""
        items, self.items = self.items or [], None
        for kind, content in items:
            super().show(kind, content)
        if self.finished:
            super().finish()


def _comparable(items: list[_Item]) -> list[Any]:
    """What was shown, however it was cut up on the way; display ids are each worker's own."""
    seen: list[list[Any]] = []
    for kind, content in items:
        if kind in ("stdout", "stderr"):
            if seen and seen[-1][0] == kind:
                seen[-1][1] += content
            else:
                seen.append([kind, content])
        else:
            bundle = json.loads(content)
            seen.append([kind, {**bundle, "transient": None} if isinstance(bundle, dict) else bundle])
    return seen


def in_short(workers: Iterator[str]) -> str:
    """Names of workers in short: `worker1-3,worker5`."""
    runs: list[tuple[str, int, int] | str] = []
    for name in workers:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            runs.append(name)
            continue
        stem, number = found[1], int(found[2])
        last = runs[-1] if runs else None
        if isinstance(last, tuple) and last[0] == stem and last[2] == number - 1:
            runs[-1] = stem, last[1], number
        else:
            runs.append((stem, number, number))
    return ",".join(run if isinstance(run, str) else _span(*run) for run in runs)


def _span(stem: str, first: int, last: int) -> str:
    return f"{stem}{first}" if first == last else f"{stem}{first}-{last}"

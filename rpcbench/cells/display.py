"""Where the output of remote cells is shown: in the notebook cell that asked, whatever runs by then.

    OutputStream (worker) ──notices──► OutputRouter ──► OutputBuffer (cell, worker) ──► OutputArea ──► OutputDisplay

Guarantees
- Items of one cell on one worker are shown in the order of their numbers, whatever order they arrive in, each once. A
  cell is over when its `end` and all before it were shown, or when its worker is gone.
- An `OutputDisplay` keeps the context in which it was made: ipykernel finds there which cell a text or a display
  belongs to, from any thread and however late. Redirections (`%%capture`, `redirect_stdout`, an Output widget) hold for
  it as for any other output; without a kernel it prints.
- Equal outputs of several workers can be shown once, under the names of all of them: `[worker1-3] …`. All is held back
  until every worker is through or given up; then it is shown in the order of the workers. What only one of them wrote
  begins with its name. Nothing is lost: what a worker writes beyond `MOST` characters is shown as it comes, and is
  equal to no other.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rpcbench.base.conditions import Flag
from rpcbench.cells.output import BESIDE, ReorderBuffer
from rpcbench.cells.runner import HEARD, OUTPUT, SHOWN
from rpcbench.cells.widgets import CommProxies
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo


class Surface(Protocol):
    """What a pane can show something on. Called from any thread."""

    def text(self, stream: str, text: str) -> None:
        """Write to "stdout" or "stderr"; it is there when this returns."""

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        """Show a mime bundle, or change the one with the same display id."""

    def clear(self, wait: bool) -> None:
        """Wipe all out, now or (`wait`) when the next is shown."""


class OutputDisplay:
    """The output area of the cell that runs when this is made. Without a shell texts are printed, of displays too."""

    def __init__(self, shell: InteractiveShell | None) -> None:
        self._shell = shell
        self._context = contextvars.copy_context()

    def text(self, stream: str, text: str) -> None:
        self.within(lambda: print(text, end="", file=getattr(sys, stream), flush=True))

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        shell = self._shell
        if shell is None:
            self.text("stdout", f"{plain(bundle)}\n")
            return
        transient = bundle.get("transient", {})
        self.within(
            lambda: shell.display_pub.publish(
                data=bundle["data"], metadata=bundle["metadata"], transient=transient, update=update
            )
        )

    def clear(self, wait: bool) -> None:
        shell = self._shell
        if shell is not None:
            self.within(lambda: shell.display_pub.clear_output(wait))  # type: ignore[no-untyped-call]

    def within(self, emit: Callable[[], object]) -> None:
        """Do something as the cell that this belongs to."""
        # A context cannot be entered twice at once, and two threads may show something.
        self._context.copy().run(emit)


def plain(bundle: dict[str, Any]) -> str:
    """A mime bundle where only text can be shown."""
    data = bundle["data"]
    return str(data.get("text/plain", f"({', '.join(data)})"))


class OutputArea:
    """One worker's part of a screen. Alone it shows everything as it comes.

    Among several (`label` is then the worker's name) each line of text begins with `[worker1]` and is shown when it is
    complete, a display has such a line above it, results wait for `finish`, and `clear_output` is not obeyed: it would
    wipe out what the others showed.
    """

    def __init__(self, screen: Surface, worker: str, label: str = "") -> None:
        self._screen = screen
        self._worker = worker
        self._prefix = f"[{label}] " if label else ""
        self._open = {"stdout": "", "stderr": ""}
        self._holding = bool(label)
        self._results: list[dict[str, Any]] = []

    def show(self, kind: str, content: str) -> None:
        """One item of a worker's outbox: text as it is, all else as JSON."""
        if kind in self._open:
            self._text(kind, content)
        elif kind == "clear":
            self._clear(json.loads(content))
        else:
            self._display(kind, json.loads(content))

    def finish(self) -> None:
        """Show what was held back, and hold nothing back from now on."""
        self._flush()
        self._holding = False
        results, self._results = self._results, []
        for bundle in results:
            self._labelled(bundle)

    def _text(self, stream: str, text: str) -> None:
        if not self._prefix:
            self._screen.text(stream, text)
            return
        lines = (self._open[stream] + text).splitlines(keepends=True)
        self._open[stream] = lines.pop() if lines and not lines[-1].endswith(("\n", "\r")) else ""
        if lines:
            self._screen.text(stream, "".join(self._prefix + line for line in lines))

    def _flush(self) -> None:
        for stream in self._open:
            rest, self._open[stream] = self._open[stream], ""
            if rest:
                self._screen.text(stream, f"{self._prefix}{rest}\n")

    def _clear(self, wait: bool) -> None:
        if not self._prefix:
            self._screen.clear(wait)

    def _display(self, kind: str, bundle: dict[str, Any]) -> None:
        self._own_id(bundle)
        if kind == "update":
            self._screen.display(bundle, update=True)
        elif not self._prefix:
            self._screen.display(bundle)
        elif kind == "result" and self._holding:
            self._results.append(bundle)
        else:
            self._flush()
            self._labelled(bundle)

    def _labelled(self, bundle: dict[str, Any]) -> None:
        text = bundle["data"].get("text/plain", "")
        if set(bundle["data"]) == {"text/plain"}:
            self._screen.text("stdout", "".join(f"{self._prefix}{line}\n" for line in text.splitlines() or [""]))
            return
        if self._prefix:
            self._screen.text("stdout", f"{self._prefix}\n")
        self._screen.display(bundle)

    def _own_id(self, bundle: dict[str, Any]) -> None:
        """Display ids are the worker's own: the same one on two workers means two displays."""
        transient = bundle.setdefault("transient", {})
        if "display_id" in transient:
            transient["display_id"] = f"{self._worker}/{transient['display_id']}"


OutputAreas = Callable[[OutputDisplay, Sequence[str], bool], Sequence[OutputArea]]
"""(screen, workers, whether lines shall begin with names) -> the pane of each worker."""


def one_below_the_other(screen: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """As output comes, in one place."""
    return [OutputArea(screen, worker, worker if labelled else "") for worker in workers]


def unseen(screen: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Nothing is shown."""
    return [OutputArea(_Nowhere(), worker) for worker in workers]


class _Nowhere:
    def text(self, stream: str, text: str) -> None:
        pass

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        pass

    def clear(self, wait: bool) -> None:
        pass


MOST = 1 << 22
_NUMBERED = re.compile(r"(.*?)(\d+)")

_Item = tuple[str, str]


def collapsed(screen: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Panes that hold back what they are given, until all of them are finished."""
    if len(workers) == 1:
        return [OutputArea(screen, workers[0], workers[0] if labelled else "")]
    together = _Together(screen)
    together.panes = [_Held(screen, worker, together) for worker in workers]
    return [*together.panes]


class _Together:
    """The panes of one cell, and the lock for all of them."""

    def __init__(self, screen: OutputDisplay) -> None:
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
        as_one = OutputArea(self._screen, first.worker, in_short(pane.worker for pane in group))
        for kind, content in first.items or []:
            as_one.show(kind, content)
        as_one.finish()
        for pane in group:
            pane.items = []
            pane.release()


class _Held(OutputArea):
    """One worker's part, held back."""

    def __init__(self, screen: OutputDisplay, worker: str, together: _Together) -> None:
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


logger = logging.getLogger(__name__)

Notice = dict[str, Any]


class OrderedOutput:
    """Turns notices that arrive in any order into items (kind, content) in order, pieces joined."""

    def __init__(self) -> None:
        self._turns: ReorderBuffer[tuple[str, str]] = ReorderBuffer()
        self._parts: list[str] = []

    @property
    def passed(self) -> int:
        """How many notices have been taken in order."""
        return self._turns.passed

    def add(self, notice: Notice) -> Iterator[tuple[str, str]]:
        """The items that this notice makes ready: none, one, or it and those that waited for it."""
        for kind, content in self._turns.add(notice["n"], (notice["kind"], notice["content"])):
            if kind == "part":
                self._parts.append(content)
            else:
                parts, self._parts = self._parts, []
                yield kind, "".join([*parts, content])


@dataclass(frozen=True, slots=True)
class End:
    """How the cell ended there: the name of the error's class (None if there was none) and its traceback."""

    error: str | None
    traceback: list[str]


class OutputBuffer:
    """The output of one cell on one worker: shown on its pane as it comes, until the end is there.

    `take_over(kind, content)` is asked first: what it takes is not shown.
    """

    def __init__(self, pane: OutputArea, take_over: Callable[[str, str], bool]) -> None:
        self.pane = pane
        self._take_over = take_over
        self.begun = Flag()
        self.heard = Flag()  # of an interrupt
        self.runs = True  # False once it is known that it is over, or will never begin
        self.over = Flag()
        self.end: End | None = None
        self.shown = 0
        self._items = OrderedOutput()

    def take(self, notice: Notice) -> None:
        """Show what this notice makes ready."""
        self.begun.set()
        for kind, content in self._items.add(notice):
            if kind == "end":
                self.end = End(**json.loads(content))
            else:
                self._show(kind, content)
        self.shown = self._items.passed
        if self.end is not None:
            self.over.set()

    def _show(self, kind: str, content: str) -> None:
        try:
            if not self._take_over(kind, content):
                self.pane.show(kind, content)
        except Exception:
            # A closed stream, say. The cell goes on, and so must its end come through.
            logger.exception("a remote cell's %s could not be shown", kind)

    def lose(self) -> None:
        """Nothing more will come."""
        self.begun.set()
        self.heard.set()
        self.over.set()


class OutputRouter:
    """All inboxes of one agent. Its notices come one at a time, so showing needs no lock."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._inboxes: dict[tuple[int, int], OutputBuffer] = {}
        agent.on_notice(OUTPUT, self._arrived)
        agent.on_notice(HEARD, self._heard)
        agent.on_member(self._changed)

    def open(self, worker: int, cell: int, inbox: OutputBuffer) -> None:
        with self._lock:
            self._inboxes[worker, cell] = inbox

    def close(self, worker: int, cell: int) -> None:
        """No more is wanted, or nothing more will come."""
        with self._lock:
            inbox = self._inboxes.pop((worker, cell), None)
        if inbox is not None:
            inbox.lose()

    def _arrived(self, worker: int, notice: Notice) -> None:
        cell = notice["cell"]
        if cell == BESIDE:
            self._agent.part(CommProxies).take(worker, notice["content"])
            return
        with self._lock:
            inbox = self._inboxes.get((worker, cell))
        if inbox is None:
            return
        inbox.take(notice)
        if inbox.over.is_set():
            self.close(worker, cell)
        else:
            self._agent.notify(worker, SHOWN, {"cell": cell, "shown": inbox.shown})

    def _heard(self, worker: int, notice: Notice) -> None:
        with self._lock:
            inbox = self._inboxes.get((worker, notice["cell"]))
        if inbox is not None:
            inbox.runs = notice["runs"]
            inbox.heard.set()

    def _changed(self, kind: str, member: WorkerInfo, _reason: str) -> None:
        if kind not in GONE:
            return
        with self._lock:
            cells = [cell for worker, cell in self._inboxes if worker == member.id]
        for cell in cells:
            self.close(member.id, cell)

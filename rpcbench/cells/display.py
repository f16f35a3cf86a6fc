"""Shows the output of remote cells in the notebook cell that sent them, even if another cell runs by then.

    OutputStream (worker) ──notices──► OutputRouter ──► OutputBuffer (cell, worker) ──► OutputArea ──► OutputDisplay

Guarantees
- Items of one cell on one worker are shown once each, in the order of their numbers. A cell has ended when its `end`
  and all earlier items were shown, or when its worker has left.
- An `OutputDisplay` keeps the context in which it was made. ipykernel finds there the cell that a text or a display
  belongs to, from any thread and at any time. Redirections (`%%capture`, `redirect_stdout`, an Output widget) apply as
  to any other output; without a kernel it prints.
- `collapsed_areas` shows equal outputs of several workers once, under all their names: `[worker1-3] …`. It holds back
  all output until every worker is through or given up, and then shows it in the order of the workers, each other output
  under its worker's name. It loses nothing: the output of a worker beyond `MOST` characters is shown as it arrives, and
  is not compared.
- Text that calls on workers write is shown in the cell that began last, also after its end, each line with the worker's
  name; in a script it is printed. Its items are numbered and ordered like a cell's, those of each call by themselves.
  A call is answered after all that it has written is shown (`CallOutput`).
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rpcbench.base.conditions import Event
from rpcbench.base.sources import ipython_shell
from rpcbench.cells.output import NO_CELL, SHOWN, Notice, ReorderBuffer, is_call_number
from rpcbench.cells.runner import INTERRUPT_HANDLED, OUTPUT
from rpcbench.cells.widgets import CommProxies
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo


class Surface(Protocol):
    """A place that output areas write to. Called from any thread."""

    def write_text(self, stream: str, text: str) -> None:
        """Write to "stdout" or "stderr"; the text is visible when this returns."""

    def display_bundle(self, bundle: dict[str, Any], update: bool = False) -> None:
        """Show a mime bundle, or replace the one with the same display id."""

    def clear_output(self, wait: bool) -> None:
        """Remove all output, now or (`wait`) when the next item is shown."""


class OutputDisplay:
    """The output of the notebook cell that runs when this is made. Without a shell it prints displays as text."""

    def __init__(self, shell: InteractiveShell | None) -> None:
        self._shell = shell
        self._context = contextvars.copy_context()

    def write_text(self, stream: str, text: str) -> None:
        self.call_in_context(lambda: print(text, end="", file=getattr(sys, stream), flush=True))

    def display_bundle(self, bundle: dict[str, Any], update: bool = False) -> None:
        shell = self._shell
        if shell is None:
            self.write_text("stdout", f"{plain_text(bundle)}\n")
            return
        transient = bundle.get("transient", {})
        self.call_in_context(
            lambda: shell.display_pub.publish(
                data=bundle["data"], metadata=bundle["metadata"], transient=transient, update=update
            )
        )

    def clear_output(self, wait: bool) -> None:
        shell = self._shell
        if shell is not None:
            self.call_in_context(lambda: shell.display_pub.clear_output(wait))  # type: ignore[no-untyped-call]

    def call_in_context(self, emit: Callable[[], object]) -> None:
        """Call `emit` in the context of the cell that this belongs to."""
        # A copy: a context cannot be entered twice at once, and two threads may show output.
        self._context.copy().run(emit)


def plain_text(bundle: dict[str, Any]) -> str:
    """Return a mime bundle as text; without a text form, the names of its mime types."""
    data = bundle["data"]
    return str(data.get("text/plain", f"({', '.join(data)})"))


class OutputArea:
    """The output of one worker. Without a `label` it is shown as it arrives.

    With one, each complete line of text begins with `[label]`, a display follows such a line, and results wait for
    `finish_output`."""

    def __init__(self, display: Surface, worker: str, label: str = "") -> None:
        self._display = display
        self._worker = worker
        self._prefix = f"[{label}] " if label else ""
        self._open = {"stdout": "", "stderr": ""}  # the incomplete last line of each stream
        self._holding = bool(label)
        self._results: list[dict[str, Any]] = []  # held back, so that results of all workers stand together
        self._as_text: set[str] = set()  # ids of displays that were shown as lines, which cannot be updated in place

    def show_item(self, kind: str, content: str) -> None:
        """Show an item of a worker's output stream. Its content is text for streams, JSON for other kinds."""
        if kind in self._open:
            self._show_text(kind, content)
        elif kind != "clear":
            self._show_bundle(kind, json.loads(content))
        elif not self._prefix:  # among several workers it would remove the output of the others
            self._display.clear_output(json.loads(content))

    def finish_output(self) -> None:
        """Show the output that was held back, and hold back no more."""
        self._flush_lines()
        self._holding = False
        results, self._results = self._results, []
        for bundle in results:
            self._show_labelled(bundle)

    def _show_text(self, stream: str, text: str) -> None:
        if not self._prefix:
            self._display.write_text(stream, text)
            return
        lines = (self._open[stream] + text).splitlines(keepends=True)
        self._open[stream] = lines.pop() if lines and not lines[-1].endswith(("\n", "\r")) else ""
        if lines:
            self._display.write_text(stream, "".join(self._prefix + line for line in lines))

    def _flush_lines(self) -> None:
        for stream in self._open:
            rest, self._open[stream] = self._open[stream], ""
            if rest:
                self._display.write_text(stream, f"{self._prefix}{rest}\n")

    def _show_bundle(self, kind: str, bundle: dict[str, Any]) -> None:
        transient = bundle.setdefault("transient", {})
        if "display_id" in transient:  # made unique: the same one on two workers belongs to two displays
            transient["display_id"] = f"{self._worker}/{transient['display_id']}"
        if kind == "update" and transient.get("display_id") in self._as_text:
            self._flush_lines()
            self._show_labelled(bundle)
        elif kind == "update":
            self._display.display_bundle(bundle, update=True)
        elif not self._prefix:
            self._display.display_bundle(bundle)
        elif kind == "result" and self._holding:
            self._results.append(bundle)
        else:
            self._flush_lines()  # an incomplete line was written before the display
            self._show_labelled(bundle)

    def _show_labelled(self, bundle: dict[str, Any]) -> None:
        text, display_id = bundle["data"].get("text/plain", ""), bundle["transient"].get("display_id")
        self._as_text.discard(display_id)
        if set(bundle["data"]) == {"text/plain"}:
            if display_id is not None:
                self._as_text.add(display_id)
            self._display.write_text("stdout", "".join(f"{self._prefix}{line}\n" for line in text.splitlines() or [""]))
            return
        if self._prefix:
            self._display.write_text("stdout", f"{self._prefix}\n")
        self._display.display_bundle(bundle)


OutputAreas = Callable[[OutputDisplay, Sequence[str], bool], Sequence[OutputArea]]
"""(display, workers, whether lines shall begin with names) -> the output area of each worker."""


def stacked_areas(display: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Make areas that show output as it arrives, in one place."""
    return [OutputArea(display, worker, worker if labelled else "") for worker in workers]


def unseen_areas(display: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Make areas that show nothing."""
    return [_UnseenArea(display, worker) for worker in workers]


class _UnseenArea(OutputArea):
    def show_item(self, kind: str, content: str) -> None:
        pass


MOST = 1 << 22  # characters that are held back per worker
_NUMBERED = re.compile(r"(.*?)(\d+)")

_Item = tuple[str, str]


def collapsed_areas(display: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Make areas that hold back their output until all of them are finished, and show equal outputs once."""
    if len(workers) == 1:
        return [OutputArea(display, workers[0], workers[0] if labelled else "")]
    together = _CollapsedAreas(display)
    together.areas = [_HeldOutput(display, worker, together) for worker in workers]
    return [*together.areas]


class _CollapsedAreas:
    """The areas of one cell."""

    def __init__(self, display: OutputDisplay) -> None:
        # for all areas: the last `finish_output` shows the output of all; reentrant for that
        self.lock = threading.RLock()
        self.areas: list[_HeldOutput] = []
        self._display = display

    def show_when_finished(self) -> None:
        """Show all output if every area is finished, areas with equal items as one."""
        held = [area for area in self.areas if area.items is not None]
        if not all(area.finished for area in held):
            return
        groups: dict[str, list[_HeldOutput]] = {}
        for area in held:
            groups.setdefault(json.dumps(_make_comparable(area.items or [])), []).append(area)
        for group in groups.values():
            if len(group) == 1:
                group[0].release_items()
            else:
                self._show_once(group)

    def _show_once(self, group: list[_HeldOutput]) -> None:
        first = group[0]
        as_one = OutputArea(self._display, first.worker, abbreviate_names(area.worker for area in group))
        for kind, content in first.items or []:
            as_one.show_item(kind, content)
        as_one.finish_output()
        for area in group:
            area.items = []  # shown with the first one's
            area.release_items()


class _HeldOutput(OutputArea):
    """The output of one worker, held back."""

    def __init__(self, display: OutputDisplay, worker: str, together: _CollapsedAreas) -> None:
        super().__init__(display, worker, worker)
        self.worker = worker
        self.items: list[_Item] | None = []  # None once it was released
        self.finished = False
        self._together = together
        self._size = 0

    def show_item(self, kind: str, content: str) -> None:
        with self._together.lock:
            if self.items is None:
                super().show_item(kind, content)
                return
            self.items.append((kind, content))
            self._size += len(content)
            if self._size > MOST:
                self.release_items()

    def finish_output(self) -> None:
        with self._together.lock:
            self.finished = True
            self._together.show_when_finished()
            if self.items is None:
                super().finish_output()

    def release_items(self) -> None:
        """Show the items that were held back, and later ones as they arrive."""
        items, self.items = self.items or [], None
        for kind, content in items:
            super().show_item(kind, content)
        if self.finished:
            super().finish_output()


def _make_comparable(items: list[_Item]) -> list[Any]:
    """Return the items in comparable form: adjacent texts joined, without display ids, which differ per worker."""
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


def abbreviate_names(workers: Iterator[str]) -> str:
    """Abbreviate names of workers: `worker1-3, worker5`."""
    spans: list[list[str]] = []  # each the first name, and the number of the last one if there are several
    following = None  # the name that would extend the last span
    for name in workers:
        found = _NUMBERED.fullmatch(name)
        if found and name == following:
            spans[-1][1:] = [found[2]]
        else:
            spans.append([name])
        following = f"{found[1]}{int(found[2]) + 1}" if found else None
    return ", ".join("-".join(span) for span in spans)


logger = logging.getLogger(__name__)


class OrderedOutput:
    """Turns notices that arrive in any order into items (kind, content) in order, with pieces joined."""

    def __init__(self) -> None:
        self._turns: ReorderBuffer[tuple[str, str]] = ReorderBuffer()
        self._parts: list[str] = []

    @property
    def ordered_count(self) -> int:
        """The number of notices taken in order."""
        return self._turns.passed

    def add_notice(self, notice: Notice) -> Iterator[tuple[str, str]]:
        """Yield the items that are now complete and in order."""
        for kind, content in self._turns.add_item(notice["n"], (notice["kind"], notice["content"])):
            if kind == "part":
                self._parts.append(content)
            else:
                parts, self._parts = self._parts, []
                yield kind, "".join([*parts, content])


@dataclass(frozen=True, slots=True)
class End:
    """The end of a cell on one worker."""

    error: str | None  # name of the error's class; None if there was no error
    traceback: list[str]  # rendered lines
    number: int | None = None  # of the worker's prompt; None if the cell never began
    seconds: float = 0.0  # that it ran there


class OutputBuffer:
    """The output of one cell on one worker. Its area shows the items for which `take_over_item(kind, content)` is
    False."""

    def __init__(self, area: OutputArea, take_over: Callable[[str, str], bool]) -> None:
        self.output_area = area
        self._take_over = take_over
        self.begun = Event()  # an item has arrived
        self.interrupt_handled = Event()  # the worker has acknowledged an interrupt
        self.runs = True  # False once the worker has reported that the cell has ended, or will never begin
        self.over = Event()  # all items were shown, or no more will arrive
        self.end: End | None = None
        self.shown = 0  # notices to acknowledge
        self.on_end: Callable[[End], object] = lambda end: None
        self._items = OrderedOutput()

    def receive_notice(self, notice: Notice) -> None:
        """Show the items that this notice completes."""
        self.begun.set()
        for kind, content in self._items.add_notice(notice):
            if kind == "end":
                self.end = End(**json.loads(content))
                self.on_end(self.end)
                continue
            try:
                if not self._take_over(kind, content):
                    self.output_area.show_item(kind, content)
            except Exception:
                # For example a closed stream. The cell still runs, so its later items, and its end, must be taken.
                logger.exception("a remote cell's %s could not be shown", kind)
        self.shown = self._items.ordered_count
        if self.end is not None:
            self.over.set()

    def output_lost(self) -> None:
        """Wake all waits: no more items will arrive."""
        self.begun.set()
        self.interrupt_handled.set()
        self.over.set()


class CallArea(OutputArea):
    """The output of one call: each line begins with the name of the worker."""

    def __init__(self, display: OutputDisplay, worker: str) -> None:
        super().__init__(display, worker, worker)
        self._lock = threading.Lock()  # guards the screen and the incomplete lines

    def show_item(self, kind: str, content: str) -> None:
        with self._lock:
            super().show_item(kind, content)

    def finish_output(self) -> None:
        with self._lock:
            super().finish_output()

    def move_to_display(self, display: OutputDisplay) -> None:
        """Show later text on this screen, and an incomplete line on the one before."""
        with self._lock:
            before = OutputArea(self._display, self._worker, self._worker)
            before._open, self._open, self._display = self._open, before._open, display
        before.finish_output()


class CallOutput:
    """The output of calls on the workers of one agent's world. Make it on the thread that runs cells."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._shell = ipython_shell()
        self._lock = threading.Lock()  # guards the two below
        self._areas: weakref.WeakSet[CallArea] = weakref.WeakSet()  # of calls that have not ended
        self._display = OutputDisplay(self._shell)  # of the cell that began last
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._begin_cell)
            agent.hooks.on_end.append(lambda: self._shell.events.unregister("pre_run_cell", self._begin_cell))

    def open_call_buffer(self, worker: int) -> OutputBuffer:
        name = self._agent.links.members.member_name(worker)
        with self._lock:
            area = CallArea(self._display, name)
            self._areas.add(area)
        return OutputBuffer(area, lambda kind, content: False)

    def _begin_cell(self, _info: object = None) -> None:
        display = OutputDisplay(self._shell)
        with self._lock:
            self._display, areas = display, list(self._areas)
        for area in areas:
            area.move_to_display(display)


class OutputRouter:
    """Passes notices to the output buffers of one agent's cells and calls."""

    def __init__(self, agent: Agent, open_call: Callable[[int], OutputBuffer]) -> None:
        """`open_call`: makes the buffer of a call on the worker with this member id."""
        self._agent = agent
        self._open_call = open_call
        self._lock = threading.Lock()
        self._buffers: dict[tuple[int, int], OutputBuffer] = {}  # by member id of the worker and number of the cell
        agent.on_notice(OUTPUT, self._output_received)
        agent.on_notice(INTERRUPT_HANDLED, self._interrupt_handled)
        agent.on_member(self._member_changed)

    def open_buffer(self, worker: int, cell: int, output_buffer: OutputBuffer) -> None:
        with self._lock:
            self._buffers[worker, cell] = output_buffer

    def drop_buffer(self, worker: int, cell: int) -> None:
        """Drop a buffer: no more items are wanted, or none will arrive."""
        with self._lock:
            output_buffer = self._buffers.pop((worker, cell), None)
        if output_buffer is None:
            return
        if is_call_number(cell):
            _finish_area(output_buffer.output_area)
        output_buffer.output_lost()

    def _output_received(self, worker: int, notice: Notice) -> None:
        cell = notice["cell"]
        if cell == NO_CELL:
            self._agent.part(CommProxies).receive_message(worker, notice["content"])
            return
        output_buffer = self._find_buffer(worker, cell)
        if output_buffer is None:
            return
        output_buffer.receive_notice(notice)  # without the lock: an agent delivers its notices one at a time
        if over := output_buffer.over.is_set():
            self.drop_buffer(worker, cell)
        if is_call_number(cell) or not over:  # the worker of a call waits until its end is shown
            self._agent.notify(worker, SHOWN, {"cell": cell, "shown": output_buffer.shown})

    def _find_buffer(self, worker: int, cell: int) -> OutputBuffer | None:
        with self._lock:
            output_buffer = self._buffers.get((worker, cell))
            if output_buffer is None and is_call_number(cell):  # the first item that arrives
                output_buffer = self._buffers[worker, cell] = self._open_call(worker)
            return output_buffer

    def _interrupt_handled(self, worker: int, notice: Notice) -> None:
        with self._lock:
            output_buffer = self._buffers.get((worker, notice["cell"]))
        if output_buffer is not None:
            output_buffer.runs = notice["runs"]
            output_buffer.interrupt_handled.set()

    def _member_changed(self, kind: str, member: WorkerInfo, _reason: str) -> None:
        if kind not in GONE:
            return
        with self._lock:
            cells = [cell for worker, cell in self._buffers if worker == member.id]
        for cell in cells:
            self.drop_buffer(member.id, cell)


def _finish_area(area: OutputArea) -> None:
    try:
        area.finish_output()
    except Exception:  # for example a closed stream: the call shall end all the same
        logger.exception("the output of a call could not be shown")

"""Background cells, which run on workers or on a thread here, and tabs for the output of each worker.

Guarantees
- The output, the progress and the error of a cell are shown in the cell that started it, even if another one runs by
  then. Its variables are bound when all its workers are through. What it shows until then stays true in a notebook that
  is closed and opened again, whose outputs nothing can change.
- Ctrl-C in a later cell, or in a wait for this one, does not stop it; `cancel` does.
- A cell on a thread here shares the notebook's names, and shows the value of its last line. It ends when its code does:
  Python cannot stop a thread from outside.
- `--tabs`: a tab shows its worker's output like a cell of its own: displays can change, `clear_output` works. Without
  widgets (an exported notebook, a terminal) the output of all tabs is shown as text once the cell is through, and each
  line begins with its worker's name.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from IPython.display import publish_display_data

from rpcbench.base.conditions import Event
from rpcbench.base.errors import CallCancelled
from rpcbench.cells.display import OutputArea, OutputDisplay, plain_text
from rpcbench.cells.tracebacks import error_message, user_frames, with_rendering
from rpcbench.notebook import require_extra

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

logger = logging.getLogger(__name__)
_numbers = itertools.count(1)  # of display ids


class CellExecution(Protocol):
    """A cell that runs on workers (`cells.client.RunningCell`) or here (`LocalCell`)."""

    def wait_for_result(self) -> Any:
        """Wait for the end of the cell and return its result."""

    def states_by_member(self) -> dict[str, str]:
        """Return the state by member: "runs", "done", or the name of the error."""

    def interrupt(self) -> None:
        """Request its end."""


class CellHandle:
    """A handle on a background cell. `settle` binds its variables and returns them, or raises the cell's error.

    >>> _.wait()  # in the cell after `%%remote worker1 --async -o y`
    {'y': 7}
    """

    def __init__(
        self,
        display: OutputDisplay,
        start: Callable[[Callable[[], object]], CellExecution],
        settle: Callable[[Any], Any],
    ) -> None:
        self._output_display = display
        self._settle = settle
        self._display = f"rpcbench-cell-{next(_numbers)}"
        self._shown = False  # the notebook has displayed the handle, so updates have a place
        self._began, self._duration = time.time(), 0.0  # start; duration in seconds once the cell has ended
        self._done = Event()
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._outcome.set_running_or_notify_cancel()  # so an `await` that is cancelled does not cancel the future
        self._sent = start(self._update_display)
        threading.Thread(target=self._follow_cell, name="rpcbench-cell", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether all its workers are through, or have been given up."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the variables by name, or raise the cell's error.

        Raises TimeoutError after `timeout` seconds, while the cell continues."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self!r} is not done after {timeout:g} s; it still runs")
        return self._outcome.result()

    def cancel(self) -> None:
        """Interrupt the cell on all workers that still run it; `wait` then raises CallCancelled."""
        self._sent.interrupt()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._outcome).__await__()

    def __repr__(self) -> str:
        states = self._sent.states_by_member().items()
        words = ", ".join(f"{worker}: {'begun' if state == 'runs' else state}" for worker, state in states)
        since = time.strftime("%H:%M:%S", time.localtime(self._began))
        when = f"{self._duration:.1f} s" if self._duration else f"at {since}, see %panel progress"
        return f"<cell on {words}; {when}>"

    def _ipython_display_(self) -> None:
        self._shown = True
        publish_display_data(**self._make_bundle())  # type: ignore[no-untyped-call]  # in the cell that displays the handle

    def _make_bundle(self) -> dict[str, Any]:
        return {"data": {"text/plain": repr(self)}, "metadata": {}, "transient": {"display_id": self._display}}

    def _update_display(self) -> None:
        """Update the display after a change of state."""
        if self._shown:
            self._output_display.display_bundle(self._make_bundle(), update=True)

    def _follow_cell(self) -> None:
        clock = time.monotonic()
        values: Any = None
        error: BaseException | None = None
        try:
            values = self._settle(self._sent.wait_for_result())
        except KeyboardInterrupt as interrupt:  # from `settle`, of an interrupted cell: this is not the main thread
            rendered: list[str] = getattr(interrupt, "_render_traceback_", list)()
            error = with_rendering(CallCancelled("the cell was cancelled"), rendered)
        except BaseException as raised:  # noqa: BLE001  (any error of the cell)
            error = raised
        self._duration = time.monotonic() - clock
        try:
            if error is not None:
                lines = getattr(error, "_render_traceback_", lambda: [error_message(error)])()
                self._output_display.write_text("stderr", "\n".join(lines) + "\n")
            self._update_display()
        except Exception:  # for example a closed stream: the threads in `wait` must still be woken
            logger.exception("the end of a remote cell could not be shown")
        if error is None:
            self._outcome.set_result(values)
        else:
            self._outcome.set_exception(error)
        self._done.set()


HERE = "notebook"  # the member name of a cell that runs here


class LocalCell:
    """A cell of the notebook that `wait_for_result` runs, on the calling thread. The constructor may raise
    SyntaxError. `on_end` is called with its error or None at its end."""

    def __init__(self, shell: InteractiveShell, display: OutputDisplay, code: str) -> None:
        self._shell = shell
        self._display = display
        self._state = "runs"
        self.on_end: Callable[[BaseException | None], object] = lambda error: None
        text = cast(Any, shell).transform_cell(code)
        # For lines of tracebacks, with the number of the cell's prompt: `execution_count` may be that of the next cell.
        number = len(cast(Any, shell.history_manager).input_hist_parsed) - 1
        name = cast(Any, shell.compile).cache(text, number, raw_code=code)
        tree = ast.parse(text, name)
        self._value = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):  # evaluated apart, to display its value
            tree.body.pop()
            self._value = compile(ast.Expression(last.value), name, "eval")
        self._code = compile(tree, name, "exec")

    def wait_for_result(self) -> None:
        """Run the cell; raise its error with IPython's rendering."""
        try:
            self._display.call_in_context(self._run_code)
        except BaseException as error:  # noqa: BLE001  (any error of the cell)
            self._state = type(error).__name__
            self.on_end(error)
            frames = user_frames(error.__traceback__)
            lines = cast(Any, self._shell.InteractiveTB).structured_traceback(type(error), error, frames)
            raise with_rendering(error, lines) from None
        self._state = "done"
        self.on_end(None)

    def _run_code(self) -> None:
        from IPython.display import display

        space = self._shell.user_ns
        exec(self._code, space)
        if self._value is not None and (value := eval(self._value, space)) is not None:
            display(value)  # type: ignore[no-untyped-call]

    def states_by_member(self) -> dict[str, str]:
        return {HERE: self._state}

    def interrupt(self) -> None:
        raise RuntimeError(
            "a background cell in the notebook itself cannot be interrupted: release its messages with stepper.go(), "
            "so that it can end"
        )


Output = dict[str, Any]


def tabbed_areas(display: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """Make and show a tab for each worker. Raises UsageError if ipywidgets is not installed."""
    with require_extra("--tabs", "ipywidgets"):
        import ipywidgets

    outputs = [ipywidgets.Output() for _ in workers]
    tabs = ipywidgets.Tab(children=outputs, titles=tuple(workers))
    view = tabs._repr_mimebundle_() or {}  # None if no front end can draw widgets
    identity = {"display_id": f"rpcbench-tabs-{next(_numbers)}"}

    def show_tabs(text: str, update: bool = False) -> None:
        data = {**view, "text/plain": text}
        display.display_bundle({"data": data, "metadata": {}, "transient": identity}, update=update)

    def worker_finished(worker: str) -> None:
        running.discard(worker)
        if not running:
            show_tabs(_as_text(workers, sheets), update=True)

    running = set(workers)  # the text form is published once, when it is empty: it needs the output of all tabs
    sheets = [_TabContent(display, output) for output in outputs]
    show_tabs(f"In tabs: {', '.join(workers)}.")
    return [_Tab(sheet, worker, worker_finished) for sheet, worker in zip(sheets, workers, strict=True)]


class _TabContent:
    """The content of one tab."""

    def __init__(self, display: OutputDisplay, widget: Any) -> None:
        self.outputs: list[Output] = []  # in the format of a notebook file
        self._display = display
        self._widget = widget
        self._ids: list[str | None] = []  # display ids, parallel to `outputs`
        self._stale = False  # clear before the next item: `clear_output(wait=True)`

    def write_text(self, stream: str, text: str) -> None:
        self._clear_stale()
        last = self.outputs[-1] if self.outputs else {}
        if last.get("name") == stream:
            self.outputs[-1] = {**last, "text": last["text"] + text}
        else:
            self._add_output({"output_type": "stream", "name": stream, "text": text}, None)
        self._publish_outputs()

    def display_bundle(self, bundle: dict[str, Any], update: bool = False) -> None:
        shown = {"output_type": "display_data", "data": bundle["data"], "metadata": bundle["metadata"]}
        name = bundle.get("transient", {}).get("display_id")
        if update:
            self.outputs = [shown if own == name else old for own, old in zip(self._ids, self.outputs, strict=True)]
        else:
            self._clear_stale()
            self._add_output(shown, name)
        self._publish_outputs()

    def clear_output(self, wait: bool) -> None:
        self._stale = True
        if not wait:
            self._clear_stale()
            self._publish_outputs()

    def _clear_stale(self) -> None:
        if self._stale:
            self.outputs, self._ids, self._stale = [], [], False

    def _add_output(self, output: Output, name: str | None) -> None:
        self.outputs.append(output)
        self._ids.append(name)

    def _publish_outputs(self) -> None:
        self._display.call_in_context(lambda: setattr(self._widget, "outputs", tuple(self.outputs)))


class _Tab(OutputArea):
    """The output area of a worker in its tab. Calls `on_finished(worker)` when it is finished."""

    def __init__(self, sheet: _TabContent, worker: str, on_finished: Callable[[str], object]) -> None:
        super().__init__(sheet, worker)
        self._on_finished = on_finished

    def finish_output(self) -> None:
        super().finish_output()
        self._on_finished(self._worker)


def _as_text(workers: Sequence[str], sheets: Sequence[_TabContent]) -> str:
    """Join the text of all tabs; a tab without output has an empty line."""
    lines = []
    for worker, sheet in zip(workers, sheets, strict=True):
        text = "".join(output["text"] if "text" in output else f"{plain_text(output)}\n" for output in sheet.outputs)
        lines += [f"[{worker}] {line}" for line in text.splitlines() or [""]]
    return "\n".join(lines)

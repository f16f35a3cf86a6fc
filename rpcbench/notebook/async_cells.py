"""Cells that run on workers, or on a thread here, while the notebook goes on; and tabs for the output of each worker.

Guarantees
- The output, the progress and the error of a cell are shown in the cell that began it, whatever runs in the notebook by
  then. Variables that it brings back are bound when all its workers are through.
- Ctrl-C in a later cell, or in a wait for this one, does not stop it; `cancel` does.
- A cell on a thread here shares the notebook's names, and shows the value of its last line. No thread can be stopped
  from outside: it ends when its code does.
- `--tabs`: a tab shows all that its worker shows, as a cell of its own would: displays change, `clear_output` is
  obeyed. Where no widgets are shown (an exported notebook, a terminal) the same stands below each other as text, once
  the cell is through: each line begins with its worker's name.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from IPython.display import publish_display_data

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import CallCancelled
from rpcbench.cells.display import OutputArea, OutputDisplay, plain
from rpcbench.cells.tracebacks import of_user, shown_as
from rpcbench.notebook import require_extra

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


logger = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Going(Protocol):
    """A cell that runs somewhere: what `cells.client.Sent` is for cells on workers."""

    def answer(self) -> Any:
        """What came of it, once it is through."""

    def states(self) -> dict[str, str]:
        """By member: "runs", "done", or the name of the error."""

    def interrupt(self) -> None:
        """Ask for its end."""


class CellHandle:
    """`settle` binds what came back and gives the values by name, or raises the cell's error.

    >>> _.wait()  # in the cell after `%%remote worker1 --async -o y`
    {'y': 7}
    """

    def __init__(
        self, screen: OutputDisplay, start: Callable[[Callable[[], object]], Going], settle: Callable[[Any], Any]
    ) -> None:
        self._screen = screen
        self._settle = settle
        self._display = f"rpcbench-cell-{next(_numbers)}"
        self._shown = False
        self._began, self._took = time.monotonic(), 0.0
        self._done = Flag()
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._outcome.set_running_or_notify_cancel()  # who awaits it, and gives up, does not end it
        self._sent = start(self._show)
        threading.Thread(target=self._follow, name="rpcbench-cell", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether all its workers are through, or have been given up."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """The variables that it brought back, by name; its error is raised. TimeoutError after `timeout` seconds: then
        it goes on."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self!r} is not done after {timeout:g} s; it goes on")
        return self._outcome.result()

    def cancel(self) -> None:
        """Interrupt it where it still runs; its `wait` raises CallCancelled then."""
        self._sent.interrupt()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._outcome).__await__()

    def __repr__(self) -> str:
        states = ", ".join(f"{worker}: {state}" for worker, state in self._sent.states().items())
        seconds = self._took or time.monotonic() - self._began
        return f"<cell on {states}; {seconds:.1f} s>"

    def _ipython_display_(self) -> None:
        self._shown = True
        publish_display_data(**self._bundle())  # type: ignore[no-untyped-call]  # in the cell that asks for it

    def _bundle(self) -> dict[str, Any]:
        return {"data": {"text/plain": repr(self)}, "metadata": {}, "transient": {"display_id": self._display}}

    def _show(self) -> None:
        """It has changed."""
        if self._shown:
            self._screen.display(self._bundle(), update=True)

    def _follow(self) -> None:
        values: Any = None
        error: BaseException | None = None
        try:
            values = self._settle(self._sent.answer())
        except KeyboardInterrupt as interrupt:  # what a cell raises that was interrupted
            lines: list[str] = getattr(interrupt, "_render_traceback_", list)()
            error = shown_as(CallCancelled("the cell was cancelled"), lines)
        except BaseException as raised:  # noqa: BLE001  (whatever the cell raised)
            error = raised
        self._took = time.monotonic() - self._began
        try:
            if error is not None:
                self._tell(error)
            self._show()
        except Exception:  # a closed stream, say: who waits must not wait for ever
            logger.exception("the end of a remote cell could not be shown")
        if error is None:
            self._outcome.set_result(values)
        else:
            self._outcome.set_exception(error)
        self._done.set()

    def _tell(self, error: BaseException) -> None:
        lines = getattr(error, "_render_traceback_", lambda: [f"{type(error).__name__}: {error}"])()
        self._screen.text("stderr", "\n".join(lines) + "\n")


HERE = "notebook"


class Beside:
    """`answer` runs the cell, on the thread that asks. SyntaxError at once where it is none."""

    def __init__(self, shell: InteractiveShell, screen: OutputDisplay, code: str) -> None:
        self._shell = shell
        self._screen = screen
        self._state = "runs"
        text = cast(Any, shell).transform_cell(code)
        name = cast(Any, shell.compile).cache(text, shell.execution_count, raw_code=code)  # for lines of tracebacks
        tree = ast.parse(text, name)
        self._value = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body.pop()
            self._value = compile(ast.Expression(last.value), name, "eval")
        self._code = compile(tree, name, "exec")

    def answer(self) -> None:
        """Its error is raised, to be shown as IPython shows errors."""
        try:
            self._screen.within(self._run)
        except BaseException as error:  # noqa: BLE001  (whatever the cell raised)
            self._state = type(error).__name__
            frames = of_user(error.__traceback__)
            lines = cast(Any, self._shell.InteractiveTB).structured_traceback(type(error), error, frames)
            raise shown_as(error, lines) from None
        self._state = "done"

    def _run(self) -> None:
        from IPython.display import display

        space = self._shell.user_ns
        exec(self._code, space)
        if self._value is not None and (value := eval(self._value, space)) is not None:
            display(value)  # type: ignore[no-untyped-call]

    def states(self) -> dict[str, str]:
        return {HERE: self._state}

    def interrupt(self) -> None:
        raise RuntimeError(
            "a cell of the notebook's own cannot be interrupted while it runs beside it: let its messages go, with "
            "stepper.go(), and it comes to its end"
        )


Output = dict[str, Any]
_tab_numbers = itertools.count(1)


def in_tabs(screen: OutputDisplay, workers: Sequence[str], labelled: bool) -> list[OutputArea]:
    """A tab for each worker, shown at once. UsageError where ipywidgets is missing."""
    with require_extra("--tabs", "ipywidgets"):
        import ipywidgets

    outputs = [ipywidgets.Output() for _ in workers]
    tabs = ipywidgets.Tab(children=outputs, titles=tuple(workers))
    view = tabs._repr_mimebundle_() or {}  # none where nobody could draw it
    identity = {"display_id": f"rpcbench-tabs-{next(_tab_numbers)}"}

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

    def __init__(self, screen: OutputDisplay, widget: Any) -> None:
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


class _Tab(OutputArea):
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
        for line in "".join(_tab_lines(sheet.outputs)).splitlines() or [""]
    )


def _tab_lines(outputs: Sequence[Output]) -> Iterator[str]:
    for output in outputs:
        yield output["text"] if "text" in output else f"{plain(output)}\n"

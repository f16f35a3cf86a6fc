"""A cell that runs on workers while the notebook goes on: what `%%remote --async` answers with.

Guarantees
- Its output, its progress and its error are shown in the cell that began it, whatever runs in the notebook by then.
- Variables that it brings back are bound when all its workers are through.
- Ctrl-C in a later cell, or in a wait for this one, does not stop it; `cancel` does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from IPython.display import publish_display_data

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import CallCancelled
from rpcbench.launch.screen import Screen
from rpcbench.launch.tracebacks import shown_as

logger = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Going(Protocol):
    """A cell that runs somewhere: what `launch.desk.Sent` is for cells on workers."""

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
        self, screen: Screen, start: Callable[[Callable[[], object]], Going], settle: Callable[[Any], Any]
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

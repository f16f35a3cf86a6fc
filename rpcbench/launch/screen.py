"""Where the output of remote cells is shown: in the notebook cell that asked, whatever runs by then.

A `Screen` keeps the context in which it was made: ipykernel finds there which cell a text or a display belongs to, from
any thread and however late. Redirections (`%%capture`, `redirect_stdout`, an Output widget) hold for it as for any
other output; without a kernel it prints.
"""

from __future__ import annotations

import contextvars
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Surface(Protocol):
    """What a pane can show something on. Called from any thread."""

    def text(self, stream: str, text: str) -> None:
        """Write to "stdout" or "stderr"; it is there when this returns."""

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        """Show a mime bundle, or change the one with the same display id."""

    def clear(self, wait: bool) -> None:
        """Wipe all out, now or (`wait`) when the next is shown."""


class Screen:
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


class Pane:
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


Panes = Callable[[Screen, Sequence[str], bool], Sequence[Pane]]
"""(screen, workers, whether lines shall begin with names) -> the pane of each worker."""


def one_below_the_other(screen: Screen, workers: Sequence[str], labelled: bool) -> list[Pane]:
    """As output comes, in one place."""
    return [Pane(screen, worker, worker if labelled else "") for worker in workers]


def unseen(screen: Screen, workers: Sequence[str], labelled: bool) -> list[Pane]:
    """Nothing is shown."""
    return [Pane(_Nowhere(), worker) for worker in workers]


class _Nowhere:
    def text(self, stream: str, text: str) -> None:
        pass

    def display(self, bundle: dict[str, Any], update: bool = False) -> None:
        pass

    def clear(self, wait: bool) -> None:
        pass

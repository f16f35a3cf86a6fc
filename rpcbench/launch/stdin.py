"""`input()` and `getpass()` on a worker: the question goes to the member that asked for the cell, which answers.

Guarantees
- The question is shown after all that the cell has written before it.
- A wait ends with the answer, with an interrupt, or with the cell: a thread that asks does not outlive it in that.
- Where nobody can answer (no cell runs, the cell runs beside the notebook, a forked child) that is said, as
  StdinNotImplementedError with what to do.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import itertools
import json
import queue
from collections.abc import Iterator
from typing import Any

from rpcbench.launch.outbox import Notice, Outbox

ANSWER = "answer"
"""The notice that brings an answer: `question` is its number, `kind` one of these, `text` the answer or the reason."""
TEXT, END, REFUSED = "text", "end", "refused"


class Stdin:
    """The questions of one process."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = itertools.count()
        self._open: dict[int, queue.SimpleQueue[tuple[str, str]]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, `input` and `getpass.getpass` ask the notebook."""
        before = builtins.input, getpass.getpass
        self.install()
        try:
            yield
        finally:
            builtins.input, getpass.getpass = before

    def install(self) -> None:
        """As `installed`, for good."""
        builtins.input, getpass.getpass = self.input, self.getpass

    def input(self, prompt: object = "", /) -> str:
        """As Python's: EOFError where the user ends the input."""
        return self._ask("input()", str(prompt), False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: Any) -> str:
        """As Python's; `stream` and the like mean something on a terminal only."""
        return self._ask("getpass()", prompt, True)

    def answered(self, _asker: int, notice: Notice) -> None:
        """An answer has come. On a pool thread."""
        answers = self._open.get(notice["question"])
        if answers is not None:
            answers.put((notice["kind"], notice["text"]))

    def end(self) -> None:
        """The cell is over: nobody answers what its threads still ask."""
        for answers in list(self._open.values()):
            answers.put((END, ""))

    def _ask(self, name: str, prompt: str, password: bool) -> str:
        number = next(self._numbers)
        answers = self._open[number] = queue.SimpleQueue()
        try:
            if not self._outbox.show("input", json.dumps({"question": number, "prompt": prompt, "password": password})):
                raise _not_here(f"{name} outside a cell: nobody is there to answer; pass the value as an argument")
            kind, text = answers.get()
        finally:
            del self._open[number]
        if kind == REFUSED:
            raise _not_here(f"{name}: {text}")
        if kind == END:
            raise EOFError(f"{name}: the input has ended")
        return text


def _not_here(words: str) -> Exception:
    from IPython.core.error import StdinNotImplementedError

    return StdinNotImplementedError(words)

"""What arrives from workers' outboxes, put in order and handed to the cell it belongs to.

Guarantees
- Items of one cell on one worker are shown in the order of their numbers, whatever order they arrive in, each once.
- A cell is over when its `end` and all before it were shown, or when its worker is gone.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcbench.base.conditions import Flag
from rpcbench.launch.cells import HEARD, OUTPUT, SHOWN
from rpcbench.launch.mirrors import Mirrors
from rpcbench.launch.outbox import BESIDE
from rpcbench.launch.turns import InTurn
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from rpcbench.launch.screen import Pane
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

logger = logging.getLogger(__name__)

Notice = dict[str, Any]


class InOrder:
    """Turns notices that arrive in any order into items (kind, content) in order, pieces joined."""

    def __init__(self) -> None:
        self._turns: InTurn[tuple[str, str]] = InTurn()
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


class Inbox:
    """The output of one cell on one worker: shown on its pane as it comes, until the end is there.

    `take_over(kind, content)` is asked first: what it takes is not shown.
    """

    def __init__(self, pane: Pane, take_over: Callable[[str, str], bool]) -> None:
        self.pane = pane
        self._take_over = take_over
        self.begun = Flag()
        self.heard = Flag()  # of an interrupt
        self.runs = True  # False once it is known that it is over, or will never begin
        self.over = Flag()
        self.end: End | None = None
        self.shown = 0
        self._items = InOrder()

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


class Relay:
    """All inboxes of one agent. Its notices come one at a time, so showing needs no lock."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        agent.on_notice(OUTPUT, self._arrived)
        agent.on_notice(HEARD, self._heard)
        agent.on_member(self._changed)

    def open(self, worker: int, cell: int, inbox: Inbox) -> None:
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
            self._agent.part(Mirrors).take(worker, notice["content"])
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

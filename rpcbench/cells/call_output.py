"""Shows the text that calls on workers write, in the cell that runs in the notebook then.

Guarantees
- Each line begins with the worker's name. Text goes to the cell that began last, also after its end; in a script it is
  printed. `OutputStream` has it in the worker's log, too.
- A worker is told once all that a call has written is shown: the call ends after that, and the cell that waits for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rpcbench.cells.display import OutputArea, OutputDisplay, shell_here
from rpcbench.cells.output import CALL_ENDS, NO_CELL, SHOWN

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

logger = logging.getLogger(__name__)


class CallOutput:
    """The output of calls on the workers of one agent's world. Make it on the thread that runs cells."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._shell = shell_here()
        self._areas: dict[int, OutputArea] = {}  # by member id of the worker, in the present cell
        self._begin_cell()
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._begin_cell)
            agent.on_end.append(lambda: self._shell.events.unregister("pre_run_cell", self._begin_cell))

    def take(self, worker: int, kind: str, content: str) -> None:
        """Show text, or acknowledge the end of a call. On a pool thread, one item of a worker at a time."""
        try:
            self._show(worker, kind, content)
        except Exception:  # for example a closed stream: the call shall end all the same
            logger.exception("the output of a call could not be shown")
        if kind == CALL_ENDS:
            self._agent.notify(worker, SHOWN, {"cell": NO_CELL, "shown": int(content)})

    def _show(self, worker: int, kind: str, content: str) -> None:
        name, areas = self._agent.member_table.name(worker), self._areas
        area = areas.setdefault(worker, OutputArea(self._screen, name, name))
        if kind == CALL_ENDS:
            area.finish()  # an incomplete line
        else:
            area.show(kind, content)

    def _begin_cell(self, _info: object = None) -> None:
        before, self._screen, self._areas = self._areas, OutputDisplay(self._shell), {}
        for area in before.values():
            area.finish()

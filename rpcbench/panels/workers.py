"""The workers panel: the state of each worker; buttons that interrupt, restart and scale, also while a cell runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import traitlets

from rpcbench.launch.actions import Actions
from rpcbench.panels.base import SESSION, Panel, PanelFeed, Source
from rpcbench.runtime import current
from rpcbench.telemetry.collector import HealthPoller
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.views import workers_view
from rpcbench.telemetry.worker_columns import WORKER_COLUMNS, Column

Act = Callable[[str, str], object]
"""(action, target), as `rpcbench.launch.actions.Actions.begin_action` takes them."""


def _fold_rule(column: Column) -> str:
    """Return the CSS rule that hides the cells of a column, if the table has folded it."""
    return f".rb-workers .rb-no-{column.key} .rb-{column.key} {{ display: none; }}"


class WorkersPanel(Panel):
    """A row for each worker; see `rpcbench.telemetry.views.workers_view`. Without `act` it has no buttons."""

    look = staticmethod(workers_view)
    sentence = "Workers, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("workers")
    _css = "\n".join([panel_styles("workers"), *map(_fold_rule, WORKER_COLUMNS)])
    acts = traitlets.Bool(False).tag(sync=True)  # show buttons

    def __init__(self, source: Source, publisher: PanelFeed = SESSION, act: Act | None = None) -> None:
        self._act = act
        super().__init__(source, publisher, acts=act is not None)

    @classmethod
    def for_current_cluster(cls) -> Self:
        agent = current.current_agent()
        actions = agent.part(Actions)  # offered if a cluster owns the agent, not after a plain `init_rpc`
        return cls(agent.part(HealthPoller), act=actions.begin_action if actions.is_offered else None)

    def message_received(self, content: dict[str, Any]) -> None:
        match content:
            case {"kind": "act", "action": str(action), "target": str(target)} if self._act is not None:
                self._act(action, target)

"""The logs panel: output of workers outside cells, by worker or merged, with a search, levels, and a file to save."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.log_follower import current_follower
from rpcbench.telemetry.log_view import logs_view


class LogsPanel(Panel):
    """Lines of all workers; see `telemetry.log_view.logs_view`. Logs are read only while such a panel is open."""

    look = staticmethod(logs_view)
    sentence = "The output of workers, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("logs")
    _css = panel_styles("logs")

    @classmethod
    def for_current_cluster(cls) -> Self:
        return cls(current_follower())

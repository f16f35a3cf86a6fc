"""The panel of traffic: bytes per second between all pairs of members, as a matrix."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel
from rpcbench.telemetry.collector import current_poller
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.resource_views import traffic_view


class TrafficPanel(Panel):
    """Senders as rows, receivers as columns; see `rpcbench.telemetry.resource_views.traffic_view`."""

    look = staticmethod(traffic_view)
    sentence = "Bytes between workers, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("traffic")
    _css = panel_styles("traffic")

    @classmethod
    def for_current_cluster(cls) -> Self:
        return cls(current_poller())

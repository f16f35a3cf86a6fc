"""The panel of resources: the figures of all members over the last minutes, as charts."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel
from rpcbench.telemetry.collector import current_poller
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.resource_views import resources_view


class ResourcesPanel(Panel):
    """A chart for each figure; see `rpcbench.telemetry.resource_views.resources_view`."""

    look = staticmethod(resources_view)
    sentence = "CPU, memory and bytes, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("resources")
    _css = panel_styles("resources")

    @classmethod
    def for_current_cluster(cls) -> Self:
        return cls(current_poller())

"""The autograd panel: the graph of a distributed-autograd context on all workers, and its backward passes."""

from __future__ import annotations

from rpcbench.panels.base import Panel, panel_asset
from rpcbench.telemetry.autograd_view import autograd_view


class AutogradPanel(Panel):
    """A lane per worker with its operations, an arrow per message; see `rpcbench.telemetry.autograd_view`."""

    look = staticmethod(autograd_view)
    sentence = "Autograd contexts, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_asset("autograd", ".js", "lanes")
    _css = panel_asset("autograd", ".css")

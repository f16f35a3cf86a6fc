"""The autograd panel: the graph of a distributed-autograd context on all workers, and its backward passes."""

from __future__ import annotations

from rpcbench.panels.base import Panel
from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.drawing import panel_script, panel_styles


class AutogradPanel(Panel):
    """A lane per worker with its operations, an arrow per message; see `rpcbench.telemetry.autograd_view`."""

    look = staticmethod(autograd_view)
    sentence = "Autograd contexts, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("autograd")
    _css = panel_styles("autograd")

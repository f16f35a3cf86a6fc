"""The autograd panel: the records of each distributed-autograd context, and the progress of its backward passes."""

from __future__ import annotations

from rpcbench.panels.base import Panel, asset
from rpcbench.telemetry.views import autograd_view


class AutogradPanel(Panel):
    """Contexts as cards, with sends and recvs between workers; see `rpcbench.telemetry.views.autograd_view`."""

    look = staticmethod(autograd_view)
    sentence = "Autograd contexts, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = asset("autograd", ".js")
    _css = asset("autograd", ".css")

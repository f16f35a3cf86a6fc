"""The RRef panel: the owner and the users of each RRef, and the forks that are in transit."""

from __future__ import annotations

from rpcbench.panels.base import Panel
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.views import rref_view


class RRefPanel(Panel):
    """Workers as columns, RRefs as rows; see `rpcbench.telemetry.views.rref_view`."""

    look = staticmethod(rref_view)
    sentence = "RRefs by owner and user, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("rrefs")
    _css = panel_styles("rrefs")

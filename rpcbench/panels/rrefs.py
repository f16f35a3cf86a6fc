"""The RRef panel: the owner and the users of each RRef, and the forks that are in transit."""

from __future__ import annotations

from rpcbench.panels.base import Panel, colour_rules, panel_asset
from rpcbench.telemetry.views import TYPE_COLOURS, rref_view

_COLOURS = {f"type-{colour}": colour for colour in TYPE_COLOURS} | {"type-mixed": "dim"}


class RRefPanel(Panel):
    """Workers as columns, RRefs as rows; see `rpcbench.telemetry.views.rref_view`."""

    look = staticmethod(rref_view)
    sentence = "RRefs by owner and user, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_asset("rrefs", ".js")
    _css = panel_asset("rrefs", ".css") + colour_rules("rrefs", "type", _COLOURS)

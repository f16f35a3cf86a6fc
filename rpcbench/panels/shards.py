"""The sharding panel: which piece of each parameter each rank holds, and which are gathered at the moment."""

from __future__ import annotations

from rpcbench.panels.base import Panel
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.shard_views import shards_view


class ShardsPanel(Panel):
    """Ranks as columns, parameters as rows; see `rpcbench.telemetry.shard_views.shards_view`."""

    look = staticmethod(shards_view)
    sentence = "Sharded models, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("shards")
    _css = panel_styles("shards")

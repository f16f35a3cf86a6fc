"""The sharding panel: which piece of each parameter each rank holds, and which are gathered at the moment."""

from __future__ import annotations

from rpcbench.panels.base import Panel, Source, find_simulated
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.shard_views import shards_view
from rpcbench.telemetry.simulated_members import shard_members


class ShardsPanel(Panel):
    """Ranks as columns, parameters as rows; see `rpcbench.telemetry.shard_views.shards_view`."""

    look = staticmethod(shards_view)
    sentence = "Sharded models, live while this notebook's kernel runs. Run the cell to see the panel."
    wants = '`rpcbench.panel("shards", world)` shows a result of rpcbench.simulate, without it the current cluster'
    _esm = panel_script("shards")
    _css = panel_styles("shards")

    @classmethod
    def find_source(cls, given: object) -> Source:
        return find_simulated(given, shard_members) or super().find_source(given)

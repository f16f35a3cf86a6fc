"""The sharding panel: which piece of each parameter each rank holds, and which are gathered at the moment."""

from __future__ import annotations

from rpcbench.panels.base import Panel, colour_rules, panel_asset
from rpcbench.telemetry.shard_views import SHARD_PARTS, SHARD_WAYS, shards_view

_COLOURS = {f"way-{key}": mark.colour for key, mark in SHARD_WAYS.items()}
_COLOURS |= {f"part-{key}": mark.colour for key, mark in SHARD_PARTS.items()} | {"part-gathered": "amber"}


class ShardsPanel(Panel):
    """Ranks as columns, parameters as rows; see `rpcbench.telemetry.shard_views.shards_view`."""

    look = staticmethod(shards_view)
    sentence = "Sharded models, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_asset("shards", ".js")
    _css = panel_asset("shards", ".css") + colour_rules("shards", "way", _COLOURS)

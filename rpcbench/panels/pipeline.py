"""The pipeline panel: the last finished step, its bubble (the idle share of the workers), and the causes of that."""

from __future__ import annotations

from rpcbench.panels.base import Panel, colour_rules, panel_asset
from rpcbench.pipeline.simulate import MARKS
from rpcbench.telemetry.views import pipeline_view

_COLOURS = {f"op-{kind}": mark.colour for kind, mark in MARKS.items()}
_LETTERS = {f"op-{kind}": mark.ink for kind, mark in MARKS.items()}


class PipelinePanel(Panel):
    """A timeline of the last finished training step; see `rpcbench.telemetry.views.pipeline_view`."""

    look = staticmethod(pipeline_view)
    sentence = "Timeline of micro-batches, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_asset("pipeline", ".js", "steps", "timeline", "curves")
    _css = (
        panel_asset("pipeline", ".css")
        + colour_rules("pipeline", "op", _COLOURS)
        + colour_rules("pipeline", "letter", _LETTERS)
    )

"""The pipeline panel: the location of each micro-batch, and the share of the step in which workers were idle."""

from __future__ import annotations

from rpcbench.panels.base import Panel, asset
from rpcbench.telemetry.views import pipeline_view


class PipelinePanel(Panel):
    """A timeline of the latest step, one lane per worker; see `rpcbench.telemetry.views.pipeline_view`."""

    look = staticmethod(pipeline_view)
    sentence = "Timeline of micro-batches, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = asset("pipeline", ".js")
    _css = asset("pipeline", ".css")

"""The pipeline panel: the last finished step, its bubble (the idle share of the workers), and the causes of that."""

from __future__ import annotations

from rpcbench.panels.base import Panel, Source, find_simulated
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.simulated_members import pipeline_members
from rpcbench.telemetry.views import pipeline_view


class PipelinePanel(Panel):
    """A timeline of the last finished training step; see `rpcbench.telemetry.views.pipeline_view`."""

    look = staticmethod(pipeline_view)
    sentence = "Timeline of micro-batches, live while this notebook's kernel runs. Run the cell to see the panel."
    wants = '`rpcbench.panel("pipeline", world)` shows a result of rpcbench.simulate, without it the current cluster'
    _esm = panel_script("pipeline")
    _css = panel_styles("pipeline")

    @classmethod
    def find_source(cls, given: object) -> Source:
        return find_simulated(given, pipeline_members) or super().find_source(given)

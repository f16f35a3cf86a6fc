"""The progress panel: the jobs of a notebook, maps and training loops, with counts and times."""

from __future__ import annotations

from rpcbench.panels.base import Panel
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.progress_view import progress_view


class ProgressPanel(Panel):
    """A row for each job; see `rpcbench.telemetry.progress_view.progress_view`."""

    look = staticmethod(progress_view)
    sentence = "Maps, training loops and cells, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("progress")
    _css = panel_styles("progress")

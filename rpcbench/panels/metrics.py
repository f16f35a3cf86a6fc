"""The metrics panel: curves of what any loop logs with `rpcbench.log`, by rank, and the ranks that diverge."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from rpcbench.panels.base import Panel
from rpcbench.runtime.current import find_current
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.metric_views import LONE_METRICS, metrics_csv, metrics_view
from rpcbench.telemetry.recording import save_text


class MetricsPanel(Panel):
    """A chart for each name; see `rpcbench.telemetry.metric_views.metrics_view`. Without a cluster: of this process."""

    look = staticmethod(metrics_view)
    sentence = "Metrics of all ranks, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("metrics")
    _css = panel_styles("metrics")

    @classmethod
    def for_current_cluster(cls) -> Self:
        return cls(LONE_METRICS) if find_current() is None else super().for_current_cluster()

    def save(self, path: str | Path) -> Path:
        """Write all points that the ranks have kept, of all runs, as CSV. Returns the path."""
        return save_text(path, metrics_csv(self._collect_world()))

    def message_received(self, content: dict[str, Any]) -> None:
        match content:
            case {"kind": "csv", "eye": str(eye)}:
                self.send({"kind": "csv", "eye": eye, "text": metrics_csv(self._collect_world())})

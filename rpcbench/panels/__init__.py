"""Panels for notebooks: `rpcbench.panel(NAME)`, with the names in `PANELS`, and those of results, in `ALL_PANELS`."""

from __future__ import annotations

from rpcbench.panels.autograd import AutogradPanel
from rpcbench.panels.base import Panel, Source
from rpcbench.panels.compare import ComparePanel
from rpcbench.panels.logs import LogsPanel
from rpcbench.panels.messages import MessagesPanel
from rpcbench.panels.metrics import MetricsPanel
from rpcbench.panels.pipeline import PipelinePanel
from rpcbench.panels.plan import PlanPanel
from rpcbench.panels.progress import ProgressPanel
from rpcbench.panels.resources import ResourcesPanel
from rpcbench.panels.rrefs import RRefPanel
from rpcbench.panels.shards import ShardsPanel
from rpcbench.panels.traffic import TrafficPanel
from rpcbench.panels.workers import WorkersPanel
from rpcbench.runtime.current import find_current

__all__ = [
    "AutogradPanel", "ComparePanel", "LogsPanel", "MessagesPanel", "MetricsPanel", "Panel", "PipelinePanel",
    "PlanPanel", "ProgressPanel", "RRefPanel", "ResourcesPanel", "ShardsPanel", "Source", "TrafficPanel",
    "WorkersPanel", "panel",
]  # fmt: skip

PANELS: dict[str, type[Panel]] = {
    "workers": WorkersPanel,
    "progress": ProgressPanel,
    "rrefs": RRefPanel,
    "autograd": AutogradPanel,
    "pipeline": PipelinePanel,
    "messages": MessagesPanel,
    "shards": ShardsPanel,
    "compare": ComparePanel,
    "metrics": MetricsPanel,
    "resources": ResourcesPanel,
    "traffic": TrafficPanel,
    "logs": LogsPanel,
}
"""Those that follow a cluster."""
ALL_PANELS: dict[str, type[Panel]] = {**PANELS, "plan": PlanPanel}


def panel(name: str, source: object = None) -> Panel:
    """Make a panel.

    Args:
        name: "workers", "progress", "rrefs", "autograd", "pipeline", "messages", "shards", "compare", "metrics",
            "resources", "traffic", "logs" or "plan".
        source: what to show; by default the current cluster. "pipeline", "messages" and "shards" show a result of
            `rpcbench.simulate`, "compare" one of `cluster.compare`, "plan" one of `rpcbench.plan`.

    Returns:
        A widget to display; `print` shows its present view as text.

    Raises:
        ValueError: for another name.
        TypeError: the panel does not show this; "plan" needs a plan.
        RuntimeError: without a source, if no cluster runs.
    """
    if name not in ALL_PANELS:
        raise ValueError(f"no panel is called {name!r}: there are {', '.join(ALL_PANELS)}")
    kind = ALL_PANELS[name]
    if source is not None:
        return kind(kind.find_source(source))
    made = kind.for_current_cluster()  # instead of a default source: some use another collector, or have buttons
    if (agent := find_current()) is not None:  # metrics have a panel without a cluster, too
        made.follow_cluster(agent)
    return made

"""Live panels for notebooks: `rpcbench.panel(NAME)`, with the names in `PANELS`."""

from __future__ import annotations

from rpcbench.panels.autograd import AutogradPanel
from rpcbench.panels.base import Panel, Source
from rpcbench.panels.compare import ComparePanel
from rpcbench.panels.messages import MessagesPanel
from rpcbench.panels.pipeline import PipelinePanel
from rpcbench.panels.rrefs import RRefPanel
from rpcbench.panels.shards import ShardsPanel
from rpcbench.panels.workers import WorkersPanel

__all__ = [
    "AutogradPanel", "ComparePanel", "MessagesPanel", "Panel", "PipelinePanel", "RRefPanel", "ShardsPanel", "Source",
    "WorkersPanel", "panel",
]  # fmt: skip

PANELS: dict[str, type[Panel]] = {
    "workers": WorkersPanel,
    "rrefs": RRefPanel,
    "autograd": AutogradPanel,
    "pipeline": PipelinePanel,
    "messages": MessagesPanel,
    "shards": ShardsPanel,
    "compare": ComparePanel,
}


def panel(name: str, source: Source | None = None) -> Panel:
    """Make a live panel.

    Args:
        name: "workers", "rrefs", "autograd", "pipeline", "messages", "shards" or "compare".
        source: what to show; by default the current cluster.

    Returns:
        A widget to display; `print` shows its present view as text.

    Raises:
        ValueError: for another name.
        RuntimeError: without a source, if no cluster runs.
    """
    if name not in PANELS:
        raise ValueError(f"no panel is called {name!r}: there are {', '.join(PANELS)}")
    # `for_current_cluster` instead of a default source: some panels use another collector, or have buttons.
    return PANELS[name].for_current_cluster() if source is None else PANELS[name](source)

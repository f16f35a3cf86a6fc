"""Live panels for notebooks: `rpcbench.panel("workers")`, `"rrefs"`, `"autograd"`, `"pipeline"`, `"messages"`."""

from __future__ import annotations

from rpcbench.panels.autograd import AutogradPanel
from rpcbench.panels.base import Panel, Source
from rpcbench.panels.messages import MessagesPanel
from rpcbench.panels.pipeline import PipelinePanel
from rpcbench.panels.rrefs import RRefPanel
from rpcbench.panels.workers import WorkersPanel

__all__ = ["AutogradPanel", "MessagesPanel", "Panel", "PipelinePanel", "RRefPanel", "Source", "WorkersPanel", "panel"]

PANELS: dict[str, type[Panel]] = {
    "workers": WorkersPanel,
    "rrefs": RRefPanel,
    "autograd": AutogradPanel,
    "pipeline": PipelinePanel,
    "messages": MessagesPanel,
}


def panel(name: str, source: Source | None = None) -> Panel:
    """A live panel of the current cluster, or of `source`. ValueError for a name that is not in `PANELS`."""
    if name not in PANELS:
        raise ValueError(f"no panel is called {name!r}: there are {', '.join(PANELS)}")
    return PANELS[name].live() if source is None else PANELS[name](source)

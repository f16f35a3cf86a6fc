"""Live panels for notebooks: `rpcbench.panel("rrefs")`, `"autograd"`, `"pipeline"`."""

from __future__ import annotations

from rpcbench.panels.autograd import AutogradPanel
from rpcbench.panels.base import Panel
from rpcbench.panels.pipeline import PipelinePanel
from rpcbench.panels.publisher import Source
from rpcbench.panels.rrefs import RRefPanel

__all__ = ["AutogradPanel", "Panel", "PipelinePanel", "RRefPanel", "Source", "panel"]

PANELS: dict[str, type[Panel]] = {"rrefs": RRefPanel, "autograd": AutogradPanel, "pipeline": PipelinePanel}


def panel(name: str, source: Source | None = None) -> Panel:
    """A live panel of the current cluster, or of `source`. ValueError for a name that is not in `PANELS`."""
    if name not in PANELS:
        raise ValueError(f"no panel is called {name!r}: there are {', '.join(PANELS)}")
    if source is None:
        from rpcbench.telemetry import collect

        source = collect.current()
    return PANELS[name](source)

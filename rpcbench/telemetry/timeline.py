"""The timeline of a pipeline step, made from `ops` rows; it lives beside the pipeline, whose results carry one."""

from __future__ import annotations

from rpcbench.pipeline.timeline import Timeline, idle_share

__all__ = ["Timeline", "idle_share"]

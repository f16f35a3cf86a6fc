"""Pipeline-parallel training, driven from one cell: `split` a model, make a `Pipeline`, `step`."""

from __future__ import annotations

from rpcbench.pipeline.lazy import lazy
from rpcbench.pipeline.links import part
from rpcbench.pipeline.pipeline import Batch, Pipeline, StepResult
from rpcbench.pipeline.planned import Plan, schedule
from rpcbench.pipeline.simulate import Costs, Simulation, simulate
from rpcbench.pipeline.split import Stages, split
from rpcbench.words.errors import PipelineError, StageLostError

__all__ = [
    "Batch",
    "Costs",
    "Pipeline",
    "PipelineError",
    "Plan",
    "Simulation",
    "StageLostError",
    "Stages",
    "StepResult",
    "lazy",
    "part",
    "schedule",
    "simulate",
    "split",
]

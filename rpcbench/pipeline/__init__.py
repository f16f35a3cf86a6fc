"""Pipeline-parallel training, driven from one cell: `split` a model, make a `Pipeline`, `step`."""

from __future__ import annotations

from rpcbench.base.errors import PipelineError, StageLostError
from rpcbench.pipeline.batch import Batch
from rpcbench.pipeline.fitting import EndFit, History
from rpcbench.pipeline.lazy import lazy
from rpcbench.pipeline.links import part
from rpcbench.pipeline.pipeline import Pipeline
from rpcbench.pipeline.planned import Plan, schedule
from rpcbench.pipeline.runs import StepResult
from rpcbench.pipeline.simulate import Costs, Simulation, simulate
from rpcbench.pipeline.split import Stages, split
from rpcbench.pipeline.tracing import traced

__all__ = [
    "Batch",
    "Costs",
    "EndFit",
    "History",
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
    "traced",
]

"""Pipeline-parallel training from one notebook cell: `split` a model, make a `Pipeline`, call `step`."""

from __future__ import annotations

from rpcbench.base.errors import PipelineError, StageLostError
from rpcbench.pipeline.batch import Batch, StepResult
from rpcbench.pipeline.lazy import lazy
from rpcbench.pipeline.pipeline import Pipeline
from rpcbench.pipeline.plan import Plan, schedule
from rpcbench.pipeline.simulate import Costs, Simulation, simulate
from rpcbench.pipeline.split import Stages, split
from rpcbench.pipeline.stage_graph import part
from rpcbench.pipeline.tracing import traced
from rpcbench.pipeline.training import EndFit, History

__all__ = [
    "Batch", "Costs", "EndFit", "History", "Pipeline", "PipelineError", "Plan", "Simulation", "StageLostError",
    "Stages", "StepResult", "lazy", "part", "schedule", "simulate", "split", "traced",
]  # fmt: skip

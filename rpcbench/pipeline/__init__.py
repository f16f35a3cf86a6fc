"""Pipeline-parallel training, driven from one cell: `split` a model, make a `Pipeline`, `step`."""

from __future__ import annotations

from rpcbench.pipeline.batch import Batch
from rpcbench.pipeline.fitting import History
from rpcbench.pipeline.pipeline import Pipeline
from rpcbench.pipeline.runs import StepResult
from rpcbench.pipeline.split import Stages, split
from rpcbench.words.errors import PipelineError

__all__ = ["Batch", "History", "Pipeline", "PipelineError", "Stages", "StepResult", "split"]

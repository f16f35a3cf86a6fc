"""The messages between driver and workers: a step's task and report, the request to apply gradients, and aborts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rpcbench.pipeline.ops import Op, parse_plan
from rpcbench.pipeline.step_log import Stamps

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor | float]


class Task(NamedTuple):
    """The work of one worker in one step."""

    step: int
    plan: str  # its operations as text, see `parse_plan`
    train: bool  # False: the last stage's outputs or scores are returned
    samples: int  # of the whole batch
    microbatches: int
    reduction: str  # of the loss over samples: "mean" or "sum"
    whole: int | None  # number of samples that losses are shares of; None: of this batch
    ideal: float | None  # idle share of the schedule, for tables
    seed: int  # of the step, for random numbers
    window: int  # flow control, see `mailboxes`; 0: none
    applies: bool  # the optimizers step once all workers have all gradients, see `mailboxes`
    keeps: bool  # it keeps these gradients until the next step
    metrics: Mapping[str, Metric] | None  # scores of the last stage's outputs, if there are targets
    targets: Any  # those of this replica, on the worker of the last stage
    inputs: tuple[Any, ...]  # those of the model's inputs that its stages take

    @property
    def ops(self) -> tuple[Op, ...]:
        return parse_plan(self.plan)


class StepReport(NamedTuple):
    """The result of a task: operations with their times; from the last stage also losses, outputs or scores."""

    stamps: Stamps
    losses: dict[int, float]  # by micro-batch, as are outputs
    outputs: dict[int, Any]
    over: bool = False  # the worker has released the context


class Apply(NamedTuple):
    """The end of a training step, once all workers have all gradients: the optimizers step with those of `context`."""

    step: int
    context: int
    keeps: bool  # the worker keeps these gradients until the next step
    last: bool  # all workers of the pipeline release the context then


ENDS = "pipeline ends"
"""The channel of notices (key, step, reason): a step was aborted."""


def error_text(error: BaseException) -> str:
    """Return the reason for a step that an error aborts."""
    return f"{type(error).__name__}: {error}"

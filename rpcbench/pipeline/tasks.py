"""The messages between a driver and its workers: a step's task and report, and the request to apply gradients.

Rule: each is plain data, sent as a flat row of numbers, text and tensors instead of an object of this package, because
the encoding of such values is faster.
"""

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

    @property
    def call_arguments(self) -> tuple[Any, ...]:
        """The task as the arguments of a call."""
        return (*self[:-1], *self.inputs)  # inputs last and flat: their number varies

    @staticmethod
    def from_arguments(arguments: tuple[Any, ...]) -> Task:
        """Return the task that such arguments hold."""
        count = len(Task._fields) - 1
        return Task._make((*arguments[:count], arguments[count:]))


class StepReport(NamedTuple):
    """The result of a task: operations with their times; from the last stage also losses, outputs or scores."""

    stamps: Stamps
    losses: dict[int, float]  # by micro-batch, as are outputs
    outputs: dict[int, Any]
    over: bool = False  # the worker has released the context

    @property
    def call_result(self) -> tuple[Any, ...]:
        """The report as the result of a call."""
        return (*map(list, self.stamps), *self[1:])

    @staticmethod
    def from_result(result: tuple[Any, ...]) -> StepReport:
        """Return the report that such a result holds."""
        began, ended, *rest = result
        return StepReport(Stamps(began, ended), *rest)


class Apply(NamedTuple):
    """The end of a training step, once all workers have all gradients: the optimizers step with those of `context`."""

    step: int
    context: int
    keeps: bool  # the worker keeps these gradients until the next step
    last: bool  # all workers of the pipeline release the context then

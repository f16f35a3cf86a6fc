"""What a driver tells a worker to do in a step, and what the worker says of it afterwards. Plain values, sent whole.

What is said at each step is numbers, text and tensors, not in anything of ours: so it takes the quick ways of the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rpcbench.pipeline.ops import Op, ops_in
from rpcbench.pipeline.step_log import Stamps

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor | float]


class Task(NamedTuple):
    """What one worker does in one step.

    `plan`: its operations, see `ops_in`. The batch has so many `samples`, in `microbatches`; for the worker of the last
    stage `targets` are those of its replica, and `inputs` are of the model's those that its stages take. Losses are
    shares of `whole` samples, by their `reduction`. Where it is not to `train`, the last stage's outputs are sent back,
    or with targets what the loss and `metrics` say of them. `ideal` idle share: for those who look on. `seed` is the
    step's, for random numbers. `window`: see `mailboxes`, 0 where there is none. `applies`: once all workers have all
    gradients, see `mailboxes`, the optimizers step with them; it `keeps` these until the next step.
    """

    step: int
    plan: str
    train: bool
    samples: int
    microbatches: int
    reduction: str
    whole: int | None
    ideal: float | None
    seed: int
    window: int
    applies: bool
    keeps: bool
    metrics: Mapping[str, Metric] | None
    targets: Any
    inputs: tuple[Any, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        return ops_in(self.plan)

    @property
    def told(self) -> tuple[Any, ...]:
        """As the arguments of a call."""
        return (*self[:-1], *self.inputs)

    @staticmethod
    def heard(told: tuple[Any, ...]) -> Task:
        count = len(Task._fields) - 1
        return Task._make((*told[:count], told[count:]))


class Report(NamedTuple):
    """What came of it: operations with their times, and on the last stage's worker losses, outputs or scores.

    `over`: the worker has let go of the context.
    """

    stamps: Stamps
    losses: dict[int, float]
    outputs: dict[int, Any]
    over: bool = False

    @property
    def told(self) -> tuple[Any, ...]:
        """As the result of a call."""
        return (*map(list, self.stamps), *self[1:])

    @staticmethod
    def heard(told: tuple[Any, ...]) -> Report:
        began, ended, *rest = told
        return Report(Stamps(began, ended), *rest)


class Apply(NamedTuple):
    """The end of a training step, once all workers have all gradients: the optimizers step with those of `context`.

    `keeps`: these gradients until the next step. `last`: the context is over then for all workers of the pipeline.
    """

    step: int
    context: int
    keeps: bool
    last: bool

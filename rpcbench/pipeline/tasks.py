"""What a driver tells a worker to do in a step, and what the worker says of it afterwards. Plain values, sent whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rpcbench.pipeline.exchange import Inputs
from rpcbench.pipeline.ops import Op
from rpcbench.words.events import Row

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker does in one step. `inputs`: for stages that take some of the model's; `targets`: for the last.

    `weights` scale the micro-batches' losses. Where it is not to `train`, the last stage's outputs are sent back, or
    with targets what the loss and `metrics` say of them. For those who look on: all `workers` that take part, and the
    `ideal` idle share. `seed` is the step's, for random numbers. `window`: see `credits`, 0 where there is none.
    """

    step: int
    ops: tuple[Op, ...]
    inputs: Inputs
    targets: Mapping[int, Any] | None
    weights: Sequence[float]
    train: bool
    workers: Sequence[int]
    ideal: float | None
    seed: int
    window: int = 0
    metrics: Mapping[str, Metric] | None = None


@dataclass(slots=True)
class Report:
    """What came of it: operations with their times, and on the last stage's worker losses, outputs or scores."""

    rows: list[Row] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Apply:
    """The end of a training step, once all workers have all gradients: the optimizers step with those of `context`.

    `keep`: these gradients until the next step. `last`: the context is over then for all `workers` of the pipeline.
    """

    step: int
    context: int
    keep: bool
    last: bool
    driver: int
    workers: Sequence[int]

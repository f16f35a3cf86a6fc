"""Stages that compute next to nothing and take a fixed time, so that what schedules do on paper can be seen on a clock.

A forward sleeps once, a backward twice as long: half of it in the way to the input, half in what branches off to the
weights, so that each half of a split backward sleeps once.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rpcbench.pipeline.ops import Kind, Op


class _Input(Function):
    """Sleeps on the way there, and on the way back to the input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _Weight(Function):
    """Sleeps on the way back to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class FixedCost(nn.Module):
    """A stage whose forward takes so many seconds, its backward twice as many. Its output is of its input's shape."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__()
        self._seconds = seconds
        self.before, self.weight = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        # `before` makes the first stage, whose input needs no gradient, sleep as long as the others.
        way: Tensor = _Input.apply(value + self.before, self._seconds)  # type: ignore[no-untyped-call]
        branch: Tensor = _Weight.apply(self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return way + branch


def cost(op: Op) -> float:
    """In units of a forward. The first stage makes no gradient of its input: all its backward is in its weights."""
    if op.kind is Kind.BACKWARD:
        return 2.0
    if op.stage == 0 and op.kind in (Kind.INPUT, Kind.WEIGHT):
        return 0.0 if op.kind is Kind.INPUT else 2.0
    return 1.0


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()

"""Gradients of one worker's parameters, added up over the micro-batches of one step.

Guarantees
- They are added in the order in which they come, to what the context has of them from before the step.
- Memory is written to only if it was made here: what a hook, or a message, has kept of a gradient does not change.
- The context gets them when the step is whole; a step that fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from rpcbench.autograd.gradients import Leaves, total
from rpcbench.pipeline.exchange import Gradients

_layout = attrgetter("layout")


class _Stage:
    """The sums of one stage, and which of them were made here and may be added to; in the order of its parameters."""

    __slots__ = ("own", "sums")

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count
        self.own = [False] * count


class Sums:
    """`params`: of each stage; gradients come in their order. `before`: what the context has."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]], before: Mapping[Tensor, Tensor]) -> None:
        self._params, self._before = params, before
        self._stages: dict[int, _Stage] = {}

    def add(self, stage: int, gradients: Gradients) -> None:
        held = self._stages.get(stage)
        if held is None:
            held = self._stages[stage] = _Stage(len(gradients))
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` is six calls in Python
        try:
            dense = _dense(gradients)  # then one call for all, however many parameters a stage has
            if dense and all(held.own):
                torch._foreach_add_(held.sums, gradients)  # type: ignore[arg-type]
            elif dense and not any(held.own) and _dense(held.sums):
                held.sums[:] = torch._foreach_add(held.sums, gradients)  # type: ignore[arg-type]
                held.own[:] = [True] * len(gradients)
            else:
                self._add(held, self._params[stage], gradients)
        finally:
            torch._C._set_grad_enabled(before)

    def _add(self, held: _Stage, params: Sequence[Tensor], gradients: Gradients) -> None:
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            sofar = held.sums[place]
            if sofar is None and self._before:
                sofar = self._before.get(params[place])
            if sofar is None:
                held.sums[place] = gradient
            elif held.own[place] and gradient.layout is torch.strided:
                sofar.add_(gradient)
            else:
                held.sums[place] = made = total(sofar, gradient)
                held.own[place] = made.layout is torch.strided

    def leaves(self) -> Leaves:
        return [
            (param, found)
            for stage, held in self._stages.items()
            for param, found in zip(self._params[stage], held.sums, strict=True)
            if found is not None
        ]


def _dense(gradients: Gradients) -> bool:
    return {*map(type, gradients)} == {Tensor} and {*map(_layout, gradients)} == {torch.strided}

"""Gradients of one worker's parameters, added up over the micro-batches of one step.

Guarantees
- They are added in the order in which they come, to what the context has of them from before the step.
- Memory is written to only if it was made here: what a hook, or a message, has kept of a gradient does not change.
- The context gets them when the step is whole; a step that fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rpcbench.autograd.gradients import Leaves, total


class Sums:
    """`before`: what the context has."""

    def __init__(self, before: Mapping[Tensor, Tensor]) -> None:
        self._before = before
        self._sums: dict[Tensor, Tensor] = {}
        self._own: set[Tensor] = set()  # parameters whose sum was made here

    def add(self, leaves: Leaves) -> None:
        if leaves:  # most operations have none
            with torch.no_grad():
                self._add(leaves)

    def _add(self, leaves: Leaves) -> None:
        for leaf, gradient in leaves:
            sofar = self._sums.get(leaf, self._before.get(leaf))
            if sofar is None:
                self._sums[leaf] = gradient
            elif leaf in self._own and sofar.layout is gradient.layout is torch.strided:
                sofar.add_(gradient)
            else:
                self._sums[leaf] = total(sofar, gradient)
                self._own.add(leaf)

    def leaves(self) -> Leaves:
        return list(self._sums.items())

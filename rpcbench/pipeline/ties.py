"""Weights that several stages use: each has a copy of its own, and all copies get the same gradient.

Guarantees
- A step's gradients of all copies are added up, in the order of the stages, before any optimizer runs: by the workers
  themselves, at the end of their operations. So every copy sees the same bits, and copies that were equal stay equal.
- What an earlier step has left in a context is not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rpcbench.pipeline.exchange import Gradients, Messages
from rpcbench.pipeline.slots import TIED, Slot
from rpcbench.pipeline.split import Stage

Tie = dict[int, str]
"""Stage → what it calls its copy of one weight."""


def ties(stages: Sequence[Stage]) -> list[Tie]:
    """The parameters that several of these stages have, or will have where they are built."""
    found: dict[tuple[str, int], Tie] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            found.setdefault(("there", id(parameter)), {})[stage.index] = name
        for tied in stage.tied:
            found.setdefault(("lazy", tied.number), {})[stage.index] = tied.own[0]
    return [tie for tie in found.values() if len(tie) > 1]


class Copies:
    """The copies of tied weights on one worker, each known by the number of its tie and its stage.

    `params`: those of each stage that are trained, in the order that gradients have.
    """

    def __init__(
        self, ties: Sequence[Tie], modules: Mapping[int, nn.Module], params: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        self.ties, self.params = ties, params
        self.names = [(number, stage) for number, tie in enumerate(ties) for stage in tie if stage in modules]
        self._named: dict[torch.Tensor, tuple[int, int]] = {
            modules[stage].get_parameter(ties[number][stage]): (number, stage) for number, stage in self.names
        }
        self.places = {
            stage: {place: self._named[param] for place, param in enumerate(own) if param in self._named}
            for stage, own in params.items()
        }
        """Stage → place among its parameters → which copy is there."""

    def repeats(self, param: torch.Tensor) -> bool:
        """Whether an earlier stage has this parameter, too."""
        name = self._named.get(param)
        return name is not None and name[1] > min(self.ties[name[0]])


class TiedGradients:
    """Gradients of this worker's copies in one step, kept apart until those of all others are known."""

    def __init__(self, step: int, copies: Copies) -> None:
        self._step, self._copies = step, copies
        self._own: dict[tuple[int, int], torch.Tensor | None] = dict.fromkeys(copies.names)

    def keep(self, stage: int, gradients: Gradients) -> Gradients:
        """Keep the gradients of a stage's tied weights; the others are returned, in their places."""
        tied = self._copies.places[stage]
        if not tied:
            return gradients
        rest = list(gradients)
        for place, copy in tied.items():
            gradient, rest[place] = rest[place], None
            if gradient is not None:
                before = self._own[copy]
                self._own[copy] = gradient if before is None else before + gradient
        return rest

    def messages(self) -> Messages:
        """Each copy's gradient, for each of the other copies."""
        return [
            (Slot(self._step, TIED, other, number, stage), (gradient,))
            for (number, stage), gradient in self._own.items()
            for other in self._copies.ties[number]
            if other != stage
        ]

    def totals(self, take: Callable[[Slot], tuple[Any, ...]]) -> dict[int, Gradients]:
        """Of each stage, the sums of all copies' gradients in the places of its tied weights, waited for."""
        found = {copy: self._total(copy, take) for copy in self._own}
        return {
            stage: [found[tied[place]] if place in tied else None for place in range(len(self._copies.params[stage]))]
            for stage, tied in self._copies.places.items()
            if tied
        }

    def _total(self, copy: tuple[int, int], take: Callable[[Slot], tuple[Any, ...]]) -> torch.Tensor | None:
        number, stage = copy
        came = [
            self._own[copy] if other == stage else take(Slot(self._step, TIED, stage, number, other))[0]
            for other in sorted(self._copies.ties[number])
        ]
        return _total(gradient for gradient in came if gradient is not None)


def _total(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A new tensor: the copies of one worker must not share the memory of a gradient."""
    total = None
    for gradient in gradients:
        total = gradient.clone() if total is None else total + gradient
    return total

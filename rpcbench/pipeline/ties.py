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

from rpcbench.pipeline.exchange import Messages
from rpcbench.pipeline.slots import Slot
from rpcbench.pipeline.split import Stage

Tie = dict[int, str]
"""Stage → what it calls its copy of one weight."""
Leaves = list[tuple[torch.Tensor, torch.Tensor]]


def ties(stages: Sequence[Stage]) -> list[Tie]:
    """The parameters that several of these stages have."""
    found: dict[int, Tie] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            found.setdefault(id(parameter), {})[stage.index] = name
    return [tie for tie in found.values() if len(tie) > 1]


class Copies:
    """The copies of tied weights on one worker, and which of them a parameter is."""

    def __init__(self, ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> None:
        self.ties = ties
        self.params = {
            (number, stage): modules[stage].get_parameter(name)
            for number, tie in enumerate(ties)
            for stage, name in tie.items()
            if stage in modules
        }
        self.places: dict[torch.Tensor, tuple[int, int]] = {param: place for place, param in self.params.items()}

    def repeats(self, param: torch.Tensor) -> bool:
        """Whether an earlier stage has this parameter, too."""
        place = self.places.get(param)
        return place is not None and place[1] > min(self.ties[place[0]])


class TiedGradients:
    """Gradients of this worker's copies in one step, kept apart until those of all others are known."""

    def __init__(self, step: int, copies: Copies) -> None:
        self._step, self._copies = step, copies
        self._own: dict[tuple[int, int], torch.Tensor | None] = dict.fromkeys(copies.params)

    def keep(self, leaves: Leaves) -> Leaves:
        """Keep the gradients of tied weights; the others are returned."""
        rest = []
        for leaf, gradient in leaves:
            place = self._copies.places.get(leaf)
            if place is None:
                rest.append((leaf, gradient))
            else:
                before = self._own[place]
                self._own[place] = gradient if before is None else before + gradient
        return rest

    def messages(self) -> Messages:
        """Each copy's gradient, for each of the other copies."""
        return [
            (Slot(self._step, "T", other, number, stage), (gradient,))
            for (number, stage), gradient in self._own.items()
            for other in self._copies.ties[number]
            if other != stage
        ]

    def totals(self, take: Callable[[Slot], Any]) -> Leaves:
        """Each copy with the sum of all copies' gradients, waited for; without those that have none anywhere."""
        found: Leaves = []
        for (number, stage), own in self._own.items():
            came = [
                own if other == stage else take(Slot(self._step, "T", stage, number, other))[0]
                for other in sorted(self._copies.ties[number])
            ]
            total = _total(gradient for gradient in came if gradient is not None)
            if total is not None:
                found.append((self._copies.params[number, stage], total))
        return found


def _total(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A new tensor: the copies of one worker must not share the memory of a gradient."""
    total = None
    for gradient in gradients:
        total = gradient.clone() if total is None else total + gradient
    return total

"""What goes between stages in one step: the values that a stage gives, and their gradients on the way back.

    stage 0 ──h, enc──► stage 1 ──h──► stage 3        one message from a stage to each that takes something of it,
       └───────────enc────────────────────┘           and one back, with a gradient or None for each value

Guarantees
- A message goes straight from the worker of one stage to that of the other; in a context it is a recorded send.
- A stage waits for gradients exactly where it gave something that requires one, whatever becomes of it there. So a
  frozen stage waits for none.
- Gradients of a value that several stages take are added up in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.ports import OUTSIDE, Ports, Way
from rpcbench.pipeline.slots import Slot

Inputs = dict[int, dict[int, tuple[Any, ...]]]
"""Stage → micro-batch → those of the model's inputs that it takes."""
Messages = list[tuple[Slot, tuple[Any, ...]]]
Gradients = list[torch.Tensor | None]


class Exchange:
    """One worker's side. `ports`: those of its stages; `take`: gives what is in a slot, waited for; `inputs`: the
    model's, where one of its stages takes some."""

    def __init__(self, step: int, ports: dict[int, Ports], take: Callable[[Slot], Any], inputs: Inputs) -> None:
        self._step, self._ports, self._take, self._inputs = step, ports, take, inputs
        self._awaited: dict[tuple[int, int], list[Way]] = {}

    # -- forward
    def taken(self, op: Op) -> tuple[Any, ...]:
        """What the stage's module is to be called with, waited for."""
        ports = self._ports[op.stage]
        values: list[Any] = [None] * ports.arity
        for way in ports.takes:
            for place, value in zip(way.places, self._message(op, way), strict=True):
                values[place] = value
        return tuple(values)

    def _message(self, op: Op, way: Way) -> tuple[Any, ...]:
        if way.stage == OUTSIDE:
            return self._inputs[op.stage][op.microbatch]
        message: tuple[Any, ...] = self._take(Slot(self._step, "F", op.stage, op.microbatch, way.stage))
        return message

    def given(self, op: Op, values: Sequence[Any]) -> Messages:
        """The messages for what the stage gives; gradients will be waited for where one is required."""
        messages = []
        for way in self._ports[op.stage].gives:
            message = tuple(values[place] for place in way.places)
            messages.append((Slot(self._step, "F", way.stage, op.microbatch, op.stage), message))
            if any(map(requires_grad, message)):
                self._awaited.setdefault((op.stage, op.microbatch), []).append(way)
        return messages

    # -- backward
    def gradients(self, op: Op, count: int) -> Gradients:
        """For each of the `count` values that the stage gave, the sum of the gradients from those who took it."""
        total: Gradients = [None] * count
        for way in self._awaited.pop((op.stage, op.microbatch), ()):
            message = self._take(Slot(self._step, "B", op.stage, op.microbatch, way.stage))
            for place, gradient in zip(way.places, message, strict=True):
                total[place] = _sum(total[place], gradient)
        return total

    def wanted(self, op: Op, values: Sequence[Any]) -> list[torch.Tensor]:
        """Those of the values taken that a gradient goes back for, each once."""
        places = self._places(op)
        return list({id(values[p]): values[p] for p in places if requires_grad(values[p])}.values())

    def _places(self, op: Op) -> list[int]:
        return [place for way in self._ports[op.stage].takes if way.stage != OUTSIDE for place in way.places]

    def returned(self, op: Op, values: Sequence[Any], found: Sequence[tuple[torch.Tensor, Any]]) -> Messages:
        """The messages with the gradients that were found; for a value that was taken in two places, in the first."""
        grads = {id(value): gradient for value, gradient in found}
        messages = []
        for way in self._ports[op.stage].takes:
            if way.stage != OUTSIDE and any(requires_grad(values[place]) for place in way.places):
                message = tuple(grads.pop(id(values[place]), None) for place in way.places)
                messages.append((Slot(self._step, "B", way.stage, op.microbatch, op.stage), message))
        return messages


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def cut_off(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values as the other stage would get them, for one on this worker: same memory, another graph."""
    return tuple(v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values)


def nbytes(value: Any) -> int:
    """Of the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return 0
    return sum(map(nbytes, value))


def _sum(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient

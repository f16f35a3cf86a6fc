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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.ports import OUTSIDE, Ports, Way
from rpcbench.pipeline.slots import BACKWARD, FORWARD, Slot

_new = tuple.__new__  # a step less than the class itself takes
Messages = list[tuple[Slot, tuple[Any, ...]]]
Gradients = Sequence[Tensor | None]


class Exchange:
    """One worker's side. `ports`: those of its stages; `take`: gives what is in a slot, waited for; `inputs`: gives
    those of the model's inputs that a stage takes, of an op's micro-batch."""

    def __init__(
        self,
        step: int,
        ports: dict[int, Ports],
        take: Callable[[Slot], tuple[Any, ...]],
        inputs: Callable[[Op], tuple[Any, ...]],
    ) -> None:
        self._step, self._ports, self._take, self._inputs = step, ports, take, inputs
        self._awaited: dict[tuple[int, int], list[Way]] = {}

    # -- forward
    def taken(self, op: Op) -> tuple[Any, ...]:
        """What the stage's module is to be called with, waited for."""
        ports = self._ports[op.stage]
        came: list[Any] = []
        for source, _ in ports.takes:
            if source == OUTSIDE:
                came += self._inputs(op)
            else:
                came += self._take(_new(Slot, (self._step, FORWARD, op.stage, op.microbatch, source)))
        return tuple([came[number] for number in ports.order])

    def given(self, op: Op, values: Sequence[Any]) -> Messages:
        """The messages for what the stage gives; gradients will be waited for where one is required."""
        messages = []
        for way in self._ports[op.stage].gives:
            message = tuple([values[place] for place in way.places])
            messages.append((_new(Slot, (self._step, FORWARD, way.stage, op.microbatch, op.stage)), message))
            if any(map(requires_grad, message)):
                self._awaited.setdefault((op.stage, op.microbatch), []).append(way)
        return messages

    # -- backward
    def gradients(self, op: Op, count: int) -> Gradients:
        """For each of the `count` values that the stage gave, the sum of the gradients from those who took it."""
        total: list[Tensor | None] = [None] * count
        for source, places in self._awaited.pop((op.stage, op.microbatch), ()):
            message = self._take(_new(Slot, (self._step, BACKWARD, op.stage, op.microbatch, source)))
            for place, gradient in zip(places, message, strict=True):
                before = total[place]
                total[place] = gradient if before is None else before if gradient is None else before + gradient
        return total

    def wanted(self, op: Op, values: Sequence[Any]) -> list[Tensor]:
        """Those of the values taken that a gradient goes back for, each once."""
        there = [values[place] for way in self._ports[op.stage].back for place in way.places]
        return list({id(value): value for value in there if requires_grad(value)}.values())

    def returned(self, op: Op, values: Sequence[Any], wanted: Sequence[Tensor], found: Gradients) -> Messages:
        """The messages with the gradients found for those wanted; for a value taken in two places, in the first."""
        if len(values) == 1:  # it has come one way
            ways = self._ports[op.stage].back if wanted else ()
            return [
                (_new(Slot, (self._step, BACKWARD, stage, op.microbatch, op.stage)), (found[0],)) for stage, _ in ways
            ]
        grads = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
        messages = []
        for way in self._ports[op.stage].back:
            own = [values[place] for place in way.places]
            if any(map(requires_grad, own)):
                message = tuple([grads.pop(id(value), None) for value in own])
                messages.append((_new(Slot, (self._step, BACKWARD, way.stage, op.microbatch, op.stage)), message))
        return messages


def requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def cut_off(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values as the other stage would get them, for one on this worker: same memory, another graph."""
    return tuple(v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values)


def nbytes(values: Iterable[Any]) -> int:
    """Of the tensors among them, or in those."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            total += nbytes(value.values())
        elif isinstance(value, tuple | list):
            total += nbytes(value)
    return total

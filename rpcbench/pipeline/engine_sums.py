"""Gradients that torch's engine adds up by itself while a backward goes on, each as soon as it is made: it is still in
the core's cache then, and there is one pass over it less.

The engine adds to `.grad`, so the sums are there while it runs, and at no other time.

Guarantees
- They are the same as those of `Sums`, to the last bit: added in the order of the micro-batches.
- What `.grad` of a parameter is to anybody else does not change: not to a forward that trains something by itself.
- Only plain parameters of one stage that have no hook, and each sum in memory of its own: nothing that anybody has kept
  of a gradient changes. (Hooks of torch's own nodes that add to `.grad`, as DDP has them, run as in one process.)

torch takes the first gradient of a parameter for the sum as it is, also where its memory is that of another one: two
weights that are added up, say, get one gradient in two shapes. What came first is copied where anybody else has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

_PLAIN = Tensor, nn.Parameter
_hooks, _later_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_trained, _grad = attrgetter("requires_grad"), attrgetter("grad")


def summable(params: Mapping[int, Sequence[Tensor]]) -> dict[int, Sequence[Tensor]]:
    """Those of these stages whose parameters are plain, and used by no other stage here."""
    uses = Counter([id(param) for own in params.values() for param in own])
    return {stage: own for stage, own in params.items() if all(uses[id(p)] == 1 and _plain(p) for p in own)}


def _plain(param: Tensor) -> bool:
    return type(param) in _PLAIN and param.is_leaf and param.layout is torch.strided


def _unseen(params: Sequence[Tensor]) -> bool:
    """Whether nobody sees their gradients as they come; and they are still trained."""
    return not any(map(_hooks, params)) and not any(map(_later_hooks, params)) and all(map(_trained, params))


class EngineSums:
    """Of those of these stages, all `summable`, that are trained and have no hooks: `stage in sums`. For one step."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        self._params = {stage: own for stage, own in params.items() if _unseen(own)}
        self._sums: dict[int, list[Tensor | None]] = {stage: [None] * len(own) for stage, own in self._params.items()}
        self._new = {stage: [*range(len(own))] for stage, own in self._params.items()}  # places without a sum yet

    def __contains__(self, stage: int) -> bool:
        return stage in self._params

    def add(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The backward of a micro-batch, from `roots` with their `gradients`; what it gives for those `wanted`, which
        are leaves of this micro-batch alone."""
        own = self._params[stage]
        if inputs := (*wanted, *own):  # else they would be all that there are
            before = [*map(_grad, own)]
            _put(own, self._sums[stage])
            try:
                _engine_run_backward(
                    tuple(roots), tuple(gradients), False, False, inputs, allow_unreachable=True, accumulate_grad=True
                )
            finally:
                self._sums[stage] = [*map(_grad, own)]
                _put(own, before)
            if self._new[stage]:
                self._part(stage)
        return [value.grad for value in wanted]

    def _part(self, stage: int) -> None:
        """Give those sums that are new memory of their own."""
        sums, new = self._sums[stage], []
        for place in self._new[stage]:
            if (came := sums[place]) is None:
                new.append(place)
            elif came.layout is not torch.strided or _uses(came) > 1:
                sums[place] = came.clone()
        self._new[stage] = new

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters with what their gradients have added up to."""
        return [
            (param, found)
            for stage, own in self._params.items()
            for param, found in zip(own, self._sums[stage], strict=True)
            if found is not None
        ]


def _put(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _uses(tensor: Tensor) -> int:
    """How many tensors have its memory."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # but for `storage`

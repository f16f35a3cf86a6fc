"""Gradients that torch's engine adds up by itself while a backward goes on, each as soon as it is made: it is still in
the core's cache then, and there is one pass over it less.

They grow in `.grad` of the parameters, as in one process.

Guarantees
- They are the same as those of `Sums`, to the last bit: added in the order of the micro-batches.
- When the step is over, however it ends, `.grad` of each parameter is what it was before.
- Only plain parameters of one stage that have no hook, and each sum in memory of its own: nothing that anybody has kept
  of a gradient changes.

torch takes the first gradient of a parameter for the sum as it is, also where its memory is that of another one: two
weights that are added up, say, get one gradient in two shapes. What came first is copied where anybody else has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import TracebackType

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
    """Of those of these stages, all `summable`, whose parameters have no hooks: `stage in sums`. Around a step."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        self._params = {stage: own for stage, own in params.items() if _unseen(own)}
        self._all = [param for own in self._params.values() for param in own]
        self._new = {stage: list(own) for stage, own in self._params.items()}  # those without a sum yet
        self._before: list[tuple[Tensor, Tensor]] = []

    def __contains__(self, stage: int) -> bool:
        return stage in self._params

    def __enter__(self) -> None:
        self._before = self.leaves()
        for param, _ in self._before:
            param.grad = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for param in self._all:
            param.grad = None
        for param, gradient in self._before:
            param.grad = gradient

    def add(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The backward of a micro-batch, from `roots` with their `gradients`; what it gives for those `wanted`, which
        are leaves of this micro-batch alone."""
        inputs = (*wanted, *self._params[stage])
        if inputs:  # else they would be all that there are
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, inputs, allow_unreachable=True, accumulate_grad=True
            )
        if new := self._new[stage]:
            self._new[stage] = [param for param in new if not _own(param)]
        return [value.grad for value in wanted]

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """What there is now."""
        return [
            (param, found) for param, found in zip(self._all, map(_grad, self._all), strict=True) if found is not None
        ]


def _own(param: Tensor) -> bool:
    """Whether there is a sum now; from then on it is the parameter's own."""
    found = param.grad
    if found is None:
        return False
    if found.layout is not torch.strided or _uses(found) > 1:
        param.grad = found.clone()
    return True


def _uses(tensor: Tensor) -> int:
    """How many tensors have its memory."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # but for `storage`

"""The gradients of this worker's leaves in one context; `.grad` of no tensor is touched.

Guarantees
- A gradient is the context's own: changing one in place changes no other, nor anything that a hook has kept a view of.
- Gradients add up from passes on any threads; what was handed out before does not change.

Parameters that several processes hold in common (DistributedDataParallel)

torch's reducer waits at the parameters' AccumulateGrad nodes for what torch writes into `.grad`, and averages that over
all replicas. A distributed backward writes no `.grad`. So for these parameters alone it takes this last step as torch
does: from the gradient in the context, plus the new one, by way of `.grad`, to the gradient in the context.
- The gradient in a context becomes what `.grad` would be after a local backward, also inside `no_sync()` and `join()`.
- `.grad` has afterwards the values from before; tensor hooks, which have run by then, do not run again.
- A process without such a module does nothing for all this.
- As with torch, one backward at a time goes over a module. A module that was unpickled is not known: wrap the module
  inside it anew.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from rpcbench.base.futures import blocked

Leaves = Sequence[tuple[Tensor, Tensor]]
_NAMELESS: frozenset[type] = frozenset((Tensor, Parameter))


class LeafGradients:
    """Leaf tensor → gradient."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Tensor] = {}
        self._adding = threading.RLock()  # an RLock: freeing a tensor may run a finalizer that comes back here

    def __len__(self) -> int:
        return len(self._held)

    def leaves(self) -> list[Tensor]:
        """Those that have a gradient here. Waits for nobody."""
        return list(self._held)

    def copy(self) -> dict[Tensor, Tensor]:
        """All as they are now."""
        with self._adding:
            return dict(self._held)

    def under_names(self) -> dict[Tensor, Tensor]:
        """All as they are now, each with names for its dimensions where its leaf has some."""
        held = self.copy()
        if _NAMELESS.issuperset(map(type, held)):
            return held
        return {leaf: _named(leaf, gradient) for leaf, gradient in held.items()}

    def add(self, leaves: Leaves) -> None:
        """Add gradients of leaves to those that are here."""
        own, held = _own(leaves), self._held
        with self._adding:
            for leaf, gradient in own:
                if leaf in held:
                    with torch.no_grad():
                        gradient = total(held[leaf], gradient)
                held[leaf] = gradient

    def replace(self, leaves: Leaves) -> None:
        """Take these gradients in place of those that are here."""
        own = _own(leaves)
        with self._adding:
            self._held.update(own)

    def scale(self, leaves: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of these leaves, as far as they are here."""
        with self._adding, torch.no_grad():
            self._held.update((leaf, self._held[leaf] * factor) for leaf in leaves if leaf in self._held)


def _named(leaf: Tensor, gradient: Tensor) -> Tensor:
    if type(leaf) in _NAMELESS:
        return gradient
    from rpcbench.named.named_tensor import (
        with_names_of,  # loaded already where a leaf has names; nobody else waits for it
    )

    return with_names_of(leaf, gradient)


def total(first: Tensor, second: Tensor) -> Tensor:
    """The sum. torch adds sparse to dense, and not dense to sparse."""
    return first + second if first.layout is torch.strided else second + first


def _own(leaves: Leaves) -> Leaves:
    """The gradients, each in memory that no other of them uses and without gaps; copied only where it must be."""
    memories = [g.untyped_storage()._cdata for _, g in leaves if g.layout is torch.strided and g.is_contiguous()]
    if len(set(memories)) == len(leaves):  # as a rule
        return leaves
    uses = Counter([_memory(grad) for _, grad in leaves])
    return [
        (leaf, grad if uses[_memory(grad)] == 1 and _compact(grad, leaf) else _copied(grad)) for leaf, grad in leaves
    ]


def _memory(grad: Tensor) -> int:
    """Names the memory of the elements."""
    values = grad if grad.layout is torch.strided else _elements(grad)[0]
    name: int = values.untyped_storage()._cdata
    return name


def _compact(grad: Tensor, leaf: Tensor) -> bool:
    if grad.layout is torch.strided:
        return grad.is_contiguous() or grad.stride() == leaf.stride()
    return all(part.is_contiguous() for part in _elements(grad))


def _copied(grad: Tensor) -> Tensor:
    return grad.clone(memory_format=torch.contiguous_format) if grad.layout is torch.strided else grad.clone()


def _elements(grad: Tensor) -> tuple[Tensor, ...]:
    if grad.layout is torch.sparse_coo:
        return grad._values(), grad._indices()
    return (grad.values(),)


_ReplicaLeaves = list[tuple[Tensor, Tensor]]

_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # the process's, as their process groups are


def _note(module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _modules.add(module)


register_module_module_registration_hook(_note)


def split_replicas(leaves: _ReplicaLeaves) -> tuple[_ReplicaLeaves, _ReplicaLeaves]:
    """The leaves of this process alone, and those that it holds in common with others.

    NotImplementedError where torch would reduce these at other places than their AccumulateGrad nodes.
    """
    if not _modules:  # as a rule, and walking through a WeakSet takes longer than all the rest
        return leaves, []
    common: dict[Tensor, Any] = {param: module for module in list(_modules) for param in module.parameters()}
    for leaf, _ in leaves:
        if leaf in common:
            _check(common[leaf])
    return [pair for pair in leaves if pair[0] not in common], [pair for pair in leaves if pair[0] in common]


def _check(module: Any) -> None:
    if module.static_graph or module.mixed_precision is not None:
        raise NotImplementedError(
            "a DistributedDataParallel with static_graph or mixed_precision reduces gradients in a way of its own, "
            "which a distributed backward cannot follow: make it without that option"
        )


def reduce_replicas(leaves: _ReplicaLeaves, held: Mapping[Tensor, Tensor]) -> _ReplicaLeaves:
    """The gradients that leaves have once their replicas are done, too; `held` has those from before."""
    tensors = [leaf for leaf, _ in leaves]
    with contextlib.ExitStack() as as_before:
        for leaf in tensors:
            as_before.enter_context(_borrowed(leaf))
            leaf.grad = _clone_of(held.get(leaf))  # others may hold the one from before
        with blocked():
            torch.autograd.backward(tensors, [gradient for _, gradient in leaves])
        return [(leaf, gradient) for leaf in tensors if (gradient := _clone_of(leaf.grad)) is not None]


@contextlib.contextmanager
def _borrowed(leaf: Any) -> Iterator[None]:
    """Give a leaf's tensor hooks back at the end, and the values in `.grad`, whose memory may be a reducer's bucket."""
    grad, hooks = _clone_of(leaf.grad), leaf._backward_hooks
    leaf._backward_hooks = None
    try:
        yield
    finally:
        leaf.grad, leaf._backward_hooks = grad, hooks


def _clone_of(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()

"""The gradients of this worker's leaves in one context; no tensor's `.grad` is changed.

Guarantees
- A gradient belongs to the context: an in-place change of one changes no other, and nothing that a hook has a view of.
- Passes on any threads add up; gradients that were returned before do not change.
- For parameters of a DistributedDataParallel module, the gradient in a context equals the `.grad` of a local backward,
  also inside `no_sync()` and `join()`. `.grad` keeps its values, and tensor hooks do not run twice.

As with torch, one backward at a time may run over such a module. An unpickled module is not recognised: wrap its inner
module again. A process without such a module spends no time on this.
"""

# torch's DistributedDataParallel averages gradients over replicas in hooks at its parameters' AccumulateGrad nodes,
# from the values that torch writes into `.grad`. A distributed backward writes no `.grad`. So for these parameters only
# `reduce_replicas` takes this last step through torch: context's gradient → `.grad`; `torch.autograd.backward` adds the
# new one and averages; `.grad` → context's gradient; then the former `.grad` is restored.

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

from rpcbench.base.futures import release_slot

Leaves = Sequence[tuple[Tensor, Tensor]]
_NAMELESS: frozenset[type] = frozenset((Tensor, Parameter))


class LeafGradients:
    """Leaf tensor → gradient."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Tensor] = {}
        self._adding = threading.RLock()  # an RLock: freeing a tensor may run a finalizer that comes back here

    def __len__(self) -> int:
        return len(self._held)

    def leaves_with_gradient(self) -> list[Tensor]:
        return list(self._held)  # one step of the interpreter, so an observer need not wait for the lock

    def copy(self) -> dict[Tensor, Tensor]:
        """Return all gradients as they are now."""
        with self._adding:
            return dict(self._held)

    def copy_with_names(self) -> dict[Tensor, Tensor]:
        """Return all gradients as they are now, with names of dimensions if the leaf has some."""
        held = self.copy()
        if named := [leaf for leaf in held if type(leaf) not in _NAMELESS]:
            # A leaf with names has loaded this module already; programs without names never load it.
            from rpcbench.named.named_tensor import gradient_with_names

            held.update((leaf, gradient_with_names(leaf, held[leaf])) for leaf in named)
        return held

    def add_gradients(self, leaves: Leaves) -> None:
        own, held = _unshare_gradients(leaves), self._held  # copies are made before the lock is taken
        with self._adding:
            for leaf, gradient in own:
                if leaf in held:
                    with torch.no_grad():
                        gradient = sum_gradients(held[leaf], gradient)
                held[leaf] = gradient

    def replace_gradients(self, leaves: Leaves) -> None:
        own = _unshare_gradients(leaves)
        with self._adding:
            self._held.update(own)

    def scale_gradients(self, leaves: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of these leaves by a factor; skip leaves without one."""
        with self._adding, torch.no_grad():
            self._held.update((leaf, self._held[leaf] * factor) for leaf in leaves if leaf in self._held)


def sum_gradients(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two gradients of any layouts."""
    # torch adds sparse to dense, and not dense to sparse.
    return first + second if first.layout is torch.strided else second + first


def _unshare_gradients(leaves: Leaves) -> Leaves:
    """Return the gradients, each in memory of its own and without gaps; copied only if necessary."""
    memories = [g.untyped_storage()._cdata for _, g in leaves if g.layout is torch.strided and g.is_contiguous()]
    if len(set(memories)) == len(leaves):  # the usual case
        return leaves
    uses = Counter([_memory_id(grad) for _, grad in leaves])
    return [
        (leaf, grad if uses[_memory_id(grad)] == 1 and _is_compact(grad, leaf) else _copy_gradient(grad))
        for leaf, grad in leaves
    ]


def _memory_id(grad: Tensor) -> int:
    """Return an identifier of the memory of the elements."""
    values = grad if grad.layout is torch.strided else _element_tensors(grad)[0]
    name: int = values.untyped_storage()._cdata
    return name


def _is_compact(grad: Tensor, leaf: Tensor) -> bool:
    if grad.layout is torch.strided:
        return grad.is_contiguous() or grad.stride() == leaf.stride()
    return all(part.is_contiguous() for part in _element_tensors(grad))


def _copy_gradient(grad: Tensor) -> Tensor:
    return grad.clone(memory_format=torch.contiguous_format) if grad.layout is torch.strided else grad.clone()


def _element_tensors(grad: Tensor) -> tuple[Tensor, ...]:
    if grad.layout is torch.sparse_coo:
        return grad._values(), grad._indices()
    return (grad.values(),)


_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # of the process, as torch's process groups are


def _module_registered(module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _modules.add(module)


register_module_module_registration_hook(_module_registered)


def split_replicas(leaves: Leaves) -> tuple[Leaves, Leaves]:
    """Split leaves into those of this process alone, and those with replicas in other processes."""
    if not _modules:  # the usual case; iterating over a WeakSet takes longer than all the rest
        return leaves, []
    common: dict[Tensor, Any] = {param: module for module in list(_modules) for param in module.parameters()}
    for leaf, _ in leaves:
        if leaf in common:
            _check_module(common[leaf])
    return [pair for pair in leaves if pair[0] not in common], [pair for pair in leaves if pair[0] in common]


def _check_module(module: Any) -> None:
    # With these options, torch reduces gradients elsewhere than at their AccumulateGrad nodes.
    if module.static_graph or module.mixed_precision is not None:
        raise NotImplementedError(
            "a DistributedDataParallel with static_graph or mixed_precision reduces gradients in another way, "
            "which a distributed backward does not support: make it without that option"
        )


def reduce_replicas(leaves: Leaves, held: Mapping[Tensor, Tensor]) -> Leaves:
    """Return the gradients of leaves averaged over their replicas; `held` has the gradients before this pass."""
    tensors = [leaf for leaf, _ in leaves]
    with contextlib.ExitStack() as as_before:
        for leaf in tensors:
            as_before.enter_context(_restore_leaf_after(leaf))
            leaf.grad = _clone_of(held.get(leaf))  # torch adds in place, and the old one may have been returned
        with release_slot():  # the all-reduce waits for the other processes
            torch.autograd.backward(tensors, [gradient for _, gradient in leaves])
        return [(leaf, gradient) for leaf in tensors if (gradient := _clone_of(leaf.grad)) is not None]


@contextlib.contextmanager
def _restore_leaf_after(leaf: Any) -> Iterator[None]:
    """Restore a leaf's `.grad` and tensor hooks after the block."""
    grad, hooks = _clone_of(leaf.grad), leaf._backward_hooks  # a clone: the memory may be a bucket of torch's reducer
    leaf._backward_hooks = None  # they have run in this pass already
    try:
        yield
    finally:
        leaf.grad, leaf._backward_hooks = grad, hooks


def _clone_of(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()

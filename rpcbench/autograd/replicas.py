"""Parameters that several processes hold in common, as `torch.nn.parallel.DistributedDataParallel` has them.

Its reducer waits at the parameters' AccumulateGrad nodes for what torch writes into `.grad`, and averages that over all
replicas. A distributed backward writes no `.grad`. So for these parameters alone it takes this last step as torch does:
from the gradient in the context, plus the new one, by way of `.grad`, to the gradient in the context.

Guarantees
- The gradient in a context becomes what `.grad` would be after a local backward, also inside `no_sync()` and `join()`.
- `.grad` has afterwards the values from before; tensor hooks, which have run by then, do not run again.
- A process without such a module does nothing for all this.

Rules
- As with torch, one backward at a time goes over a module.
- A module that was unpickled is not known: wrap the module inside it anew.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from rpcbench.base.futures import blocked

Leaves = list[tuple[Tensor, Tensor]]

_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # the process's, as their process groups are


def _note(module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _modules.add(module)


register_module_module_registration_hook(_note)


def apart(leaves: Leaves) -> tuple[Leaves, Leaves]:
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


def reduced(leaves: Leaves, held: Mapping[Tensor, Tensor]) -> Leaves:
    """The gradients that leaves have once their replicas are done, too; `held` has those from before."""
    tensors = [leaf for leaf, _ in leaves]
    with contextlib.ExitStack() as as_before:
        for leaf in tensors:
            as_before.enter_context(_borrowed(leaf))
            leaf.grad = _copied(held.get(leaf))  # others may hold the one from before
        with blocked():
            torch.autograd.backward(tensors, [gradient for _, gradient in leaves])
        return [(leaf, gradient) for leaf in tensors if (gradient := _copied(leaf.grad)) is not None]


@contextlib.contextmanager
def _borrowed(leaf: Any) -> Iterator[None]:
    """Give a leaf's tensor hooks back at the end, and the values in `.grad`, whose memory may be a reducer's bucket."""
    grad, hooks = _copied(leaf.grad), leaf._backward_hooks
    leaf._backward_hooks = None
    try:
        yield
    finally:
        leaf.grad, leaf._backward_hooks = grad, hooks


def _copied(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()

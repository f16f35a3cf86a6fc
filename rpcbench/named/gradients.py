"""Gradients that torch.autograd.grad gives have the names of the tensors they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rpcbench.named.call import names_of
from rpcbench.named.dims import NamesError, unify
from rpcbench.named.dispatch import OWN
from rpcbench.named.named_tensor import NamedTensor, alias, bare, told


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """torch.autograd.grad, called with plain tensors: hooks of the user's on the way find torch as it always is."""
    if kwargs.get("is_grads_batched"):
        raise NamesError("grad with is_grads_batched knows no names: take tensor.rename(None)")
    roots, leaves = _list(outputs), _list(inputs)
    given = None if grad_outputs is None else _list(grad_outputs)
    for root, gradient in zip(roots, given or (), strict=False):
        _check(root, gradient)
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(leaf) for leaf in leaves]
    found = torch.autograd.grad([*map(bare, roots)], edges, given and [*map(bare, given)], *args, **kwargs)
    pairs = zip(leaves, found, strict=True)
    return tuple(gradient if gradient is None else like(leaf, gradient) for leaf, gradient in pairs)


def like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A gradient of `tensor`, under its names if it has some."""
    return alias(gradient, tensor.names) if isinstance(tensor, NamedTensor) else gradient


def _check(root: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None:
        told("grad", root, lambda: unify(names_of(root), names_of(gradient)))


def _list(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Tensor) else [*value]


OWN[torch.autograd.grad] = _grad

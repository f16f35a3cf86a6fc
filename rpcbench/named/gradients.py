"""Gradients that torch.autograd finds have the names of their tensors, and those that it is given must fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
    _check(roots, given)
    edges = _edges(leaves)
    found = torch.autograd.grad([*map(bare, roots)], edges, given and [*map(bare, given)], *args, **kwargs)
    pairs = zip(leaves, found, strict=True)
    return tuple(gradient if gradient is None else like(leaf, gradient) for leaf, gradient in pairs)


def _backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """torch.autograd.backward, called so too."""
    roots = _list(tensors)
    given = grad_variables if grad_tensors is None else grad_tensors
    given = None if given is None else _list(given)
    _check(roots, given)
    leaves = None if inputs is None else _edges(_list(inputs))
    torch.autograd.backward(
        [*map(bare, roots)], given and [*map(bare, given)], retain_graph, create_graph, inputs=leaves
    )


def like(tensor: Tensor | GradientEdge, gradient: Tensor) -> Tensor:
    """A gradient of `tensor`, under its names if it has some."""
    return alias(gradient, tensor.names) if isinstance(tensor, NamedTensor) else gradient


def _check(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None] | None) -> None:
    for root, gradient in zip(roots, gradients or (), strict=False):
        if gradient is not None and isinstance(root, Tensor):
            told("grad", root, partial(unify, names_of(root), names_of(gradient)))


def _edges(leaves: Sequence[Tensor | GradientEdge]) -> list[GradientEdge]:
    with torch._C.DisableTorchFunctionSubclass():
        return [get_gradient_edge(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _list(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Tensor | GradientEdge) else [*value]


OWN[torch.autograd.grad] = _grad
OWN[torch.autograd.backward] = _backward

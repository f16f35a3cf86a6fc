"""Layers with named parameters, and products of tensors by the names of their dimensions.

A layer of torch's whose parameters have names checks what goes in, and names what comes out: the rules are in `layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from rpcbench.named.call import names_of, show
from rpcbench.named.dims import NamesError, checked
from rpcbench.named.named_tensor import NamedTensor, bare, dress, named

Layer = TypeVar("Layer", bound=nn.Module)


def name_parameters(module: Layer, **names: Iterable[str | None]) -> Layer:
    """Give names to parameters of a module, and return it.

    `name_parameters(nn.Linear(3, 8), weight=("H", "C"), bias=("H",))` takes (…, C) and gives (…, H).
    Each becomes a new nn.Parameter in the same memory, so do it before an optimizer is made.
    NamesError where the module has no such parameter, or the names do not fit it.
    """
    for key, each in names.items():
        parameter = module._parameters.get(key)
        if parameter is None:
            raise NamesError(f"{type(module).__name__} has no parameter {key!r}, only {[*module._parameters]}")
        module._parameters[key] = nn.Parameter(named(parameter.detach(), *each), parameter.requires_grad)
    return module


def contract(*tensors: Tensor, to: Iterable[str]) -> NamedTensor:
    """The product of tensors whose dimensions all have names, summed over those that are not in `to`, in its order.

    `contract(query, key, to=("N", "T", "S"))` of (N, T, E) and (N, S, E) sums over E.
    NamesError where a dimension has no name, or a name of `to` is in none of them.
    """
    order = tuple(to)
    wanted = checked(order, len(order))
    letters: dict[str, int] = {}
    operands: list[object] = []
    for tensor in tensors:
        if None in names_of(tensor):
            raise NamesError(f"contract of {' and '.join(map(show, tensors))}: all dimensions need names")
        operands += [bare(tensor), [letters.setdefault(str(name), len(letters)) for name in names_of(tensor)]]
    if missing := [name for name in wanted if name not in letters]:
        raise NamesError(f"contract of {' and '.join(map(show, tensors))}: none of them has {missing[0]!r}")
    made = torch.einsum(*operands, [letters[str(name)] for name in wanted])
    return cast(NamedTensor, dress(made, wanted))

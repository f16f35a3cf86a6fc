"""Layers with named parameters, products of tensors by names of dimensions, and named tensors in files.

Rules: a torch layer whose parameters have names checks its input and names its output, see `rules`. Copies, pickles and
saved files of named tensors keep their names, and need this package to be read. `torch.load(weights_only=True)`, its
default, accepts them once `rpcbench.named` has been imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rpcbench.named.dimnames import Names, NamesError, check_names
from rpcbench.named.named_tensor import NO_DISPATCH, OWN, NamedTensor, attach_names, named, strip_names
from rpcbench.named.rules import format_tensor, names_of

Layer = TypeVar("Layer", bound=nn.Module)


def name_parameters(module: Layer, **names: Iterable[str | None]) -> Layer:
    """Give names to the dimensions of a module's parameters.

    `name_parameters(nn.Linear(3, 8), weight=("H", "C"), bias=("H",))` takes (…, C) and gives (…, H).

    Args:
        module: the module. Each parameter becomes a new nn.Parameter in the same memory, so call this before an
            optimizer is made.
        names: the names of each parameter's dimensions.

    Returns:
        The module.

    Raises:
        NamesError: where the module has no such parameter, or the names do not fit it.
    """
    for key, each in names.items():
        parameter = module._parameters.get(key)
        if parameter is None:
            raise NamesError(f"{type(module).__name__} has no parameter {key!r}, only {[*module._parameters]}")
        module._parameters[key] = nn.Parameter(named(parameter.detach(), *each), parameter.requires_grad)
    return module


def contract(*tensors: Tensor, to: Iterable[str]) -> NamedTensor:
    """Multiply tensors whose dimensions all have names, and sum over the names that are not in `to`.

    `contract(query, key, to=("N", "T", "S"))` of (N, T, E) and (N, S, E) sums over E.

    Args:
        tensors: the factors, named in every dimension.
        to: the names of the result, in its order.

    Raises:
        NamesError: where a dimension has no name, or no tensor has a name of `to`.
    """
    order = tuple(to)
    wanted = check_names(order, len(order))
    letters: dict[str, int] = {}  # name -> einsum's number for it
    operands: list[object] = []
    for tensor in tensors:
        if None in names_of(tensor):
            raise NamesError(f"contract of {' and '.join(map(format_tensor, tensors))}: all dimensions need names")
        operands += [strip_names(tensor), [letters.setdefault(str(name), len(letters)) for name in names_of(tensor)]]
    if missing := [name for name in wanted if name not in letters]:
        raise NamesError(f"contract of {' and '.join(map(format_tensor, tensors))}: none of them has {missing[0]!r}")
    made = torch.einsum(*operands, [letters[str(name)] for name in wanted])
    return cast(NamedTensor, attach_names(made, wanted))


_Parts = tuple[Tensor, Names, bool, dict[str, Any]]


def rebuild(plain: Tensor, names: Names, requires_grad: bool, state: dict[str, Any]) -> NamedTensor:
    """Return a named tensor from its parts, after a copy, an unpickling or a load; it reuses the plain tensor."""
    made = cast(NamedTensor, attach_names(plain, tuple(names)))
    vars(made).update(state)
    made.requires_grad_(requires_grad)
    return made


def _parts_of_tensor(tensor: NamedTensor) -> _Parts:
    state = {key: value for key, value in vars(tensor).items() if key != "_dim_names"}
    with NO_DISPATCH():
        return tensor.detach().as_subclass(Tensor), tensor.names, tensor.requires_grad, state


def _copy_tensor(tensor: NamedTensor, memo: dict[int, Any]) -> NamedTensor:
    if not tensor.is_leaf:
        raise RuntimeError("only a tensor that is a leaf of its graph can be copied deeply: detach() it first")
    if id(tensor) not in memo:
        plain, names, requires_grad, state = _parts_of_tensor(tensor)
        made = rebuild(copy.deepcopy(plain, memo), names, requires_grad, copy.deepcopy(state, memo))
        memo[id(tensor)] = made
        if tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
    return cast(NamedTensor, memo[id(tensor)])


OWN[Tensor.__reduce_ex__] = lambda tensor, protocol: (rebuild, _parts_of_tensor(tensor))
OWN[Tensor.__deepcopy__] = _copy_tensor
torch.serialization.add_safe_globals([rebuild])  # for weights_only=True

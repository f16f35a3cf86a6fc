"""New tensors with names; all else is as torch's function of the same name takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from rpcbench.named.changes import refined
from rpcbench.named.named_tensor import NamedTensor, bare, dress, told

_Names = Iterable[str | None]


def tensor(data: Any, *, names: _Names, **options: Any) -> NamedTensor:
    """`torch.tensor` with names: `tensor([[1.0]], names=("N", "C"))`. NamesError where they do not fit."""
    return _made(torch.tensor, (data,), names, options)


def zeros(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """`torch.zeros` with names: `zeros(32, 3, names=("N", "C"))`."""
    return _made(torch.zeros, size, names, options)


def ones(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """`torch.ones` with names."""
    return _made(torch.ones, size, names, options)


def empty(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """`torch.empty` with names."""
    return _made(torch.empty, size, names, options)


def rand(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """`torch.rand` with names."""
    return _made(torch.rand, size, names, options)


def randn(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """`torch.randn` with names."""
    return _made(torch.randn, size, names, options)


def empty_like(input: Tensor, *, names: _Names | None = None, **options: Any) -> NamedTensor:
    """`torch.empty_like`; without `names` it has those of `input`, which must have some then."""
    given = input.names if names is None and isinstance(input, NamedTensor) else names or ()
    return _made(torch.empty_like, (bare(input),), given, options)


def _made(make: Callable[..., Tensor], args: tuple[Any, ...], names: _Names, options: dict[str, Any]) -> NamedTensor:
    made = make(*args, **options)
    fitting = told(make.__name__, made, lambda: refined((None,) * made.dim(), tuple(names)))
    return cast(NamedTensor, dress(made, fitting))

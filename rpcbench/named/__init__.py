"""Tensors whose dimensions have names, as torch had them until 2.12, extended to calls, gradients and files.

    x = named.rand(32, 3, names=("N", "C"))
    x.sum("C")                      # a name wherever torch takes a dimension
    x + named.rand(3, names=("N",))      # NamesError: 'C' against 'N'

`NamedTensor` is a torch.Tensor. Each operator follows its row in `rpcbench.named.operators`; one without a row refuses.
torch's functions parse dimensions before they dispatch to a subclass, so they do not take names: use `named.cat([x, y],
"N")` instead of `torch.cat`, and likewise for each function that has a row.
"""

from __future__ import annotations

import functools
from inspect import isroutine
from typing import Any

from rpcbench.named.dimnames import NamesError
from rpcbench.named.modules import contract, name_parameters
from rpcbench.named.named_tensor import (
    FUNCTIONS,
    HOMES,
    OWN,
    NamedTensor,
    apply_function,
    empty,
    empty_like,
    named,
    ones,
    rand,
    randn,
    tensor,
    zeros,
)
from rpcbench.named.rules import names_of

__all__ = [
    "NamedTensor", "NamesError", "contract", "empty", "empty_like", "name_parameters", "named", "names_of", "ones",
    "rand", "randn", "tensor", "zeros",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return torch's function of that name, extended to names of dimensions for its `dim`."""
    found = [] if name.startswith("__") else [getattr(module, name, None) for module in HOMES]
    listed = [each for each in found if isroutine(each) and each in FUNCTIONS]
    # torch.embedding and its like, without documentation, take other arguments than torch.nn.functional.embedding.
    function = next(iter(sorted(listed, key=lambda each: not each.__doc__)), None)
    if function is None:
        raise AttributeError(f"module 'rpcbench.named' has no attribute {name!r}")

    @functools.wraps(function)
    def by_name(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input")
        # A replacement in OWN takes a NamedTensor; a plain tensor needs none.
        if function in OWN and not isinstance(first, NamedTensor):
            return function(*args, **kwargs)
        return apply_function(function, args, kwargs)

    return by_name

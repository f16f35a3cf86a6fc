"""Copies, pickles and saved files of named tensors keep their names, and need this package to be read again.

`torch.load(weights_only=True)`, its default, takes them once `rpcbench.named` has been imported.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor

from rpcbench.named.dims import Names
from rpcbench.named.dispatch import OWN
from rpcbench.named.named_tensor import NamedTensor, dress

_Parts = tuple[Tensor, Names, bool, dict[str, Any]]


def rebuild(plain: Tensor, names: Names, requires_grad: bool, state: dict[str, Any]) -> NamedTensor:
    """What was copied, pickled or saved; it takes over the plain tensor."""
    made = cast(NamedTensor, dress(plain, tuple(names)))
    vars(made).update(state)
    made.requires_grad_(requires_grad)
    return made


def _parts(tensor: NamedTensor) -> _Parts:
    state = {key: value for key, value in vars(tensor).items() if key != "_dim_names"}
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor), tensor.names, tensor.requires_grad, state


def _reduce(tensor: NamedTensor, protocol: object) -> tuple[Any, _Parts]:
    return rebuild, _parts(tensor)


def _deepcopy(tensor: NamedTensor, memo: dict[int, Any]) -> NamedTensor:
    if not tensor.is_leaf:
        raise RuntimeError("only a tensor that is a leaf of its graph can be copied deeply: detach() it first")
    if id(tensor) not in memo:
        plain, names, requires_grad, state = _parts(tensor)
        made = rebuild(copy.deepcopy(plain, memo), names, requires_grad, copy.deepcopy(state, memo))
        memo[id(tensor)] = made
        if tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
    return cast(NamedTensor, memo[id(tensor)])


OWN[Tensor.__reduce_ex__] = _reduce
OWN[Tensor.__deepcopy__] = _deepcopy
torch.serialization.add_safe_globals([rebuild])

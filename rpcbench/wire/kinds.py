"""Which tensors go into a table, as instances of which class; and why some cannot travel at all.

Guarantees
- A class arrives with its state, as pickling it would give: its attributes, slots, or what it says itself.
- What exists only while torch traces or transforms a function is refused by name, not sent as an empty shell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rpcbench.wire.layouts import QUANTIZED

ORDINARY = (torch.Tensor, torch.nn.Parameter)
_ORDINARY_REDUCE = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
_TRACED = (
    "a tensor that stands for others while torch traces a function (torch.compile, torch.export, fake or functional "
    "tensors) has no data to send: make the call outside"
)
_TRANSFORMED = "a tensor inside torch.vmap or a transform of torch.func cannot be sent: make the call outside"


def fits(tensor: torch.Tensor) -> bool:
    """Whether a table can describe this tensor. Nested tensors and elements of less than a byte it cannot, nor classes
    with data of their own: wrappers that dispatch, and those that say themselves how they are pickled."""
    kind = type(tensor)
    if kind not in ORDINARY:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__reduce_ex__ not in _ORDINARY_REDUCE:
            return False
        tensor = undressed(tensor)
    if tensor.is_quantized:
        return tensor.dtype in QUANTIZED.values()
    return not tensor.is_nested


def unsendable(tensor: torch.Tensor) -> str | None:
    """Why there is nothing that could be sent of this tensor."""
    if isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor):
        return _TRACED
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return _TRANSFORMED
    return None


def undressed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, without class and graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def state_of(tensor: torch.Tensor, kind: type) -> Any:
    """What a tensor has besides its elements, for `dress`; nothing for most."""
    return vars(tensor) if kind in ORDINARY else torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]


def dress(kind: type[torch.Tensor], tensor: torch.Tensor, state: Any) -> torch.Tensor:
    """`tensor` as an instance of `kind` with this state: a leaf where it is one, else still in its graph."""
    if kind is not type(tensor):
        leaf, wanted = tensor.is_leaf, tensor.requires_grad
        tensor = (tensor.detach() if leaf else tensor).as_subclass(kind)
        if leaf:
            tensor.requires_grad_(wanted)
    if kind.__setstate__ is not torch.Tensor.__setstate__:
        tensor.__setstate__(state)  # type: ignore[no-untyped-call]
    else:
        torch._utils._set_obj_state(tensor, state)  # type: ignore[no-untyped-call]
    return tensor

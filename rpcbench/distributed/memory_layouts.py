"""Which tensors the backends can move, by their devices, dtypes and layouts in memory.

Guarantees
- A tensor that a backend would move wrongly, as gloo does where elements have gaps between them, is refused.
- Tensors without gaps in another order of memory, as of channels_last, move as they lie: all ranks must have one order.
- No element is read.
"""

from __future__ import annotations

import torch

from rpcbench.base.errors import count_noun
from rpcbench.runtime.handles import layout_of

_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
"""The dtypes that gloo's collectives support."""
BOTH = "cpu:gloo,cuda:nccl"
"""Torch's name of a backend that moves tensors of both types of device."""
DEVICES = dict.fromkeys(["gloo", "nccl", "mpi", BOTH], ("cpu", "cuda"))
"""The types of device that each backend supports."""


def backend_fault(name: str, tensor: object, may_be_sparse: bool = False) -> str:
    """Return the reason that the backend cannot move this tensor; empty if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"pass a tensor, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided and not (may_be_sparse and tensor.layout is torch.sparse_coo):
        return f"its {layout_name(tensor)} is not dense: pass tensor.to_dense(); all_reduce takes sparse_coo, too"
    if tensor.layout is torch.sparse_coo and name != "gloo":
        return f"{name} takes no sparse tensors: pass tensor.to_dense()"
    if tensor.layout is torch.strided and memory_order(tensor) is None:
        return f"its {layout_name(tensor)} is not contiguous: pass tensor.contiguous()"
    devices = DEVICES.get(name)  # None for a backend that torch's own functions have brought
    if devices is not None and tensor.device.type not in devices:
        return f"{name} takes tensors on {' or '.join(devices)}, not on {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"{name} does not support {tensor.dtype}: convert the tensor first"
    return ""


def order_fault(*tensors: object) -> str:
    """Return the reason that a call cannot take one of these tensors, whose parts must follow one another in memory."""
    wrong = (each for each in tensors if isinstance(each, torch.Tensor) and each.layout is torch.strided)
    fault = next((each for each in wrong if not each.is_contiguous()), None)
    return "" if fault is None else f"its {layout_name(fault)} is not contiguous: pass tensor.contiguous()"


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a dense tensor from the widest stride to the narrowest: of a contiguous one (0, 1, …).

    None where elements have gaps between them, or share memory.
    """
    plain = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return plain
    wide = sorted((each for each in plain if tensor.shape[each] > 1), key=tensor.stride, reverse=True)
    expected = 1
    for each in reversed(wide):
        if tensor.stride(each) != expected:
            return None
        expected *= tensor.shape[each]
    narrow = [each for each in plain if tensor.shape[each] == 1]  # have no place of their own
    return (*narrow, *wide)


def contiguous_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, or else one of its elements in the order of memory, which shares them."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def layout_name(tensor: object) -> str:
    """Return dtype and shape, as `float32[4, 2]` or `float32[N=4, C=2]`, and what ranks must also have in common."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    if tensor.layout is torch.sparse_coo:
        return f"{layout_of(tensor)}, sparse in {count_noun(tensor.sparse_dim(), 'dimension')}"
    if tensor.layout is not torch.strided or tensor.is_contiguous() or (order := memory_order(tensor)) is None:
        return layout_of(tensor)
    return f"{layout_of(tensor)} with dimensions {list(order)} in memory"

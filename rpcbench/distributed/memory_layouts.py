"""Which tensors the backends can move, by their devices, dtypes and layouts in memory.

Guarantees
- A tensor that a backend would move wrongly, as gloo does where elements have gaps between them, is refused.
- No element is read.
"""

from __future__ import annotations

import torch

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


def backend_fault(name: str, tensor: object) -> str:
    """Return the reason that the backend cannot move this tensor; empty if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"pass a tensor, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return f"its {layout_name(tensor)} is not contiguous: pass tensor.contiguous()"
    devices = DEVICES.get(name)  # None for a backend that torch's own functions have brought
    if devices is not None and tensor.device.type not in devices:
        return f"{name} takes tensors on {' or '.join(devices)}, not on {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"{name} does not support {tensor.dtype}: convert the tensor first"
    return ""


def layout_name(tensor: object) -> str:
    """Return dtype and shape, as `float32[4, 2]` or `float32[N=4, C=2]`."""
    return layout_of(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__

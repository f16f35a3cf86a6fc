"""Which backend does what: torch's process groups behind the names of torch.distributed 0.4, or the reason why not."""

from __future__ import annotations

import torch
import torch.distributed as c10d

from rpcbench.base.errors import CollectiveError
from rpcbench.runtime.handles import layout_of

_NUMBERS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
"""What gloo's collectives can move."""
_DEVICES = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",), "mpi": ("cpu", "cuda")}


def behind(name: str) -> str:
    """What torch is asked for. CollectiveError where this process cannot have it, with the reason.

    NCCL comes with gloo beside it, on which ranks agree before they move tensors of devices.
    """
    name = name.lower()
    if name == "tcp":
        raise CollectiveError("torch has dropped the backend 'tcp': use 'gloo', which does all of it on CPU tensors")
    if name not in _DEVICES:
        raise CollectiveError(f"there is no backend {name!r}: use 'gloo' for CPU tensors, 'nccl' for those on GPUs")
    if name == "mpi" and not c10d.is_mpi_available():
        raise CollectiveError("this torch is built without MPI, as all that are on PyPI: use 'gloo', or build torch")
    if name == "nccl" and not (c10d.is_nccl_available() and torch.cuda.is_available()):
        raise CollectiveError("NCCL moves tensors between NVIDIA GPUs, and this process has none: use 'gloo'")
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name


def fault(name: str, tensor: object) -> str:
    """Why the backend cannot take this for a tensor; empty where it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"a tensor is wanted, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return f"its {layout(tensor)} is not contiguous: pass tensor.contiguous()"
    if tensor.device.type not in _DEVICES[name]:
        return f"{name} takes tensors on {' or '.join(_DEVICES[name])}, not on {tensor.device}"
    if tensor.dtype not in _NUMBERS:
        return f"{name} moves no {tensor.dtype}: convert it first"
    return ""


def layout(tensor: object) -> str:
    """As `float32[4, 2]`, or `float32[N=4, C=2]`."""
    return layout_of(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__

"""Tensors that are made of others: sparse layouts as indices and values, quantized ones as integers and a quantizer.

Guarantees
- `notes_of` and `parts_of` say all that `assembled` needs; parts are ordinary strided tensors.
- `assembled` believes nothing: indices out of bounds or a quantizer that does not fit are a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rpcbench.base.errors import ProtocolError, SerializationError

Notes = dict[str, Any]
Parts = list[torch.Tensor]

_BY_ROW = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_BY_COLUMN = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
SPARSE: dict[str, tuple[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]] = {
    "torch.sparse_coo": (torch.sparse_coo, (torch.Tensor._indices, torch.Tensor._values)),
    "torch.sparse_csr": (torch.sparse_csr, _BY_ROW),
    "torch.sparse_bsr": (torch.sparse_bsr, _BY_ROW),
    "torch.sparse_csc": (torch.sparse_csc, _BY_COLUMN),
    "torch.sparse_bsc": (torch.sparse_bsc, _BY_COLUMN),
}
QUANTIZED = {torch.int8: torch.qint8, torch.uint8: torch.quint8, torch.int32: torch.qint32}
"""What the elements of a quantized tensor are in memory. Those of less than a byte are not among them."""
_INTEGERS = {quantized: plain for plain, quantized in QUANTIZED.items()}
_NOT_A_TABLE_MATTER = "a tensor of layout {} cannot be sent: send its .to_dense()"


def sparse_notes(tensor: torch.Tensor) -> tuple[Notes, Parts]:
    """What a sparse tensor says of itself, and what it consists of."""
    layout = str(tensor.layout)
    if layout not in SPARSE:
        raise SerializationError(_NOT_A_TABLE_MATTER.format(layout))
    notes: Notes = {"layout": layout}
    if tensor.is_sparse:
        notes["coalesced"] = tensor.is_coalesced()
    return notes, [part(tensor) for part in SPARSE[layout][1]]


def sparse(dtype: torch.dtype, shape: list[int], notes: Notes, parts: Parts) -> torch.Tensor:
    """The sparse tensor of these notes and parts."""
    layout = notes["layout"]
    if layout not in SPARSE or len(parts) != len(SPARSE[layout][1]):
        raise _broken(f"there is no layout {layout!r} of {len(parts)} parts")
    *indices, values = parts
    if values.dtype is not dtype:
        raise _broken(f"a sparse tensor of {dtype} has values of {values.dtype}")
    if layout == "torch.sparse_coo":
        coalesced = bool(notes.get("coalesced"))
        return torch.sparse_coo_tensor(
            indices[0], values, shape, is_coalesced=coalesced, check_invariants=True, device=values.device
        )
    compressed, plain = indices
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=SPARSE[layout][0], check_invariants=True, device=values.device
    )


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a quantized tensor as integers."""
    plain = torch.empty(0, dtype=_INTEGERS[tensor.dtype], device=tensor.device)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def quantizer_notes(tensor: torch.Tensor) -> tuple[Notes, Parts]:
    """Scale and zero point of a quantized tensor: `[scale, zero point]`, or the axis, with both as parts."""
    if tensor.qscheme() == torch.per_tensor_affine:
        return {"quantizer": [tensor.q_scale(), tensor.q_zero_point()]}, []
    parts = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return {"quantizer": tensor.q_per_channel_axis()}, parts


def quantized(plain: torch.Tensor, quantizer: Any, parts: Parts) -> torch.Tensor:
    """The quantized tensor over the memory of these integers."""
    if plain.dtype not in QUANTIZED:
        raise _broken(f"a tensor of {plain.dtype} cannot be quantized")
    made = _per_channel(plain, quantizer, parts) if parts else _per_tensor(plain, quantizer)
    return made.set_(plain.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride())


def _per_tensor(plain: torch.Tensor, quantizer: Any) -> torch.Tensor:
    scale, zero_point = quantizer
    return torch._empty_affine_quantized(
        (0,), scale=scale, zero_point=zero_point, dtype=QUANTIZED[plain.dtype], device=plain.device
    )


def _per_channel(plain: torch.Tensor, axis: Any, parts: Parts) -> torch.Tensor:
    if type(axis) is not int or not 0 <= axis < plain.dim():
        raise _broken(f"a tensor of {plain.dim()} dimensions has no axis {axis!r}")
    if [list(part.shape) for part in parts] != [[plain.shape[axis]]] * 2:  # torch would read beyond them
        raise _broken(f"a quantizer does not fit {plain.shape[axis]} channels")
    scales, zero_points = parts
    return torch._empty_per_channel_affine_quantized(
        [0] * plain.dim(),
        scales=scales,
        zero_points=zero_points,
        axis=axis,
        dtype=QUANTIZED[plain.dtype],
        device=plain.device,
    )


def _broken(what: str) -> ProtocolError:
    return ProtocolError(f"the peer sent a broken tensor table: {what}")

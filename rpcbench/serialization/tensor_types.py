"""The tensors that a table can describe, and how: devices, sparse and quantized layouts, subclasses.

Guarantees
- Memory of an accelerator is sent through the CPU: copied there before it is sent, and to its device before any object
  refers to it. Both copies are complete when the call returns. The first one begins after the work that the sending
  thread has queued on its current stream, so a received tensor is complete on every stream.
- A sparse or quantized tensor is sent as ordinary strided parts and notes about them. The receiver validates these:
  indices out of bounds, or a quantizer that does not fit, raise ProtocolError.
- A subclass arrives with its state, as pickle sends it: its attributes and slots, or the result of its own method.
- A tensor that exists only while torch traces or transforms a function is refused by name, not sent without data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rpcbench.base.errors import ProtocolError, SerializationError

Name = int | str | torch.device
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Route:
    """What messages to one worker depend on. Tensors on the CPU stay there unless the device map has the CPU."""

    targets: Mapping[torch.device, torch.device]  # device of this process -> device of the receiver
    refusal: str  # the advice in the error for a tensor on a device that is not mapped
    files: set[str] | None = None  # whose sources the worker has, so that each is sent once; None: it gets none

    def target_device(self, device: torch.device) -> str | None:
        """Return the name of the receiver's device; None: the CPU. SerializationError for a device without a route."""
        there = self.targets.get(device, CPU if device == CPU else None)
        if there is None:
            raise SerializationError(f"a tensor on {device} has no route to its destination. {self.refusal}")
        return None if there == CPU else str(there)


CPU_ONLY = Route({}, "Send t.cpu(), and move it to a device on the other side.")


def device_of(name: Name) -> torch.device:
    """Return a device by name or number, with index 0 for an accelerator without one. RuntimeError for no device."""
    device = torch.device(name)
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else torch.device(device.type, 0)


def copy_to_cpu(storage: torch.UntypedStorage, start: int, size: int) -> torch.UntypedStorage:
    """Copy bytes of a device's memory to the CPU."""
    window = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))
    return window.cpu().untyped_storage()


def copy_to_device(memory: bytearray | memoryview, device: torch.device) -> torch.UntypedStorage:
    """Copy bytes to the memory of a device; for the CPU, return a storage over the same memory."""
    return torch.frombuffer(memory, dtype=torch.uint8).to(device).untyped_storage()


def local_device(name: object) -> torch.device:
    """Return a device that a peer has named. ProtocolError for no device name, SerializationError if it is not here."""
    try:
        device = torch.device(str(name)) if type(name) is str else None
    except RuntimeError:
        device = None
    if device is None:
        raise ProtocolError(f"the peer sent a tensor for {name!r}, which is not a device")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the type depends on torch's build
        raise SerializationError(
            f"a tensor came for {device}, which this worker does not have: correct the device map. {error}"
        ) from error


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
"""Types of elements in memory -> types of quantized tensors. Elements of less than a byte are not supported."""
_INTEGERS = {quantized: plain for plain, quantized in QUANTIZED.items()}


def sparse_notes(tensor: torch.Tensor) -> tuple[Notes, Parts]:
    """Return the notes about a sparse tensor, and the strided tensors that it consists of."""
    layout = str(tensor.layout)
    if layout not in SPARSE:
        raise SerializationError(f"a tensor of layout {layout} cannot be sent: send its .to_dense()")
    notes: Notes = {"layout": layout}
    if tensor.is_sparse:
        notes["coalesced"] = tensor.is_coalesced()
    return notes, [part(tensor) for part in SPARSE[layout][1]]


def make_sparse(dtype: torch.dtype, shape: list[int], notes: Notes, parts: Parts) -> torch.Tensor:
    layout = notes["layout"]
    if layout not in SPARSE or len(parts) != len(SPARSE[layout][1]):
        raise broken_table_error(f"there is no layout {layout!r} of {len(parts)} parts")
    *indices, values = parts
    if values.dtype is not dtype:
        raise broken_table_error(f"a sparse tensor of {dtype} has values of {values.dtype}")
    if layout == "torch.sparse_coo":
        coalesced = bool(notes.get("coalesced"))
        return torch.sparse_coo_tensor(
            indices[0], values, shape, is_coalesced=coalesced, check_invariants=True, device=values.device
        )
    compressed, plain = indices
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=SPARSE[layout][0], check_invariants=True, device=values.device
    )


def integer_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a quantized tensor as integers."""
    plain = torch.empty(0, dtype=_INTEGERS[tensor.dtype], device=tensor.device)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def quantizer_notes(tensor: torch.Tensor) -> tuple[Notes, Parts]:
    """Return the quantizer of a tensor: `[scale, zero point]`, or the axis, with scales and zero points as parts."""
    if tensor.qscheme() == torch.per_tensor_affine:
        return {"quantizer": [tensor.q_scale(), tensor.q_zero_point()]}, []
    parts = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return {"quantizer": tensor.q_per_channel_axis()}, parts


def make_quantized(plain: torch.Tensor, quantizer: Any, parts: Parts) -> torch.Tensor:
    """Make the quantized tensor over the memory of these integers."""
    if plain.dtype not in QUANTIZED:
        raise broken_table_error(f"a tensor of {plain.dtype} cannot be quantized")
    if parts:
        made = _per_channel(plain, quantizer, parts)
    else:
        scale, zero_point = quantizer
        made = torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=QUANTIZED[plain.dtype], device=plain.device
        )
    return made.set_(plain.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride())


def _per_channel(plain: torch.Tensor, axis: Any, parts: Parts) -> torch.Tensor:
    if type(axis) is not int or not 0 <= axis < plain.dim():
        raise broken_table_error(f"a tensor of {plain.dim()} dimensions has no axis {axis!r}")
    if [list(part.shape) for part in parts] != [[plain.shape[axis]]] * 2:  # torch would read beyond them
        raise broken_table_error(f"a quantizer does not fit {plain.shape[axis]} channels")
    scales, zero_points = parts
    return torch._empty_per_channel_affine_quantized(
        [0] * plain.dim(),
        scales=scales,
        zero_points=zero_points,
        axis=axis,
        dtype=QUANTIZED[plain.dtype],
        device=plain.device,
    )


def broken_table_error(what: str) -> ProtocolError:
    """Make the error for a table that no sender of this version writes."""
    return ProtocolError(f"the peer sent a broken tensor table: {what}")


ORDINARY = (torch.Tensor, torch.nn.Parameter)
_ORDINARY_REDUCE = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
_TRACED = (
    "a tensor that stands for others while torch traces a function (torch.compile, torch.export, fake or functional "
    "tensors) has no data to send: make the call outside"
)
_TRANSFORMED = "a tensor inside torch.vmap or a transform of torch.func cannot be sent: make the call outside"


def is_describable(tensor: torch.Tensor) -> bool:
    """Return whether a table can describe this tensor: no nested tensor, and no elements of less than a byte."""
    kind = type(tensor)
    if kind not in ORDINARY:  # no classes with data of their own: wrappers that dispatch, or with a `__reduce_ex__`
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__reduce_ex__ not in _ORDINARY_REDUCE:
            return False
        tensor = as_plain_tensor(tensor)
    if tensor.is_quantized:
        return tensor.dtype in QUANTIZED.values()
    return not tensor.is_nested


def unsendable_reason(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no data that could be sent; None if it has."""
    if isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor):
        return _TRACED
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return _TRANSFORMED
    return None


def as_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor over the same memory, without subclass and graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def subclass_state(tensor: torch.Tensor, kind: type) -> Any:
    """Return the state of a tensor besides its elements, for `restore_subclass`; empty for most."""
    return vars(tensor) if kind in ORDINARY else torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]


def restore_subclass(kind: type[torch.Tensor], tensor: torch.Tensor, state: Any) -> torch.Tensor:
    """Return `tensor` as an instance of `kind` with this state."""
    if kind is not type(tensor):
        leaf, wanted = tensor.is_leaf, tensor.requires_grad
        # `as_subclass` records an operation: a leaf is detached to stay one, any other tensor stays in its graph.
        tensor = (tensor.detach() if leaf else tensor).as_subclass(kind)
        if leaf:
            tensor.requires_grad_(wanted)
    if kind.__setstate__ is not torch.Tensor.__setstate__:
        tensor.__setstate__(state)  # type: ignore[no-untyped-call]
    else:
        torch._utils._set_obj_state(tensor, state)  # type: ignore[no-untyped-call]
    return tensor

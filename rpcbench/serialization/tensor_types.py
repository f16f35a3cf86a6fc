"""Which tensors go into a table, and how: devices, sparse and quantized layouts, subclasses.

Guarantees
- Bytes of an accelerator travel through the CPU: copied there before they are sent, and to their device before anything
  refers to them. Both copies are complete when the call returns. The first begins after what the sending thread has
  queued on its current stream, so what is received is complete on every stream.
- A sparse or quantized tensor goes as ordinary strided parts and notes about them. The receiver checks these: indices
  out of bounds, or a quantizer that does not fit, are a ProtocolError.
- A subclass arrives with its state, as pickling it would give: its attributes, slots, or what it says itself.
- What exists only while torch traces or transforms a function is refused by name, not sent as an empty shell.
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
    """The way to one worker: device here -> device there. Tensors on the CPU stay there if nothing else is said.

    `refusal` is the error for a tensor on a device that is not named, after a mention of that device.
    """

    targets: Mapping[torch.device, torch.device]
    refusal: str

    def target(self, device: torch.device) -> str | None:
        """Name of the device over there; None for the CPU. SerializationError where there is no way."""
        there = self.targets.get(device, CPU if device == CPU else None)
        if there is None:
            raise SerializationError(f"a tensor on {device} has no way to its destination. {self.refusal}")
        return None if there == CPU else str(there)


CPU_ONLY = Route({}, "Send t.cpu(), and move it to a device on the other side.")


def device_of(name: Name) -> torch.device:
    """A device by its name or number, with an index if it is an accelerator: "cuda" is "cuda:0". RuntimeError for no
    device."""
    device = torch.device(name)
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else torch.device(device.type, 0)


def fetched(storage: torch.UntypedStorage, start: int, size: int) -> torch.UntypedStorage:
    """A copy, on the CPU, of these bytes of a device's memory."""
    window = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))
    return window.cpu().untyped_storage()


def placed(memory: bytearray | memoryview, device: torch.device) -> torch.UntypedStorage:
    """These bytes in memory of a device; on the CPU that is the same memory."""
    return torch.frombuffer(memory, dtype=torch.uint8).to(device).untyped_storage()


def here(name: object) -> torch.device:
    """The device that a peer has named. ProtocolError for what is no name; SerializationError where it is not here."""
    try:
        device = torch.device(str(name)) if type(name) is str else None
    except RuntimeError:
        device = None
    if device is None:
        raise ProtocolError(f"the peer sent a tensor for {name!r}, which is no device")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise SerializationError(
            f"a tensor came for {device}, which this worker does not have: mend the device map. {error}"
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

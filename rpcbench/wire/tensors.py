"""Tensors as a table of descriptions and the raw bytes of their storages.

The table is msgpack: `[storages, entries]`. A storage is its bytes or, if large, the length of the next out-of-band
buffer. An entry is `[dtype, shape, storage]` and, where something is out of the ordinary, a dict of notes (`_NOTES`).

Guarantees
- A note that this version does not know is refused, never dropped.
- Received tensors own their memory, and can write it; those that shared a storage share one (see `storages`).
- Everything a peer sends is checked before a tensor is made: nonsense is a ProtocolError and takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch

from rpcbench.wire.storages import Entry, Storages, last_index, note
from rpcbench.words.errors import ProtocolError, SerializationError

Buffer = memoryview | bytearray | bytes

_NOTES = frozenset({"strides", "offset", "requires_grad", "parameter", "conj", "neg", "layout", "parts", "coalesced"})
_MAX_DIMENSIONS = 64
_MAX_SIZE = (1 << 63) - 1

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_COO = (torch.Tensor._indices, torch.Tensor._values)
_BY_ROW = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_BY_COLUMN = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
_SPARSE: dict[str, tuple[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]] = {
    "torch.sparse_coo": (torch.sparse_coo, _COO),
    "torch.sparse_csr": (torch.sparse_csr, _BY_ROW),
    "torch.sparse_bsr": (torch.sparse_bsr, _BY_ROW),
    "torch.sparse_csc": (torch.sparse_csc, _BY_COLUMN),
    "torch.sparse_bsc": (torch.sparse_bsc, _BY_COLUMN),
}

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_ORDINARY_REDUCE = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)


def fits(tensor: torch.Tensor) -> bool:
    """Whether a table can describe this tensor. Quantized and nested tensors it cannot, nor classes with data of
    their own: wrappers that dispatch, and those that say themselves how they are pickled."""
    kind = type(tensor)
    if kind not in _ORDINARY:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__reduce_ex__ not in _ORDINARY_REDUCE:
            return False
        tensor = _undressed(tensor)
    return not (tensor.is_quantized or tensor.is_nested)


def _undressed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, without class and graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def dress(kind: type[torch.Tensor], tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """`tensor` as an instance of `kind` with these attributes: a leaf where it is one, else still in its graph."""
    if kind is not type(tensor):
        leaf, wanted = tensor.is_leaf, tensor.requires_grad
        tensor = (tensor.detach() if leaf else tensor).as_subclass(kind)
        if leaf:
            tensor.requires_grad_(wanted)
    vars(tensor).update(attributes)
    return tensor


def encode(tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[memoryview]]:
    """The table and the out-of-band buffers: read-only views of tensor memory, which must not change until sent.

    Raises SerializationError for a tensor that has no memory on the CPU.
    """
    storages = Storages()
    entries = [_entry(tensor, storages) for tensor in tensors]
    sizes, buffers = storages.finish()
    return msgpack.packb([sizes, entries]), buffers


def _entry(tensor: torch.Tensor, storages: Storages) -> Entry:
    plain = tensor if type(tensor) in _ORDINARY else _undressed(tensor)
    if not plain.is_cpu:
        raise SerializationError(_elsewhere(plain))
    entry: Entry = [_NAMES[plain.dtype], list(plain.shape), None]
    if tensor.requires_grad:
        note(entry, "requires_grad", True)
    if type(tensor) is torch.nn.Parameter:
        note(entry, "parameter", True)
    if plain.layout is not torch.strided:
        _describe_sparse(entry, plain.detach(), storages)
        return entry
    if plain.is_conj():
        note(entry, "conj", True)
    if plain.is_neg():
        note(entry, "neg", True)
    if plain.numel():
        storages.place(entry, plain)
    return entry


def _describe_sparse(entry: Entry, tensor: torch.Tensor, storages: Storages) -> None:
    layout = str(tensor.layout)
    if layout not in _SPARSE:
        raise SerializationError(f"a tensor of layout {layout} cannot be sent: send its .to_dense()")
    note(entry, "layout", layout)
    note(entry, "parts", [_entry(part(tensor), storages) for part in _SPARSE[layout][1]])
    if tensor.is_sparse:
        note(entry, "coalesced", tensor.is_coalesced())


def _elsewhere(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "a meta tensor has no data to send: give it some first, e.g. torch.empty_like(t, device='cpu')"
    return f"a tensor on {tensor.device} cannot be sent: send t.cpu() and move it to a device on the other side"


def decode(table: bytes, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int]:
    """The tensors of a table, and how many of the buffers it used.

    Writable buffers (16-byte aligned) become the tensors' memory; read-only ones are copied. ProtocolError for what no
    sender of this version would have written.
    """
    try:
        storages, entries = msgpack.unpackb(table)
        reader = _Reader(storages, buffers)
        return [reader.tensor(entry) for entry in entries], reader.used
    except ProtocolError:
        raise
    except (TypeError, ValueError, RuntimeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the peer sent a broken tensor table: {error}") from error


class _Reader:
    """Makes the tensors of one table, all of whose numbers are suspect."""

    def __init__(self, storages: list[Any], buffers: Sequence[Buffer]) -> None:
        self.used = 0
        self._buffers = buffers
        self._memory = [bytearray(item) if type(item) is bytes else self._next(item) for item in storages]
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _next(self, length: Any) -> memoryview | bytearray:
        if self.used == len(self._buffers):
            raise _broken("a storage has no buffer")
        buffer = memoryview(self._buffers[self.used]).cast("B")
        if buffer.nbytes != length:
            raise _broken(f"a buffer of {buffer.nbytes} bytes was announced as {length!r}")
        self.used += 1
        return bytearray(buffer) if buffer.readonly else buffer

    def tensor(self, entry: Any) -> torch.Tensor:
        name, sizes, index, *rest = entry
        notes = rest[0] if rest else {}
        if len(rest) > 1 or type(notes) is not dict:
            raise _broken("an entry is too long")
        if name not in _DTYPES:
            raise _broken(f"there is no dtype {name!r}")
        if unknown := notes.keys() - _NOTES:
            raise ProtocolError(f"a tensor has {sorted(map(str, unknown))}, which this version of rpcbench cannot keep")
        dtype, shape = _DTYPES[name], _naturals(sizes)
        if "layout" in notes:
            return _finished(self._sparse(dtype, shape, notes), notes)
        if index is None:
            return _finished(_empty(dtype, shape), notes)
        tensor = self._strided(dtype, shape, _natural(index), notes)
        return _finished(tensor, notes) if notes else tensor

    def _strided(self, dtype: torch.dtype, shape: list[int], index: int, notes: dict[str, Any]) -> torch.Tensor:
        if index >= len(self._memory):
            raise _broken(f"there is no storage {index}")
        size, count = len(self._memory[index]), math.prod(shape)
        if not 0 < count <= _MAX_SIZE:
            raise _broken(f"a stored tensor cannot have the shape {shape}")
        if not notes and count * dtype.itemsize == size and index not in self._storages:
            return self._first(index, dtype, shape)
        offset = _natural(notes.get("offset", 0))
        strides = _naturals(notes["strides"]) if "strides" in notes else ()
        last = last_index(shape, strides) if "strides" in notes else count - 1
        if (offset + last + 1) * dtype.itemsize > size:
            raise _broken("a tensor reaches beyond its storage")
        return torch.empty(0, dtype=dtype, device="cpu").set_(self._storage(index), offset, shape, strides)

    def _first(self, index: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """The quick way for a tensor that fills its storage, and is the first to use it."""
        tensor = torch.frombuffer(self._memory[index], dtype=dtype)
        self._storages[index] = tensor.untyped_storage()
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def _storage(self, index: int) -> torch.UntypedStorage:
        if index not in self._storages:
            self._storages[index] = torch.frombuffer(self._memory[index], dtype=torch.uint8).untyped_storage()
        return self._storages[index]

    def _sparse(self, dtype: torch.dtype, shape: list[int], notes: dict[str, Any]) -> torch.Tensor:
        layout, parts = notes["layout"], notes.get("parts", ())
        if layout not in _SPARSE or len(parts) != len(_SPARSE[layout][1]):
            raise _broken(f"there is no layout {layout!r} of {len(parts)} parts")
        if any(len(part) > 3 and "layout" in part[3] for part in parts):
            raise _broken("a part of a sparse tensor is sparse")
        *indices, values = map(self.tensor, parts)
        if values.dtype is not dtype:
            raise _broken(f"a sparse tensor of {dtype} has values of {values.dtype}")
        if layout == "torch.sparse_coo":
            coalesced = bool(notes.get("coalesced"))
            return torch.sparse_coo_tensor(
                indices[0], values, shape, is_coalesced=coalesced, check_invariants=True, device="cpu"
            )
        compressed, plain = indices
        return torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=_SPARSE[layout][0], check_invariants=True, device="cpu"
        )


def _empty(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if 0 not in shape or math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise _broken(f"a tensor without storage cannot have the shape {shape}")
    return torch.empty(shape, dtype=dtype, device="cpu")


def _finished(tensor: torch.Tensor, notes: dict[str, Any]) -> torch.Tensor:
    if notes.get("conj"):
        tensor = tensor.conj()
    if notes.get("neg"):
        tensor = torch._neg_view(tensor)
    wanted = bool(notes.get("requires_grad"))
    return torch.nn.Parameter(tensor, wanted) if notes.get("parameter") else tensor.requires_grad_(wanted)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise _broken(f"{value!r} is no size")
    return value


def _naturals(values: Any) -> list[int]:
    if type(values) is not list or len(values) > _MAX_DIMENSIONS:
        raise _broken("a shape is too long")
    for value in values:
        _natural(value)
    return values


def _broken(what: str) -> ProtocolError:
    return ProtocolError(f"the peer sent a broken tensor table: {what}")

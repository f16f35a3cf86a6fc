"""Tensors as a table of descriptions and the raw bytes of their storages.

The table is msgpack: `[storages, entries]`. A storage is its bytes, or, from 16 KB on, the length of the next
out-of-band buffer. An entry is `[dtype, shape, storage]` and, where something is out of the ordinary, a dict of notes
(`_NOTES`); a note that this version does not know is refused, never dropped.

Guarantees
- Large storages are not copied on the sending side. Only the part that the message's tensors look at is sent; where
  that is mostly gaps, each tensor is packed on its own and aliasing inside that storage is given up.
- Otherwise tensors that share a storage share one on arrival. Received tensors own their memory, and can write it.
- Everything a peer sends is checked before a tensor is made: nonsense is a ProtocolError and takes no memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from rpcbench.words.errors import ProtocolError, SerializationError

Buffer = memoryview | bytearray | bytes

INLINE = 16 << 10
"""Storages below this many bytes travel in the table itself."""
_WORTH_PACKING = 8 << 10
_ALIGNMENT = 16
_MAX_DIMENSIONS = 64
_MAX_SIZE = (1 << 63) - 1

_Entry = list[Any]
_NOTES = frozenset({"strides", "offset", "requires_grad", "parameter", "conj", "neg", "layout", "parts", "coalesced"})
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SPARSE: dict[torch.layout, tuple[Callable[[Any], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in _SPARSE}


def fits(tensor: torch.Tensor) -> bool:
    """Whether a table can describe this tensor; quantized and nested ones, and wrappers around others, it cannot."""
    kind = type(tensor)
    if kind in _ORDINARY:
        return not (tensor.is_quantized or tensor.is_nested)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__reduce_ex__ not in _ORDINARY_REDUCE:
        return False
    return fits(_undressed(tensor))


def dress(kind: type[torch.Tensor], tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """`tensor` as an instance of `kind` with these attributes: a leaf where it is one, else still in its graph."""
    if kind is not type(tensor):
        leaf = tensor.grad_fn is None
        wanted = tensor.requires_grad
        tensor = (tensor.detach() if leaf else tensor).as_subclass(kind)
        if leaf and wanted:
            tensor.requires_grad_()
    tensor.__dict__.update(attributes)
    return tensor


def _undressed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, without its class and graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def encode(tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[memoryview]]:
    """The table and the out-of-band buffers: read-only views of tensor memory, which must not change until sent.

    Raises SerializationError for a tensor that has no memory on the CPU.
    """
    writer = _Writer()
    entries = [writer.entry(tensor) for tensor in tensors]
    storages, buffers = writer.storages()
    return msgpack.packb([storages, entries]), buffers


@dataclass(slots=True)
class _Piece:
    """What one entry needs of a storage: bytes [start, stop), of which `dense` bytes are its own elements."""

    entry: _Entry
    tensor: torch.Tensor
    start: int
    stop: int
    dense: int


class _Writer:
    """Collects the tensors of one message by storage."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}
        self._storages: list[bytes | int] = []
        self._buffers: list[memoryview] = []

    def entry(self, tensor: torch.Tensor) -> _Entry:
        plain = tensor
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            plain = _undressed(tensor)
        if not plain.is_cpu:
            raise SerializationError(_elsewhere(plain))
        notes = self._notes(tensor, plain)
        entry: _Entry = [_NAMES[plain.dtype], list(plain.shape), None]
        if notes:
            entry.append(notes)
        if "layout" not in notes and plain.numel():
            self._place(entry, plain)
        return entry

    def _notes(self, tensor: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
        notes: dict[str, Any] = {}
        if tensor.requires_grad:
            notes["requires_grad"] = True
        if type(tensor) is torch.nn.Parameter:
            notes["parameter"] = True
        if plain.layout is not torch.strided:
            return notes | self._sparse(plain.detach())
        if plain.is_conj():
            notes["conj"] = True
        if plain.is_neg():
            notes["neg"] = True
        if not plain.is_contiguous():
            notes["strides"] = list(plain.stride())
        return notes

    def _sparse(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout not in _SPARSE:
            raise SerializationError(f"a tensor of layout {tensor.layout} cannot be sent: send its .to_dense()")
        notes: dict[str, Any] = {
            "layout": str(tensor.layout).removeprefix("torch."),
            "parts": [self.entry(part(tensor)) for part in _SPARSE[tensor.layout]],
        }
        if tensor.layout is torch.sparse_coo:
            notes["coalesced"] = tensor.is_coalesced()
        return notes

    def _place(self, entry: _Entry, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        start = tensor.storage_offset() * item
        dense = tensor.numel() * item
        stop = start + dense
        if len(entry) > 3 and "strides" in entry[3]:
            shape, strides = entry[1], entry[3]["strides"]
            stop = start + (_last(shape, strides) + 1) * item
            dense = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride) * item
        if stop > storage.nbytes():
            raise SerializationError("a tensor whose storage was freed or cut short cannot be sent")
        self._pieces.setdefault(storage.data_ptr(), []).append(_Piece(entry, tensor, start, stop, dense))

    def storages(self) -> tuple[list[bytes | int], list[memoryview]]:
        for pieces in self._pieces.values():
            for group in _groups(pieces):
                self._finish(group)
        return self._storages, self._buffers

    def _finish(self, pieces: list[_Piece]) -> None:
        start = pieces[0].start // _ALIGNMENT * _ALIGNMENT
        stop = max(piece.stop for piece in pieces)
        dense = sum(piece.dense for piece in pieces)
        if dense * 2 <= stop - start and stop - start - dense >= _WORTH_PACKING:
            for piece in pieces:
                self._pack(piece)
            return
        for piece in pieces:
            piece.entry[2] = len(self._storages)
            if piece.start > start:
                _note(piece.entry, "offset", (piece.start - start) // piece.tensor.element_size())
        self._store(pieces[0].tensor.untyped_storage(), start, stop)

    def _pack(self, piece: _Piece) -> None:
        """A storage of its own for this piece, without the gaps; repeated dimensions stay repeated."""
        tensor, strides = piece.tensor, piece.tensor.stride()
        kept = [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)]
        raw = torch.empty(0, dtype=tensor.dtype, device="cpu")
        packed = raw.set_(tensor.untyped_storage(), tensor.storage_offset(), kept, strides).clone(
            memory_format=torch.contiguous_format
        )
        steps = [step if stride else 0 for step, stride in zip(packed.stride(), strides, strict=True)]
        piece.entry[2] = len(self._storages)
        _note(piece.entry, "strides", steps)
        self._store(packed.untyped_storage(), 0, piece.dense)

    def _store(self, storage: torch.UntypedStorage, start: int, stop: int) -> None:
        size = stop - start
        if size < INLINE:
            self._storages.append(ctypes.string_at(storage.data_ptr() + start, size))
            return
        window = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,))
        self._storages.append(size)
        self._buffers.append(memoryview(window.numpy()).toreadonly())


def _groups(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one storage that overlap or lie near each other, in order of their start."""
    pieces.sort(key=lambda piece: piece.start)
    group = [pieces[0]]
    end = pieces[0].stop
    for piece in pieces[1:]:
        if piece.start - end >= _WORTH_PACKING:
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.stop)
    yield group


def _note(entry: _Entry, key: str, value: Any) -> None:
    if len(entry) == 3:
        entry.append({})
    entry[3][key] = value


def _elsewhere(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "a meta tensor has no data to send: make it on the CPU first, for example with torch.empty_like(t, device='cpu')"
    return f"a tensor on {tensor.device} cannot be sent: send t.cpu() and move it to a device on the other side"


def _last(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Index of the last element that a tensor without offset touches; the tensor is not empty."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def decode(table: bytes, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int]:
    """The tensors of a table, and how many of the buffers it used.

    Writable buffers become the tensors' memory; read-only ones are copied. ProtocolError for anything a sender of this
    version would not have written.
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
        self._memory = [self._own(storage, buffers) for storage in storages]
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _own(self, storage: Any, buffers: Sequence[Buffer]) -> memoryview | bytearray:
        if type(storage) is bytes:
            return bytearray(storage)
        length = _natural(storage)
        _require(self.used < len(buffers), "a storage has no buffer")
        buffer = memoryview(buffers[self.used]).cast("B")
        _require(buffer.nbytes == length, f"a buffer of {buffer.nbytes} bytes was announced with {length}")
        self.used += 1
        return bytearray(buffer) if buffer.readonly else buffer

    def tensor(self, entry: Any) -> torch.Tensor:
        name, sizes, index, *rest = entry
        notes = rest[0] if rest else {}
        _require(len(rest) < 2 and type(notes) is dict, "an entry is too long")
        _require(name in _DTYPES, f"no dtype {name!r} here")
        if unknown := notes.keys() - _NOTES:
            raise ProtocolError(f"a tensor has {sorted(map(str, unknown))}, which this version of rpcbench cannot keep")
        dtype, shape = _DTYPES[name], _naturals(sizes)
        if "layout" in notes:
            return _finished(self._sparse(dtype, shape, notes), notes)
        if index is None:
            _require(0 in shape, "a tensor that is not empty has no storage")
            return _finished(_empty(dtype, shape, notes), notes)
        return _finished(self._strided(dtype, shape, index, notes), notes)

    def _strided(self, dtype: torch.dtype, shape: list[int], index: int, notes: dict[str, Any]) -> torch.Tensor:
        _require(_natural(index) < len(self._memory), f"there is no storage {index}")
        offset = _natural(notes.get("offset", 0))
        memory = self._memory[index]
        strides = _naturals(notes["strides"]) if "strides" in notes else None
        count = math.prod(shape)
        last = count - 1 if strides is None else _last(shape, strides)
        _require(0 < count <= _MAX_SIZE, f"a stored tensor cannot have the shape {shape}")
        _require((offset + last + 1) * dtype.itemsize <= len(memory), "a tensor reaches beyond its storage")
        if strides is None and count * dtype.itemsize == len(memory) and index not in self._storages:
            tensor = torch.frombuffer(memory, dtype=dtype)
            self._storages[index] = tensor.untyped_storage()
            return tensor if len(shape) == 1 else tensor.resize_(shape)
        raw = torch.empty(0, dtype=dtype, device="cpu")
        return raw.set_(self._storage(index), offset, shape, strides or ())

"""The encoding of tensors: a table of descriptions, and the raw bytes of their storages.

The table is msgpack: `[storages, entries]`. A storage is its bytes or, if large, the length of the next out-of-band
buffer; `[storage, device]` if it belongs on another device than the CPU. An entry is `[dtype, shape, storage]` and, for
anything beyond that, a dict of notes (`_NOTES`).

Guarantees
- A note that this version does not know is refused, never dropped. Received values are validated before a tensor is
  made: invalid ones raise ProtocolError and allocate no memory. Received tensors have writable memory of their own.
- Only the part of a storage that the message's tensors use is sent: if small, copied into the table, else as a view.
- Tensors whose bytes overlap, or are less than 8 KB apart, share a storage on arrival too. But where such a part is
  mostly gaps (a column of a matrix), each tensor is packed separately: that loses aliasing, and saves half the bytes.

The fast path of plain dense tensors (`encode_dense`, `decode_dense`) makes the same bytes in fewer steps. It returns
None for all others; the general path then also raises the error, if there is one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from rpcbench.base.errors import ProtocolError, SerializationError
from rpcbench.serialization import tensor_types
from rpcbench.serialization.tensor_types import CPU, CPU_ONLY, Route, broken_table_error, copy_to_cpu
from rpcbench.wire.encoding import encode_plain

Entry = list[Any]
"""One tensor in the table: dtype, shape, storage and, if there are any, notes."""

Item = bytes | int | list[Any]
"""One storage in the table: its bytes, or the length of the next buffer; with the name of its device, if it has one."""
SMALL = 16 << 10
"""Bytes. Smaller storages are sent in the table itself, where they are copied a few times;"""
INLINE = 96 << 10
"""bytes of larger storages in one table at most. Beyond that, a buffer beside the message costs less."""
WORTH_PACKING = 8 << 10
"""Bytes. Smaller gaps between tensors are sent."""
_ALIGNMENT = 16  # bytes: the start of a part that is sent, so that the receiver's tensors are aligned


@dataclass(slots=True)
class _StorageSlice:
    """The bytes [start, stop) of a storage that one entry uses; its elements take `dense` bytes of them."""

    entry: Entry
    tensor: torch.Tensor
    start: int
    stop: int
    dense: int


class Storages:
    """The storages of a message's tensors; `finish_storages` decides which bytes are sent and completes the entries."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._mapped = bool(route.targets)
        self._whole: dict[int, tuple[int, int]] = {}  # address of a storage that is sent whole -> its number and size
        self._pieces: dict[int, list[_StorageSlice]] = {}
        self._items: list[Item] = []
        self._buffers: list[memoryview] = []
        self._room = INLINE  # bytes left in the table for storages that are not small

    def target_device(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the tensor's device on the receiver; None: the CPU. SerializationError without a route."""
        return self._route.target_device(tensor.device) if self._mapped or not tensor.is_cpu else None

    def add_tensor(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Add a strided tensor that is not empty, and the entry that describes it."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        start = int(tensor.storage_offset()) * tensor.element_size()
        dense = tensor.nbytes
        stop = start + dense
        if not tensor.is_contiguous():
            stop, dense = _note_strides(entry, tensor, start)
        if stop > size:
            raise SerializationError("a tensor whose storage was freed or cut short cannot be sent")
        if dense == size and address not in self._whole and address not in self._pieces:  # most: nothing to group
            entry[2] = len(self._items)
            self._whole[address] = entry[2], size
            self._store_range(tensor, storage, 0, size)
            return
        number, within = self._whole.get(address, (0, 0))
        if stop <= within:
            _refer_to_storage(entry, number, start, tensor)
        else:
            self._pieces.setdefault(address, []).append(_StorageSlice(entry, tensor, start, stop, dense))

    def finish_storages(self) -> tuple[list[Item], list[memoryview]]:
        """Return the storages and the out-of-band buffers."""
        for pieces in self._pieces.values():
            for group in _group_slices(pieces) if len(pieces) > 1 else (pieces,):
                self._write_slices(group)
        return self._items, self._buffers

    def _write_slices(self, pieces: list[_StorageSlice]) -> None:
        start = pieces[0].start // _ALIGNMENT * _ALIGNMENT
        stop = dense = 0
        for piece in pieces:
            stop = max(stop, piece.stop)
            dense += piece.dense
        gaps = stop - start - dense
        if gaps >= WORTH_PACKING and gaps * 2 >= stop - start:  # at least half of the bytes are not needed
            for piece in pieces:
                self._pack_slice(piece)
            return
        for piece in pieces:
            _refer_to_storage(piece.entry, len(self._items), piece.start - start, piece.tensor)
        self._store_range(pieces[0].tensor, pieces[0].tensor.untyped_storage(), start, stop)

    def _pack_slice(self, piece: _StorageSlice) -> None:
        """Copy a tensor to a storage of its own, without gaps; expanded dimensions (stride 0) stay expanded."""
        tensor, strides = piece.tensor, piece.tensor.stride()
        kept = [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)]
        window = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        window.set_(tensor.untyped_storage(), tensor.storage_offset(), kept, strides)
        packed = window.clone(memory_format=torch.contiguous_format)
        piece.entry[2] = len(self._items)
        steps = zip(packed.stride(), strides, strict=True)
        note_entry(piece.entry, "strides", [step if stride else 0 for step, stride in steps])
        self._store_range(tensor, packed.untyped_storage(), 0, piece.dense)

    def _store_range(self, tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, stop: int) -> None:
        """Add bytes [start, stop) of a storage, which is on the tensor's device, to the message."""
        size, target = stop - start, self.target_device(tensor)
        if not tensor.is_cpu:
            storage, start = copy_to_cpu(storage, start, size), 0
        item = self._store_bytes(storage, start, size)
        self._items.append(item if target is None else [item, target])

    def _store_bytes(self, storage: torch.UntypedStorage, start: int, size: int) -> bytes | int:
        if size < SMALL or size < self._room:
            self._room -= size if size >= SMALL else 0  # small ones are sent in the table in any case
            return ctypes.string_at(storage.data_ptr() + start, size)
        window = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,), (1,))
        self._buffers.append(window.numpy().data.toreadonly())
        return size


def _note_strides(entry: Entry, tensor: torch.Tensor, start: int) -> tuple[int, int]:
    """Note the strides of a tensor; return the end of its bytes in the storage, and the bytes of its elements."""
    shape, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    note_entry(entry, "strides", list(strides))
    dense = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride)
    return start + (last_element_index(shape, strides) + 1) * item, dense * item


def _refer_to_storage(entry: Entry, number: int, start: int, tensor: torch.Tensor) -> None:
    entry[2] = number
    if start:
        note_entry(entry, "offset", start // tensor.element_size())


def _group_slices(pieces: list[_StorageSlice]) -> Iterator[list[_StorageSlice]]:
    """Yield groups of slices of one storage that overlap or are close to each other, in order of their start."""
    pieces.sort(key=lambda piece: piece.start)
    group, end = [pieces[0]], pieces[0].stop
    for piece in pieces[1:]:
        if piece.start - end >= WORTH_PACKING:
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.stop)
    yield group


def note_entry(entry: Entry, key: str, value: Any) -> None:
    if len(entry) == 3:
        entry.append({})
    entry[3][key] = value


def last_element_index(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the index of the last element that a tensor without offset touches; the tensor is not empty."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Buffer = memoryview | bytearray | bytes
_MOST = 64
"""Tensors (or dimensions) beyond which the general path is not slower."""
_WANTED = {"requires_grad": True}
_INTS = frozenset({int})


def encode_dense(tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[memoryview]] | None:
    """Return the table and buffers of CPU tensors that each fill a storage of their own; None for any others."""
    items: list[bytes | int] = []
    buffers: list[memoryview] = []
    entries: list[tuple[Any, ...]] = []
    addresses: set[int] = set()
    room = INLINE
    try:
        for tensor in tensors:
            size, storage = tensor.nbytes, tensor.untyped_storage()
            if not size or storage.nbytes() != size or not tensor.is_contiguous() or type(tensor) is not torch.Tensor:
                return None
            addresses.add(storage.data_ptr())
            entry: tuple[Any, ...] = (NAMES[tensor.dtype], tensor.shape, len(items))
            if tensor.requires_grad:
                tensor, entry = tensor.detach(), (*entry, _WANTED)
            entries.append(entry)
            array = tensor.numpy()  # raises for other devices and layouts, and for lazy conjugation or negation
            if size < SMALL or size < room:
                items.append(array.tobytes())
                room -= size if size >= SMALL else 0
            else:
                items.append(size)
                buffers.append(array.reshape(-1).view(np.uint8).data.toreadonly())
    except (KeyError, TypeError, RuntimeError):
        return None
    # Fewer addresses than items: two tensors share a storage.
    return (encode_plain((items, entries)), buffers) if len(addresses) == len(items) <= _MOST else None


def decode_dense(storages: Any, entries: Any, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int] | None:
    """Return the tensors of such a table, and the count of buffers used; None for another table, or an invalid one."""
    if type(storages) is not list or type(entries) is not list or len(storages) != len(entries):
        return None
    found: list[torch.Tensor] = []
    left = iter(buffers)
    used = 0
    for data, entry in zip(storages, entries, strict=True):
        if type(entry) is not list:
            return None
        if len(entry) == 3:
            name, shape, number = entry
        elif len(entry) == 4 and entry[3] == _WANTED:
            name, shape, number, _ = entry
        else:
            return None
        dtype, inline = DTYPES.get(name), type(data) is bytes
        memory: Buffer | None = bytearray(data) if inline else _matching_buffer(left, data)
        if (
            not memory
            or dtype is None
            or number != len(found)
            or not _is_exact_shape(shape, dtype.itemsize, len(memory))
        ):
            return None
        if not inline:
            used += 1
        tensor = torch.frombuffer(memory, dtype=dtype)
        if len(shape) != 1:
            tensor.resize_(shape)
        found.append(tensor if len(entry) == 3 else tensor.requires_grad_())
    return found, used


def _matching_buffer(buffers: Iterator[Buffer], length: Any) -> memoryview | bytearray | None:
    """Return the next buffer, if it has that length and can be a tensor's memory without a copy."""
    buffer = next(buffers, None)
    if type(length) is not int or type(buffer) not in (memoryview, bytearray):
        return None
    view = memoryview(buffer)  # type: ignore[arg-type]
    return None if view.readonly or view.itemsize != 1 or view.nbytes != length else view


def _is_exact_shape(shape: Any, itemsize: int, size: int) -> bool:
    """Return whether `shape` is a valid shape without zeros, and takes `size` bytes."""
    if type(shape) is not list or len(shape) > _MOST or not _INTS.issuperset(map(type, shape)):
        return False
    return math.prod(shape) * itemsize == size and (not shape or min(shape) > 0)


_NOTES = {
    "strides", "offset", "device", "requires_grad", "parameter", "conj", "neg", "layout", "coalesced", "quantizer",
    "parts",
}  # fmt: skip
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_SIZE = (1 << 63) - 1  # torch has signed 64-bit sizes


def encode_tensors(tensors: Sequence[torch.Tensor], route: Route = CPU_ONLY) -> tuple[bytes, list[memoryview]]:
    """Return the table and the out-of-band buffers: read-only views of memory that must not change until it is sent.
    SerializationError for a tensor without memory, or on a device without a route."""
    if not route.targets and (quickly := encode_dense(tensors)) is not None:
        return quickly
    return _encode_general(tensors, Storages(route))


def _encode_general(tensors: Sequence[torch.Tensor], storages: Storages) -> tuple[bytes, list[memoryview]]:
    try:
        entries = [_encode_entry(tensor, storages) for tensor in tensors]
    except (NotImplementedError, RuntimeError) as error:  # torch's, for tensors without a storage
        reason = next(filter(None, map(tensor_types.unsendable_reason, tensors)), None)
        if isinstance(error, SerializationError) or reason is None:
            raise
        raise SerializationError(reason) from error
    items, buffers = storages.finish_storages()
    return encode_plain([items, entries]), buffers


def _encode_entry(tensor: torch.Tensor, storages: Storages) -> Entry:
    kind = type(tensor)
    plain = tensor if kind in tensor_types.ORDINARY else tensor_types.as_plain_tensor(tensor)
    entry: Entry = [NAMES.get(plain.dtype), list(plain.shape), None]
    if tensor.requires_grad:
        note_entry(entry, "requires_grad", True)
    if kind is torch.nn.Parameter:
        note_entry(entry, "parameter", True)
    if plain.layout is not torch.strided:
        _add_parts(entry, *tensor_types.sparse_notes(plain.detach()), storages)
        return entry
    if plain.is_quantized:
        _add_parts(entry, *tensor_types.quantizer_notes(plain), storages)
        plain = tensor_types.integer_memory(plain)
        entry[0] = NAMES[plain.dtype]
    if plain.is_conj():
        note_entry(entry, "conj", True)
    if plain.is_neg():
        note_entry(entry, "neg", True)
    if plain.is_meta:
        note_entry(entry, "device", "meta")
        note_entry(entry, "strides", list(plain.stride()))
    elif plain.numel():
        storages.add_tensor(entry, plain)
    elif target := storages.target_device(plain):
        note_entry(entry, "device", target)
    return entry


def _add_parts(entry: Entry, notes: tensor_types.Notes, parts: tensor_types.Parts, storages: Storages) -> None:
    for key, value in notes.items():
        note_entry(entry, key, value)
    if parts:
        note_entry(entry, "parts", [_encode_entry(part, storages) for part in parts])


def decode_tensors(table: bytes, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int]:
    """Return the tensors of a table, and the count of buffers used. Writable buffers (16-byte aligned) become the
    tensors' memory; read-only ones are copied. ProtocolError for a table that no sender of this version writes,
    SerializationError for a device that this process does not have."""
    try:
        storages, entries = msgspec.msgpack.decode(table)
        if (quickly := decode_dense(storages, entries, buffers)) is not None:
            return quickly
        reader = _Reader(storages, buffers)
        return [reader.read_tensor(entry) for entry in entries], reader.used
    except (ProtocolError, SerializationError):
        raise
    except (TypeError, ValueError, RuntimeError, msgspec.DecodeError) as error:
        raise broken_table_error(str(error)) from error


class _Reader:
    """The general decoder of one table, none of whose numbers is trusted."""

    def __init__(self, storages: list[Any], buffers: Sequence[Buffer]) -> None:
        self.used = 0  # buffers
        self._buffers = buffers
        self._storages: dict[int, torch.UntypedStorage] = {}  # by number, made at second use, or on its device
        self._filled: dict[int, torch.Tensor] = {}  # by number of the storage: the tensor that fills it
        self._memory = [self._take_memory(number, item) for number, item in enumerate(storages)]

    def _take_memory(self, number: int, item: Any) -> memoryview | bytearray:
        if type(item) is not list:
            return bytearray(item) if type(item) is bytes else self._next_buffer(item)
        inner, name = item
        memory = bytearray(inner) if type(inner) is bytes else self._next_buffer(inner)
        self._storages[number] = tensor_types.copy_to_device(memory, tensor_types.local_device(name))
        return memory

    def _next_buffer(self, length: Any) -> memoryview | bytearray:
        if self.used == len(self._buffers):
            raise broken_table_error("a storage has no buffer")
        buffer = memoryview(self._buffers[self.used]).cast("B")
        if buffer.nbytes != length:
            raise broken_table_error(f"a buffer of {buffer.nbytes} bytes was announced as {length!r}")
        self.used += 1
        return bytearray(buffer) if buffer.readonly else buffer

    def read_tensor(self, entry: Any) -> torch.Tensor:
        name, sizes, index, *rest = entry
        notes = rest[0] if rest else {}
        if len(rest) > 1 or type(notes) is not dict:
            raise broken_table_error("an entry is too long")
        if name not in DTYPES:
            raise broken_table_error(f"there is no dtype {name!r}")
        if notes and (unknown := notes.keys() - _NOTES):
            raise ProtocolError(f"a tensor has {sorted(map(str, unknown))}, unknown to this version of rpcbench")
        tensor = self._plain_tensor(DTYPES[name], _check_sizes(sizes), index, notes)
        return _finish_tensor(tensor, notes) if notes else tensor

    def _plain_tensor(self, dtype: torch.dtype, shape: list[int], index: Any, notes: dict[str, Any]) -> torch.Tensor:
        if "layout" in notes:
            return tensor_types.make_sparse(dtype, shape, notes, self._read_parts(notes))
        if index is None:
            plain = _without_memory(dtype, shape, notes)
        else:
            plain = self._strided_tensor(dtype, shape, index, notes)
        return (
            tensor_types.make_quantized(plain, notes["quantizer"], self._read_parts(notes))
            if "quantizer" in notes
            else plain
        )

    def _read_parts(self, notes: dict[str, Any]) -> tensor_types.Parts:
        entries = notes.get("parts", ())
        if any(len(part) > 3 and ("layout" in part[3] or "quantizer" in part[3]) for part in entries):
            raise broken_table_error("a part of a tensor has parts")  # else a peer could nest them without limit
        return [self.read_tensor(part) for part in entries]

    def _strided_tensor(self, dtype: torch.dtype, shape: list[int], index: Any, notes: dict[str, Any]) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._memory):
            raise broken_table_error(f"there is no storage {index!r}")
        size, count = len(self._memory[index]), math.prod(shape)
        if not 0 < count <= _MAX_SIZE:
            raise broken_table_error(f"a stored tensor cannot have the shape {shape}")
        if not notes and count * dtype.itemsize == size and index not in self._storages and index not in self._filled:
            # It fills its storage and is the first to use it: made in fewer steps.
            tensor = self._filled[index] = torch.frombuffer(self._memory[index], dtype=dtype)
            return tensor if len(shape) == 1 else tensor.resize_(shape)
        offset = _check_size(notes.get("offset", 0))
        strides = _check_sizes(notes["strides"]) if "strides" in notes else ()
        last = last_element_index(shape, strides) if "strides" in notes else count - 1
        if (offset + last + 1) * dtype.itemsize > size:
            raise broken_table_error("a tensor reaches beyond its storage")
        storage = self._storage_at(index)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)

    def _storage_at(self, index: int) -> torch.UntypedStorage:
        if index not in self._storages:
            first = self._filled.get(index)
            tensor = torch.frombuffer(self._memory[index], dtype=torch.uint8) if first is None else first
            self._storages[index] = tensor.untyped_storage()
        return self._storages[index]


def _without_memory(dtype: torch.dtype, shape: list[int], notes: dict[str, Any]) -> torch.Tensor:
    device = tensor_types.local_device(notes["device"]) if "device" in notes else CPU
    if device.type == "meta":
        strides = _check_sizes(notes.get("strides"))
        if max(math.prod(shape), last_element_index(shape, strides)) * dtype.itemsize > _MAX_SIZE:
            raise broken_table_error(f"a tensor cannot have the shape {shape}")
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # An empty tensor has no storage. torch multiplies its other sizes, too, which must not overflow.
    if 0 not in shape or math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise broken_table_error(f"a tensor without storage cannot have the shape {shape}")
    return torch.empty(shape, dtype=dtype, device=device)


def _finish_tensor(tensor: torch.Tensor, notes: dict[str, Any]) -> torch.Tensor:
    if notes.get("conj"):
        tensor = tensor.conj()
    if notes.get("neg"):
        tensor = torch._neg_view(tensor)
    wanted = bool(notes.get("requires_grad"))
    return torch.nn.Parameter(tensor, wanted) if notes.get("parameter") else tensor.requires_grad_(wanted)


def _check_size(value: Any) -> int:
    return _check_sizes([value])[0]


def _check_sizes(values: Any) -> list[int]:
    if type(values) is not list or len(values) > _MAX_DIMENSIONS:
        raise broken_table_error("a shape is too long")
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            raise broken_table_error(f"{value!r} is not a size")
    return values

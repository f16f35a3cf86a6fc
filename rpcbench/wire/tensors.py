"""Tensors as a table of descriptions and the raw bytes of their storages.

The table is msgpack: `[storages, entries]`. A storage is its bytes or, if large, the length of the next out-of-band
buffer; `[storage, device]` where it belongs on another device than the CPU. An entry is `[dtype, shape, storage]` and,
where something is out of the ordinary, a dict of notes (`_NOTES`).

Guarantees
- A note that this version does not know is refused, never dropped.
- Received tensors own their memory, and can write it; those that shared a storage share one (see `storages`).
- Everything a peer sends is checked before a tensor is made: nonsense is a ProtocolError and takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from rpcbench.base.errors import ProtocolError, SerializationError
from rpcbench.wire import devices, kinds, layouts, ordinary
from rpcbench.wire.devices import CPU, CPU_ONLY, Route
from rpcbench.wire.ordinary import Buffer
from rpcbench.wire.storages import Entry, Storages, last_index, note

_NOTES = frozenset(
    {
        *("strides", "offset", "device", "requires_grad", "parameter", "conj", "neg"),
        *("layout", "coalesced", "quantizer", "parts"),
    }
)
_MAX_DIMENSIONS = 64
_MAX_SIZE = (1 << 63) - 1


def encode(tensors: Sequence[torch.Tensor], route: Route = CPU_ONLY) -> tuple[bytes, list[memoryview]]:
    """The table and the out-of-band buffers: read-only views of memory, which must not change until sent.

    Raises SerializationError for a tensor that has no memory, or whose device has no way on this route.
    """
    if not route.targets and (quickly := ordinary.encode(tensors)) is not None:
        return quickly
    return _encode(tensors, Storages(route))


def _encode(tensors: Sequence[torch.Tensor], storages: Storages) -> tuple[bytes, list[memoryview]]:
    try:
        entries = [_entry(tensor, storages) for tensor in tensors]
    except (NotImplementedError, RuntimeError) as error:
        reason = next(filter(None, map(kinds.unsendable, tensors)), None)
        if isinstance(error, SerializationError) or reason is None:
            raise
        raise SerializationError(reason) from error
    items, buffers = storages.finish()
    return msgpack.packb([items, entries]), buffers


def _entry(tensor: torch.Tensor, storages: Storages) -> Entry:
    kind = type(tensor)
    plain = tensor if kind in kinds.ORDINARY else kinds.undressed(tensor)
    entry: Entry = [ordinary.NAMES.get(plain.dtype), list(plain.shape), None]
    if tensor.requires_grad:
        note(entry, "requires_grad", True)
    if kind is torch.nn.Parameter:
        note(entry, "parameter", True)
    if plain.layout is not torch.strided:
        _compose(entry, *layouts.sparse_notes(plain.detach()), storages)
        return entry
    if plain.is_quantized:
        _compose(entry, *layouts.quantizer_notes(plain), storages)
        plain = layouts.integers(plain)
        entry[0] = ordinary.NAMES[plain.dtype]
    if plain.is_conj():
        note(entry, "conj", True)
    if plain.is_neg():
        note(entry, "neg", True)
    if plain.is_meta:
        note(entry, "device", "meta")
        note(entry, "strides", list(plain.stride()))
    elif plain.numel():
        storages.place(entry, plain)
    elif target := storages.target(plain):
        note(entry, "device", target)
    return entry


def _compose(entry: Entry, notes: layouts.Notes, parts: layouts.Parts, storages: Storages) -> None:
    for key, value in notes.items():
        note(entry, key, value)
    if parts:
        note(entry, "parts", [_entry(part, storages) for part in parts])


def decode(table: bytes, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int]:
    """The tensors of a table, and how many of the buffers it used.

    Writable buffers (16-byte aligned) become the tensors' memory; read-only ones are copied. ProtocolError for what no
    sender of this version would have written, SerializationError for a device that is not here.
    """
    try:
        storages, entries = msgpack.unpackb(table)
        if (quickly := ordinary.decode(storages, entries, buffers)) is not None:
            return quickly
        reader = _Reader(storages, buffers)
        return [reader.tensor(entry) for entry in entries], reader.used
    except (ProtocolError, SerializationError):
        raise
    except (TypeError, ValueError, RuntimeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the peer sent a broken tensor table: {error}") from error


class _Reader:
    """Makes the tensors of one table, all of whose numbers are suspect."""

    def __init__(self, storages: list[Any], buffers: Sequence[Buffer]) -> None:
        self.used = 0
        self._buffers = buffers
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._memory = [self._taken(number, item) for number, item in enumerate(storages)]

    def _taken(self, number: int, item: Any) -> memoryview | bytearray:
        if type(item) is not list:
            return bytearray(item) if type(item) is bytes else self._next(item)
        inner, name = item
        memory = bytearray(inner) if type(inner) is bytes else self._next(inner)
        self._storages[number] = devices.placed(memory, devices.here(name))
        return memory

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
        if name not in ordinary.DTYPES:
            raise _broken(f"there is no dtype {name!r}")
        if unknown := notes.keys() - _NOTES:
            raise ProtocolError(f"a tensor has {sorted(map(str, unknown))}, which this version of rpcbench cannot keep")
        tensor = self._bare(ordinary.DTYPES[name], _naturals(sizes), index, notes)
        return _finished(tensor, notes) if notes else tensor

    def _bare(self, dtype: torch.dtype, shape: list[int], index: Any, notes: dict[str, Any]) -> torch.Tensor:
        if "layout" in notes:
            return layouts.sparse(dtype, shape, notes, self._parts(notes))
        if index is None:
            plain = _without_memory(dtype, shape, notes)
        else:
            plain = self._strided(dtype, shape, _natural(index), notes)
        return layouts.quantized(plain, notes["quantizer"], self._parts(notes)) if "quantizer" in notes else plain

    def _parts(self, notes: dict[str, Any]) -> layouts.Parts:
        entries = notes.get("parts", ())
        if any(len(part) > 3 and ("layout" in part[3] or "quantizer" in part[3]) for part in entries):
            raise _broken("a part of a tensor has parts")
        return [self.tensor(part) for part in entries]

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
        storage = self._storage(index)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)

    def _first(self, index: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """The quick way for a tensor that fills its storage, and is the first to use it."""
        tensor = torch.frombuffer(self._memory[index], dtype=dtype)
        self._storages[index] = tensor.untyped_storage()
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def _storage(self, index: int) -> torch.UntypedStorage:
        if index not in self._storages:
            self._storages[index] = torch.frombuffer(self._memory[index], dtype=torch.uint8).untyped_storage()
        return self._storages[index]


def _without_memory(dtype: torch.dtype, shape: list[int], notes: dict[str, Any]) -> torch.Tensor:
    device = devices.here(notes["device"]) if "device" in notes else CPU
    if device.type == "meta":
        strides = _naturals(notes.get("strides"))
        if max(math.prod(shape), last_index(shape, strides)) * dtype.itemsize > _MAX_SIZE:
            raise _broken(f"a tensor cannot have the shape {shape}")
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if 0 not in shape or math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise _broken(f"a tensor without storage cannot have the shape {shape}")
    return torch.empty(shape, dtype=dtype, device=device)


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

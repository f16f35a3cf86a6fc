"""Which bytes of the sender's memory travel for the tensors of one message.

Guarantees
- Only the part of a storage that the message's tensors look at is sent. Small ones are copied into the message's table;
  large ones go as views, and nothing of them is copied.
- Tensors whose bytes overlap, or lie less than 8 KB apart, share a storage on arrival too.
- Where such a part is mostly gaps (a column of a matrix), each tensor is packed on its own: aliasing is given up for
  half the bytes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpcbench.base.errors import SerializationError
from rpcbench.wire.devices import Route, fetched

Entry = list[Any]
"""One tensor in the table: dtype, shape, storage and, if there are any, notes."""

Item = bytes | int | list[Any]
"""One storage in the table: its bytes, or the length of the next buffer; with the name of its device, if it has one."""
SMALL = 16 << 10
"""Storages below this many bytes travel in the table itself, where they are copied a few times;"""
INLINE = 96 << 10
"""and larger ones as long as those of one message take less than this. Beyond, memory beside the message costs less."""
WORTH_PACKING = 8 << 10
"""Gaps below this many bytes are sent along."""
_ALIGNMENT = 16


@dataclass(slots=True)
class _Piece:
    """What one entry needs of a storage: bytes [start, stop), of which `dense` bytes are its own elements."""

    entry: Entry
    tensor: torch.Tensor
    start: int
    stop: int
    dense: int


class Storages:
    """Collects tensors by storage; `finish` decides what travels and completes their entries."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._mapped = bool(route.targets)
        self._whole: dict[int, tuple[int, int]] = {}  # address of a storage -> its number and size
        self._pieces: dict[int, list[_Piece]] = {}
        self._items: list[Item] = []
        self._buffers: list[memoryview] = []
        self._room = INLINE

    def target(self, tensor: torch.Tensor) -> str | None:
        """Where the tensor goes; None for the CPU. SerializationError where it cannot go anywhere."""
        return self._route.target(tensor.device) if self._mapped or not tensor.is_cpu else None

    def place(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Remember a strided tensor that is not empty, together with the entry that describes it."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        start = int(tensor.storage_offset()) * tensor.element_size()
        dense = tensor.nbytes
        stop = start + dense
        if not tensor.is_contiguous():
            stop, dense = _strided(entry, tensor, start)
        if stop > size:
            raise SerializationError("a tensor whose storage was freed or cut short cannot be sent")
        if dense == size and address not in self._whole and address not in self._pieces:
            entry[2] = len(self._items)
            self._whole[address] = entry[2], size
            self._store(tensor, storage, 0, size)
            return
        number, within = self._whole.get(address, (0, 0))
        if stop <= within:
            _refer(entry, number, start, tensor)
        else:
            self._pieces.setdefault(address, []).append(_Piece(entry, tensor, start, stop, dense))

    def finish(self) -> tuple[list[Item], list[memoryview]]:
        """The storages and the out-of-band buffers."""
        for pieces in self._pieces.values():
            for group in _groups(pieces) if len(pieces) > 1 else (pieces,):
                self._write(group)
        return self._items, self._buffers

    def _write(self, pieces: list[_Piece]) -> None:
        start = pieces[0].start // _ALIGNMENT * _ALIGNMENT
        stop = dense = 0
        for piece in pieces:
            stop = max(stop, piece.stop)
            dense += piece.dense
        gaps = stop - start - dense
        if gaps >= WORTH_PACKING and gaps * 2 >= stop - start:
            for piece in pieces:
                self._pack(piece)
            return
        for piece in pieces:
            _refer(piece.entry, len(self._items), piece.start - start, piece.tensor)
        self._store(pieces[0].tensor, pieces[0].tensor.untyped_storage(), start, stop)

    def _pack(self, piece: _Piece) -> None:
        """A storage of its own for this piece, without the gaps; repeated dimensions stay repeated."""
        tensor, strides = piece.tensor, piece.tensor.stride()
        kept = [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)]
        window = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        window.set_(tensor.untyped_storage(), tensor.storage_offset(), kept, strides)
        packed = window.clone(memory_format=torch.contiguous_format)
        piece.entry[2] = len(self._items)
        steps = zip(packed.stride(), strides, strict=True)
        note(piece.entry, "strides", [step if stride else 0 for step, stride in steps])
        self._store(tensor, packed.untyped_storage(), 0, piece.dense)

    def _store(self, tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, stop: int) -> None:
        """Send these bytes of a storage that is on the tensor's device."""
        size, target = stop - start, self.target(tensor)
        if not tensor.is_cpu:
            storage, start = fetched(storage, start, size), 0
        item = self._bytes(storage, start, size)
        self._items.append(item if target is None else [item, target])

    def _bytes(self, storage: torch.UntypedStorage, start: int, size: int) -> bytes | int:
        if size < SMALL or size < self._room:
            self._room -= size if size >= SMALL else 0
            return ctypes.string_at(storage.data_ptr() + start, size)
        window = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,), (1,))
        self._buffers.append(window.numpy().data.toreadonly())
        return size


def _strided(entry: Entry, tensor: torch.Tensor, start: int) -> tuple[int, int]:
    """Where a tensor with strides ends, and how many bytes its elements take."""
    shape, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    note(entry, "strides", list(strides))
    dense = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride)
    return start + (last_index(shape, strides) + 1) * item, dense * item


def _refer(entry: Entry, number: int, start: int, tensor: torch.Tensor) -> None:
    entry[2] = number
    if start:
        note(entry, "offset", start // tensor.element_size())


def _groups(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one storage that overlap or lie near each other, in order of their start."""
    pieces.sort(key=lambda piece: piece.start)
    group, end = [pieces[0]], pieces[0].stop
    for piece in pieces[1:]:
        if piece.start - end >= WORTH_PACKING:
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.stop)
    yield group


def note(entry: Entry, key: str, value: Any) -> None:
    """Add a note to an entry."""
    if len(entry) == 3:
        entry.append({})
    entry[3][key] = value


def last_index(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Index of the last element that a tensor without offset touches; the tensor is not empty."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

"""The quick way through tensor tables, for tensors that are nothing special: the same bytes in fewer steps.

Both directions answer None where anything needs the general way (`tensors`), which also says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rpcbench.wire.packing import packed
from rpcbench.wire.storages import INLINE, SMALL

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Buffer = memoryview | bytearray | bytes
_MOST = 64
"""Beyond so many tensors (or dimensions) the general way is no slower."""
_WANTED = {"requires_grad": True}
_INTS = frozenset({int})


def encode(tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[memoryview]] | None:
    """The table and buffers of tensors that each fill a storage of their own, on the CPU."""
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
            array = tensor.numpy()  # numpy knows neither devices, layouts nor lazy bits, and says so
            if size < SMALL:
                items.append(array.tobytes())
            elif size < room:
                items.append(array.tobytes())
                room -= size
            else:
                items.append(size)
                buffers.append(array.reshape(-1).view(np.uint8).data.toreadonly())
    except (KeyError, TypeError, RuntimeError):
        return None
    return (packed((items, entries)), buffers) if len(addresses) == len(items) <= _MOST else None


def decode(storages: Any, entries: Any, buffers: Sequence[Buffer]) -> tuple[list[torch.Tensor], int] | None:
    """The tensors of such a table, and how many of the buffers it used; nothing has been checked yet."""
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
        memory: Buffer | None = bytearray(data) if inline else _next(left, data)
        if not memory or dtype is None or number != len(found) or not _fills(shape, dtype.itemsize, len(memory)):
            return None
        if not inline:
            used += 1
        tensor = torch.frombuffer(memory, dtype=dtype)
        if len(shape) != 1:
            tensor.resize_(shape)
        found.append(tensor if len(entry) == 3 else tensor.requires_grad_())
    return found, used


def _next(buffers: Iterator[Buffer], length: Any) -> memoryview | bytearray | None:
    """The next buffer, if it has that length and may become a tensor as it is."""
    buffer = next(buffers, None)
    if type(length) is not int or type(buffer) not in (memoryview, bytearray):
        return None
    view = memoryview(buffer)  # type: ignore[arg-type]
    return None if view.readonly or view.itemsize != 1 or view.nbytes != length else view


def _fills(shape: Any, itemsize: int, size: int) -> bool:
    """Whether this is a shape, and takes so many bytes."""
    if type(shape) is not list or len(shape) > _MOST or not _INTS.issuperset(map(type, shape)):
        return False
    return math.prod(shape) * itemsize == size and (not shape or min(shape) > 0)

"""The quick way through tensor tables, for small tensors that are nothing special: the same bytes in fewer steps.

Both directions answer None where anything needs the general way (`tensors`), which also says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from rpcbench.wire.storages import INLINE

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST = 64
"""Beyond so many tensors (or dimensions) the general way is no slower."""


def encode(tensors: Sequence[torch.Tensor]) -> bytes | None:
    """The table of tensors that each fill a storage of their own, on the CPU, and want no gradients."""
    items: list[bytes] = []
    entries: list[tuple[str, torch.Size, int]] = []
    addresses: set[int] = set()
    try:
        for tensor in tensors:
            size, storage = tensor.nbytes, tensor.untyped_storage()
            if not 0 < size < INLINE or storage.nbytes() != size or not tensor.is_contiguous() or tensor.requires_grad:
                return None
            if type(tensor) is not torch.Tensor:
                return None
            addresses.add(storage.data_ptr())
            entries.append((NAMES[tensor.dtype], tensor.shape, len(items)))
            items.append(tensor.numpy().tobytes())  # numpy knows neither devices, layouts nor lazy bits, and says so
    except (KeyError, TypeError, RuntimeError):
        return None
    return msgpack.packb((items, entries)) if len(addresses) == len(items) <= _MOST else None


def decode(storages: Any, entries: Any) -> list[torch.Tensor] | None:
    """The tensors of such a table; nothing has been checked yet."""
    if type(storages) is not list or type(entries) is not list or len(storages) != len(entries):
        return None
    found: list[torch.Tensor] = []
    for number, entry in enumerate(entries):
        if type(entry) is not list or len(entry) != 3 or entry[2] != number:
            return None
        data, dtype, shape = storages[number], DTYPES.get(entry[0]), entry[1]
        if type(data) is not bytes or not data or dtype is None or not _fills(shape, dtype.itemsize, len(data)):
            return None
        tensor = torch.frombuffer(bytearray(data), dtype=dtype)
        found.append(tensor if len(shape) == 1 else tensor.resize_(shape))
    return found


def _fills(shape: Any, itemsize: int, size: int) -> bool:
    """Whether this is a shape, and takes so many bytes."""
    if type(shape) is not list or len(shape) > _MOST:
        return False
    for length in shape:
        if type(length) is not int or length < 1:
            return False
    return math.prod(shape) * itemsize == size

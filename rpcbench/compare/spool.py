"""Tensors of a run in a temporary file, so that a run may keep more values than fit in memory.

Guarantees
- A stored tensor has the values that it had when it was added, whatever the program does to it later.
- The file has no name: it is gone with its process. Reading copies; nothing returned shares memory with the file.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Stored(NamedTuple):
    """A tensor in a spool."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class Spool:
    """An append-only file of tensors. Any thread may add."""

    def __init__(self) -> None:
        file = self._file = tempfile.TemporaryFile(prefix="rpcbench-compare-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)  # a capture in a cell is closed by nobody
        self._lock = threading.Lock()
        self._end = 0

    def add_tensor(self, tensor: Tensor) -> Stored:
        """Append the values of a dense tensor of any device, contiguous. OSError if the disk is full."""
        values = tensor.detach().cpu().contiguous()
        data = values.view(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
        with self._lock:
            stored = Stored(self._end, tuple(values.shape), values.dtype)
            self._end += len(data)
        _write_all(self._file.fileno(), data, stored.offset)
        return stored

    def read_tensor(self, stored: Stored) -> Tensor:
        """Return a copy of a stored tensor, on the CPU."""
        data = bytearray(stored.size)
        if not data:
            return torch.empty(stored.shape, dtype=stored.dtype)
        _read_all(self._file.fileno(), memoryview(data), stored.offset)
        return torch.frombuffer(data, dtype=stored.dtype).view(stored.shape)

    def read_blocks(self, stored: Stored, count: int) -> Iterator[Tensor]:
        """Yield the numbers of a stored tensor in order, at most `count` of them at a time."""
        size = count * stored.dtype.itemsize
        for offset in range(stored.offset, stored.offset + stored.size, size):
            length = min(size, stored.offset + stored.size - offset) // stored.dtype.itemsize
            yield self.read_tensor(Stored(offset, (length,), stored.dtype))

    def close(self) -> None:
        """Free the file."""
        self._file.close()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_all(descriptor: int, into: memoryview, offset: int) -> None:
    while into:
        if not (count := os.preadv(descriptor, [into], offset)):
            raise OSError("a spool of captured tensors ends before the tensor that was stored in it")
        into, offset = into[count:], offset + count

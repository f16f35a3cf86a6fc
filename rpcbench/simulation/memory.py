"""The memory of a played rank: each storage of its tensors, from its first use until it is freed, and its purpose.

Guarantees
- Only storages that a tensor has used while the book is open are counted, each once, with all its bytes; none on
  "meta", where there is no memory.
- A storage that the program frees by resizing (FSDP does) is counted as freed.
- The category is decided when the step is over: a gradient or a state cannot be told from other memory when it is
  made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rpcbench.simulation.allocator import count_reserved
from rpcbench.simulation.rank_log import (
    ACTIVATIONS,
    CATEGORIES,
    GATHERED,
    PARAMETERS,
    TEMPORARY,
    Allocation,
    MemoryChange,
    ModelPart,
    RankLog,
)

_RANK = {category: n for n, category in enumerate((TEMPORARY, ACTIVATIONS, GATHERED))}


@dataclass(slots=True, eq=False)
class _StorageEntry:
    """A storage that was seen."""

    number: int
    stream: int  # on which it was made
    bytes: int
    is_forward: bool  # made in a forward pass
    category: str = TEMPORARY


class MemoryBook:
    """Keeps the changes of memory of one rank. `find_stream` returns the number of the stream that is used now."""

    def __init__(self, find_stream: Callable[[], int]) -> None:
        self._find_stream = find_stream
        self._allocations: list[Allocation] = []
        self._entries: weakref.WeakKeyDictionary[torch.UntypedStorage, _StorageEntry] = weakref.WeakKeyDictionary()
        self._changes: list[tuple[int, int, _StorageEntry, ModelPart]] = []
        self._forward: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # made since the last backward began
        self._action, self._part = 0, ModelPart("", "")
        self._count = 0
        self._bytes = self._peak = 0  # now, and at most

    def set_position(self, action: int, part: ModelPart) -> None:
        """Changes from now on belong to this place of the step."""
        self._action, self._part = action, part

    def add_tensors(self, tensors: Iterable[Tensor], is_forward: bool) -> None:
        """Count the storages of tensors that an operator has made."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._entries or tensor.device.type == "meta":
                continue
            entry = self._entries[storage] = _StorageEntry(self._count, self._find_stream(), 0, is_forward)
            self._count += 1
            weakref.finalize(storage, self._set_bytes, entry, 0).atexit = False
            self._set_bytes(entry, storage.nbytes())
            if is_forward:
                self._forward.add(storage)

    def resize_storage(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count the changed size of a storage."""
        if (entry := self._entries.get(storage)) is not None:
            if size and not entry.bytes:
                entry.stream = self._find_stream()
            self._set_bytes(entry, size)

    def _set_bytes(self, entry: _StorageEntry, size: int) -> None:
        if size != entry.bytes:
            self._changes.append((self._action, size - entry.bytes, entry, self._part))
            self._allocations.append(Allocation(entry.number, size, entry.stream))
            self._bytes += size - entry.bytes
            self._peak = max(self._peak, self._bytes)
            entry.bytes = size

    def read_statistics(self) -> dict[str, int]:
        """Return what `torch.cuda.memory_stats` has of the memory now."""
        reserved = count_reserved(self._allocations)
        now = {f"{name}_bytes.all.current": self._bytes for name in ("allocated", "active")}
        peak = {f"{name}_bytes.all.peak": self._peak for name in ("allocated", "active")}
        return now | peak | dict.fromkeys(("reserved_bytes.all.current", "reserved_bytes.all.peak"), reserved)

    def reset_peak(self) -> None:
        """Let the most memory be that of now."""
        self._peak = self._bytes

    def mark_tensors(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of tensors. That of a parameter, a gradient or a state is not overridden by a vaguer one."""
        for tensor in tensors:
            entry = self._entries.get(tensor.untyped_storage())
            if entry is None or entry.category == PARAMETERS:
                continue
            if category not in _RANK or _RANK.get(entry.category, len(_RANK)) < _RANK[category]:
                entry.category = category

    def begin_backward(self) -> None:
        """A backward pass begins: the storages that a forward pass has made and kept are its activations."""
        for storage in self._forward:
            entry = self._entries[storage]
            if entry.category == TEMPORARY:
                entry.category = ACTIVATIONS
        self._forward.clear()

    def begin_step(self) -> None:
        """Forget the changes until now; memory that is held now is there before the step."""
        self._changes.clear()

    def write_step(self, log: RankLog) -> None:
        """Write the changes since `begin_step`, and the memory before them, to the log."""
        log.memory = [MemoryChange(action, size, entry.category, part) for action, size, entry, part in self._changes]
        after = dict.fromkeys(CATEGORIES, 0)
        for entry in self._entries.values():
            after[entry.category] += entry.bytes
        for change in log.memory:
            after[change.category] -= change.bytes
        log.before = after
        log.allocations = list(self._allocations)

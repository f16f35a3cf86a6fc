"""The memory that torch's caching allocator reserves on a GPU for the storages of a played rank.

Guarantees
- Rules are those of `c10/cuda/CUDACachingAllocator.cpp`, with its constants: nothing in it is fitted.
- Memory that is given back is used again on its own stream alone, and stays reserved. So the reserved memory is more
  than the tensors' own, and it is this that `torch.cuda.max_memory_reserved` returns.
- Not counted, as the allocator does not have it: the CUDA context, buffers of NCCL and of cuBLAS.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from rpcbench.simulation.rank_log import Allocation

_KIB, _MIB = 2**10, 2**20
_ROUND = 512  # sizes are multiples of it
_SMALL = _MIB  # requests up to it come from segments for small ones
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB  # for requests under _OWN_SEGMENT, and the step in which an expandable segment grows
_OWN_SEGMENT = 10 * _MIB  # requests from it on get a segment of their own size


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment."""

    size: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Pool:
    """The segments of one stream, for small requests or for large ones."""

    is_small: bool
    is_expandable: bool
    reserved: int = 0
    _free: list[tuple[int, int, _Block]] = field(default_factory=list)  # by size, then by age
    _last: _Block | None = None  # the end of an expandable segment
    _count: int = 0

    def allocate(self, size: int) -> _Block:
        """Return a block of at least `size`: the smallest free one, or one of new memory."""
        place = bisect.bisect_left(self._free, (size,))
        block = self._free.pop(place)[2] if place < len(self._free) else self._reserve(size)
        rest = block.size - size
        if rest >= (_ROUND if self.is_small or self.is_expandable else _SMALL + 1):
            self._split(block, size)
        block.is_free = False
        return block

    def free(self, block: _Block) -> None:
        """Take a block back, and join it with free neighbours."""
        if block.after is not None and block.after.is_free:
            self._remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.is_free:
            block = block.before
            self._remove(block)
            assert block.after is not None
            self._join(block, block.after)
        self._add(block)

    def _reserve(self, size: int) -> _Block:
        if not self.is_expandable:
            block = _Block(_segment_size(size, self.is_small))
            self.reserved += block.size
            return block
        page = _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT
        if self._last is None or not self._last.is_free:
            new = _Block(0, before=self._last)
            if self._last is not None:
                self._last.after = new
            self._last = new
        else:
            self._remove(self._last)
        grown = -(-(size - self._last.size) // page) * page
        self._last.size += grown
        self.reserved += grown
        return self._last

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if self._last is block:
            self._last = rest
        self._add(rest)

    def _join(self, block: _Block, after: _Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if self._last is after:
            self._last = block

    def _add(self, block: _Block) -> None:
        block.is_free = True
        self._count += 1
        bisect.insort(self._free, (block.size, self._count, block))

    def _remove(self, block: _Block) -> None:
        place = bisect.bisect_left(self._free, (block.size,))
        while self._free[place][2] is not block:
            place += 1
        del self._free[place]


def _segment_size(size: int, is_small: bool) -> int:
    if is_small:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


def count_reserved(allocations: Iterable[Allocation], is_expandable: bool = True) -> int:
    """Return the bytes that the allocator has reserved in the end; it gives none back as long as there is enough.

    Args:
        allocations: Of a rank's program, from its begin.
        is_expandable: Whether `PYTORCH_CUDA_ALLOC_CONF` has "expandable_segments:True".
    """
    pools: dict[tuple[int, bool], _Pool] = {}
    blocks: dict[int, tuple[_Pool, _Block]] = {}
    for storage, size, stream in allocations:
        if storage in blocks:
            pool, block = blocks.pop(storage)
            pool.free(block)
        if size:
            rounded = -(-size // _ROUND) * _ROUND
            is_small = rounded <= _SMALL
            pool = pools.setdefault((stream, is_small), _Pool(is_small, is_expandable))
            blocks[storage] = pool, pool.allocate(rounded)
    return sum(pool.reserved for pool in pools.values())

"""Reused memory: each byte has one owner, unused pages go back to the system, loans end with their last user."""

from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.transport.shared_memory import SMALL, Arena, BorrowedBuffers, BufferPool

PAGE = mmap.PAGESIZE
PAGES = 16


def anonymous(pages: int = PAGES) -> mmap.mmap:
    return mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@given(st.lists(st.tuples(st.integers(0, 6 * PAGE), st.integers(0, 9)), max_size=60))
def test_an_arena_gives_each_byte_to_one_buffer(steps: list[tuple[int, int]]) -> None:
    """Each step takes a piece of some size, and then gives a piece back, or tidies up."""
    arena = Arena(anonymous(), mmap.MADV_DONTNEED)
    mine: dict[int, bytes] = {}
    for number, (size, choice) in enumerate(steps):
        start = arena.reserve_block(size)
        if start is not None:
            assert start not in mine
            mine[start] = bytes([number]) * size
            arena.memory[start : start + size] = mine[start]
        if choice == 0:
            arena.free_idle_memory()
        elif choice < 6 and mine:
            gone = [*mine][choice % len(mine)]
            arena.free_block(gone)
            del mine[gone]
        for place, data in mine.items():
            assert arena.memory[place : place + len(data)] == data
    for start in mine:
        arena.free_block(start)
    assert arena.reserve_block(PAGES * PAGE) == 0, "the free memory is one piece again"


def test_an_arena_without_room_returns_none() -> None:
    arena = Arena(anonymous(2), mmap.MADV_DONTNEED)
    assert arena.reserve_block(PAGE + 1) == 0
    assert arena.reserve_block(1) is None
    with pytest.raises(KeyError):
        arena.free_block(PAGE)
    arena.free_block(0)
    assert arena.reserve_block(1) == 0


def test_tidy_returns_the_pages_that_were_unused_since_the_last_tidy() -> None:
    arena = Arena(anonymous(), mmap.MADV_DONTNEED)
    kept, needed, once = arena.reserve_block(PAGE), arena.reserve_block(PAGE), arena.reserve_block(PAGE)
    assert (kept, needed, once) == (0, PAGE, 2 * PAGE)
    arena.memory[: 3 * PAGE] = b"x" * (3 * PAGE)
    arena.free_block(PAGE)
    arena.free_block(2 * PAGE)
    arena.free_idle_memory()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * (3 * PAGE), "all pages were in use since the last tidy"
    assert arena.reserve_block(PAGE) == PAGE
    arena.free_block(PAGE)
    arena.free_idle_memory()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * (2 * PAGE) + bytes(PAGE)
    arena.free_idle_memory()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * PAGE + bytes(2 * PAGE), "pages in use stay"


def test_an_arena_does_not_assign_pages_while_it_returns_them() -> None:
    """The advice takes effect at any moment during the call, and data that was written before is lost."""
    given: list[int | None] = []

    class Slow(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            given.append(arena.reserve_block(PAGE))

    arena = Arena(Slow(-1, 2 * PAGE), mmap.MADV_DONTNEED)
    assert arena.reserve_block(PAGE) == 0
    arena.free_block(0)
    arena.free_idle_memory()
    arena.free_idle_memory()
    assert given == [PAGE]
    assert arena.reserve_block(PAGE) == 0


def test_a_loan_ends_with_the_last_object_that_uses_it() -> None:
    loans = BorrowedBuffers(anonymous())
    view = loans.borrow_block(PAGE, 8 * 64)
    tensor = torch.frombuffer(view.cast("B")[:64], dtype=torch.float64).reshape(2, 4)
    array = np.frombuffer(view, np.int64)[8:]
    del view
    with pytest.raises(ValueError, match="in use"):
        loans.borrow_block(PAGE, 1)
    storage = tensor.untyped_storage()
    del tensor, array
    gc.collect()
    assert loans.pop_unused_blocks() == []
    del storage
    gc.collect()
    assert loans.pop_unused_blocks() == [PAGE]
    assert loans.pop_unused_blocks() == [], "each loan is reported once"
    loans.borrow_block(PAGE, 1)


@pytest.mark.parametrize("place", [PAGES * PAGE, -1, -PAGE, PAGES * PAGE - 1, 1 << 63, 1, PAGE + 64])
def test_memory_outside_of_the_arena_cannot_be_lent(place: int) -> None:
    with pytest.raises(ValueError, match="not there"):
        BorrowedBuffers(anonymous()).borrow_block(place, 2)


def test_a_page_cannot_be_lent_twice_at_a_time() -> None:
    loans = BorrowedBuffers(mmap.mmap(-1, PAGES * PAGE))
    middle, after = loans.borrow_block(4 * PAGE, 2 * PAGE + 1), loans.borrow_block(8 * PAGE, PAGE)
    for start, pages in ((3, 2), (3, 6), (4, 1), (5, 1), (6, 1), (7, 2), (8, 1), (0, 16)):
        with pytest.raises(ValueError, match="in use"):
            loans.borrow_block(start * PAGE, pages * PAGE)
    others = [loans.borrow_block(start * PAGE, PAGE) for start in (7, 3, 9)]
    del middle
    gc.collect()
    assert loans.pop_unused_blocks() == [4 * PAGE]
    others.append(loans.borrow_block(6 * PAGE, PAGE))
    with pytest.raises(ValueError, match="in use"):
        loans.borrow_block(5 * PAGE, 2 * PAGE)
    loans.release_unused()
    assert len(after) == PAGE


def test_released_memory_cannot_be_lent() -> None:
    loans = BorrowedBuffers(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    kept = loans.borrow_block(0, 8)
    loans.release_unused()
    with pytest.raises(ValueError, match="has ended"):
        loans.borrow_block(mmap.PAGESIZE, 8)
    assert len(kept) == 8


def test_a_pool_reuses_buffers_and_returns_unused_ones_to_the_system() -> None:
    reused = BufferPool()
    first = reused.allocate_buffer(SMALL)
    assert isinstance(first, memoryview) and not first.readonly
    address = np.frombuffer(first, np.uint8).ctypes.data
    second = reused.allocate_buffer(SMALL)
    assert np.frombuffer(second, np.uint8).ctypes.data != address
    first[:] = b"x" * SMALL
    del first
    third = reused.allocate_buffer(SMALL)
    assert np.frombuffer(third, np.uint8).ctypes.data == address
    del third
    reused.free_idle_memory()
    reused.free_idle_memory()
    assert bytes(reused.allocate_buffer(SMALL)) == bytes(SMALL), "the system has given new pages"


def test_a_pool_without_memory_gives_buffers_that_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reused = BufferPool()
    monkeypatch.setattr("rpcbench.transport.shared_memory.SIZE", 2 * SMALL)
    assert is_of_mapping(reused.allocate_buffer(SMALL))
    assert not is_of_mapping(reused.allocate_buffer(3 * SMALL))

    def refuse(*args: object, **options: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("rpcbench.transport.shared_memory.mmap.mmap", refuse)
    assert not is_of_mapping(BufferPool().allocate_buffer(SMALL))


def is_of_mapping(buffer: memoryview) -> bool:
    """Return whether a buffer lies in the mapping of a pool, whose memory is used again."""
    return isinstance(buffer.obj, np.ndarray) and buffer.obj.base is not None

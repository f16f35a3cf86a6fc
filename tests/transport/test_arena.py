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
        start = arena.take(size)
        if start is not None:
            assert start not in mine
            mine[start] = bytes([number]) * size
            arena.memory[start : start + size] = mine[start]
        if choice == 0:
            arena.tidy()
        elif choice < 6 and mine:
            gone = [*mine][choice % len(mine)]
            arena.give_back(gone)
            del mine[gone]
        for place, data in mine.items():
            assert arena.memory[place : place + len(data)] == data
    for start in mine:
        arena.give_back(start)
    assert arena.take(PAGES * PAGE) == 0, "the free memory is one piece again"


def test_an_arena_without_room_returns_none() -> None:
    arena = Arena(anonymous(2), mmap.MADV_DONTNEED)
    assert arena.take(PAGE + 1) == 0
    assert arena.take(1) is None
    with pytest.raises(KeyError):
        arena.give_back(PAGE)
    arena.give_back(0)
    assert arena.take(1) == 0


def test_tidy_returns_the_pages_that_were_unused_since_the_last_tidy() -> None:
    arena = Arena(anonymous(), mmap.MADV_DONTNEED)
    kept, needed, once = arena.take(PAGE), arena.take(PAGE), arena.take(PAGE)
    assert (kept, needed, once) == (0, PAGE, 2 * PAGE)
    arena.memory[: 3 * PAGE] = b"x" * (3 * PAGE)
    arena.give_back(PAGE)
    arena.give_back(2 * PAGE)
    arena.tidy()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * (3 * PAGE), "all pages were in use since the last tidy"
    assert arena.take(PAGE) == PAGE
    arena.give_back(PAGE)
    arena.tidy()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * (2 * PAGE) + bytes(PAGE)
    arena.tidy()
    assert bytes(arena.memory[: 3 * PAGE]) == b"x" * PAGE + bytes(2 * PAGE), "pages in use stay"


def test_an_arena_does_not_assign_pages_while_it_returns_them() -> None:
    """The advice takes effect at any moment during the call, and data that was written before is lost."""
    given: list[int | None] = []

    class Slow(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            given.append(arena.take(PAGE))

    arena = Arena(Slow(-1, 2 * PAGE), mmap.MADV_DONTNEED)
    assert arena.take(PAGE) == 0
    arena.give_back(0)
    arena.tidy()
    arena.tidy()
    assert given == [PAGE]
    assert arena.take(PAGE) == 0


def test_a_loan_ends_with_the_last_object_that_uses_it() -> None:
    loans = BorrowedBuffers(anonymous())
    view = loans.lend(PAGE, 8 * 64)
    tensor = torch.frombuffer(view.cast("B")[:64], dtype=torch.float64).reshape(2, 4)
    array = np.frombuffer(view, np.int64)[8:]
    del view
    with pytest.raises(ValueError, match="in use"):
        loans.lend(PAGE, 1)
    storage = tensor.untyped_storage()
    del tensor, array
    gc.collect()
    assert loans.over() == []
    del storage
    gc.collect()
    assert loans.over() == [PAGE]
    assert loans.over() == [], "each loan is reported once"
    loans.lend(PAGE, 1)


@pytest.mark.parametrize("place", [PAGES * PAGE, -1, -PAGE, PAGES * PAGE - 1, 1 << 63, 1, PAGE + 64])
def test_memory_outside_of_the_arena_cannot_be_lent(place: int) -> None:
    with pytest.raises(ValueError, match="not there"):
        BorrowedBuffers(anonymous()).lend(place, 2)


def test_a_page_cannot_be_lent_twice_at_a_time() -> None:
    loans = BorrowedBuffers(mmap.mmap(-1, PAGES * PAGE))
    middle, after = loans.lend(4 * PAGE, 2 * PAGE + 1), loans.lend(8 * PAGE, PAGE)
    for start, pages in ((3, 2), (3, 6), (4, 1), (5, 1), (6, 1), (7, 2), (8, 1), (0, 16)):
        with pytest.raises(ValueError, match="in use"):
            loans.lend(start * PAGE, pages * PAGE)
    others = [loans.lend(start * PAGE, PAGE) for start in (7, 3, 9)]
    del middle
    gc.collect()
    assert loans.over() == [4 * PAGE]
    others.append(loans.lend(6 * PAGE, PAGE))
    with pytest.raises(ValueError, match="in use"):
        loans.lend(5 * PAGE, 2 * PAGE)
    loans.release_unused()
    assert len(after) == PAGE


def test_released_memory_cannot_be_lent() -> None:
    loans = BorrowedBuffers(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    kept = loans.lend(0, 8)
    loans.release_unused()
    with pytest.raises(ValueError, match="has ended"):
        loans.lend(mmap.PAGESIZE, 8)
    assert len(kept) == 8


def test_a_pool_reuses_buffers_and_returns_unused_ones_to_the_system() -> None:
    reused = BufferPool()
    first = reused.room(SMALL)
    assert isinstance(first, memoryview) and not first.readonly
    address = np.frombuffer(first, np.uint8).ctypes.data
    second = reused.room(SMALL)
    assert np.frombuffer(second, np.uint8).ctypes.data != address
    first[:] = b"x" * SMALL
    del first
    third = reused.room(SMALL)
    assert np.frombuffer(third, np.uint8).ctypes.data == address
    del third
    reused.tidy()
    reused.tidy()
    assert bytes(reused.room(SMALL)) == bytes(SMALL), "the system has given new pages"


def test_a_pool_without_memory_gives_buffers_that_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reused = BufferPool()
    monkeypatch.setattr("rpcbench.transport.shared_memory.SIZE", 2 * SMALL)
    assert is_of_mapping(reused.room(SMALL))
    assert not is_of_mapping(reused.room(3 * SMALL))

    def refuse(*args: object, **options: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("rpcbench.transport.shared_memory.mmap.mmap", refuse)
    assert not is_of_mapping(BufferPool().room(SMALL))


def is_of_mapping(buffer: memoryview) -> bool:
    """Return whether a buffer lies in the mapping of a pool, whose memory is used again."""
    return isinstance(buffer.obj, np.ndarray) and buffer.obj.base is not None

"""Causal ring attention on paper, for lesson 28: which rank has which places of a row, and what it computes when.

Keys and values go round, as in `ring_attention`: in step s rank r has those of rank r - s.
"""

from __future__ import annotations

from collections.abc import Sequence

from draw import Drawing, blocks

Places = Sequence[Sequence[int]]
"""Of each rank the places in the row whose tokens it has."""

COLOURS = ("blue", "green", "orange", "purple")


def in_order(ranks: int, length: int) -> list[list[int]]:
    """A slice for each rank."""
    wide = length // ranks
    return [list(range(wide * rank, wide * (rank + 1))) for rank in range(ranks)]


def striped(ranks: int, length: int) -> list[list[int]]:
    """Dealt like cards: Striped attention."""
    return [list(range(rank, length, ranks)) for rank in range(ranks)]


def zigzag(ranks: int, length: int) -> list[list[int]]:
    """A chunk from the front and one from the back."""
    chunks = in_order(2 * ranks, length)
    return [chunks[rank] + chunks[-1 - rank] for rank in range(ranks)]


def work(places: Places) -> list[list[int]]:
    """For each step, for each rank: the pairs of a query and a key that it may see."""
    size = len(places)
    return [
        [sum(key <= query for query in places[rank] for key in places[(rank - step) % size]) for rank in range(size)]
        for step in range(size)
    ]


def time_of(places: Places) -> int:
    """In pairs: in each step all wait for the rank that has most of them."""
    return sum(max(step) for step in work(places))


def ranks_of(ways: dict[str, Places], length: int, title: str) -> Drawing:
    """Which rank has which place of the row."""
    rows = {}
    for name, places in ways.items():
        rank_at = {place: rank for rank, each in enumerate(places) for place in each}
        rows[name] = [(str(rank_at[place]), COLOURS[rank_at[place]]) for place in range(length)]
    return blocks(rows, [str(place) for place in range(length)], title, wide=34)


def drawn(places: Places, title: str) -> Drawing:
    """The work of each rank in each step; empty where a rank has nothing to do."""
    rows = {
        f"step {step}": [
            (f"KV {(rank - step) % len(places)}: {pairs}", COLOURS[(rank - step) % len(places)]) if pairs else None
            for rank, pairs in enumerate(each)
        ]
        for step, each in enumerate(work(places))
    }
    return blocks(rows, [f"rank {rank}" for rank in range(len(places))], title, wide=110)

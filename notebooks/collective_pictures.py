"""What each rank has before and after a collective, as tables of coloured blocks, for lessons 04 and 20.

Number `place` of rank r is (place + 1) · 10^r, so a sum shows by its digits whose numbers are in it: 1111 is a sum over
all four ranks. A number has the colour of the rank that it came from; sums over several ranks are red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import draw

RANKS = ("blue", "green", "orange", "purple", "indigo", "teal", "olive", "dim")
Numbers = Sequence[Sequence[float]]
"""Of each rank the numbers that it has."""


def numbers(rank: int, count: int = 4) -> list[float]:
    """What a rank has at the beginning: of rank 1 these are 10, 20, 30 and 40."""
    return [float((place + 1) * 10**rank) for place in range(count)]


def colour(number: float) -> str:
    """That of the rank from which the number came; red for a sum over several."""
    from_ranks = [rank for rank, digit in enumerate(reversed(str(round(number)))) if digit != "0"]
    return RANKS[from_ranks[0]] if len(from_ranks) == 1 else "red"


def moments(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Mapping[str, Sequence[float]]], *names: str
) -> dict[str, Numbers]:
    """Tables for `picture`, of variables of workers: `before` is {worker: numbers}, `after` {worker: {name: numbers}}.

    A name is that of a collective, or "before", or "one": the one number of each rank that some collectives begin with.
    """
    titles = {"before": "before", "one": "one number of each"}
    return {
        titles.get(name, f"after {name}"): list(before.values())
        if name == "before"
        else [of[name] for of in after.values()]
        for name in names
    }


def picture(tables: Mapping[str, Numbers], title: str = "", line: int = 4) -> draw.Drawing:
    """A table for each moment, with a row for each rank."""
    parts = {
        name: [[(str(round(number)), colour(number)) for number in row] for row in table]
        for name, table in tables.items()
    }
    size = max(map(len, tables.values()))
    return draw.tables(parts, [f"rank {rank}" for rank in range(size)], title, 46, line)

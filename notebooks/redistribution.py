"""How ranks share a tensor, for lesson 06: the collective of each change, its bytes, products; and pictures of them.

A placement is written as torch prints it: "Shard(0)", "Shard(1)", "Replicate" or "Partial". A matrix `held` is a list
of rows of numbers: what one rank has of a square matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collective_pictures import RANKS
from draw import Drawing

from rpcbench.base.charts import Picture

PLACEMENTS = ("Shard(0)", "Shard(1)", "Replicate", "Partial")
TENSORS = {"nothing": 0, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
Held = Sequence[Sequence[float]]


def collective(before: str, after: str) -> str:
    """The cheapest collective that leads from one placement to another; "nothing" if each rank can do it alone."""
    if before == after or before == "Replicate" or after == "Partial":
        return "nothing"
    if before == "Partial":
        return "all_reduce" if after == "Replicate" else "reduce_scatter"
    return "all_gather" if after == "Replicate" else "all_to_all"


def sent(name: str, size: float, ranks: int) -> float:
    """The bytes that each rank sends at least in a collective on a tensor of `size` bytes."""
    tensors = 1 / ranks if name == "all_to_all" else TENSORS[name]
    return tensors * size * (ranks - 1) / ranks


def product(left: str, right: str) -> str | None:
    """The placement of a product if each rank multiplies what it has; None if that makes no placement of it."""
    known = {
        ("Replicate", "Replicate"): "Replicate",
        ("Shard(0)", "Replicate"): "Shard(0)",
        ("Replicate", "Shard(1)"): "Shard(1)",
        ("Shard(1)", "Shard(0)"): "Partial",
        ("Partial", "Replicate"): "Partial",
        ("Replicate", "Partial"): "Partial",
    }
    return known.get((left, right))


# -- pictures
WIDE, TALL, GAP, LEFT, TOP = 36, 22, 26, 118, 62


def picture(held: Mapping[str, Sequence[Held]], title: str) -> Drawing:
    """For each placement what each rank has of a matrix, at its place; grey is what the rank does not have."""
    size = len(next(iter(held.values())))
    side = max(len(rows) for ranks in held.values() for rows in ranks)
    words = "\n".join(
        f"{name}: " + "; ".join(f"rank {rank} has {_told(rows)}" for rank, rows in enumerate(ranks))
        for name, ranks in held.items()
    )
    drawn = Picture(LEFT + size * (side * WIDE + GAP), title, words)
    drawn.draw_text(12, 20, title, "strong")
    for line, (name, ranks) in enumerate(held.items()):
        y = TOP + line * (side * TALL + GAP)
        drawn.draw_text(12, y + side * TALL / 2 + 4, name)
        for rank, rows in enumerate(ranks):
            x = LEFT + rank * (side * WIDE + GAP)
            if not line:
                drawn.draw_text(x + side * WIDE / 2, TOP - 14, f"rank {rank}", "note middle")
            begin = {"Shard(0)": (rank * len(rows), 0), "Shard(1)": (0, rank * len(rows[0]))}.get(name, (0, 0))
            _draw_matrix(drawn, x, y, side, rows, begin, RANKS[rank])
    return Drawing(drawn.svg(), words)


def _draw_matrix(
    drawn: Picture, x: float, y: float, side: int, rows: Held, begin: tuple[int, int], colour: str
) -> None:
    """Draw a rank's numbers, of which the first one stands at `begin`, in the whole matrix."""
    drawn.draw_rect(x, y, side * WIDE - 2, side * TALL - 2, "plate")
    for down, row in enumerate(rows, begin[0]):
        for across, number in enumerate(row, begin[1]):
            left, top = x + across * WIDE, y + down * TALL
            drawn.draw_rect(left, top, WIDE - 2, TALL - 2, f"f-{colour}")
            drawn.draw_text(left + WIDE / 2 - 1, top + 15, f"{number:g}", "middle on-blue")


def _told(rows: Held) -> str:
    return " / ".join(" ".join(f"{number:g}" for number in row) for row in rows)


BOX, HIGH, ACROSS, MIDDLE = 132, 112, 300, 172  # a state; from one state to the next; the height of their middle
STATES = {"Partial": 20, "Shard": 20 + ACROSS, "Replicate": 20 + 2 * ACROSS}
ABOUT = {"Partial": "a summand each", "Shard": "a piece each", "Replicate": "the whole each"}
COSTS = {"all_gather": "(n - 1)/n · S", "reduce_scatter": "(n - 1)/n · S", "all_reduce": "2 (n - 1)/n · S",
         "all_to_all": "(n - 1)/n² · S", "nothing": "0"}  # fmt: skip
CHANGES = (("Partial", "Shard(0)"), ("Shard(0)", "Replicate"), ("Partial", "Replicate"), ("Shard(0)", "Shard(1)"),
           ("Replicate", "Shard(0)"), ("Shard(0)", "Partial"), ("Replicate", "Partial"))  # fmt: skip


def diagram() -> Drawing:
    """The placements as states, with the collective of each change and the bytes that each rank sends in it."""
    names = {change: collective(*change) for change in CHANGES}
    words = "\n".join(
        f"{before} to {after}: {name}, each rank sends {COSTS[name]} bytes" for (before, after), name in names.items()
    )
    title = "Changes of placement, and the bytes that each of n ranks sends for a tensor of S bytes"
    drawn = Picture(STATES["Replicate"] + BOX + 20, title, words)
    drawn.draw_text(12, 20, title, "strong")
    for name, x in STATES.items():
        _draw_state(drawn, name, x)
    for before, after, name in (("Partial", "Shard", "reduce_scatter"), ("Shard", "Replicate", "all_gather")):
        begin, end = STATES[before] + BOX + 6, STATES[after] - 6
        _label(drawn, (begin + end) / 2, MIDDLE - 36, name)
        drawn.draw_arrow(begin, MIDDLE - 10, end, MIDDLE - 10, "blue")
        drawn.draw_arrow(end, MIDDLE + 20, begin, MIDDLE + 20, "dim")
        drawn.draw_text((begin + end) / 2, MIDDLE + 38, "nothing", "note middle")
    left, middle, right = (x + BOX / 2 for x in STATES.values())
    top, bottom = MIDDLE - HIGH / 2 - 6, MIDDLE + HIGH / 2 + 6
    _bend(drawn, (left, top), (left + 90, top - 62), (right - 90, top - 62), (right, top), "blue")
    _label(drawn, middle, top - 27, "all_reduce")
    _bend(drawn, (right, bottom), (right - 90, bottom + 104), (left + 90, bottom + 104), (left, bottom), "dim")
    drawn.draw_text(middle, bottom + 96, "nothing", "note middle")
    _bend(
        drawn,
        (middle - 30, bottom),
        (middle - 50, bottom + 50),
        (middle + 50, bottom + 50),
        (middle + 30, bottom),
        "blue",
    )
    drawn.draw_text(middle + 50, bottom + 18, "all_to_all: from one")
    drawn.draw_text(middle + 50, bottom + 34, "dimension to another")
    drawn.draw_text(middle + 50, bottom + 50, COSTS["all_to_all"], "note")
    return Drawing(drawn.svg(), words)


def _draw_state(drawn: Picture, name: str, x: float) -> None:
    """A box with what four ranks have: summands that lie on each other, pieces of one tensor, or four tensors."""
    y = MIDDLE - HIGH / 2
    drawn.draw_rect(x, y, BOX, HIGH, "plate", rx=8)
    drawn.draw_text(x + BOX / 2, y + 22, name, "strong middle")
    drawn.draw_text(x + BOX / 2, y + 40, ABOUT[name], "note middle")
    for rank, colour in enumerate(RANKS[:4]):
        if name == "Partial":
            drawn.draw_rect(x + 38 + 10 * rank, y + 52 + 7 * rank, 28, 28, f"f-{colour}")
        elif name == "Shard":
            drawn.draw_rect(x + 44, y + 53 + 12 * rank, 46, 11, f"f-{colour}", rx=1)
        else:
            drawn.draw_rect(x + 10 + 29 * rank, y + 64, 26, 26, f"f-{colour}")


def _label(drawn: Picture, x: float, y: float, name: str) -> None:
    drawn.draw_text(x, y, name, "middle")
    drawn.draw_text(x, y + 17, COSTS[name], "note middle")


Place = tuple[float, float]


def _bend(drawn: Picture, begin: Place, first: Place, second: Place, end: Place, colour: str) -> None:
    """A Bézier curve with two control points, and an arrow head at its end."""
    points = [_between(begin, first, second, end, step / 24) for step in range(25)]
    drawn.draw_curve(points, f"s-{colour}")
    (x1, y1), (x2, y2) = points[-2:]
    drawn.draw_arrow(x1, y1, x2, y2, colour)


def _between(begin: Place, first: Place, second: Place, end: Place, t: float) -> Place:
    shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    x, y = (sum(s * at[axis] for s, at in zip(shares, (begin, first, second, end), strict=True)) for axis in (0, 1))
    return x, y

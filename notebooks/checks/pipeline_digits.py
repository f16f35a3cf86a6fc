"""Checks of lesson 00."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from checks import differ, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

Rows = list[dict[str, Any]]


def _rows(*ops: tuple[int, str, float, float], stages: Sequence[int] = (0, 1, 2)) -> Rows:
    """Rows of a step, for (worker, name, begin, end). `stages`: of worker 1, 2, ..."""
    return [
        {
            "worker": worker, "stage": stages[worker - 1], "op": name[0], "microbatch": int(name[1:]),
            "begin": begin, "end": end,
        }
        for worker, name, begin, end in ops
    ]  # fmt: skip


# Each worker rests at another time; the rows of the second step stand in no order, and worker 3 ends it.
_EVEN = _rows((1, "F0", 100.0, 101.0), (2, "F0", 101.0, 102.0), (2, "B0", 102.0, 104.0), (1, "B0", 104.0, 106.0))
_MIXED = _rows(
    (2, "B1", 17.0, 19.0), (1, "F1", 11.0, 12.0), (3, "B0", 14.0, 15.0), (2, "F0", 11.0, 12.5), (1, "B0", 16.5, 17.5),
    (1, "F0", 10.0, 11.0), (3, "F1", 19.5, 20.0), (2, "F1", 13.0, 14.0), (1, "B1", 19.0, 19.5), (2, "B0", 15.0, 16.5),
)  # fmt: skip
_HELD = _rows(
    (1, "F0", 5.0, 6.0), (1, "F1", 6.0, 7.0), (2, "F0", 7.0, 9.0), (1, "B1", 10.0, 10.5), (1, "B0", 9.5, 9.75),
    (2, "B1", 9.0, 9.25), (2, "F10", 12.0, 12.25), (2, "B0", 10.5, 11.0), (1, "F10", 11.0, 11.75), stages=(1, 0),
)  # fmt: skip
# The operation that begins last is not the last to end, and the first to end is not the first to begin.
_LONG = _rows(
    (1, "F0", 3.0, 7.0), (2, "F0", 4.0, 5.0), (1, "B0", 7.5, 11.0), (2, "B0", 8.0, 9.0), (2, "F1", 9.5, 10.0),
)  # fmt: skip


def _told(rows: Rows) -> str:
    """The rows in short, for a message."""
    return ", ".join(
        f"worker {row['worker']} {_name(row)} {row['begin']:g} to {row['end']:g}"
        for row in sorted(rows, key=lambda row: (row["worker"], row["begin"]))
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['op']}{row['microbatch']}"


def _asked(answer: Callable[[Rows, int], Any], rows: Rows, worker: int) -> Any:
    """What the answer says of a copy of the rows, which it must leave alone."""
    given = copy.deepcopy(rows)
    with trying():
        found = returned(answer(given, worker))
    require(given == rows, "Your function has changed `rows`. They belong to the caller: make a list of your own.")
    return found


@exercise(
    "Two times are needed: that of the worker's own operations, added up, and that of the whole step.",
    "Begin with `lasted = max(row['end'] for row in rows) - min(row['begin'] for row in rows)`.",
)
def busy(answer: Callable[[Rows, int], float]) -> None:
    """`answer(rows, worker)` is the share of the step in which the worker runs an operation."""
    for rows, workers in ((_EVEN, (1, 2)), (_MIXED, (1, 2, 3)), (_HELD, (1, 2)), (_LONG, (1, 2))):
        lasted = max(row["end"] for row in rows) - min(row["begin"] for row in rows)
        for worker in workers:
            own = sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker)
            found = _asked(answer, rows, worker)
            found = read(found, float, "A number is wanted")
            require(
                abs(found - own / lasted) < 1e-6,
                f"In this step worker {worker} is busy for {own:g} of {lasted:g} s, a share of "
                f"{differ(own / lasted, found, '; you say ')}{_like(found, rows, worker)}. The step: {_told(rows)}.",
            )
    right("One minus the mean of these shares over all workers is the bubble.")


def _like(found: float, rows: Rows, worker: int) -> str:
    """The usual mistake that gives this number, in words."""
    begin, end = min(row["begin"] for row in rows), max(row["end"] for row in rows)
    mine = [row for row in rows if row["worker"] == worker]
    own, work = (sum(row["end"] - row["begin"] for row in some) for some in (mine, rows))
    in_order = rows[-1]["end"] - rows[0]["begin"]
    seen = max(row["end"] for row in mine) - min(row["begin"] for row in mine)
    mistakes = {
        ", its idle share": 1 - own / (end - begin),
        ", the seconds, not a share": own,
        ", a share of the time from its own first operation to its own last one": own / seen,
        ", a share of the work of all workers": own / work,
        ", which counts the operations of all workers": work / (end - begin),
        ", as if the step began at 0": own / end,
        ", per cent": 100 * own / (end - begin),
        ", as if the first row began the step and the last one ended it": own / (in_order or 1),
    }
    return next((words for words, number in mistakes.items() if abs(found - number) < 1e-9), "")


def _longest(own: Rows) -> tuple[float, str, str]:
    """The longest wait between neighbours."""
    return max((b["begin"] - a["end"], _name(a), _name(b)) for a, b in itertools.pairwise(own))


@exercise(
    "Look at the worker's own rows alone, in order of time: each wait lies between two of them that are neighbours.",
    "Begin with `own = sorted((row for row in rows if row['worker'] == worker), key=lambda row: row['begin'])`.",
)
def longest_wait(answer: Callable[[Rows, int], Sequence[Any]]) -> None:
    """`answer(rows, worker)` is the longest wait between two operations of the worker, and both their names."""
    for rows, workers in ((_MIXED, (1, 2, 3)), (_HELD, (1, 2)), (_EVEN, (1, 2))):
        for worker in workers:
            own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: float(row["begin"]))
            wanted = _longest(own)
            found = _asked(answer, rows, worker)
            found = read(found, (float, str, str), "Three values are wanted, the seconds and two names")
            same = abs(found[0] - wanted[0]) < 1e-9
            begins = max(b["begin"] - a["begin"] for a, b in itertools.pairwise(own))
            unsorted = _longest([row for row in rows if row["worker"] == worker])
            mistake = (
                ", the names the other way round" if same and tuple(found[:0:-1]) == wanted[1:]
                else ", with names that are no operations of this worker"
                if not {*found[1:]} <= {_name(row) for row in own}
                else ", from the begin of one to the begin of the next" if abs(found[0] - begins) < 1e-9 and not same
                else ", as if the rows stood in order of time"
                if abs(found[0] - unsorted[0]) < 1e-9 and tuple(found[1:]) == unsorted[1:]
                else ""
            )  # fmt: skip
            require(
                same and tuple(found[1:]) == wanted[1:],
                f"Worker {worker} waits longest between {wanted[1]} and {wanted[2]}, for {wanted[0]:g} s; you say "
                f"{shown(tuple(found))}{mistake}. The step: {_told(rows)}.",
            )
    right("That is where to look first when a pipeline is slow.")

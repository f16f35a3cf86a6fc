"""What a row of the table is: a piece of work, and what it must reach."""

from __future__ import annotations

from dataclasses import dataclass

from rpcbench.bench.operation import Prepare


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row of the table must reach: the `ratio` theirs / ours (`stretch` is welcome), or `most` of ours.

    `most` is in the unit of the row, or, where `of` names another row, a multiple of what ours takes there.
    """

    ratio: float | None = None
    stretch: float | None = None
    most: float | None = None
    of: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """How to make its operation, its goal, which quantile of the calls counts, and whether only ours can do it."""

    prepare: Prepare
    goal: Goal
    quantile: float = 0.5
    ours_only: bool = False

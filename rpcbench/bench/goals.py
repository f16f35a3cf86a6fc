"""What a row of the table is: what it must reach, in which unit, and the work behind it."""

from __future__ import annotations

from dataclasses import dataclass

from rpcbench.bench.operation import Prepare
from rpcbench.bench.sides import CALLS

PLAIN = "rpcbench.bench.plain"
BOTH, OURS, HOSTS, BARE = "both", "ours", "hosts", "bare"
SECONDS, BYTES, CORES = "s", "B", "cores"


@dataclass(frozen=True, slots=True)
class Goal:
    """The `ratio` theirs / ours, at least; or `most` of ours.

    `most` is in the unit of the row, or, where `of` names another row, a multiple of what ours takes there.
    """

    ratio: float | None = None
    most: float | None = None
    of: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Its goal, the unit of its values, and which quantile of them counts."""

    goal: Goal
    unit: str = SECONDS
    quantile: float = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """How to make its operation, its row, and who is measured.

    `on`: BOTH sides; OURS alone; ours between two HOSTS. For comparison: a PLAIN loop over
    TCP between these; two BARE processes of this host, which have a socket and no runtime.
    `needs`: what the other side must be able to do.
    """

    prepare: Prepare
    row: Row
    on: str = BOTH
    needs: str = CALLS

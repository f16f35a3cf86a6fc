"""What a step of lesson 37 is played on, and what is recorded of it: the world, names of tensors, bars of time, memory.

Sizes are in MB, times in ms. Nothing here plays: that does `one_step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

WEIGHTS, GRADIENTS, STATES, KEPT = "weights", "gradients", "states", "kept"
INPUT, INPUT_GRADIENT = "input", "input gradient"


class StepError(Exception):
    """A mistake in a step. A notebook shows its text alone. `run` is what had happened until then."""

    run: Run

    def _render_traceback_(self) -> list[str]:
        return [f"The step fails. {self}"]


@dataclass(frozen=True)
class World:
    """A model and the ranks that train it. Sizes are those of one layer, or of one micro-batch in it, in MB; times are
    in ms.

    Ranks are numbered stage by stage: with 2 stages and 2 replicas, ranks 0 and 1 are the first stage. `zero` is what
    the ranks of a stage have cut into shards before the step: from 1 on states, with 3 weights, too.
    """

    replicas: int = 4
    stages: int = 1
    layers: int = 4
    microbatches: int = 4  # of all replicas together
    zero: int = 0
    weights: float = 8
    states: float = 16
    kept: float = 2
    input: float = 1
    forward: float = 2
    backward: float = 4
    update: float = 0.4
    alpha: float = 0.1
    beta: float = 4  # MB in a ms

    @property
    def size(self) -> int:
        return self.stages * self.replicas


class Line(NamedTuple):
    """A line of the program. `sender`: the rank that has run it, where it changes the memory of another one."""

    number: int
    text: str
    sender: int | None = None

    def __str__(self) -> str:
        told = f"line {self.number}, `{self.text}`" if self.number else self.text
        return told if self.sender is None else f"{told} of rank {self.sender}, which sent it"


class Name(NamedTuple):
    """The name of a tensor on a rank. `shard`: the rank's own part, of as many as its stage has ranks."""

    kind: str
    layer: int
    microbatch: int | None = None
    shard: bool = False

    def __str__(self) -> str:
        of = f"the {'shard of the ' if self.shard else ''}{self.kind} of layer {self.layer}"
        if self.kind == KEPT:
            of = f"what layer {self.layer} has kept"
        return of if self.microbatch is None else f"{of} for micro-batch {self.microbatch}"

    @property
    def are(self) -> str:
        plural = self.kind in (WEIGHTS, GRADIENTS, STATES) and not self.shard
        return f"{self} {'are' if plural else 'is'}"


class Bar(NamedTuple):
    """A span of time of a rank: it computes, or its link is busy (`network`), or it waits."""

    rank: int
    lane: str  # compute, network, wait
    begin: float
    end: float
    call: str
    name: Name
    line: Line
    sent: float = 0


class Change(NamedTuple):
    """A rank's memory grows or shrinks."""

    time: float
    rank: int
    kind: str
    size: float
    line: Line


class Moment(NamedTuple):
    """The fullest moment of a rank."""

    size: float
    time: float
    kinds: dict[str, float]
    line: Line  # which has taken the last of it


@dataclass
class Run:
    """What has happened in a step."""

    world: World
    bars: list[Bar] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    failed: bool = False  # it has ended with a StepError

    @property
    def time(self) -> float:
        return max((bar.end for bar in self.bars), default=0)

    def sent(self, rank: int) -> dict[str, float]:
        """MB that a rank has sent, by the calls that sent them."""
        found: dict[str, float] = {}
        for bar in self.bars:
            if bar.rank == rank and bar.lane == "network":
                found[bar.call] = found.get(bar.call, 0) + bar.sent
        return found

    def memory(self, rank: int) -> list[tuple[float, dict[str, float], Line]]:
        """The memory of a rank by kinds from each time on, and the line that has changed it last."""
        now: dict[str, float] = {}
        found: list[tuple[float, dict[str, float], Line]] = []
        mine = [change for change in self.changes if change.rank == rank]
        for change in sorted(mine, key=lambda change: (change.time, change.size > 0)):  # what ends at a time goes first
            now[change.kind] = now.get(change.kind, 0) + change.size
            found.append((change.time, dict(now), change.line))
        return found

    def fullest(self, rank: int) -> Moment:
        time, kinds, line = max(self.memory(rank), key=lambda moment: sum(moment[1].values()))
        return Moment(sum(kinds.values()), time, kinds, line)

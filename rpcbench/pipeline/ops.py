"""What schedules are made of: ops, one list for each worker, and their text.

`ops[w][i]` is what worker number w does as its i-th operation. As text, one line per worker and one word per op, `stage
kind micro-batch`; 1F1B for two workers and three micro-batches is

    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

A backward is one op, B, or two: I makes the gradient of the stage's input, which the stage before waits for, and W
those of its weights, which nobody waits for before the end of the step. Where an R comes before the backward, the
forward keeps its input only, and R computes it once more. A U, after a backward, is a step of the stage's optimizer
with the gradients of this micro-batch alone. An A adds up the gradients that the replicas of a stage have made; no
schedule has one, as the pipeline itself puts them where there are replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

from rpcbench.base.errors import PipelineError


class Kind(StrEnum):
    """What an op computes. The value is its letter in text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    RECOMPUTE = "R"
    UPDATE = "U"
    ALL_REDUCE = "A"


_WRITTEN = [kind for kind in Kind if kind is not Kind.ALL_REDUCE]
_OP = re.compile(rf"(\d+)([{''.join(_WRITTEN)}])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of one stage on one micro-batch; `str(op)` is `0F3`: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def label(self) -> str:
        """What it is called within its stage: `F3`; an all-reduce is one of no micro-batch."""
        return str(self.kind) if self.kind is Kind.ALL_REDUCE else f"{self.kind}{self.microbatch}"

    @staticmethod
    def parse(word: str) -> Op:
        """The op written as `word`; PipelineError if it is none."""
        match = _OP.fullmatch(word)
        if match is None:
            kinds = f"{', '.join(_WRITTEN[:-1])} or {_WRITTEN[-1]}"
            raise PipelineError(f"{word!r} is no operation; write stage, {kinds}, micro-batch: 0F3")
        stage, kind, microbatch = match.groups()
        return Op(int(stage), Kind(kind), int(microbatch))


Ops = list[list[Op]]


class Schedule(Protocol):
    """What every schedule offers; a user's own function of this shape is one too."""

    def __call__(self, workers: int, microbatches: int, chunks: int = 1) -> Ops: ...


def text(ops: Ops) -> str:
    """The ops as text, a line per worker. `parse(text(ops)) == ops`, unless the first or the last worker has no ops."""
    return "\n".join(" ".join(map(str, own)) for own in ops)


def parse(written: str) -> Ops:
    """The ops of a text, a line per worker; empty lines around it are left out. PipelineError at a wrong word."""
    return [[Op.parse(word) for word in line.split()] for line in written.strip().splitlines()]


def read(made: Any) -> Ops:
    """What a schedule has made: ops or their words, in a list for each worker, or as text. PipelineError for others."""
    if isinstance(made, str):
        return parse(made)
    if isinstance(made, list | tuple) and all(isinstance(own, list | tuple) for own in made):
        read = [[Op.parse(op) if isinstance(op, str) else op for op in own] for own in made]
        if all(isinstance(op, Op) for own in read for op in own):
            return read
    raise PipelineError(f"a schedule is a list of operations for each worker, as [['0F0', '0B0'], …], not {made!r:.80}")


@lru_cache(maxsize=64)
def ops_in(plan: str) -> tuple[Op, ...]:
    """One worker's ops, of any kind, as a pipeline has written them; the same at each step, so they are read once."""
    found = re.findall(r"(\d+)(\D)(\d+)", plan)
    return tuple(Op(int(stage), Kind(kind), int(microbatch)) for stage, kind, microbatch in found)


@lru_cache(maxsize=64)
def places_in(plan: str, kind: Kind) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of each of its ops of this kind."""
    return frozenset((op.stage, op.microbatch) for op in ops_in(plan) if op.kind is kind)


def run(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Op]:
    """One op of one stage for each of these micro-batches."""
    return [Op(stage, kind, microbatch) for microbatch in microbatches]


def check(workers: int, microbatches: int, chunks: int = 1) -> None:
    """PipelineError for numbers that make no schedule."""
    for what, number in (("workers", workers), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(number, int) or number < 1:
            raise PipelineError(f"{what} must be a whole number of at least 1, not {number!r}")


def check_chunks(name: str, chunks: int, wanted: int) -> None:
    """PipelineError where a schedule is made for another number of stages per worker."""
    if chunks != wanted:
        stages = "one stage" if wanted == 1 else f"{wanted} stages"
        raise PipelineError(f"schedule {name!r} gives each worker {stages}: chunks must be {wanted}, not {chunks!r}")

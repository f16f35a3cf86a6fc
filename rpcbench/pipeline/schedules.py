"""Schedules: pure functions `(workers, microbatches, chunks) -> ops`, one list of ops per worker, run in that order.

`ops[w][i]` is what worker number w does as its i-th operation. With `chunks` stages per worker there are
`workers * chunks` stages; which worker holds a stage is read off the lists. As text, one line per worker and one word
per op, `stage kind micro-batch`; 1F1B for two workers and three micro-batches is

    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

Rules: a schedule only orders; it knows no time, no transfer and no worker names. Backwards of a stage come in the order
of the micro-batches, so every schedule adds gradients up in the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rpcbench.words.errors import PipelineError


class Kind(StrEnum):
    """What an op computes. The value is its letter in text."""

    FORWARD = "F"
    BACKWARD = "B"


_OP = re.compile(rf"(\d+)([{''.join(Kind)}])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of one stage on one micro-batch; `str(op)` is `0F3`: stage 0, forward, micro-batch 3."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(word: str) -> Op:
        """The op written as `word`; PipelineError if it is none."""
        match = _OP.fullmatch(word)
        if match is None:
            raise PipelineError(f"{word!r} is no operation; write stage, {' or '.join(Kind)}, micro-batch: 0F3")
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


def gpipe(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """All forwards, then all backwards. Every stage keeps the activations of all micro-batches until its backwards."""
    _check(workers, microbatches)
    _one_chunk("gpipe", chunks)
    everything = range(microbatches)
    return [_ops(w, Kind.FORWARD, everything) + _ops(w, Kind.BACKWARD, everything) for w in range(workers)]


def one_f_one_b(workers: int, microbatches: int, chunks: int = 1) -> Ops:
    """Forwards until the pipeline is full, then a backward after each forward. Idles as long as gpipe, keeps less:

    worker w holds the activations of at most `workers - w` micro-batches, however many there are.
    """
    _check(workers, microbatches)
    _one_chunk("1f1b", chunks)
    return [_alternate(w, min(microbatches, workers - 1 - w), microbatches) for w in range(workers)]


def _alternate(stage: int, ahead: int, microbatches: int) -> list[Op]:
    """`ahead` forwards first, then forward and backward in turn, then the backwards that are left."""
    forwards = _ops(stage, Kind.FORWARD, range(microbatches))
    backwards = _ops(stage, Kind.BACKWARD, range(microbatches))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return forwards[:ahead] + [op for pair in pairs for op in pair] + backwards[microbatches - ahead :]


def _ops(stage: int, kind: Kind, microbatches: range) -> list[Op]:
    return [Op(stage, kind, microbatch) for microbatch in microbatches]


def _check(workers: int, microbatches: int) -> None:
    for what, number in (("workers", workers), ("microbatches", microbatches)):
        if not isinstance(number, int) or number < 1:
            raise PipelineError(f"{what} must be a whole number of at least 1, not {number!r}")


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise PipelineError(f"schedule {name!r} gives each worker one stage: chunks must be 1, not {chunks!r}")


_NAMED: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def named(name: str) -> Schedule:
    """The schedule of that name; PipelineError with the names there are if there is none."""
    if name not in _NAMED:
        raise PipelineError(f"unknown schedule {name!r}; there are {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]

"""A schedule worked out for some workers and micro-batches: to look at, to check, to play through, to train with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline import ops as _ops
from rpcbench.pipeline.ops import Ops, Schedule
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import Cost, Each, Simulation, equal_stages, simulate
from rpcbench.pipeline.validate import validate


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What each worker does, in `ops`; it can run to its end. Printed it is text that `schedule` reads again.

    It is a schedule itself, for these numbers: `Pipeline(stages, schedule=plan, microbatches=plan.microbatches)`. A
    batch that has fewer samples than that does without the operations of the micro-batches that it lacks.
    """

    ops: Ops
    stages: int
    microbatches: int

    def __str__(self) -> str:
        return _ops.text(self.ops)

    __repr__ = __str__

    def __call__(self, workers: int, microbatches: int, chunks: int = 0) -> Ops:
        """The ops of so many micro-batches; PipelineError for more than it was made for, and for other workers.

        `chunks`: 0 for what it has.
        """
        mine = (len(self.ops), self.microbatches)
        if workers != mine[0] or microbatches > mine[1] or chunks * workers not in (0, self.stages):
            raise PipelineError(
                f"this schedule is for {mine[0]} workers with {counted(self.stages, 'stage')} and "
                f"{counted(mine[1], 'micro-batch')}, not for {counted(workers, 'worker')} and "
                f"{counted(microbatches, 'micro-batch')}"
            )
        return [[op for op in own if op.microbatch < microbatches] for own in self.ops]

    def check(self, most_live: int) -> None:
        """PipelineError, with the op, if a worker would keep more activations than `most_live` at once."""
        validate(self.ops, self.stages, self.microbatches, most_live)

    def simulate(self, cost: Cost = equal_stages, transfer: float = 0.0, activation: Each = 1.0) -> Simulation:
        """As `simulate` with these ops."""
        return simulate(self.ops, cost, transfer, activation)

    def _repr_html_(self) -> str:
        return self.simulate()._repr_html_()


def schedule(
    what: str | Schedule | Ops, workers: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Plan:
    """A plan from a schedule's name or function, for these numbers; or from a text or lists that have them already.

    The text has a line per worker and a word per op: stage, F, B, I, W, R or U, micro-batch. PipelineError where it is
    not all of the work, or can never end; it names the op.

    >>> from rpcbench.pipeline import schedule
    >>> print(schedule("1f1b", workers=2, microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    >>> schedule('''0F0 0B0
    ...             1B0 1F0''')
    Traceback (most recent call last):
    ...
    rpcbench.base.errors.PipelineError: this schedule never ends: ops[0][1] = 0B0 waits for 1B0 at ops[1][0]; ...
    """
    ops = _ops.read(_made(what, workers, microbatches, chunks))
    every = [op for own in ops for op in own]
    if not every:
        raise PipelineError("this schedule has no operation")
    stages, numbers = 1 + max(op.stage for op in every), 1 + max(op.microbatch for op in every)
    if (workers or len(ops), microbatches or numbers) != (len(ops), numbers):
        raise PipelineError(
            f"asked for {workers or 'any number of'} workers and {microbatches or 'any number of'} micro-batches, the "
            f"schedule has made one of {counted(len(ops), 'worker')} and {counted(numbers, 'micro-batch')}"
        )
    validate(ops, stages, numbers)
    return Plan(ops, stages, numbers)


def maker(what: str | Schedule) -> Schedule:
    """Of a schedule's name, function, plan or text. PipelineError for what is none of them."""
    if isinstance(what, str):
        return schedule(what) if is_text(what) else named(what)
    if not callable(what):
        raise PipelineError(f"a schedule is a name, as '1f1b', a function, or what schedule() makes, not {what!r}")
    return what


def _made(what: str | Schedule | Ops, workers: int | None, microbatches: int | None, chunks: int | None) -> Any:
    if isinstance(what, list) or (isinstance(what, str) and is_text(what)):
        if (workers, microbatches, chunks) != (None, None, None):
            raise PipelineError("operations that are written down are for numbers of their own: leave the others out")
        return what
    make = maker(what)
    if workers is None or microbatches is None:
        raise PipelineError("say for how many workers and micro-batches: schedule('1f1b', workers=4, microbatches=8)")
    return make(workers, microbatches, **({} if chunks is None else {"chunks": chunks}))


def is_text(what: str) -> bool:
    """A single word that has not the shape of an op is a name."""
    return len(what.split()) != 1 or (what.strip()[0].isdigit() and what.strip()[-1].isdigit())

"""Which forwards are computed once more for their backward, so that activations need not be kept until then.

`recompute` of a pipeline is "none", "all", "except_last" (all micro-batches but the last, whose backward follows soon)
or a function (stage, microbatch) -> bool. It only inserts ops; a schedule may have them itself.

Random numbers of a forward depend on its step, stage and micro-batch, and on nothing else. So dropout is the same under
every schedule, and when a forward is computed once more. What else draws random numbers in this process draws what it
would have drawn. Numbers of the CPU's generator only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, Ops

_ODD = 0x9E3779B97F4A7C15
"""Spreads small numbers over 64 bits: 2**64 over the golden ratio."""
_alone = threading.Lock()
"""Around the generator's state: torch makes a tensor of it while it holds a lock of its own. If that sets off a garbage
collection that frees tensors, it waits for Python's lock, which a second thread here would keep while it waits for that
other one."""


class StepSeeds:
    """Seeds of steps, in a row: each depends on `base`, 0 to 2**62 - 1, and on how many were `drawn` before it."""

    def __init__(self, base: int, drawn: int = 0) -> None:
        self.base, self.drawn = base, drawn

    def draw(self) -> int:
        """The next one, 0 to 2**62 - 1."""
        self.drawn += 1
        return _mixed(self.base, self.drawn) >> 2


def seed(step_seed: int, op: Op) -> int:
    """The seed of a stage's forward of a micro-batch, 0 to 2**63 - 1."""
    return _mixed(step_seed, op.stage, op.microbatch) >> 1


def _mixed(start: int, *numbers: int) -> int:
    """64 bits that look random, of numbers that look alike."""
    mixed = start
    for number in numbers:
        mixed = (mixed ^ (number + 1)) * _ODD % 2**64
        mixed ^= mixed >> 29
    return mixed


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Random numbers begin anew from this seed inside, and go on as before afterwards."""
    before = begin_rng(number)
    try:
        yield
    finally:
        resume_rng(before)


def begin_rng(number: int) -> torch.Tensor:
    """Random numbers begin anew from this seed; give what is returned to `go_on`."""
    with _alone:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(number)
    return before


def resume_rng(before: torch.Tensor) -> None:
    """They go on as before."""
    with _alone:
        torch.default_generator.set_state(before)


Recompute = str | Callable[[int, int], bool]


def with_recompute(ops: Ops, recompute: Recompute, microbatches: int) -> Ops:
    """The same ops, with an R right before each backward that is meant. PipelineError for other words."""
    wanted = _wanted(recompute, microbatches)
    return [[each for op in own for each in _before(op, wanted)] for own in ops]


def _before(op: Op, wanted: Callable[[int, int], bool]) -> list[Op]:
    if op.kind in (Kind.BACKWARD, Kind.INPUT) and wanted(op.stage, op.microbatch):
        return [Op(op.stage, Kind.RECOMPUTE, op.microbatch), op]
    return [op]


def _wanted(recompute: Recompute, microbatches: int) -> Callable[[int, int], bool]:
    if callable(recompute):
        return recompute
    words: dict[str, Callable[[int, int], bool]] = {
        "none": lambda stage, microbatch: False,
        "all": lambda stage, microbatch: True,
        "except_last": lambda stage, microbatch: microbatch < microbatches - 1,
    }
    if not isinstance(recompute, str) or recompute not in words:
        raise PipelineError(
            f"unknown recompute {recompute!r}; there are {', '.join(map(repr, words))}, or a function of stage and "
            "micro-batch that says True or False"
        )
    return words[recompute]

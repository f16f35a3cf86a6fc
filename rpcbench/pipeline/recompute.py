"""Recomputation: forwards that are computed again for their backward, so that their activations need not be kept.

`recompute` of a pipeline is "none", "all", "except_last" (all micro-batches but the last, whose backward follows soon)
or a function (stage, microbatch) -> bool. It only inserts ops; a schedule may contain them itself.

Rules: random numbers of a forward depend on its step, stage and micro-batch only, so dropout is the same under every
schedule and in a recomputed forward. All other code in the process draws the numbers that it would have drawn without
the pipeline. Numbers of the CPU's generator only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, Ops

_MULTIPLIER = 0x9E3779B97F4A7C15
"""A multiplier that spreads small numbers over 64 bits: 2**64 over the golden ratio."""
_generator_lock = threading.Lock()
"""Held around the generator's state. torch creates a tensor of it under a lock of its own. If that starts a garbage
collection that frees tensors, the thread waits for Python's lock, which a second thread here would hold while it waits
for torch's."""


class StepSeeds:
    """The sequences of seeds of training steps and of evaluations, which leave those of training as they were. A seed
    depends on `base`, 0 to 2**62 - 1, and on how many of its sequence were drawn before."""

    def __init__(self, base: int, drawn: int = 0, evaluated: int = 0) -> None:
        self.base, self.drawn, self.evaluated = base, drawn, evaluated  # all three are in checkpoints

    def next_seed(self, train: bool = True) -> int:
        """Return the next seed, 0 to 2**62 - 1."""
        if train:
            self.drawn += 1
            return _mix_numbers(self.base, self.drawn) >> 2
        self.evaluated += 1
        return _mix_numbers(self.base + 1, self.evaluated) >> 2


def forward_seed(step_seed: int, op: Op) -> int:
    """Return the seed of a stage's forward of a micro-batch, 0 to 2**63 - 1."""
    return _mix_numbers(step_seed, op.stage, op.microbatch) >> 1


def _mix_numbers(start: int, *numbers: int) -> int:
    """Return 64 bits that look random, from numbers that are small and alike."""
    mixed = start
    for number in numbers:
        mixed = (mixed ^ (number + 1)) * _MULTIPLIER % 2**64  # + 1: stage 0 must change it, too
        mixed ^= mixed >> 29  # a product moves bits up only; this moves them down
    return mixed


@contextlib.contextmanager
def seeded_rng(number: int) -> Iterator[None]:
    """Seed the generator for the block, and restore its state afterwards."""
    before = seed_generator(number)
    try:
        yield
    finally:
        resume_rng(before)


def seed_generator(number: int) -> torch.Tensor:
    """Seed the generator; return its former state, for `resume_rng`."""
    with _generator_lock:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(number)
    return before


def resume_rng(before: torch.Tensor) -> None:
    """Restore a state of the generator."""
    with _generator_lock:
        torch.default_generator.set_state(before)


Recompute = str | Callable[[int, int], bool]


def with_recompute(ops: Ops, recompute: Recompute, microbatches: int) -> Ops:
    """Return the ops with an R right before each backward that needs it. PipelineError for an unknown `recompute`."""
    wanted = _make_predicate(recompute, microbatches)
    return [[each for op in own for each in _with_recompute(op, wanted)] for own in ops]


def _with_recompute(op: Op, wanted: Callable[[int, int], bool]) -> list[Op]:
    if op.kind in (Kind.BACKWARD, Kind.INPUT) and wanted(op.stage, op.microbatch):  # not WEIGHT: INPUT comes before it
        return [Op(op.stage, Kind.RECOMPUTE, op.microbatch), op]
    return [op]


def _make_predicate(recompute: Recompute, microbatches: int) -> Callable[[int, int], bool]:
    if callable(recompute):
        return recompute
    words: dict[str, Callable[[int, int], bool]] = {
        "none": lambda stage, microbatch: False,
        "all": lambda stage, microbatch: True,
        # its backward follows at once, in most schedules
        "except_last": lambda stage, microbatch: microbatch < microbatches - 1,
    }
    if not isinstance(recompute, str) or recompute not in words:
        raise PipelineError(
            f"unknown recompute {recompute!r}; there are {', '.join(map(repr, words))}, or a function of stage and "
            "micro-batch that returns True or False"
        )
    return words[recompute]

"""Random numbers of a stage: those of a forward depend on its step, stage and micro-batch, and on nothing else.

So dropout is the same under every schedule, and when a forward is computed once more. What else draws random numbers in
this process draws what it would have drawn. Numbers of the CPU's generator only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rpcbench.pipeline.ops import Op

_ODD = 0x9E3779B97F4A7C15
"""Spreads small numbers over 64 bits: 2**64 over the golden ratio."""


def seed(step_seed: int, op: Op) -> int:
    """The seed of a stage's forward of a micro-batch, 0 to 2**63 - 1."""
    mixed = step_seed
    for number in (op.stage, op.microbatch):
        mixed = (mixed ^ (number + 1)) * _ODD % 2**64
        mixed ^= mixed >> 29
    return mixed >> 1


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Random numbers begin anew from this seed inside, and go on as before afterwards."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(number)
    try:
        yield
    finally:
        generator.set_state(before)

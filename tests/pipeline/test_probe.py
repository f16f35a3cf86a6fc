"""The operation in which each gradient is computed, as the layers see it: of inputs in I, of weights in W."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import nothing_left, world

from rpcbench.pipeline import Pipeline, split
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

SEEN: list[tuple[str, str, int, str]] = []
"""(what was made, kind of the op that ran, its stage, the layer)"""


def running() -> tuple[str, int]:
    """Return the operation that runs on this worker, from its table."""
    (row,) = [row for row in current.current_agent().tables()["ops"].values() if row["end"] is None]
    return row["op"], row["stage"]


class Probe(torch.autograd.Function):
    """Records the operation in which a gradient passes it in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, what: str, layer: str) -> torch.Tensor:
        ctx.what, ctx.layer = what, layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        SEEN.append((ctx.what, *running(), ctx.layer))
        return gradients[0], None, None


class Probed(nn.Module):
    """A linear layer that records the backward to its input and to its weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        seen: Any = Probe.apply
        return torch.tanh(seen(value, "input", self.name) @ seen(self.weight, "weight", self.name))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    SEEN.clear()
    with world(tmp_path, 3) as made:
        yield made
        nothing_left(made)


def trained(schedule: str) -> Pipeline:
    """Run one step with 4 micro-batches; the pipeline has two layers in each of its four stages."""
    layers = [Probed(str(number)) for number in range(8)]
    stages = split(layers, ["worker1", "worker2"], balance=[2, 2, 2, 2])
    pipe = Pipeline(stages, schedule, 4, functional.mse_loss)
    x = torch.rand(8, 4)
    with pipe.batch(x, x):
        return pipe


def ran(pipe: Pipeline, kind: str) -> set[int]:
    """Return the stages with an operation of this kind in the schedule."""
    return {op.stage for own in pipe.ops for op in own if op.kind == kind}


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
def test_split_backwards_compute_each_gradient_once_in_its_own_half(agents: list[Agent], schedule: str) -> None:
    trained(schedule)
    assert {op for what, op, _, _ in SEEN if what == "weight"} == {"W"}
    # The first stage needs no gradient of its input: the backward to its first layer belongs to its weights.
    assert {op for what, op, stage, _ in SEEN if what == "input" and stage} == {"I"}
    made = [(what, layer) for what, _, _, layer in SEEN]
    assert sorted(made) == sorted(
        (what, str(n)) for what in ("input", "weight") for n in range(8) if (what, n) != ("input", 0) for _ in range(4)
    ), "each gradient is computed once for each micro-batch"


def test_a_schedule_with_whole_and_split_backwards_computes_gradients_in_both(agents: list[Agent]) -> None:
    """In DualPipeV some backwards are whole."""
    pipe = trained("dualpipev")
    assert ran(pipe, "B") and ran(pipe, "I") and ran(pipe, "W")
    weights = [op for what, op, _, _ in SEEN if what == "weight"]
    inputs = [op for what, op, stage, _ in SEEN if what == "input" and stage]
    assert set(weights) == {"B", "W"} and set(inputs) == {"B", "I"}
    planned = [op.kind for own in pipe.ops for op in own]
    assert weights.count("W") == 2 * planned.count("W") and weights.count("B") == 2 * planned.count("B")


def test_a_whole_backward_computes_both_kinds_of_gradients(agents: list[Agent]) -> None:
    trained("interleaved")
    assert {(what, op) for what, op, _, _ in SEEN} == {("weight", "B"), ("input", "B")}

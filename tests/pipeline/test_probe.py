"""Where gradients are made, as the layers themselves see it: those of inputs inside I, those of weights inside W."""

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
    """The op that runs on this worker, as its table says."""
    (row,) = [row for row in current.current().tables()["ops"].values() if row["end"] is None]
    return row["op"], row["stage"]


class Probe(torch.autograd.Function):
    """Notes in which op a gradient passes it on the way back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, what: str, layer: str) -> torch.Tensor:
        ctx.what, ctx.layer = what, layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        SEEN.append((ctx.what, *running(), ctx.layer))
        return gradients[0], None, None


class Probed(nn.Module):
    """A linear layer whose way back to its input, and to its weight, is seen."""

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
    """One step over 4 micro-batches; two layers in each of the four stages."""
    layers = [Probed(str(number)) for number in range(8)]
    stages = split(layers, ["worker1", "worker2"], balance=[2, 2, 2, 2])
    pipe = Pipeline(stages, schedule, 4, functional.mse_loss)
    x = torch.rand(8, 4)
    with pipe.batch(x, x):
        return pipe


def ran(pipe: Pipeline, kind: str) -> set[int]:
    """The stages that the schedule has such an op of."""
    return {op.stage for own in pipe.ops for op in own if op.kind == kind}


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
def test_each_gradient_is_made_in_its_own_half(agents: list[Agent], schedule: str) -> None:
    trained(schedule)
    assert {op for what, op, _, _ in SEEN if what == "weight"} == {"W"}
    # The first stage has no input to make a gradient of: the way to its first layer is that of its weights.
    assert {op for what, op, stage, _ in SEEN if what == "input" and stage} == {"I"}
    made = [(what, layer) for what, _, _, layer in SEEN]
    assert sorted(made) == sorted(
        (what, str(n)) for what in ("input", "weight") for n in range(8) if (what, n) != ("input", 0) for _ in range(4)
    ), "each once for each micro-batch: no half does the other's work again"


def test_a_schedule_with_both_kinds_makes_each_where_it_says(agents: list[Agent]) -> None:
    """In DualPipeV some backwards are whole."""
    pipe = trained("dualpipev")
    assert ran(pipe, "B") and ran(pipe, "I") and ran(pipe, "W")
    weights = [op for what, op, _, _ in SEEN if what == "weight"]
    inputs = [op for what, op, stage, _ in SEEN if what == "input" and stage]
    assert set(weights) == {"B", "W"} and set(inputs) == {"B", "I"}
    planned = [op.kind for own in pipe.ops for op in own]
    assert weights.count("W") == 2 * planned.count("W") and weights.count("B") == 2 * planned.count("B")


def test_a_whole_backward_makes_both(agents: list[Agent]) -> None:
    trained("interleaved")
    assert {(what, op) for what, op, _, _ in SEEN} == {("weight", "B"), ("input", "B")}

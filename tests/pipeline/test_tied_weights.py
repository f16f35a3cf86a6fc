"""Weights that several stages share: training equals one process, and copies stay equal to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small import STAGES, step_alike
from torch import nn
from torch.nn import functional
from worlds import nothing_left, world

from rpcbench.pipeline import Pipeline, split
from rpcbench.pipeline.split import Stages
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2", "worker3"]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 4) as made:
        yield made
        nothing_left(made)


def model() -> nn.Sequential:
    """A model with an embedding tied to its head, and one layer in three places; seven modules."""
    torch.manual_seed(6)
    shared = nn.Linear(5, 5)
    nn.init.zeros_(shared.bias)  # so that the first step shows every bit of its gradient
    made = nn.Sequential(nn.Embedding(9, 5), shared, nn.Tanh(), shared, nn.LayerNorm(5), nn.Linear(5, 9)).double()
    made[5].weight = made[0].weight
    made.insert(5, shared)
    return made


def stages(whole: nn.Sequential, chunks: int) -> Stages:
    return split(whole, WORKERS, balance=[2, 3, 2] if chunks == 1 else [1, 1, 1, 1, 1, 2])


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randint(0, 9, (samples,), generator=made), torch.randint(0, 9, (samples,), generator=made)


@pytest.mark.parametrize("schedule", STAGES)
def test_training_with_tied_weights_equals_one_process(agents: list[Agent], schedule: str) -> None:
    whole, (x, y) = model(), data(13)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    pipe = Pipeline(
        stages(model(), STAGES[schedule]), schedule, 5, functional.cross_entropy,
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    )  # fmt: skip
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.cross_entropy(whole(x), y)
        step_alike(pipe, whole, loss, x, y)
        optimizer.step()
        state = pipe.state_dict()
        assert state.keys() == whole.state_dict().keys()
        for first, other in [("0.weight", "6.weight"), *itertools.product(["1.weight"], ["3.weight", "5.weight"])]:
            assert torch.equal(state[first], state[other])
        assert torch.equal(state["1.bias"], state["3.bias"]) and torch.equal(state["1.bias"], state["5.bias"])


def test_earlier_gradients_of_tied_weights_are_not_counted_again_when_a_batch_is_added(agents: list[Agent]) -> None:
    """The same batch is added twice in one context: the mean over both equals that of one."""
    whole, (x, y) = model(), data(12)
    pipe = Pipeline(stages(whole, 1), "gpipe", 3, functional.cross_entropy)
    with pipe.batch(x, y) as batch:
        once = batch.gradients()
        batch.add(x, y)
        for name, gradient in batch.gradients().items():
            torch.testing.assert_close(gradient, once[name], rtol=1e-12, atol=1e-12)


def test_a_frozen_tied_weight_does_not_change(agents: list[Agent]) -> None:
    whole, (x, y) = model(), data(12)
    whole[0].weight.requires_grad_(False)
    before = whole[0].weight.clone()
    pipe = Pipeline(stages(whole, 1), "1f1b", 3, functional.cross_entropy, (torch.optim.SGD, {"lr": 0.1}))
    pipe.step(x, y)
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], before) and torch.equal(state["6.weight"], before)
    assert not torch.equal(state["1.weight"], whole[1].weight)

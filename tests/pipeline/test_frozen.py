"""Frozen stages, anywhere in the model: the others train as in one process, and no stage waits for them."""

from __future__ import annotations

import pytest
import torch
from covering import pairs
from small import STAGES
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, split
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]
FROZEN = {
    "the first": {0},
    "the first two": {0, 1},
    "one within": {2},
    "the last": {3},
    "the first and the last": {0, 3},
    "all": {0, 1, 2, 3},
}


def model(frozen: set[int]) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    made = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers)).double()
    for number in frozen:
        made[number].requires_grad_(False)
    return made


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    x = torch.rand(samples, 6, dtype=torch.double, generator=made)
    return x, torch.randint(0, 4, (samples,), generator=made)


@pytest.mark.parametrize(
    ("schedule", "frozen", "recompute"),
    pairs(STAGES, FROZEN, ["none", "all"]),
)
def test_only_parameters_that_are_not_frozen_get_gradients_and_change(
    agents: list[Agent], schedule: str, frozen: str, recompute: str
) -> None:
    whole, (x, y) = model(FROZEN[frozen]), data(13)
    loss = functional.cross_entropy(whole(x), y)
    if loss.requires_grad:
        loss.backward()
    balance = {1: [2, 2], 2: [1, 1, 1, 1]}[STAGES[schedule]]
    stages = split(model(FROZEN[frozen]), WORKERS, balance=balance)
    sgd = (torch.optim.SGD, {"lr": 0.1})
    pipe = Pipeline(stages, schedule, 5, functional.cross_entropy, sgd, recompute=recompute)
    with pipe.batch(x, y) as batch:
        found = batch.gradients()
        batch.apply()
    assert batch.result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert found.keys() == {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    state = pipe.state_dict()
    assert {name for name, tensor in whole.state_dict().items() if not torch.equal(state[name], tensor)} == set(found)


def test_no_gradient_is_sent_to_a_frozen_first_stage(agents: list[Agent]) -> None:
    pipe = Pipeline(split(model({0, 1}), WORKERS, balance=[2, 2]), "gpipe", 4, functional.cross_entropy)
    with pipe.batch(*data(12)) as batch:
        pass
    sent = {(row["stage"], row["op"]): row["bytes"] for row in batch.result.rows}
    assert sent[0, "F"] == 3 * 8 * 8 and sent[1, "B"] == 0

"""Each recipe of the course is the same computation as one process: also in bfloat16, and with an optimizer."""

from __future__ import annotations

from functools import partial

import pytest
import recipes
import torch
from recipe_trials import RATE, TRIALS
from tiny_transformer import batch, loss_of

import rpcbench

pytestmark = pytest.mark.process

MODES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def autocast(dtype):
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


def make_alone(number):
    return TRIALS[number].model()


def step_alone(dtype, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = batch(0)
    with autocast(dtype):
        loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def make_on_rank(number, mesh):
    return getattr(recipes, TRIALS[number].recipe)(TRIALS[number].model(), mesh)


def step_on_rank(number, dtype, model, mesh):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with autocast(dtype):
        loss = TRIALS[number].backward(model, mesh, *batch(0))
    optimizer.step()
    return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(len(TRIALS)), ids=[trial.recipe for trial in TRIALS])
def test_a_recipe_is_right(four: rpcbench.Cluster, number: int, mode: str) -> None:
    dtype = MODES[mode]
    report = four.compare(
        reference=(partial(make_alone, number), partial(step_alone, dtype)),
        parallel=(partial(make_on_rank, number), partial(step_on_rank, number, dtype)),
        mesh=TRIALS[number].sizes,
    )
    report.raise_if_wrong()
    words = [each.word for each in report.verdicts]
    assert words.count("right") > 100 and words.count("cannot tell") < 60

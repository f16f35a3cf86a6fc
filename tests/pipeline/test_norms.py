"""Norm and clipping of all stages' gradients, against torch's own over the whole model."""

from __future__ import annotations

import math

import pytest
import torch
from small import SGD, WORKERS, data, grads, model, pipeline, same
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from rpcbench.pipeline import Pipeline, PipelineError, split
from rpcbench.runtime.agent import Agent

X, Y = data(29)


def with_gradients() -> nn.Sequential:
    net = model()
    functional.cross_entropy(net(X), Y).backward()
    return net


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("share", [0.4, 3.0])
def test_norms_and_clipping_equal_those_of_torch(agents: list[Agent], norm_type: float, share: float) -> None:
    norm = float(clip_grad_norm_(with_gradients().parameters(), math.inf, norm_type))
    net = with_gradients()
    clip_grad_norm_(net.parameters(), share * norm, norm_type)
    with pipeline(microbatches=3).batch(X, Y) as batch:
        assert batch.grad_norm(norm_type) == pytest.approx(norm, rel=1e-12)
        assert batch.clip(share * norm, norm_type) == pytest.approx(norm, rel=1e-12)
        same(batch.gradients(), grads(net))
        assert batch.grad_norm(norm_type) == pytest.approx(min(share, 1) * norm, rel=1e-4)  # torch: 1e-6 less


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_training_with_clipping_equals_one_process(agents: list[Agent], schedule: str) -> None:
    net, pipe = model(), pipeline(schedule=schedule, optimizer=SGD)
    optimizer = torch.optim.SGD(net.parameters(), **SGD[1])
    for _ in range(4):
        optimizer.zero_grad()
        functional.cross_entropy(net(X), Y).backward()
        clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        with pipe.accumulate() as batch:  # the norm is that of all batches together
            batch.add(X[:20], Y[:20])
            batch.add(X[20:], Y[20:])
            batch.clip(0.1)
            batch.apply()
    same(pipe.state_dict(), net.state_dict())


@pytest.mark.parametrize("balance", [[3, 1], [2, 2]], ids=["in one stage", "in both"])
def test_a_layer_that_is_used_twice_counts_once_in_the_norm(agents: list[Agent], balance: list[int]) -> None:
    layer = nn.Linear(6, 6).double()
    net = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4).double())
    functional.cross_entropy(net(X), Y).backward()
    norm = float(clip_grad_norm_(net.parameters(), 0.02))
    pipe = Pipeline(
        split(net, WORKERS, balance=balance), optimizer=SGD, loss_fn=functional.cross_entropy, keep_gradients=True
    )
    with pipe.accumulate() as batch:
        batch.add(X[:20], Y[:20])
        batch.add(X[20:], Y[20:])
        assert batch.grad_norm() == pytest.approx(norm, rel=1e-12)
        assert batch.clip(0.02) == pytest.approx(norm, rel=1e-12)
        batch.apply()
    same(pipe.gradients(), grads(net))


def test_a_frozen_stage_adds_nothing_to_the_norm(agents: list[Agent]) -> None:
    net = with_gradients()
    norm = float(clip_grad_norm_(net[-1:].parameters(), math.inf))
    for layer in net[:-1]:
        layer.requires_grad_(False)
    with pipeline(net).batch(X, Y) as batch:
        assert batch.grad_norm() == pytest.approx(norm, rel=1e-12)


def test_invalid_uses_of_clipping_are_refused(agents: list[Agent]) -> None:
    pipe = pipeline()
    with pipe.accumulate() as empty, pytest.raises(PipelineError, match=r"call add\(x, y\) first"):
        empty.clip(1.0)
    with pipe.batch(X, Y) as batch:
        with pytest.raises(PipelineError, match="positive number, not 0"):
            batch.clip(0)
        batch.clip(1.0)
        with pytest.raises(PipelineError, match="clipped already: add all batches first"):
            batch.add(X, Y)

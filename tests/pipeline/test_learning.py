"""Learning rate schedulers beside the optimizers of all stages, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import SGD, data, model, pipeline, same
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from rpcbench.pipeline import PipelineError
from rpcbench.runtime.agent import Agent

X, Y = data(29)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=13)
HALVES = (lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5})
WARMS_UP = (lr_scheduler.LambdaLR, {"lr_lambda": lambda done: min(1, (done + 1) / 4)})
SPECS = {
    "steps": HALVES,
    "warm-up": WARMS_UP,
    "one cycle": (lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": 9}),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("lr_step", ["epoch", "step"])
def test_training_with_a_scheduler_equals_one_process(agents: list[Agent], spec: Any, lr_step: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), **SGD[1])
    scheduler = spec[0](optimizer, **spec[1])
    for _ in range(3):
        for x, y in LOADER:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if lr_step == "step":
                scheduler.step()
        if lr_step == "epoch":
            scheduler.step()
    pipe = pipeline(schedule="interleaved", optimizer=SGD, lr_scheduler=spec)
    pipe.fit(LOADER, 3, lr_step=lr_step, progress=False)
    assert pipe.lr == pytest.approx(scheduler.get_last_lr()[0], rel=1e-15)
    same(pipe.state_dict(), net.state_dict())


def test_the_learning_rate_changes_only_when_the_scheduler_steps(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=SGD, lr_scheduler=HALVES)
    rates = []
    for _ in range(4):
        pipe.step(X, Y)
        rates.append(pipe.lr)
        pipe.lr_scheduler.step()
    assert rates == [0.3, 0.3, 0.15, 0.15]


def test_a_scheduler_can_use_a_score(agents: list[Agent]) -> None:
    plateau = (lr_scheduler.ReduceLROnPlateau, {"patience": 0, "factor": 0.1})
    pipe = pipeline(optimizer=SGD, lr_scheduler=plateau)
    pipe.step(X, Y)
    for score, lr in ((2.0, 0.3), (1.0, 0.3), (1.5, 0.03)):
        pipe.lr_scheduler.step(score)
        assert pipe.lr == pytest.approx(lr)


def test_a_stage_without_trainable_parameters_needs_no_scheduler(agents: list[Agent]) -> None:
    net = model()
    net[-1].requires_grad_(False)
    pipe = pipeline(net, optimizer=SGD, lr_scheduler=HALVES)
    pipe.fit(LOADER, 2, progress=False)
    assert pipe.lr == 0.15


@pytest.mark.parametrize(
    ("use", "error", "reason"),
    [
        (lambda: pipeline(lr_scheduler=HALVES), PipelineError, "needs an optimizer"),
        (lambda: pipeline().lr, PipelineError, "has no learning rate"),
        (lambda: pipeline(optimizer=SGD).lr_scheduler, PipelineError, "give Pipeline lr_scheduler"),
        (lambda: pipeline(optimizer=SGD).fit(LOADER, lr_step="day"), PipelineError, "'epoch' or 'step', not 'day'"),
        (lambda: pipeline(optimizer=SGD, lr_scheduler=(HALVES[0], {"size": 1})), TypeError, "size"),
    ],
)
def test_invalid_uses_of_a_scheduler_are_refused(
    agents: list[Agent], use: Callable[[], Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        use()

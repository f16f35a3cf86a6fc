"""Loss, metrics and outputs in evaluation mode, of batches and loaders, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import data, model, pipeline, same
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from rpcbench.pipeline import Pipeline, PipelineError
from rpcbench.runtime.agent import Agent

X, Y = data(29)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=13)  # 13, 13, 3: fewer than the micro-batches


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


def net() -> nn.Sequential:
    """A model that differs between training and evaluation: dropout, and running statistics of other data."""
    made = model(nn.BatchNorm1d(16), nn.Dropout(0.5))
    for norm in made.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.double()(torch.rand(7, 16, dtype=torch.double))
    return made


def expected(reduction: str = "mean") -> dict[str, float]:
    with torch.no_grad():
        output = net().eval()(X)
    loss = functional.cross_entropy(output, Y, reduction=reduction).item()
    return {"loss": loss, "accuracy": accuracy(output, Y).item()}


@pytest.mark.parametrize(
    "of", [lambda: (X, Y), lambda: (LOADER,), lambda: (iter(LOADER),)], ids=["batch", "loader", "iterator"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_evaluation_equals_one_process_and_changes_no_state(
    agents: list[Agent], of: Callable[[], Any], reduction: str
) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() and not output.requires_grad
        return functional.cross_entropy(output, target, reduction=reduction)

    pipe = pipeline(net(), batch_norm="microbatch", schedule="zbv", loss_fn=loss_fn, loss_reduction=reduction)
    before = pipe.state_dict()
    found = pipe.evaluate(*of(), metrics={"accuracy": accuracy})
    assert found == pytest.approx(expected(reduction), rel=1e-12)
    same(pipe.state_dict(), before)  # running statistics, too


def test_metrics_can_be_computed_without_a_loss_function(agents: list[Agent]) -> None:
    found = pipeline(net(), batch_norm="microbatch", loss_fn=None).evaluate(LOADER, metrics={"accuracy": accuracy})
    assert found == pytest.approx({"accuracy": expected()["accuracy"]}, rel=1e-12)


def test_predictions_of_a_loader_are_in_the_order_of_its_samples(agents: list[Agent]) -> None:
    pipe = pipeline(net(), batch_norm="microbatch")
    with torch.no_grad():
        wanted = net().eval()(X)
    for of in (X, LOADER, (x for x, _ in LOADER), ([x] for x, _ in LOADER)):
        torch.testing.assert_close(pipe.predict(of), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda pipe: pipe.evaluate(X), r"evaluate\(x, y\), or a loader"),
        (lambda pipe: pipe.evaluate(LOADER, Y), r"evaluate\(x, y\), or a loader"),
        (lambda pipe: pipe.evaluate(iter([])), "gives no batch"),
        (lambda pipe: pipe.evaluate(iter([X])), "batch 0 of the loader is a Tensor, not a pair"),
        (lambda pipe: pipe.evaluate(iter([(X, Y), (X, Y, Y)])), "batch 1 of the loader is a tuple of 3"),
        (lambda pipe: pipe.evaluate(X, Y[1:]), "29 samples, but its targets 28"),
        (lambda pipe: pipe.evaluate(X, Y, metrics={"loss": accuracy}), "no metric can be called 'loss'"),
        (lambda pipe: pipe.predict(iter([])), "gives no batch"),
        (lambda pipe: pipeline(loss_fn=None).evaluate(X, Y), "needs a loss_fn"),
    ],
)
def test_evaluation_with_wrong_arguments_is_refused_with_the_reason(
    agents: list[Agent], use: Callable[[Pipeline], Any], reason: str
) -> None:
    with pytest.raises(PipelineError, match=reason):
        use(pipeline())

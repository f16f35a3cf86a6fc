"""Batch norms in micro-batches: one warning, and deferred ones have the running statistics of whole batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small import data, model, pipeline, same
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import PipelineError
from rpcbench.pipeline.batchnorm import Deferred
from rpcbench.runtime.agent import Agent

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
BATCHES = [data(29, seed) for seed in range(3)]


def net(**changes: Any) -> nn.Sequential:
    """A model with a batch norm before its last layer; the layers before it treat each sample alone."""
    return model(nn.BatchNorm1d(16, **changes))


def statistics(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.endswith(STATISTICS)}


def plain(**changes: Any) -> dict[str, torch.Tensor]:
    """Return the statistics after a forward of each whole batch, in one process."""
    whole = net(**changes)
    for x, _ in BATCHES:
        whole(x)
    return statistics(whole.state_dict())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_has_the_statistics_of_whole_batches(
    agents: list[Agent], schedule: str, recompute: str, momentum: float | None
) -> None:
    wanted = plain(momentum=momentum)
    assert len(wanted) == 3
    pipe = pipeline(net(momentum=momentum), schedule=schedule, recompute=recompute, batch_norm="deferred")
    for x, y in BATCHES:
        with pipe.batch(x, y):
            pass
    found = statistics(pipe.state_dict())
    same(found, wanted)
    pipe.evaluate(*BATCHES[0])
    same(statistics(pipe.state_dict()), found)


def test_deferred_batch_norm_has_gradients_of_micro_batches_and_evaluates_with_statistics(agents: list[Agent]) -> None:
    whole, (x, y) = net(), BATCHES[0]
    for inputs, targets in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (functional.cross_entropy(whole(inputs), targets) * (len(inputs) / len(x))).backward()
    pipe = pipeline(net(), batch_norm="deferred")
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), {name: parameter.grad for name, parameter in whole.named_parameters()})
    whole.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe.predict(x), whole.eval()(x), rtol=1e-12, atol=1e-12)


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) == 7:
            raise ArithmeticError("the last micro-batch")
        return x


def test_a_failed_step_does_not_change_the_statistics(agents: list[Agent]) -> None:
    pipe = pipeline(model(nn.BatchNorm1d(16), Breaks()), batch_norm="deferred", schedule="gpipe")
    before = pipe.state_dict()
    with pytest.raises(ArithmeticError, match="last"), pipe.batch(*BATCHES[0]):
        pass
    same(pipe.state_dict(), before)
    with pipe.batch(*data(24)):
        pass
    assert statistics(pipe.state_dict())["3.num_batches_tracked"] == 1


def test_deferred_batch_norm_handles_images_and_means_far_from_zero() -> None:
    """Channels are in dimension 1; a mean of a thousand times the deviation costs no precision."""
    whole, parts = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(11, 3, 5, 4) + 1000
    whole.double()(x.double())
    deferred = Deferred([parts])
    with deferred.step_scope(), deferred.forward_scope(first=True):
        for part in x.split(4):
            parts(part)
    wanted = {name: tensor.to(parts.state_dict()[name].dtype) for name, tensor in whole.state_dict().items()}
    torch.testing.assert_close(dict(parts.state_dict()), wanted, rtol=1e-6, atol=0)


def test_a_pipeline_warns_once_of_its_batch_norms_by_name(agents: list[Agent]) -> None:
    with pytest.warns(UserWarning, match=r"one micro-batch at a time \(3\): .* each of the 4 micro-batches") as told:
        pipe = pipeline(net())
        pipe.evaluate(*BATCHES[0])
    assert len(told) == 1
    with pipe.batch(*BATCHES[0]):
        pass
    assert statistics(pipe.state_dict())["3.num_batches_tracked"] == 4


def test_a_pipeline_without_a_batch_norm_problem_gives_no_warning(agents: list[Agent]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(net(), batch_norm="microbatch")
        pipeline(net(), batch_norm="deferred")
        pipeline(net(), microbatches=1)
        pipeline(net(), loss_fn=None)
        pipeline(model(nn.LayerNorm(16)))


def test_an_unknown_batch_norm_mode_is_refused(agents: list[Agent]) -> None:
    with pytest.raises(PipelineError, match="'warn', 'microbatch' and 'deferred'"):
        pipeline(batch_norm="global")

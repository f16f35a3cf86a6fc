"""Stages under autocast, against a loop over the same micro-batches in one process: equal to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import SGD, data, grads, model, pipeline
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import PipelineError
from rpcbench.pipeline.microbatch import split_batch
from rpcbench.pipeline.stage import ForwardContext, PrecisionConfig
from rpcbench.runtime.agent import Agent

LOW = torch.bfloat16


def net() -> nn.Sequential:
    return model(nn.LayerNorm(16)).float()


def batch(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(29, seed)
    return x.float(), y


def single(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that checks that its output has single precision, and that autocast is off."""
    assert output.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return functional.cross_entropy(output, target)


def forward(whole: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", LOW):
        output: torch.Tensor = whole(x)
    assert output.dtype == LOW, "the reference runs under autocast"
    return output


def backward(whole: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    losses = []
    for inputs, targets in zip(split_batch(x, 4), split_batch(y, 4), strict=True):
        loss, share = single(forward(whole, inputs).float(), targets), len(inputs) / len(x)
        (loss * share).backward()
        losses.append(loss.item() * share)
    return sum(losses)


def test_low_precision_tensors_in_any_output_reach_the_loss_in_single_precision() -> None:
    judged = ForwardContext(PrecisionConfig(LOW), []).output_for_loss
    low, count = torch.ones(2, dtype=LOW), torch.ones(2, dtype=torch.long)
    found = judged({"logits": low, "more": (low, [count]), "none": None})
    assert found["logits"].dtype == found["more"][0].dtype == torch.float32
    assert found["more"][1][0] is count and found["none"] is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb1p", "zbv"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_autocast_gradients_equal_those_of_one_process(agents: list[Agent], schedule: str, recompute: str) -> None:
    whole, (x, y) = net(), batch()
    loss = backward(whole, x, y)
    pipe = pipeline(net(), schedule=schedule, recompute=recompute, loss_fn=single, autocast=LOW)
    with pipe.batch(x, y) as step:
        found = step.gradients()
    assert step.loss == loss
    for name, gradient in grads(whole).items():
        assert gradient is not None and found[name].dtype == torch.float32
        assert torch.equal(found[name], gradient), name


def test_autocast_training_and_evaluation_equal_those_of_one_process(agents: list[Agent]) -> None:
    whole, pipe = net(), pipeline(net(), loss_fn=single, optimizer=SGD, autocast=LOW)
    optimizer = torch.optim.SGD(whole.parameters(), **SGD[1])
    for seed in range(4):
        optimizer.zero_grad()
        loss = backward(whole, *batch(seed))
        optimizer.step()
        assert pipe.step(*batch(seed)).loss == loss
    x, y = batch()
    with torch.no_grad():
        assert torch.equal(pipe.predict(x), torch.cat([forward(whole, part) for part in split_batch(x, 4)]))
        wanted = sum(
            single(forward(whole, a).float(), b).item() * len(a)
            for a, b in zip(split_batch(x, 4), split_batch(y, 4), strict=True)
        )
    assert pipe.evaluate(x, y)["loss"] == pytest.approx(wanted / 29, rel=1e-12)
    state: dict[str, Any] = pipe.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}, "weights stay in single precision"


def test_an_unsupported_autocast_dtype_is_refused(agents: list[Agent]) -> None:
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(PipelineError, match=f"must be torch.bfloat16, not {dtype}: "):
            pipeline(autocast=dtype)

"""Lazy modules with weights that are tied by name: they train like one process, and copies are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import step_alike
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, PipelineError, lazy, split
from rpcbench.pipeline.lazy import build_stage
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]
TIE = [("0.weight", "3.weight", "5.weight"), ("1.bias", "4.bias")]
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def row() -> list[Any]:
    """An embedding that shares its table with another layer and with the head."""
    torch.manual_seed(6)
    double = {"dtype": torch.double}
    return [
        lazy(nn.Embedding, 9, 9, **double), lazy(nn.Linear, 9, 9, **double), nn.Tanh(),
        lazy(nn.Linear, 9, 9, **double), lazy(nn.Linear, 9, 9, **double), lazy(nn.Linear, 9, 9, bias=False, **double),
    ]  # fmt: skip


def whole() -> nn.Sequential:
    made = build_stage(nn.Sequential(*row()))
    made[3].weight = made[5].weight = made[0].weight
    made[4].bias = made[1].bias
    return made


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randint(0, 9, (samples,), generator=made), torch.randint(0, 9, (samples,), generator=made)


@pytest.mark.parametrize(
    ("schedule", "balance"), [("1f1b", [3, 3]), ("gpipe", [1, 5]), ("interleaved", [1, 2, 1, 2]), ("1f1b", [5, 1])]
)
def test_lazy_modules_with_tied_weights_train_like_one_process(
    agents: list[Agent], schedule: str, balance: list[int]
) -> None:
    model, (x, y) = whole(), data(13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipe = Pipeline(split(row(), WORKERS, balance, tie=TIE), schedule, 5, functional.cross_entropy, SGD)
    assert all(not list(stage.named_tensors()) for stage in pipe.stages), "the driver has no weights"
    state = pipe.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    for _ in range(3):
        optimizer.zero_grad()
        step_alike(pipe, model, functional.cross_entropy(model(x), y), x, y)
        optimizer.step()
        state = pipe.state_dict()
        assert state.keys() == model.state_dict().keys()
        for first, *others in TIE:
            assert all(torch.equal(state[first], state[other]) for other in others)


def test_the_first_name_of_a_tie_decides_whether_the_weight_is_trained(agents: list[Agent]) -> None:
    torch.manual_seed(1)
    modules = [lazy(frozen, 4), nn.Tanh(), lazy(nn.Linear, 4, 4)]
    pipe = Pipeline(split(modules, WORKERS, [2, 1], tie=[("0.weight", "2.weight")]), "gpipe", 2, total)
    with pipe.batch(torch.ones(4, 4), torch.ones(4, 4)) as batch:
        assert batch.gradients().keys() == {"0.bias", "2.bias"}
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])


def frozen(width: int) -> nn.Module:
    made = nn.Linear(width, width)
    made.weight.requires_grad_(False)
    return made


def total(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("tie", "told"),
    [
        (["0.weight", "3.weight"], "tie must be lists of two or more names"),
        ([["0.weight"]], "tie must be lists of two or more names"),
        ([["0.weight", 3]], "tie must be lists of two or more names"),
        ([["0.weight", "7.weight"]], "no module has '7.weight'"),
        ([["0.weight", "2.weight"]], "'2.weight' cannot be tied by name: it exists already"),
        ([["0.weight", "3.weight"], ["5.weight", "0.weight"]], "'0.weight' is tied twice"),
        ([["3.weight", "3.bias"]], "'3.weight' and '3.bias': a module has to tie its own weights itself"),
    ],
)
def test_an_invalid_tie_is_refused(tie: Any, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split(row(), WORKERS, [3, 3], tie=tie)


@pytest.mark.parametrize(
    ("tie", "told"),
    [
        (
            ["0.weight", "3.bias"],
            r"'0\.weight' and '3\.bias' cannot be tied: they are float64\[9, 9\] and float64\[9\]",
        ),
        (["0.weight", "5.bias"], r"'0\.weight' and '5\.bias' cannot be tied: .*bias"),
    ],
)
def test_a_tie_of_different_weights_is_refused_when_they_are_built(
    agents: list[Agent], tie: list[str], told: str
) -> None:
    with pytest.raises(PipelineError, match=told):
        Pipeline(split(row(), WORKERS, [3, 3], tie=[tie]), "gpipe", 2, functional.cross_entropy)

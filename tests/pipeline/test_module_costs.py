"""Balance by time and memory, measured with a sample: the exact weights, and an unchanged model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcbench.pipeline import PipelineError, balance, lazy, part, split

TWO = ["worker1", "worker2"]


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now


class Takes(nn.Module):
    """A module that takes these times, in ns; its first call is a slow warm-up."""

    def __init__(self, clock: Clock, forward: int, backward: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.costs = [forward, backward]
        self.clocks = [lambda: clock]  # deepcopy does not copy functions
        self.cold = 1_000_000

    def forward(self, x: Tensor) -> Tensor:
        clock = self.clocks[0]()
        clock.now += self.costs[0] + self.cold
        self.cold = 0
        made = x * self.weight
        made.register_hook(lambda _grad: self._back(clock))
        return made

    def _back(self, clock: Clock) -> None:
        clock.now += self.costs[1]


def test_balance_by_time_uses_the_times_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(balance, "time", clock)
    model = nn.Sequential(*(Takes(clock, *cost) for cost in [(10, 20), (5, 5), (5, 10), (1, 100)]))
    stages = split(model, TWO, balance="time", sample=torch.ones(3))
    assert stages.weights == (30, 10, 15, 101)
    assert [stage.names for stage in stages.cut()] == [("0", "1", "2"), ("3",)]
    assert [stage.names for stage in stages.cut([0, 1, 0, 1])] == [("0",), ("1",), ("2",), ("3",)]


class Both(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu_(x), ids


def test_balance_by_memory_counts_weights_gradients_and_saved_activations() -> None:
    frozen = nn.Linear(100, 10, bias=False).requires_grad_(False)
    model = [
        part(nn.Linear(4, 100, bias=False), takes=("x",), gives=("h",)),
        part(nn.Tanh(), takes=("h",), gives=("h",)),
        part(Both(), takes=("h", "ids"), gives=("h", "ids")),
        part(frozen, takes=("h",)),
    ]
    sample = {"x": torch.randn(1000, 4)[:8], "ids": torch.arange(8)}
    stages = split(model, TWO, balance="memory", sample=sample, inputs=("x", "ids"))
    one = 4 * 8 * 100  # bytes of a float, samples, features
    assert stages.weights == (2 * 4 * 400 + 4 * 8 * 4, one, one, 4 * 1000)


def test_measuring_does_not_change_the_model_or_the_random_state() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    for kind in ("time", "memory"):
        split(model, TWO, balance=kind, sample=torch.randn(8, 4, generator=torch.Generator()))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        (nn.Sequential(nn.Tanh(), nn.Tanh()), {"balance": "time"}, "give it a batch, as sample="),
        ([nn.Tanh(), lazy(nn.Tanh)], {}, r"'1' is built on its worker.*balance=\[2, 1\]"),
        ([nn.Tanh(), lazy(nn.Tanh)], {"balance": "memory", "sample": torch.ones(2)}, "'1' is built on its worker"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused(model: Any, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split(model, TWO, **arguments)

"""The schedule "async", with stashed weights: equal to one process with the same operations and stale weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from worlds import nothing_left, world

from rpcbench.pipeline import Pipeline, PipelineError, schedule, split
from rpcbench.pipeline.microbatch import cut
from rpcbench.pipeline.ops import Kind, Op, parse, validate
from rpcbench.pipeline.schedules import asynchronous
from rpcbench.pipeline.simulate import simulate
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2", "worker3"]
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (torch.optim.Adam, {"lr": 0.01})


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 4) as made:
        yield made
        nothing_left(made)


def stages() -> list[nn.Sequential]:
    torch.manual_seed(3)
    sizes = [(6, 8), (8, 8), (8, 4)]
    return [nn.Sequential(nn.Linear(*size), nn.Tanh()).double() for size in sizes]


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.rand(samples, 6, dtype=torch.double, generator=made), torch.randint(0, 4, (samples,), generator=made)


class Alone:
    """The same operations in one process; each forward keeps the weights that it used."""

    def __init__(self, optimizer: Any) -> None:
        self.stages = stages()
        kind, kwargs = optimizer
        self.optimizers = [kind(stage.parameters(), **kwargs) for stage in self.stages]

    def step(self, ops: list[Op], x: list[torch.Tensor], y: list[torch.Tensor]) -> dict[int, float]:
        given: dict[tuple[int, int], Any] = {}
        back: dict[tuple[int, int], torch.Tensor] = {}
        gradients: dict[tuple[int, int], Any] = defaultdict(list)
        losses = {}
        for op in ops:
            s, m, at = op.stage, op.microbatch, (op.stage, op.microbatch)
            if op.kind is Kind.FORWARD:
                taken = (given[s - 1, m][2].detach() if s else x[m]).requires_grad_()
                used = {name: p.detach().clone().requires_grad_() for name, p in self.stages[s].named_parameters()}
                made = functional_call(self.stages[s], used, (taken,))
                if s == 2:
                    made = functional.cross_entropy(made, y[m])
                    losses[m] = made.item()
                given[at] = taken, used, made
            elif op.kind is Kind.BACKWARD:
                taken, used, made = given[at]
                back[at], *gradients[at] = torch.autograd.grad(made, [taken, *used.values()], back.get((s + 1, m)))
            else:
                for parameter, gradient in zip(self.stages[s].parameters(), gradients[at], strict=True):
                    parameter.grad = gradient
                self.optimizers[s].step()
        return losses


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_async_training_equals_one_process_with_the_same_stale_weights(
    agents: list[Agent], optimizer: Any, recompute: str
) -> None:
    alone, (x, y) = Alone(optimizer), data(29)
    pipe = Pipeline(
        split([layer for stage in stages() for layer in stage], WORKERS, balance=[2, 2, 2]),
        "async", 5, functional.cross_entropy, optimizer, recompute=recompute,
    )  # fmt: skip
    order = [span.op for span in simulate(asynchronous(3, 5)).spans]  # one possible order: all give the same result
    parts = cut(x, 5), cut(y, 5)
    for _ in range(3):
        result = pipe.step(x, y)
        losses = alone.step(order, *parts)
        assert result.loss == pytest.approx(
            sum(losses[m] * len(part) / 29 for m, part in enumerate(parts[0])), rel=1e-12
        )
    state = pipe.state_dict()
    whole = nn.Sequential(*(layer for stage in alone.stages for layer in stage)).state_dict()
    assert state.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


def test_async_uses_stale_weights_only_with_more_than_one_micro_batch(agents: list[Agent]) -> None:
    """With a single micro-batch, a step equals one of any other schedule."""
    made = [
        Pipeline(split([layer for stage in stages() for layer in stage], WORKERS, balance=[2, 2, 2]), name, number,
                 functional.cross_entropy, SGD)
        for name, number in (("async", 1), ("1f1b", 1), ("async", 4))
    ]  # fmt: skip
    first, second, third = (_trained(pipe) for pipe in made)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.allclose(first[name], third[name]) for name in first)


def _trained(pipe: Pipeline) -> dict[str, torch.Tensor]:
    pipe.step(*data(12))
    return pipe.state_dict()


def test_async_is_1f1b_with_an_update_after_each_backward() -> None:
    assert str(schedule("async", 2, 2)) == "0F0 0F1 0B0 0U0 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1"
    assert simulate(asynchronous(4, 8)).idle == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        ("0F0 0U0 0B0", r"ops\[0\]\[1\] = 0U0 cannot be: the gradients"),
        ("0F0 0I0 0U0 0W0", r"ops\[0\]\[2\] = 0U0 cannot be: the gradients"),
        ("0F0 0B0 0U0 0F1 0B1", r"after ops\[0\]\[4\] = 0B1 comes no update"),
    ],
)
def test_a_schedule_with_a_misplaced_or_missing_update_is_refused(ops: str, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        validate(parse(ops), 1, 2 if "F1" in ops else 1)


def test_an_update_may_follow_the_weight_half_of_a_backward() -> None:
    validate(parse("0F0 0I0 0W0 0U0"), 1, 1)


def test_async_needs_an_optimizer(agents: list[Agent]) -> None:
    layers = [layer for stage in stages() for layer in stage]
    with pytest.raises(PipelineError, match="updates within a step needs an optimizer"):
        Pipeline(split(layers, WORKERS), "async", 4, functional.cross_entropy)


class Breaks(nn.Module):
    """Raises for negative samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ArithmeticError("negative")
        return x


def test_after_a_failed_async_step_steps_are_refused_until_a_state_is_loaded(agents: list[Agent]) -> None:
    layers = [Breaks(), *stages()]
    pipe = Pipeline(split(layers, WORKERS, balance=[2, 1, 1]), "async", 4, functional.cross_entropy, SGD)
    x, y = data(12)
    before = pipe.state_dict()
    pipe.step(x, y)
    with pytest.raises(ArithmeticError):
        pipe.step(torch.cat([x[:9], -x[9:]]), y)
    with pytest.raises(PipelineError, match=r"stages 0, 1 and 2 hold an unknown mixture of optimizer steps\. Before"):
        pipe.step(x, y)
    pipe.load_state_dict(before)
    assert pipe.step(x, y).loss > 0 and pipe.optimizer_step == 1

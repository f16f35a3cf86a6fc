"""Modules that are built on their workers: equal to those built on the driver, which never holds a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import grads, same
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, PipelineError, lazy, part, split
from rpcbench.pipeline.lazy import Lazy, build_stage
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]


_made: list[int] = []


class Noted(nn.Linear):
    """Records each construction; the agents of a test are in one process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _made.append(self.out_features)


def row() -> list[Any]:
    torch.manual_seed(7)
    first = lazy(Noted, 6, 8, dtype=torch.double)
    return [first, nn.Tanh(), part(lazy(Noted, 8, 8, dtype=torch.double)), lazy(Noted, 8, 4, dtype=torch.double)]


def whole() -> nn.Sequential:
    modules = [each.module if hasattr(each, "takes") else each for each in row()]
    return build_stage(nn.Sequential(*modules))


@pytest.mark.parametrize(("schedule", "balance"), [("1f1b", [2, 2]), ("1f1b", [1, 3]), ("zbv", [1, 1, 1, 1])])
def test_modules_built_on_workers_equal_those_built_on_the_driver(
    agents: list[Agent], schedule: str, balance: list[int]
) -> None:
    model, x, y = whole(), torch.rand(13, 6, dtype=torch.double), torch.randint(0, 4, (13,))
    functional.cross_entropy(model(x), y).backward()
    stages = split(row(), WORKERS, balance=balance)
    _made.clear()
    torch.manual_seed(99)
    pipe = Pipeline(stages, schedule, 5, functional.cross_entropy)
    assert sorted(_made) == [4, 8, 8], "each is built once, and not before"
    assert all(not list(stage.named_tensors()) for stage in pipe.stages), "the driver has no weights"
    state = pipe.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(model))


def test_building_is_repeatable_and_does_not_change_the_random_state() -> None:
    module = lazy(nn.Linear, 3, 3)
    state = torch.get_rng_state()
    assert torch.equal(module.build_module().weight, module.build_module().weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(module.build_module().weight, lazy(nn.Linear, 3, 3).build_module().weight)


def test_invalid_uses_of_lazy_modules_are_refused(agents: list[Agent]) -> None:
    one = lazy(nn.Linear, 4, 4)
    with pytest.raises(PipelineError, match=r"'1' and '0' are the same Lazy\(Linear, 4, 4\)"):
        split([one, one], WORKERS, balance=[1, 1])
    with pytest.raises(PipelineError, match="only modules of the row itself"):
        split([nn.Tanh(), Inside(one)], WORKERS, balance=[1, 1])
    with pytest.raises(PipelineError, match=r"made Tensor, not a torch\.nn\.Module"):
        Pipeline(split([nn.Tanh(), lazy(torch.ones, 3)], WORKERS, balance=[1, 1]))
    with pytest.raises(TypeError, match="unexpected keyword"):
        Pipeline(split([nn.Tanh(), lazy(nn.Linear, 4, 4, size=3)], WORKERS, balance=[1, 1]))


class Inside(nn.Module):
    def __init__(self, inner: Lazy) -> None:
        super().__init__()
        self.inner = inner

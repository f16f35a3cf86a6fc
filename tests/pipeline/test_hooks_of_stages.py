"""Hooks within stages run once for each micro-batch, in every schedule, and the gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import small
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import Pipeline, lazy, split
from rpcbench.runtime.agent import Agent

ran: dict[str, int] = {}
"""Kind of hook → its runs; the workers of these tests are in this process."""


class Hooked(nn.Module):
    """A layer with hooks that change gradients: of its output, before its node, and behind a node with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        made: Any = self.linear(value)
        if made.requires_grad:  # not in the first forward of a stage that is recomputed
            made.register_hook(lambda grad: _counted("tensor", grad * 2))
            made.grad_fn.register_prehook(lambda up: (_counted("before node", up[0] * 3),))
        inner: Any = functional.linear(torch.tanh(made), self.linear.weight)
        if made.requires_grad:
            inner.grad_fn.register_hook(lambda down, _: _counted("behind node", _halved(down)))
        return torch.tanh(inner)


def _counted(kind: str, grads: Any) -> Any:
    ran[kind] = ran.get(kind, 0) + 1
    return grads


def _halved(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple([grad if grad is None else grad / 2 for grad in grads])


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), Hooked(), Hooked(), nn.Tanh(), Hooked(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("schedule", small.STAGES)
def test_hooks_run_once_for_each_micro_batch(agents: list[Agent], schedule: str, recompute: str) -> None:
    net, (x, y) = model(), small.data(12)
    stages = split(copy.deepcopy(net), small.WORKERS, {1: [3, 3], 2: [1, 2, 1, 2]}[small.STAGES[schedule]])
    pipe = Pipeline(stages, schedule, 4, functional.cross_entropy, small.SGD, recompute=recompute)
    ran.clear()
    loss = functional.cross_entropy(net(x), y)
    small.step_alike(pipe, net, loss, x, y)
    alone, microbatches = 3, 4 * 3
    assert ran == dict.fromkeys(("tensor", "before node", "behind node"), alone + microbatches)


class WritingHook(nn.Linear):
    """A layer that registers a hook for the writing of its weight's gradient, where it is made."""

    def __init__(self, kind: str) -> None:
        super().__init__(6, 4)
        weight: Any = self.weight
        if kind == "post-accumulate":
            weight.register_post_accumulate_grad_hook(lambda param: None)
        elif kind == "prehook":
            self.node = get_gradient_edge(weight).node  # keeps it, and so its hooks, alive
            self.node.register_prehook(lambda up: None)
        else:
            self.node = get_gradient_edge(weight).node
            self.node.register_hook(lambda down, up: None)


@pytest.mark.parametrize("kind", ["post-accumulate", "prehook", "hook"])
def test_a_stage_with_a_hook_for_the_writing_of_gradients_is_refused(agents: list[Agent], kind: str) -> None:
    stages = split([nn.Linear(6, 6), lazy(WritingHook, kind)], small.WORKERS, [1, 1])
    with pytest.raises(PipelineError, match=r"parameter '0.weight' of stage 1 .* writing of .grad"):
        Pipeline(stages, "1f1b", 4, functional.cross_entropy, small.SGD)

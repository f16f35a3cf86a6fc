"""The context of a step is released on all members of it, and on none before that member has applied the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import nn
from worlds import nothing_left, world

from rpcbench.pipeline import Pipeline, split
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

_first = threading.Event()


def look(number: int) -> int:
    return number


class Asks(nn.Module):
    """A stage that calls a worker outside the pipeline, as it would call a parameter server."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current.current_agent().call("worker3", look, (1,)).wait()
        return x


class InTurn(torch.optim.SGD):
    """Steps on the second worker only after the first one has released its part of the context."""

    def step(self, closure: Any = None) -> Any:
        agent: Agent = current.current_agent()
        if agent.name == "worker2":
            assert _first.wait(20)
            assert agent.call("worker3", look, (1,)).wait() == 1  # after the messages of that release
        return super().step(closure)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if current.current_agent().name == "worker2":
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 4) as made:
        yield made


def pipeline(net: nn.Sequential, workers: list[str], optimizer: type[torch.optim.Optimizer]) -> Pipeline:
    stages = split(net, workers, balance=[len(net) // 2, len(net) - len(net) // 2])
    return Pipeline(stages, "1f1b", 2, nn.functional.cross_entropy, (optimizer, {"lr": 0.1}))


def test_a_worker_that_has_applied_does_not_release_the_context_on_others(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages have called a third worker, which would pass a release on."""
    recorder = agents[1].calls.values.recorder
    assert recorder is not None
    _first.clear()
    reply = Agent.reply

    def told(self: Agent, to: int, call: int, answer: Any) -> None:
        reply(self, to, call, answer)
        if self is agents[1]:
            _first.set()

    net = nn.Sequential(nn.Linear(6, 8), Asks(), nn.Linear(8, 4), Asks()).double()
    pipe = pipeline(net, ["worker1", "worker2"], InTurn)
    with pipe.batch(*small.data(4)) as batch:
        monkeypatch.setattr(Agent, "reply", told)
        batch.apply(last=True)
    monkeypatch.undo()
    assert pipe.optimizer_step == 1
    del pipe, batch
    nothing_left(agents)


@pytest.mark.parametrize("workers", [["notebook", "worker2"], ["worker1", "worker2"]])
def test_a_failed_optimizer_step_leaves_nothing_behind(agents: list[Agent], workers: list[str]) -> None:
    pipe = pipeline(small.model(), workers, Fails)
    with pytest.raises(ArithmeticError, match="no step"):
        pipe.step(*small.data(4))
    del pipe
    nothing_left(agents)


@pytest.mark.parametrize("workers", [["notebook", "worker2"], ["worker1", "worker2"]])
def test_a_step_with_calls_outside_the_pipeline_leaves_nothing_behind(agents: list[Agent], workers: list[str]) -> None:
    """No worker releases a context by itself if it does not know all members of it; the driver releases it."""
    net = nn.Sequential(nn.Linear(6, 8), Asks(), nn.Linear(8, 4), Asks()).double()
    pipe = pipeline(net, workers, torch.optim.SGD)
    assert pipe.step(*small.data(4)).loss > 0 and pipe.optimizer_step == 1
    del pipe
    nothing_left(agents)

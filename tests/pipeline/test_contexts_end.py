"""A step's context ends on all who had part in it, and on none before it has applied."""

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
    """A stage that asks a worker outside of the pipeline something, as it would a parameter server."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current.current().call("worker3", look, (1,)).wait()
        return x


class InTurn(torch.optim.SGD):
    """The second worker's steps when the first one's has let go of all that it lets go of."""

    def step(self, closure: Any = None) -> Any:
        agent: Agent = current.current()
        if agent.name == "worker2":
            assert _first.wait(20)
            assert agent.call("worker3", look, (1,)).wait() == 1  # behind what that tells
        return super().step(closure)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if current.current().name == "worker2":
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 4) as made:
        yield made


def pipeline(net: nn.Sequential, workers: list[str], optimizer: type[torch.optim.Optimizer]) -> Pipeline:
    stages = split(net, workers, balance=[len(net) // 2, len(net) - len(net) // 2])
    return Pipeline(stages, "1f1b", 2, nn.functional.cross_entropy, (optimizer, {"lr": 0.1}))


def test_who_has_applied_ends_no_context_of_those_who_have_not(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though both stages have asked a third worker, which would pass the word on."""
    recorder = agents[1].values.recorder
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
def test_nothing_is_left_where_an_optimizer_fails(agents: list[Agent], workers: list[str]) -> None:
    pipe = pipeline(small.model(), workers, Fails)
    with pytest.raises(ArithmeticError, match="no step"):
        pipe.step(*small.data(4))
    del pipe
    nothing_left(agents)


@pytest.mark.parametrize("workers", [["notebook", "worker2"], ["worker1", "worker2"]])
def test_nothing_is_left_of_a_step_that_others_had_part_in(agents: list[Agent], workers: list[str]) -> None:
    """No worker lets go by itself of a context that it does not know all of; the driver tells it."""
    net = nn.Sequential(nn.Linear(6, 8), Asks(), nn.Linear(8, 4), Asks()).double()
    pipe = pipeline(net, workers, torch.optim.SGD)
    assert pipe.step(*small.data(4)).loss > 0 and pipe.optimizer_step == 1
    del pipe
    nothing_left(agents)

"""What panels are told of a context: each stage of its life, on each worker, as it comes; nothing if nobody listens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worlds import nothing_left, until, world

from rpcbench import autograd
from rpcbench.agent.core import Agent
from rpcbench.protocol import records
from rpcbench.rpc import rpc_sync

RECORDED_HERE = ["ContextCreated", "SendRecorded", "RecvRecorded"]
RECORDED_THERE = ["ContextCreated", "RecvRecorded", "SendRecorded"]
RAN_THERE = ["GradientsArrived", "GradientsAccumulated", "GradientsSent", "WalkFinished", "ContextReleased"]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made
        nothing_left(made)


def listen(agent: Agent) -> list[str]:
    """What is told of contexts from now on."""
    told: list[str] = []

    def note(kind: str, table: str, key: str, row: object) -> None:
        if table == "contexts":
            told.append(kind)

    agent.machine.ask(lambda node: node.listen(note))
    return told


def work(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def one_step() -> None:
    with autograd.context() as context:
        loss = rpc_sync("worker1", work, (torch.ones(3, requires_grad=True),)).sum()
        autograd.backward(context, [loss])


def test_every_stage_is_told_in_order(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    one_step()
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[:5] == [*RECORDED_HERE, "WalkBegan", "GradientsSent"]
    assert here[-4:] == ["GradientsArrived", "GradientsAccumulated", "WalkFinished", "ContextReleased"]
    assert there == RECORDED_THERE + RAN_THERE


def test_a_part_that_has_run_is_told_while_another_waits(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        both = [rpc_sync("worker1", work, (x * factor,)) for factor in (1, 2)]
        autograd.backward(context, [torch.cat(both).sum()])
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    ran = [kind for kind in there[len(RECORDED_THERE) :] if kind in ("GradientsRan", "GradientsSent", "WalkFinished")]
    assert ran == ["GradientsSent", "GradientsRan", "GradientsSent", "WalkFinished"]
    assert here[-2:] == ["WalkFinished", "ContextReleased"]


def test_discovery_is_told_where_messages_do_not_say_enough(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_BEHIND", 0)
    here, there = map(listen, agents)
    one_step()
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[3:8] == ["WalkMoved", "SendDiscovered", "WalkMoved", "WalkMoved", "GradientsSent"]
    assert there == [*RECORDED_THERE, "SendDiscovered", "WalkMoved", "WalkMoved", *RAN_THERE]


def test_a_pass_that_fails_is_told_on_both_sides(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)  # type: ignore[arg-type, return-value]
    with autograd.context() as context, pytest.raises(ZeroDivisionError):
        autograd.backward(context, [rpc_sync("worker1", work, (x,)).sum()])
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[-2:] == ["WalkFailed", "ContextReleased"]
    assert "WalkFailed" in there

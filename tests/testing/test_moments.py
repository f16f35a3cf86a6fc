"""Whenever a stepper holds the world, the data of the panels equals the tables of the members."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import msgpack
from worlds import nothing_left, until, world

from rpcbench import autograd as dist_autograd
from rpcbench.base.errors import RpcError
from rpcbench.base.futures import release_slot
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.views import rref_view
from rpcbench.testing import Held, Stepper

MOMENTS = 20


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=0)


def there_and_on(x: torch.Tensor, to: str) -> Any:
    return rpc_sync(to, torch.mul, (x, 2.0), timeout=0) * x


class Program:
    """A program as in a notebook: it shares RRefs and runs backward passes, several of each at once."""

    def __init__(self, agent: Agent, seed: int) -> None:
        self._agent = agent
        self._random_of = random.Random(seed)
        self._kept: list[RRef[Any]] = []
        self.running = 0
        self.passes = self.shares = 0

    def more(self) -> None:
        while self.running < 3:
            self.running += 1
            a, b = self._random_of.sample(["worker1", "worker2"], 2)
            deed = self._random_of.choice([self._share, self._backward])
            self._agent.submit(lambda deed=deed, a=a, b=b: self._do(deed, a, b))

    def _do(self, deed: Any, a: str, b: str) -> None:
        with contextlib.suppress(RpcError):  # a body that was dropped
            deed(a, b)
        self.running -= 1

    def _share(self, a: str, b: str) -> None:
        rref = remote(a, torch.ones, (2,), timeout=0)
        rpc_sync(b, fetch, (rref,), timeout=0)
        self._kept = [*self._kept[-3:], rref]
        self.shares += 1

    def _backward(self, a: str, b: str) -> None:
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc_sync(a, there_and_on, (x, b), timeout=0).sum()])
            assert dist_autograd.get_gradients(context)[x].tolist() == [4.0, 4.0]
        self.passes += 1

    def end(self) -> None:
        with release_slot():
            until(lambda: not self.running, "the end of the program")
        self._kept.clear()


Tables = dict[int, dict[str, Any]]


def truth(agents: list[Agent]) -> Tables:
    """The tables of the members, as they would arrive over the wire."""
    return filled({agent.id: msgpack.decode(msgpack.encode(agent.tables())) for agent in agents})


def filled(tables: Tables) -> Tables:
    """Leave out the tables without rows."""
    return {id_: {name: rows for name, rows in own.items() if rows} for id_, own in tables.items()}


def gathered(world: dict[int, dict[str, Any]]) -> Tables:
    return filled({id_: member["tables"] for id_, member in world.items()})


def agreement(collector: Collector, agents: list[Agent], moment: int) -> tuple[dict[int, dict[str, Any]], Tables]:
    """Return the data of the panels and the tables once they are equal: from one look, as the program may go on."""
    looks: list[tuple[dict[int, dict[str, Any]], Tables]] = []

    def same() -> bool:
        looks[:] = [(collector.world(), truth(agents))]
        return gathered(looks[0][0]) == looks[0][1]

    until(same, f"panels and tables to agree at {moment}")
    return looks[0]


def something(stepper: Stepper) -> list[Held]:
    """Return the held messages; if the program waits for dropped ones, let time pass."""

    def there() -> bool:
        with contextlib.suppress(RpcError):
            return bool(stepper.wait(timeout=0.2))
        stepper.pass_time(0.5)
        return False

    until(there, "a message")
    return stepper.held


def some_steps(stepper: Stepper, program: Program, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 8)):
        program.more()
        row = dice.choice(something(stepper))
        deed = dice.choices([stepper.deliver, stepper.delay, stepper.drop], [10, 2, 1])[0]
        with contextlib.suppress(ValueError):  # the message is no longer held
            deed(row.n)
        if dice.random() < 0.2:
            stepper.pass_time(0.5)


@pytest.mark.parametrize("seed", range(2))
def test_panels_show_the_tables_of_all_members_at_each_moment(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with world(tmp_path, 3) as agents:
        collector = agents[0].part(Collector)
        close = collector.subscribe(lambda: None)
        stepper, program = Stepper.on(), Program(agents[0], seed)
        seen: list[tuple[int, int]] = []
        for moment in range(MOMENTS):
            some_steps(stepper, program, dice)
            world_now, tables = agreement(collector, agents, moment)
            assert all((member["state"], member["left_out"]) == ("up", 0) for member in world_now.values())
            tables_now = {id_: {**member, "tables": tables[id_]} for id_, member in world_now.items()}
            assert rref_view(world_now) == rref_view(tables_now)
            assert autograd_view(world_now) == autograd_view(tables_now)
            for agent in agents:
                agent.machine.read_node(lambda node: node.check_tables())
            seen.append((len(rref_view(world_now)["forks"]), len(autograd_view(world_now)["contexts"])))
        stepper.go()
        program.end()
        assert max(forks for forks, _ in seen) > 1 and max(contexts for _, contexts in seen) > 0
        close()
        nothing_left(agents)

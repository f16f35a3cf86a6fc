"""Worlds with lost, late, repeated and held messages: programs notice only the time that it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import config, until, until_quiet

from rpcbench.base.errors import ConnectionLostError, RpcTimeoutError
from rpcbench.rpc import RRef, remote
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.testing import Faults, install

RETRY = 0.1
_kept: list[RRef[Any]] = []


@contextlib.contextmanager
def disturbed(directory: Path, *links: Faults) -> Iterator[list[Agent]]:
    """Start agents whose messages pass through these links; the first agent is the current one."""
    agents: list[Agent] = []
    try:
        for number, link in enumerate(links):
            agents.append(start_agent(config(directory, number), link))
        until(lambda: all(len(agent.members()) == len(links) for agent in agents))
        with current.use_agent(agents[0]):
            yield agents
    finally:
        for agent in reversed(agents):
            agent.stop()


def keep(rref: RRef[Any]) -> None:
    _kept.append(rref)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def shared(agent: Agent, number: int) -> Any:
    """Return a value of worker1 that worker2 has fetched; None if a body was lost."""
    rref = remote("worker1", divmod, (number, 5))
    with contextlib.suppress(ConnectionLostError):
        return agent.call(2, fetch, (rref,)).wait()


@pytest.mark.parametrize("seed", range(2))
def test_a_world_with_lost_repeated_and_late_messages_gives_right_results(tmp_path: Path, seed: int) -> None:
    links = [Faults(seed, drop=0.1, duplicate=0.2, delay=0.02, retry_seconds=RETRY) for _ in range(3)]
    with disturbed(tmp_path, *links) as agents:
        answers = [shared(agents[0], number) for number in range(4)]
        while not any(answers):  # half of them lose a body
            answers.append(shared(agents[0], len(answers)))
        for link in links:
            link.heal()
        assert any(line.endswith("lost") for link in links for line in link.history)
        assert all(answer in (None, divmod(number, 5)) for number, answer in enumerate(answers))
        until_quiet(agents)


@pytest.mark.parametrize("kind", ["ForkRequest", "ForkAccept", "ChildAccept", "UserDelete"])
def test_a_shared_rref_survives_the_loss_of_any_control_message(tmp_path: Path, kind: str) -> None:
    links = [Faults(retry_seconds=RETRY) for _ in range(3)]
    for link in links:
        link.drop(kind, times=2)
    with disturbed(tmp_path, *links) as agents:
        rref = remote("worker1", divmod, (17, 5))
        future = agents[0].call(2, fetch, (rref,))
        del rref
        assert future.wait() == (3, 2)
        until_quiet(agents)
        lost = [line for link in links for line in link.history if line.endswith(": lost")]
        assert len(lost) >= 2 and all(f" {kind}(" in line for line in lost)


def test_a_value_lives_and_its_released_user_stays_while_the_request_of_a_child_is_held(tmp_path: Path) -> None:
    links = [Faults(retry_seconds=RETRY) for _ in range(3)]
    links[2].hold("ForkRequest")
    with disturbed(tmp_path, *links) as agents:
        rref = remote("worker1", divmod, (17, 5))
        rref.to_here()
        future = agents[0].call(2, fetch, (rref,))
        del rref
        until(lambda: bool(links[2].held), "the request")
        until(lambda: all(row["state"] == "deleting" for row in agents[0].tables()["users"].values()), "the drop")
        assert len(agents[1].tables()["owned"]) == 1 and not future.done()
        links[2].release()
        assert future.wait() == (3, 2)
        until_quiet(agents)


def test_a_refused_call_fails_at_the_caller_and_leaves_nothing(tmp_path: Path) -> None:
    here = Faults(retry_seconds=RETRY)
    here.refuse("Call")
    with disturbed(tmp_path, here, Faults(retry_seconds=RETRY)) as agents:
        rref = RRef("mine")
        with pytest.raises(ConnectionLostError, match="on purpose") as refused:
            agents[0].call(1, fetch, (rref,)).wait()
        assert not refused.value.maybe_executed
        del rref, refused
        assert any(line.endswith(": refused") for line in here.history)
        until_quiet(agents)


def test_a_lost_call_without_a_deadline_fails(tmp_path: Path) -> None:
    here, there = Faults(retry_seconds=RETRY), Faults(retry_seconds=RETRY)
    with disturbed(tmp_path, here, there) as agents:
        here.drop("Call")
        with pytest.raises(ConnectionLostError, match=r"divmod .* worker1"):
            agents[0].call(1, divmod, (1, 1), timeout=0).wait()
        here.heal()
        there.drop("Result")
        with pytest.raises(ConnectionLostError, match="answer"):
            agents[0].call(1, divmod, (1, 1), timeout=0).wait()
        until_quiet(agents)


def test_members_that_were_cut_off_work_together_again(tmp_path: Path) -> None:
    links = [Faults(retry_seconds=RETRY) for _ in range(2)]
    with disturbed(tmp_path, *links) as agents:
        rref = remote("worker1", divmod, (17, 5))
        assert rref.to_here() == (3, 2)
        links[0].cut(1)
        links[1].cut(0)
        with pytest.raises((RpcTimeoutError, ConnectionLostError)):
            agents[0].call(1, divmod, (1, 1), timeout=0.2).wait()
        del rref
        links[0].heal()
        links[1].heal()
        assert agents[0].call(1, divmod, (17, 5)).wait() == (3, 2)
        until_quiet(agents)


def test_a_member_retransmits_its_last_messages_before_it_leaves(tmp_path: Path) -> None:
    links = [Faults(retry_seconds=RETRY) for _ in range(2)]
    with disturbed(tmp_path, *links) as agents:
        mine = RRef("mine")
        agents[0].call(1, keep, (mine,)).wait()
        links[1].drop("UserDelete", times=3)
        _kept.clear()
        until(lambda: not agents[1].tables()["users"], "the drop")
        agents[1].shutdown()
        assert any("from 1 " in line and "UserDelete" in line for line in links[0].history)


def test_faults_can_be_installed_in_a_running_world(tmp_path: Path) -> None:
    with disturbed(tmp_path, Faults(), Faults()) as agents:
        faults = install(Faults(retry_seconds=10 * RETRY), agents[1])
        faults.delay("Result", 1.5)
        with pytest.raises(RpcTimeoutError):
            agents[0].call(1, divmod, (1, 1), timeout=0.05).wait()
        assert agents[0].call(1, divmod, (17, 5)).wait() == (3, 2)
        assert any("Result" in line and line.endswith("late") for line in faults.history)
        until_quiet(agents)


# -- the link alone
def fate(seed: int) -> list[str]:
    link = Faults(seed, drop=0.3, duplicate=0.3)
    sent: list[int] = []
    link.attach_callbacks(lambda to, seq, message, may_wait: sent.append(seq), lambda *arrived: None)
    for seq in range(50):
        link.handle_outgoing(1, seq, Faults, False)
    return [line.partition("#")[2] for line in link.history] + [str(sent)]


def test_faults_with_one_seed_are_reproducible() -> None:
    assert fate(3) == fate(3) != fate(4)


def test_an_unknown_kind_of_message_is_refused() -> None:
    with pytest.raises(ValueError, match="ForkRequest"):
        Faults().drop("ForkRequests")

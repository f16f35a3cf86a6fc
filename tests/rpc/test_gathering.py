"""Workers that exchange objects and wait for each other, also while members join and leave; workers are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Answer
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from worlds import config, until, world

import rpcbench.rpc as rpc
from rpcbench.base.errors import RpcTimeoutError, ShutdownError, WorkerLostError
from rpcbench.rpc import api
from rpcbench.rpc.gather import AllGatherStates, _GatherRounds, _send_result
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

EVERYONE = ("notebook", "worker1", "worker2")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


class As:
    """Runs functions as a worker, each on a thread of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16)

    def __call__(self, agent: Agent, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Answer[Any]:
        def run() -> Any:
            with current.use_agent(agent):
                return function(*args, **kwargs)

        return self._threads.submit(run)


@pytest.fixture
def on() -> Iterator[As]:
    made = As()
    yield made
    made._threads.shutdown(wait=False)  # threads that still wait end when the agents stop


def open_rounds(agent: Agent) -> int:
    gathering = agent.part(_GatherRounds)
    return len(gathering._led) + len(gathering._followed)


def has_given(follower: Agent, leader: Agent) -> bool:
    return open_rounds(leader) == 1 and follower.machine.read_node(lambda node: not node.calls.outgoing)


def test_all_gather_returns_the_objects_of_all_members(agents: list[Agent], on: As) -> None:
    for number in range(5):
        answers = [on(agent, api._all_gather, (agent.id, number)) for agent in agents]
        expected = {name: (id_, number) for id_, name in enumerate(EVERYONE)}
        assert [answer.result(20) for answer in answers] == [expected] * 3
    assert [open_rounds(agent) for agent in agents] == [0, 0, 0]


def test_wait_all_workers_returns_only_after_the_last_member_has_arrived(agents: list[Agent], on: As) -> None:
    early = [on(agent, api._wait_all_workers) for agent in agents[:2]]
    led = agents[0].part(_GatherRounds)._led
    until(lambda: [len(states.gathered_objects) for states in list(led)] == [2], "both to have given")
    assert not any(answer.done() for answer in early)
    on(agents[2], api._wait_all_workers).result(20)
    assert [answer.result(20) for answer in early] == [None, None]


def test_barriers_of_different_groups_and_threads_are_separate(agents: list[Agent], on: As) -> None:
    pair, other = ["worker2", "worker1"], ["notebook", "worker2"]
    answers = [on(agent, api._barrier, pair) for agent in agents[1:] for _ in range(3)]
    answers += [on(agent, api._barrier, other) for agent in (agents[0], agents[2]) for _ in range(3)]
    answers += [on(agents[0], api._barrier, ["notebook"])]
    assert [answer.result(20) for answer in answers] == [None] * 13


def test_a_later_member_takes_part_in_the_next_all_gather(agents: list[Agent], on: As, tmp_path: Path) -> None:
    [answer.result(20) for answer in [on(agent, api._all_gather, 0) for agent in agents]]
    late = start_agent(config(tmp_path, 3))
    try:
        until(lambda: all(len(agent.members()) == 4 for agent in agents))
        answers = [on(agent, api._all_gather, agent.id) for agent in [late, *agents]]
        assert [answer.result(20) for answer in answers] == [{**dict(zip(EVERYONE, range(3))), "worker3": 3}] * 4  # noqa: B905
    finally:
        late.stop()


def test_all_gather_does_not_wait_for_a_member_that_leaves(agents: list[Agent], on: As) -> None:
    answers = [on(agent, api._all_gather, agent.id) for agent in agents[:2]]
    until(lambda: open_rounds(agents[1]) == 1)
    agents[2].shutdown(graceful=False)
    assert [answer.result(20) for answer in answers] == [{"notebook": 0, "worker1": 1}] * 2


@pytest.mark.parametrize("gone", [1, 2])  # the leader of the round, and a follower
def test_all_gather_of_a_group_fails_if_a_member_of_the_group_leaves(agents: list[Agent], on: As, gone: int) -> None:
    stays = agents[3 - gone]
    group = [EVERYONE[1], EVERYONE[2]]
    if gone == 1:  # the leader of the round: it is there while the other one sends its object
        answer = on(stays, api._all_gather, 0, group)
        until(lambda: has_given(stays, agents[gone]))
    else:
        answer = on(stays, api._all_gather, 0, group)
        until(lambda: open_rounds(stays) == 1)
    agents[gone].shutdown(graceful=False)
    with pytest.raises(WorkerLostError, match=EVERYONE[gone]):
        answer.result(20)
    assert open_rounds(stays) == 0


def test_all_gather_waits_for_a_suspected_member(agents: list[Agent], on: As) -> None:
    answers = [on(agent, api._all_gather, agent.id, EVERYONE) for agent in agents[:2]]
    until(lambda: open_rounds(agents[0]) == open_rounds(agents[1]) == 1)
    kinds: list[str] = []
    agents[0].on_member(lambda kind, who, reason: kinds.append(kind))
    for kind in ("suspect", "recovered"):
        agents[0].links.members.suspicion_changed(kind, 2, "silent")
    until(lambda: kinds == ["suspect", "recovered"])
    answers.append(on(agents[2], api._all_gather, 2, EVERYONE))
    assert [answer.result(20) for answer in answers] == [dict(zip(EVERYONE, range(3), strict=True))] * 3


def test_the_leader_ignores_a_follower_that_has_left_before_the_result(agents: list[Agent], monkeypatch: Any) -> None:
    states, before = AllGatherStates("notebook"), agents[0].members()
    states.numbers = {"worker1": 1, "worker2": 1}
    agents[2].shutdown(graceful=False)
    until(lambda: len(agents[0].members()) == 2)
    monkeypatch.setattr(agents[0], "members", lambda: before)
    _send_result(agents[0], states, 20)


def given(agents: list[Agent], *followers: Agent) -> bool:
    """Whether the leader has the objects of these followers, and no other one."""
    led = list(agents[0].part(_GatherRounds)._led)
    return [set(states.gathered_objects) for states in led] == [{agent.name for agent in followers}]


@pytest.fixture
def patient(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of the followers stand still, so that no timeout ends the call with their object."""
    for agent in agents[1:]:
        now = agent.links.interceptors.clock()
        monkeypatch.setattr(agent.links.interceptors, "clock", lambda now=now: now)


def test_all_gather_raises_at_its_timeout_and_the_next_round_works(agents: list[Agent], on: As, patient: None) -> None:
    answers = [on(agents[1], api._all_gather, 0, EVERYONE, timeout=0.2)]
    until(lambda: given(agents, agents[1]))
    answers.append(on(agents[0], api._all_gather, 0, EVERYONE, timeout=0.2))
    for answer in answers:
        with pytest.raises(RpcTimeoutError, match="in _all_gather"):
            answer.result(20)
    answers = [on(agent, api._all_gather, agent.id, EVERYONE) for agent in agents]  # the failed round leaves no trace
    assert [answer.result(20) for answer in answers] == [{"notebook": 0, "worker1": 1, "worker2": 2}] * 3


def test_followers_that_do_not_receive_the_result_in_time_are_named(agents: list[Agent], on: As, patient: None) -> None:
    gate = threading.Event()
    Slow.gates.append(gate)
    answers = [on(agent, api._all_gather, Slow(), timeout=0.5) for agent in agents[1:]]
    until(lambda: given(agents, *agents[1:]))
    answers.insert(0, on(agents[0], api._all_gather, Slow(), timeout=0.5))
    told = r"Followers \['worker1', 'worker2'\] timed out in _all_gather after 0.50"
    with pytest.raises(RpcTimeoutError, match=told):
        answers[0].result(20)
    for answer in answers[1:]:
        with pytest.raises(RpcTimeoutError):
            answer.result(20)
    gate.set()  # not earlier: the followers would receive the result after all
    until(lambda: not any(agent.machine.read_node(lambda node: node.calls.serving) for agent in agents))
    assert [open_rounds(agent) for agent in agents] == [0, 0, 0]


class Slow:
    """An object that members other than 0 unpickle only when the gate opens."""

    gates: list[threading.Event] = []

    def __reduce__(self) -> Any:
        return _unpack, ()


def _unpack() -> Slow:
    if current.current_agent().id:
        Slow.gates[-1].wait(20)
    return Slow()


def test_a_wait_raises_shutdown_error_when_its_agent_stops(agents: list[Agent], on: As) -> None:
    waits = on(agents[1], api._wait_all_workers)
    until(lambda: has_given(agents[1], agents[0]))
    agents[1].stop()
    with pytest.raises(ShutdownError, match="worker1 has shut down"):
        waits.result(20)


def test_a_failed_barrier_returns_and_is_logged(agents: list[Agent], on: As, caplog: pytest.LogCaptureFixture) -> None:
    passed = on(agents[1], api._barrier, ("worker1", "worker2"))
    until(lambda: open_rounds(agents[1]) == 1, "the leader's round")
    agents[2].stop()
    assert passed.result(20) is None
    (record,) = caplog.records
    assert record.getMessage() == "worker1 continues although not all of worker1, worker2 have reached _barrier"
    assert record.exc_info is not None and isinstance(record.exc_info[1], WorkerLostError)


def test_all_gather_and_barrier_without_an_agent_raise() -> None:
    for function in (api._all_gather, api._barrier):
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            function([])
    assert not rpc._is_current_rpc_agent_set()

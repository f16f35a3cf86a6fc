"""The end of a connection: pairs of members that reconnect, and pairs that do not."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from worlds import PATIENCE, address_of, entries, far_world, nothing_left, until, world

from rpcbench.base.errors import ConnectionLostError, RefusedError, WorkerLostError
from rpcbench.rpc import remote
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Link
from rpcbench.transport.stream import StreamConnection

T = TypeVar("T")
GO = threading.Event()
WORLDS = {"one host": world, "two hosts": far_world}


def wait_here() -> str:
    assert GO.wait(60)
    return "done"


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(autouse=True)
def nobody_may_go() -> Iterator[None]:
    GO.clear()
    yield
    GO.set()


@pytest.fixture(params=WORLDS)
def agents(request: pytest.FixtureRequest, tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with WORLDS[request.param](tmp_path, 3, grace_seconds=10.0, threads=16) as made:
        yield made
        GO.set()


def cut(agents: list[Agent]) -> None:
    """Break all connections between the first two agents, at both ends and almost at once."""
    for entry in entries(agents[0], agents[1]) + entries(agents[1], agents[0]):
        entry.break_connection()


def take_resumed(agents: list[Agent]) -> bool:
    return bool(entries(agents[0], agents[1]) and entries(agents[1], agents[0]))


def returned(ask: Callable[[], T]) -> T:
    """Return the result of a call after a break. One call may be lost for each side that has not noticed it yet."""
    for _ in range(4):
        with contextlib.suppress(ConnectionLostError):
            return ask()
    raise AssertionError("one break makes all these calls fail")


def sum_of(here: Agent, there: Agent) -> int:
    return returned(lambda: here.call(there.id, add, (1, 2)).wait())


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ticks, lost messages are retransmitted only by the next connection."""
    monkeypatch.setattr(Link, "retry_seconds", 1000.0)


def test_a_reconnected_pair_is_reported_as_resumed_on_both_sides(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[str] = []
    for agent in agents[:2]:
        monkeypatch.setattr(agent.links.peer_events, "connection_resumed", lambda peer: resumed.append(peer.name))
    cut(agents)
    until(lambda: {*resumed} == {"notebook", "worker1"})


@pytest.mark.usefixtures("no_ticks")
@pytest.mark.parametrize("caller", [0, 1])
def test_a_pair_whose_connection_breaks_reconnects_and_only_calls_in_flight_fail(
    agents: list[Agent], caller: int
) -> None:
    here, there = agents[caller], agents[1 - caller]
    rref = remote("worker1", add, (40, 2))
    assert rref.to_here() == 42
    bystander = here.call(2, wait_here)
    for _ in range(3):
        lost = here.call(there.id, wait_here)
        cut(agents)
        with pytest.raises(ConnectionLostError, match="broke before wait_here had finished") as caught:
            lost.wait()
        assert caught.value.maybe_executed
        assert sum_of(here, there) == sum_of(there, here) == 3
    assert returned(rref.to_here) == 42, "the same incarnation still has its values"
    GO.set()
    assert bystander.wait() == "done"
    assert len(here.members()) == 3
    del rref
    nothing_left(agents)


def test_an_rref_survives_a_broken_connection_while_its_value_is_made(agents: list[Agent]) -> None:
    rref = remote("worker1", wait_here)
    until(lambda: agents[1].calls.pool.busy == 1, "the function to run")
    cut(agents)
    with pytest.raises(ConnectionLostError, match="wait_here"):
        rref._get_future().wait()
    GO.set()
    assert returned(rref.to_here) == "done", "the owner has the value"
    del rref
    nothing_left(agents)


@pytest.mark.usefixtures("no_ticks")
def test_calls_during_repeated_breaks_are_answered_or_reported_as_lost(agents: list[Agent]) -> None:
    over = threading.Event()
    outcomes: dict[str, int] = collections.Counter()

    def call_again_and_again(here: Agent, there: Agent) -> None:
        while not over.is_set():
            try:
                outcomes["answered"] += here.call(there.id, add, (0, 1), timeout=PATIENCE).wait()
            except ConnectionLostError:
                outcomes["lost"] += 1
            except Exception as error:
                outcomes[repr(error)] += 1

    callers = [threading.Thread(target=call_again_and_again, args=pair) for pair in 2 * [agents[:2], agents[1::-1]]]
    for caller in callers:
        caller.start()
    for number in range(30):
        one, other = agents[number % 2], agents[1 - number % 2]
        for entry in entries(one, other) if number % 3 else entries(one, other) + entries(other, one):
            entry.break_connection()
        before = outcomes["answered"]
        if number % 4:
            until(lambda before=before: outcomes["answered"] > before)  # type: ignore[misc]
    over.set()
    for caller in callers:
        caller.join(2 * PATIENCE)
    assert set(outcomes) <= {"answered", "lost"} and outcomes["answered"] > 0
    assert len(agents[0].members()) == 3
    nothing_left(agents)


@pytest.mark.usefixtures("no_ticks")
def test_an_rref_that_is_dropped_without_a_connection_is_freed_after_reconnection(agents: list[Agent]) -> None:
    rref = remote("worker1", add, (40, 2))
    rref.to_here()
    agents[1].links.peers.acceptor.close()  # so the pair stays separated until a listener is back
    cut(agents)
    del rref
    nothing_left(agents)


def test_a_message_whose_connection_ends_before_it_is_written_goes_to_the_next_one(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, was_cut = agents[0].links.peers, threading.Event()
    connect, find = peers.connect_to_member, peers.find

    def cut_once(to: int, addresses: Iterable[str]) -> StreamConnection:
        connection = connect(to, addresses)
        if not was_cut.is_set():
            was_cut.set()
            cut(agents)
        return connection

    monkeypatch.setattr(peers, "connect_to_member", cut_once)
    monkeypatch.setattr(peers, "find", lambda to: find(to) if was_cut.is_set() else None)
    with contextlib.suppress(ConnectionLostError):  # but no WorkerLostError
        assert agents[0].call(1, add, (1, 2)).wait() == 3
    assert was_cut.is_set()


def test_calls_wait_for_a_peer_that_is_unreachable_for_a_while(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    for agent in agents[:2]:
        dial = agent.links.peers._opener.dial_peer
        monkeypatch.setattr(
            agent.links.peers._opener, "dial_peer", lambda *a, dial=dial: dial(*a) if gate.is_set() else _unreachable()
        )
    before = agents[0].call("worker1", wait_here)
    cut(agents)
    with pytest.raises(ConnectionLostError):
        before.wait()
    calls = [agents[0].call("worker1", add, (number, 1)) for number in range(3)]
    assert not take_resumed(agents) and not any(call.done() for call in calls)
    gate.set()
    assert [call.wait() for call in calls] == [1, 2, 3]


def test_a_peer_without_a_listener_is_reported_as_lost_at_once(agents: list[Agent]) -> None:
    """As for a killed process: connections break, and no process listens at the address."""
    lost = agents[0].call("worker1", wait_here)
    agents[1].links.peers.acceptor.close()
    agents[1].links.peer_events.peer_addresses = lambda peer: ()  # a dead process does not dial
    cut(agents)
    with pytest.raises(WorkerLostError, match="worker1"):
        lost.wait()
    until(lambda: len(agents[2].members()) == 2)
    GO.set()


def test_a_member_that_was_given_up_cannot_reconnect_and_ends(agents: list[Agent]) -> None:
    told: list[tuple[str, str]] = []
    agents[2].on_member(lambda kind, who, reason: told.append((kind, who.name)))
    agents[0].links.peers.give_up_member(1, "nothing was received from it")
    until(lambda: len(agents[0].members()) == 2 and len(agents[2].members()) == 2)
    assert agents[1].links.closing.wait(20), "a member that has lost member 0 ends itself"
    until(lambda: ("lost", "worker1") in told)
    with pytest.raises(RefusedError, match="nothing was received from it"):
        Opener(agents[0].config.secret).dial_peer(_way(agents[0], agents[1]), agents[1].links.peers.own_identity)
    assert agents[0].call(2, add, (2, 2)).wait() == 4


def _way(to: Agent, source: Agent) -> str:
    member = to.machine.read_node(lambda node: node.members.me)
    return member.addresses_from(source.links.peers.own_identity.host)[0]


def test_a_pair_that_does_not_reconnect_in_time_is_separated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path, 3, grace_seconds=0.3) as agents:
        for agent in agents[:2]:
            monkeypatch.setattr(agent.links.peers._opener, "dial_peer", _unreachable)
        monkeypatch.setattr(agents[1].links.peers._reconnector, "_grace", 3.0)  # so that member 0 gives up first
        before = agents[0].call("worker1", wait_here)
        cut(agents)
        with pytest.raises(ConnectionLostError):
            before.wait()
        with pytest.raises(WorkerLostError, match=r"could not be reached again in 0\.3 s"):
            agents[0].call("worker1", wait_here).wait()
        assert agents[1].links.closing.wait(20)
        until(lambda: [info.id for info in agents[2].members()] == [0, 2])
        GO.set()


def _unreachable(*_: object) -> None:
    raise OSError(113, "No route to host")


# -- silence
def mute(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop all data that this agent sends; its host acknowledges nothing."""
    for entry in agent.links.peers._table.all_entries():
        entry.connection._stream.write = lambda views, may_wait: views.clear()


class Clock:
    """The clock of all agents. It stands still but for `let_pass`, so that no thread is late."""

    def __init__(self, agents: list[Agent]) -> None:
        self._agents = agents
        self._now = agents[0].links.clock()
        for agent in agents:
            agent.links.interceptors.clock = lambda: self._now

    def let_pass(self, seconds: float, mute: tuple[int, ...] = ()) -> None:
        """Let time pass in steps, in each of which all members but the mute ones hear one another."""
        hear = [agent for agent in self._agents if agent.id not in mute]
        for _ in range(round(seconds / 0.1)):
            entries = [entry for agent in hear for entry in agent.links.peers._table.all_entries()]
            heard = {e.connection: e.connection.bytes_received for e in entries if e.peer.id not in mute}
            self._now += 0.1
            until(lambda heard=heard: all(each.bytes_received > before for each, before in heard.items()))  # type: ignore[misc]


def test_a_silent_member_on_another_host_is_reported_as_suspect_and_then_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with far_world(tmp_path, 3, suspect_seconds=0.5, lost_seconds=1.0, stuck_seconds=1.0) as agents:
        clock = Clock(agents)
        told: list[tuple[str, WorkerInfo]] = []
        agents[0].on_member(lambda kind, who, reason: told.append((kind, who)))
        lost = agents[0].call("worker1", wait_here)
        mute(agents[1], monkeypatch)
        clock.let_pass(0.7, mute=(1,))
        until(lambda: told == [("suspect", WorkerInfo("worker1", 1))])
        assert not lost.done()
        clock.let_pass(0.5, mute=(1,))
        with pytest.raises(WorkerLostError, match=r"nothing was received from it for 1\.\d s") as caught:
            lost.wait()
        assert caught.value.maybe_executed
        until(lambda: ("lost", WorkerInfo("worker1", 1)) in told)
        assert agents[1].links.closing.wait(20), "it learns that it was given up"
        assert agents[0].call(2, add, (2, 2)).wait() == 4
        GO.set()


def test_a_worker_that_receives_nothing_from_member_0_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with far_world(tmp_path, 2, suspect_seconds=0.5, lost_seconds=1.0, stuck_seconds=1.0) as agents:
        mute(agents[0], monkeypatch)
        assert agents[1].links.closing.wait(20)
        until(lambda: len(agents[0].members()) == 1, "its farewell")
        assert agents[1].members() == []


def test_silence_on_one_host_is_no_sign_of_a_loss(tmp_path: Path) -> None:
    with world(tmp_path, 2, suspect_seconds=0.05, lost_seconds=0.1, stuck_seconds=0.1) as agents:
        assert not [t for t in threading.enumerate() if t.name.endswith("heartbeat")]
        assert not agents[0].links.closing.wait(0.5)
        assert len(agents[0].members()) == 2
        assert address_of(agents[0])


def test_heartbeats_keep_the_members_of_an_idle_world_on_two_hosts_alive(tmp_path: Path, no_leaks: None) -> None:
    with far_world(tmp_path, 2, suspect_seconds=0.5, lost_seconds=1.0, stuck_seconds=1.0) as agents:
        told: list[str] = []
        agents[0].on_member(lambda kind, who, reason: told.append(kind))
        Clock(agents).let_pass(3.0)
        assert agents[0].call(1, add, (1, 1)).wait() == 2
        assert told == [] and not agents[1].links.closing.is_set()

"""The picture of a whole world: equal to its tables when all is quiet, whatever was dropped and whoever came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import PATIENCE, config, until, world

from rpcbench.base.config import LAST_WORDS_SECONDS
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import events, publisher
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.publisher import Publisher
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import Collector


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


@pytest.fixture
def collector(agents: list[Agent]) -> Collector:
    return collect.current_collector()


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def equal(collector: Collector, agents: list[Agent]) -> bool:
    """Whether the picture is what the tables of these members say at this moment."""
    shown = {id_: member["tables"] for id_, member in collector.world().items()}
    return all(shown.get(agent.id) == agent.tables() for agent in agents)


def listening(agents: list[Agent]) -> list[bool]:
    return [agent.links.bus.listening for agent in agents]


def test_while_nobody_looks_there_is_nothing(collector: Collector, agents: list[Agent]) -> None:
    rref = remote("worker1", int, (1,))
    assert rref.to_here() == 1
    assert collector.world() == {} and not any(listening(agents))


def test_who_looks_sees_what_is_there_and_all_that_follows(collector: Collector, agents: list[Agent]) -> None:
    early = remote("worker1", int, (1,))
    rpc_sync("worker2", fetch, (early,))
    changed = threading.Event()
    stop = collector.subscribe(changed.set)
    until(lambda: equal(collector, agents))
    picture = collector.world()
    assert [(m["name"], m["id"], m["state"], m["incarnation"], m["left_out"]) for m in picture.values()] == [
        ("notebook", 0, "up", 0, 0), ("worker1", 1, "up", 0, 0), ("worker2", 2, "up", 0, 0),
    ]  # fmt: skip
    (row,) = picture[1]["tables"]["owned"].values()
    assert row["type"] == "int" and row["ready"]
    assert changed.wait(PATIENCE)  # told after the picture has changed
    changed.clear()
    late = [remote("worker2", int, (number,)) for number in range(30)]
    rpc_sync("worker1", fetch, (late[0],))
    until(lambda: len(collector.world()[2]["tables"]["owned"]) == 30 and equal(collector, agents))
    assert changed.wait(PATIENCE)
    del early, late
    until(lambda: collector.world()[2]["tables"]["owned"] == {} and equal(collector, agents))
    stop()


def test_a_member_that_leaves_while_a_watch_begins_is_no_error(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = agents[0].members()
    agents[1].stop()
    until(lambda: len(agents[0].members()) == 2)
    monkeypatch.setattr(agents[0], "members", lambda: there)  # as read just before
    stop = collector.subscribe(lambda: None)
    until(lambda: equal(collector, [agents[0], agents[2]]))
    stop()


def test_a_watch_that_begins_while_the_last_one_ends_sees_all(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, listen = collector.subscribe(lambda: None), collector._update_level
    until(lambda: equal(collector, agents))
    stops: list[Any] = []
    other = threading.Thread(target=lambda: stops.append(collector.subscribe(lambda: None)))

    def late() -> None:
        monkeypatch.setattr(collector, "_update_level", listen)
        other.start()
        other.join(0.5)  # it waits for this one, or has begun its watch
        listen()

    monkeypatch.setattr(collector, "_update_level", late)
    stop()
    other.join()
    until(lambda: equal(collector, agents))
    stops[0]()


def test_a_picture_that_was_taken_stays_as_it_is(collector: Collector, agents: list[Agent]) -> None:
    stop = collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents))
    before = collector.world()
    rref = remote("worker1", int, (1,))
    until(lambda: len(collector.world()[1]["tables"]["owned"]) == 1)
    assert before[1]["tables"]["owned"] == {}
    del rref
    stop()


def test_what_was_dropped_is_made_up_for(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "CAPACITY", 3)
    stop = collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents))
    kept = [remote("worker1", int, (number,)) for number in range(100)]
    del kept[50:]
    until(lambda: len(agents[1].tables()["owned"]) == 50 and equal(collector, agents))
    assert collector.world()[1]["left_out"] > 0
    stop()


def test_it_looks_as_long_as_one_does(collector: Collector, agents: list[Agent]) -> None:
    calls: list[str] = []
    stop_first = collector.subscribe(lambda: calls.append("first"))
    stop_second = collector.subscribe(lambda: calls.append("second"))
    until(lambda: listening(agents) == [True] * 3 and equal(collector, agents))
    stop_first()
    stop_first()
    for number in (1, 2):  # a thread that was about to call both when the first stopped may do so once
        calls.clear()
        rref = remote("worker1", int, (number,))
        until(lambda: len(collector.world()[1]["tables"]["owned"]) == 1 and "second" in calls)
    assert "first" not in calls
    stop_second()
    until(lambda: listening(agents) == [False] * 3)
    assert collector.world() == {}
    again = collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents) and len(collector.world()[1]["tables"]["owned"]) == 1)
    del rref
    again()


def test_members_come_go_and_are_lost_under_ones_eyes(
    collector: Collector, agents: list[Agent], tmp_path: Path
) -> None:
    stop = collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents))
    late = start_agent(config(tmp_path, 3))
    until(lambda: 3 in collector.world() and equal(collector, [*agents, late]))
    rref = agents[0].create("worker3", int, (1,))
    until(lambda: len(collector.world()[3]["tables"]["owned"]) == 1)
    late.shutdown(graceful=False)
    until(lambda: collector.world()[3]["state"] == "left")
    agents[1].links.peers.close()
    until(lambda: collector.world()[1]["state"] == "lost")
    assert collector.world()[2]["state"] == "up"
    del rref
    again = start_agent(config(tmp_path, 3, incarnation=1))
    until(lambda: equal(collector, [agents[0], agents[2], again]))
    assert (collector.world()[3]["state"], collector.world()[3]["incarnation"]) == ("up", 1)
    stop()
    again.stop()


def test_the_end_of_the_world_ends_the_looking(collector: Collector, agents: list[Agent]) -> None:
    stop = collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents))
    agents[0].shutdown(graceful=False)
    stop()
    assert collector.world() == {}


@pytest.mark.parametrize("end", ["shutdown", "stop"])
def test_when_the_world_is_over_its_last_moment_stays(collector: Collector, agents: list[Agent], end: str) -> None:
    changed = threading.Event()
    collector.subscribe(changed.set)
    until(lambda: equal(collector, agents))
    assert collector.phase.name == "live"
    changed.clear()
    before = time.time()
    agents[0].shutdown(graceful=False) if end == "shutdown" else agents[0].stop()
    assert changed.wait(10), "subscribers are told"
    assert collector.phase.name == "stopped" and before <= collector.phase.at <= time.time()
    last = collector.world()
    assert {member["state"] for member in last.values()} == {"up"}, "members that leave with it are not shown as gone"
    for agent in agents[1:]:
        agent.stop()
    assert collector.world() is last


def test_who_goes_just_before_it_is_asked_is_not_waited_for(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = collector.subscribe(lambda: None)
    assert collector.settle(20)
    ask = collector._probes.send_probe

    def late(member: int) -> int:
        if member == 2:
            agents.pop().stop()
            until(lambda: collector.world()[2]["state"] in ("left", "lost"))
        return ask(member)

    monkeypatch.setattr(collector._probes, "send_probe", late)
    assert collector.settle(20)
    stop()


@pytest.mark.parametrize("graceful", [False, True])
def test_who_looks_is_told_all_before_this_process_leaves(
    collector: Collector, agents: list[Agent], graceful: bool
) -> None:
    go_on = threading.Event()
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: go_on.wait(20)})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publisher, "time", clock)
            patch.setattr(collect, "LAST_REPORT_SECONDS", 20.0)
            collector.subscribe(lambda: None)
            until(lambda: equal(collector, agents))
            rrefs = [remote("worker1", int, (1,))]
            until(lambda: len(collector.world()[1]["tables"]["owned"]) == 1)
            rrefs.append(remote("worker1", int, (2,)))  # it tells of this one when the pause is over
            assert rrefs[1].to_here() == 2
            agents[0].shutdown(graceful)
            assert len(collector.world()[1]["tables"]["owned"]) == 2
    finally:
        go_on.set()


def test_a_member_that_tells_nothing_holds_nobody_back_who_leaves(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents[1].part(Publisher), "_answer_probe", lambda source, number: None)
    collector.subscribe(lambda: None)
    until(lambda: equal(collector, agents))
    begin = time.monotonic()
    agents[0].shutdown(graceful=False)
    assert time.monotonic() - begin < 5 * (collect.LAST_REPORT_SECONDS + LAST_WORDS_SECONDS)

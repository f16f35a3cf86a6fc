"""Watchers get all tables, then each change; without watchers, no changes are recorded or sent."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import PATIENCE, until, world

from rpcbench.base.ids import Tables, apply_change
from rpcbench.rpc import RRef, remote
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.publisher import TELEMETRY, WATCH, Publisher


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


class Watcher:
    """An agent that watches worker1."""

    def __init__(self, agent: Agent) -> None:
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.snapshots = 0
        self.tables: Tables = {}
        self._agent = agent
        self._batch = -1
        agent.on_notice(TELEMETRY, lambda source, data: self.heard.put(data))
        self.ask(True)

    def ask(self, on: bool) -> None:
        self._agent.notify(1, WATCH, on)

    def follow(self) -> None:
        """Apply the next notice; there must be no gap."""
        data = self.heard.get(timeout=PATIENCE)
        if "snapshot" in data:
            self.snapshots += 1
            self.tables, self._batch = data["snapshot"], data["batch"]
            return
        assert (data["dropped"], data["batch"]) == (0, self._batch + 1)
        self._batch = data["batch"]
        for table, rows in data["rows"].items():
            for key, row in rows.items():
                apply_change(self.tables, table, key, row)

    def follow_until(self, owned: int) -> None:
        while len(self.tables.get("owned", {})) != owned:
            self.follow()


def test_a_value_of_this_process_is_as_old_as_its_rref(agents: list[Agent]) -> None:
    before = time.monotonic()
    mine = RRef([1])
    after = time.monotonic()
    holder = remote("worker1", list, ([mine],))  # shares it
    (row,) = agents[0].tables()["owned"].values()
    assert before <= row["made"] <= after
    assert len(holder.to_here()) == 1


def make(count: int) -> list[RRef[Any]]:
    return [remote("worker1", int, (number,)) for number in range(count)]


def publishing() -> int:
    return sum(thread.name == "rpcbench-publish" for thread in threading.enumerate())


def test_an_agent_without_watchers_records_and_publishes_nothing(agents: list[Agent]) -> None:
    until(lambda: publishing() == 0, "the end of publishers of earlier tests")
    make(3)[0].to_here()
    assert not any(agent.links.bus.listening for agent in agents) and publishing() == 0
    assert agents[1].links.bus.drain_changes(10).rows == {}


def test_a_watcher_gets_the_tables_and_then_all_changes(agents: list[Agent]) -> None:
    before = make(2)
    until(lambda: [row["ready"] for row in agents[1].tables()["owned"].values()] == [True, True])
    watcher = Watcher(agents[0])
    watcher.follow()
    assert watcher.tables["owned"] == agents[1].tables()["owned"] and len(watcher.tables["owned"]) == 2
    assert watcher.snapshots == 1
    until(lambda: publishing() == 1)
    after = make(40)
    watcher.follow_until(owned=42)
    del before, after[2:]
    watcher.follow_until(owned=2)
    until(lambda: agents[1].tables()["owned"].keys() == watcher.tables["owned"].keys())
    assert watcher.snapshots == 1


def test_an_agent_records_no_changes_after_its_last_watcher_leaves(agents: list[Agent]) -> None:
    first, second = Watcher(agents[0]), Watcher(agents[2])
    for watcher in (first, second):
        watcher.follow()
    first.ask(False)
    rrefs = make(3)
    second.follow_until(owned=3)
    second.ask(False)
    until(lambda: publishing() == 0 and not agents[1].links.bus.listening)
    del rrefs
    until(lambda: agents[1].tables()["owned"] == {})
    assert agents[1].links.bus.drain_changes(10).rows == {}
    second.ask(True)
    while second.snapshots == 1:
        second.follow()
    until(lambda: publishing() == 1)


def test_a_second_watcher_does_not_disturb_the_first(agents: list[Agent]) -> None:
    first = Watcher(agents[0])
    first.follow()
    rrefs = make(5)
    second = Watcher(agents[2])
    for watcher in (first, second):
        watcher.follow_until(owned=5)
    rrefs += make(5)
    for watcher in (first, second):
        watcher.follow_until(owned=10)


def test_an_agent_stops_publishing_when_its_watcher_is_lost(agents: list[Agent]) -> None:
    watcher = Watcher(agents[2])
    watcher.follow()
    agents[2].stop()
    until(lambda: publishing() == 0 and not agents[1].links.bus.listening)


def test_the_publisher_of_a_worker_ends_with_the_worker(agents: list[Agent]) -> None:
    Watcher(agents[0]).follow()
    agents[1].stop()
    until(lambda: publishing() == 0)


def test_the_publisher_ends_although_its_worker_stops_while_it_drains_the_log(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, send = threading.Event(), threading.Event(), Publisher._send_batch

    def held(publisher: Publisher, most: int) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        send(publisher, most)

    monkeypatch.setattr(Publisher, "_send_batch", held)
    Watcher(agents[0]).follow()
    rrefs = make(1)
    assert begun.wait(PATIENCE) and rrefs
    agents[1].stop()
    go.set()
    until(lambda: publishing() == 0)

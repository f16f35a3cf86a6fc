"""What all members of a world say of themselves, put together: tables kept current by events.

Listens only while somebody looks. A member's tables begin with a snapshot; a gap in the numbers of its events (some
were dropped, or it began again) asks for a new one. Nothing here waits for a worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rpcbench.agent import current as agents
from rpcbench.agent.core import Agent
from rpcbench.agent.publish import TELEMETRY, WATCH
from rpcbench.agent.roster import GONE, WorkerInfo
from rpcbench.words.events import apply

World = dict[int, dict[str, Any]]
Wake = Callable[[], None]


class Collector:
    """The current picture of one world, for panels. One for each agent: `agent.part(Collector)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._world: World = {}
        self._seq: dict[int, int] = {}
        self._wakes: dict[object, Wake] = {}
        agent.on_notice(TELEMETRY, self._heard)
        agent.on_member(self._member)
        agent.on_end.append(self._wake)

    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """Begin to look: `wake` is called, on some thread, after each change. Call the result to stop."""
        key = object()
        with self._lock:
            first = not self._wakes
            self._wakes[key] = wake
        if first:
            for info in self._agent.members():
                self._watch(info.id, True)
        return lambda: self._unsubscribe(key)

    def _unsubscribe(self, key: object) -> None:
        with self._lock:
            if self._wakes.pop(key, None) is None or self._wakes:
                return
            self._world.clear()
            self._seq.clear()
        if self._agent.running:
            for info in self._agent.members():
                self._watch(info.id, False)

    def world(self) -> World:
        """{worker id: {name, id, incarnation, state, tables, left_out}}; rows are shared and never change."""
        over: dict[str, Any] = {} if self._agent.running else {"state": "left"}
        with self._lock:
            return {
                id_: {**member, **over, "tables": {name: dict(rows) for name, rows in member["tables"].items()}}
                for id_, member in sorted(self._world.items())
            }

    def _watch(self, member: int, on: bool) -> None:
        if on:
            with self._lock:
                self._world.setdefault(member, self._empty(member))
        self._agent.notify(member, WATCH, on)

    def _empty(self, member: int) -> dict[str, Any]:
        name = self._agent.member(member).name
        return {"name": name, "id": member, "incarnation": 0, "state": "up", "tables": {}, "left_out": 0}

    def _member(self, kind: str, who: WorkerInfo, reason: str) -> None:
        with self._lock:
            if not self._wakes:
                return
            if kind == "joined":
                self._world.pop(who.id, None)
            elif who.id in self._world:
                self._world[who.id]["state"] = "up" if kind == "recovered" else kind
            if kind in GONE:
                self._seq.pop(who.id, None)
        if kind == "joined":
            self._watch(who.id, True)
        self._wake()

    def _heard(self, source: int, data: dict[str, Any]) -> None:
        with self._lock:
            member = self._world.get(source)
            if member is None:
                return
            if "snapshot" in data:
                member.update(tables=data["snapshot"], incarnation=data["incarnation"])
                self._seq[source] = data["seq"]
                missed = False
            else:
                missed = self._apply(source, member, data)
        if missed:
            self._watch(source, True)
        self._wake()

    def _apply(self, source: int, member: dict[str, Any], data: dict[str, Any]) -> bool:
        """Carry a batch out; True where one is missing between the last and this."""
        last = self._seq.get(source)
        member["left_out"] += data["dropped"]
        for seq, _, _, table, key, row in data["events"]:
            if last is None or seq <= last:
                continue  # the snapshot that was asked for will have it, or had it
            if seq != last + 1:
                del self._seq[source]
                return True
            apply(member["tables"], table, key, row)
            last = self._seq[source] = seq
        return False

    def _wake(self) -> None:
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()


def current() -> Collector:
    """The collector of the current agent. RuntimeError where RPC is not initialized."""
    return agents.current().part(Collector)

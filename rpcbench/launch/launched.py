"""The processes that a cluster has started, as the table "launched" of the member that did: what the system and their
logs say of them, also of one that is stopped, hangs or has ended. Looked at when `Health` is, never of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import psutil

from rpcbench.base.events import Row, Table
from rpcbench.launch.worker import Place
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.publisher import Health
from rpcbench.transport.hosts import host_id

LINES = 8
_WIDEST = 300


class Started(NamedTuple):
    """One of them. `ending` says how it ended, empty while it runs; `log` is what it wrote outside cells and calls."""

    id: int
    name: str
    place: Place
    incarnation: int
    ending: str
    log: str


class Launched:
    """`started` tells of all that belong to the cluster now."""

    def __init__(self, agent: Agent, started: Callable[[], Iterable[Started]]) -> None:
        self._bus = agent.bus
        self._started = started
        self._lock = threading.Lock()
        self._rows: Table = {}
        agent.bus.register("launched", self.table)
        agent.part(Health).others.append(self.look)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def look(self) -> None:
        """Bring the table up to date."""
        now = {str(one.id): _row(one) for one in self._started()}
        with self._lock:
            before, self._rows = self._rows, now
        for key in before.keys() - now.keys():
            self._bus.note("ProcessForgotten", "launched", key, lambda: None)
        for key, row in now.items():
            if before.get(key) != row:
                self._bus.note("ProcessChanged", "launched", key, partial(now.get, key))


def _row(one: Started) -> Row:
    lines = [line[:_WIDEST] for line in one.log.splitlines()[-LINES:]]
    state = one.ending or _state(one.place)
    who = {"name": one.name, "pid": one.place.pid, "incarnation": one.incarnation}
    return {**who, "state": state, "log": "\n".join(lines)}


def _state(place: Place) -> str:
    """What the system says of a process: serves, stopped, has ended. Of one elsewhere it knows nothing."""
    if place.host != host_id():
        return "serves"
    try:
        return "stopped" if psutil.Process(place.pid).status() == psutil.STATUS_STOPPED else "serves"
    except psutil.NoSuchProcess:
        return "has ended"

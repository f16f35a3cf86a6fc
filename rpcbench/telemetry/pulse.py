"""The collector's world, and in it how all members are: while somebody looks they are asked, twice a second.

A member that has not answered is not asked again, so a busy or stopped one finds no heap of questions; the numbers of
questions and answers say for how long it has been silent. Nobody looks: nobody is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcbench.agent import current as agents
from rpcbench.agent.core import Agent
from rpcbench.agent.health import LOOK
from rpcbench.agent.roster import WorkerInfo
from rpcbench.telemetry.collect import Collector, Wake, World
from rpcbench.telemetry.workers import PERIOD
from rpcbench.words.changes import Changes


class Pulse:
    """One for each agent: `agent.part(Pulse)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._collector = agent.part(Collector)
        self._lock = threading.Lock()
        self._lookers: set[object] = set()
        self._asks = False  # whether the thread runs
        self._changes = Changes()
        self._question = 0
        self._asked: dict[int, int] = {}  # by member: the last question
        agent.on_member(self._member)
        agent.on_end.append(self._changes.tell)

    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """As the collector's; meanwhile members are asked."""
        stop = self._collector.subscribe(wake)
        key = object()
        with self._lock:
            if not self._lookers:
                self._asked.clear()
            self._lookers.add(key)
            begins, self._asks = not self._asks, True
        if begins:
            threading.Thread(target=self._run, name="rpcbench-pulse", daemon=True).start()

        def over() -> None:
            with self._lock:
                self._lookers.discard(key)
            self._changes.tell()
            stop()

        return over

    def world(self) -> World:
        return self._collector.world()

    def _run(self) -> None:
        while self._goes_on():
            self._ask()
            self._changes.wait_for(lambda: not (self._lookers and self._agent.running), PERIOD)

    def _goes_on(self) -> bool:
        with self._lock:
            self._asks = bool(self._lookers) and self._agent.running
            return self._asks

    def _ask(self) -> None:
        self._question += 1
        for id_, member in self._collector.world().items():
            answered = member["tables"].get("health", {}).get(str(id_), {}).get("question", 0)
            if member["state"] in ("up", "suspect") and answered >= self._asked.get(id_, 0):
                self._asked[id_] = self._question
                self._agent.notify(id_, LOOK, self._question)

    def _member(self, kind: str, who: WorkerInfo, _reason: str) -> None:
        if kind == "joined":
            self._asked.pop(who.id, None)


def current() -> Pulse:
    """That of the current agent. RuntimeError where RPC is not initialized."""
    return agents.current().part(Pulse)

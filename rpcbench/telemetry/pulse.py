"""The collector's world, and in it how all members are: while somebody looks they are asked, twice a second.

A member that has not answered is not asked again, so a busy or stopped one finds no heap of questions; the numbers of
questions and answers say for how long it has been silent. Nobody looks: nobody is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rpcbench.base.conditions import Changes
from rpcbench.runtime import current as agents
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.runtime.publisher import LOOK
from rpcbench.telemetry.collect import SETTLE_SECONDS, Collector, Wake, World
from rpcbench.telemetry.workers import PERIOD


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

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """Ask all members that are up how they are, and wait until they have said so, and all else. False: not all."""
        deadline = time.monotonic() + timeout
        changes = Changes()
        stop = self._collector.subscribe(changes.tell)
        try:
            self._ask()
            told = changes.wait_for(self._all_told, timeout)
        finally:
            stop()
        return self._collector.settle(deadline - time.monotonic()) and told

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
        """Who has answered its last question gets another one."""
        world = self._collector.world()
        with self._lock:
            self._question += 1
            free = [id_ for id_, one in world.items() if one["state"] in ("up", "suspect") and self._told(id_, one)]
            self._asked.update(dict.fromkeys(free, self._question))
            question = self._question
        for id_ in free:
            self._agent.notify(id_, LOOK, question)

    def _told(self, id_: int, member: dict[str, Any]) -> bool:
        """Whether a member has answered its last question."""
        answered: int = member["tables"].get("health", {}).get(str(id_), {}).get("question", 0)
        return answered >= self._asked.get(id_, 0)

    def _all_told(self) -> bool:
        up = {id_: one for id_, one in self._collector.world().items() if one["state"] == "up"}
        return not self._agent.running or all(self._told(id_, one) for id_, one in up.items())

    def _member(self, kind: str, who: WorkerInfo, _reason: str) -> None:
        if kind == "joined":
            self._asked.pop(who.id, None)


def current() -> Pulse:
    """That of the current agent. RuntimeError where RPC is not initialized."""
    return agents.current().part(Pulse)

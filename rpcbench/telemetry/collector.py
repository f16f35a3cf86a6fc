"""What all members of a world say of themselves, put together: tables kept current by changes.

Listens only while somebody looks, and for messages only while somebody looks at those. A member's tables begin with a
snapshot; a batch that is missing, or that left rows out, asks for a new one. Nothing here waits for a worker, but
`settle`, which is asked to, also before this process leaves the world.

`HealthPoller` asks the members how they are, twice a second, while somebody looks. A member that has not answered is
not asked again, so a busy or stopped one finds no heap of questions; the numbers of questions and answers say for how
long it has been silent. `LatencyProbes` are questions that a member answers once everything that it had to tell before
is on its way: so an answer says both that all of it is here, and what the member's clock shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rpcbench.base.conditions import Changes
from rpcbench.base.events import CHANGES, MESSAGES, QUIET, apply
from rpcbench.base.ids import Counter
from rpcbench.protocol.node import Node
from rpcbench.runtime import current as agents
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.publisher import LOOK, TELEMETRY, WATCH
from rpcbench.telemetry.message_views import SHARED, Clock, began_since, better, estimate, gather
from rpcbench.telemetry.views import PERIOD

MEASURE_SECONDS = 5.0


class LatencyProbes:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._changes = Changes()
        self._numbers = Counter()
        self._open: dict[int, tuple[int, float]] = {}  # number: member, when it was asked
        self._latest: dict[int, float] = {}

    def near(self, member: int) -> bool:
        """Whether it is on this host, and so has this clock."""

        def same(node: Node) -> bool:
            other = node.members.members.get(member)
            return other is None or other.host == node.members.me.host

        return self._agent.machine.ask(same)

    def ask(self, member: int) -> int:
        """Ask; the number of the question."""
        number, now = self._numbers.next(), time.monotonic()
        with self._lock:
            self._open[number] = member, now
            self._latest[member] = now
        self._agent.notify(member, WATCH, {"probe": number})
        return number

    def refresh(self, member: int) -> None:
        """Measure the clock of a member on another host, unless that was done lately."""
        with self._lock:
            lately = time.monotonic() - self._latest.get(member, -MEASURE_SECONDS) < MEASURE_SECONDS
        if not lately and not self.near(member):
            self.ask(member)

    def answered(self, source: int, heard: float, said: float, number: int) -> Clock | None:
        """An answer has come: what it says of that member's clock, None where it has ours."""
        told = time.monotonic()
        with self._lock:
            _, asked = self._open.pop(number, (source, None))
        self._changes.tell()
        return None if asked is None or self.near(source) else estimate(asked, heard, said, told)

    def forget(self, member: int) -> None:
        """It is gone, and will not answer."""
        with self._lock:
            self._latest.pop(member, None)
            self._open = {number: one for number, one in self._open.items() if one[0] != member}
        self._changes.tell()

    def wait(self, number: int, timeout: float) -> bool:
        """Until that one is answered, or never will be; whether it is so in time."""
        return self._changes.wait_for(lambda: number not in self._open, max(0.0, timeout))


World = dict[int, dict[str, Any]]
Wake = Callable[[], None]
SETTLE_SECONDS = 5.0
"""How long to wait, by default, for what members have to tell: a process that is stopped tells nothing."""
LAST_NEWS_SECONDS = 0.5
"""As long before this process leaves while somebody looks: what they see then is how it all ended."""


class Collector:
    """The current picture of one world, for panels. One for each agent: `agent.part(Collector)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._world: World = {}
        self._batch: dict[int, int] = {}
        self._wakes: dict[object, tuple[Wake, int]] = {}
        self._level = QUIET
        self._probes = LatencyProbes(agent)
        agent.on_notice(TELEMETRY, self._heard)
        agent.on_member(self._member)
        agent.on_leave.append(lambda: self.settle(LAST_NEWS_SECONDS))
        agent.on_end.append(self._wake)

    def subscribe(self, wake: Wake, level: int = CHANGES) -> Callable[[], None]:
        """Begin to look: `wake` is called, on some thread, after each change. Call the result to stop.

        `level`: `base.events.MESSAGES` to be told of every message as well.
        """
        key = object()
        with self._lock:
            self._wakes[key] = wake, level
        self._listen()
        return lambda: self._unsubscribe(key)

    def _unsubscribe(self, key: object) -> None:
        with self._lock:
            if self._wakes.pop(key, None) is None:
                return
            if not self._wakes:
                self._world.clear()
                self._batch.clear()
        self._listen()

    def _listen(self) -> None:
        """Ask all members for as much as is wanted now, if that has changed."""
        with self._lock:
            level = max((level for _, level in self._wakes.values()), default=QUIET)
            before, self._level = self._level, level
            if level < MESSAGES:
                for member in self._world.values():
                    member["tables"].pop("messages", None)
                    member["missed"] = member["trimmed"] = 0
        if level != before and self._agent.running:
            for info in self._agent.members():
                self._watch(info.id)

    def world(self) -> World:
        """{worker id: {name, id, incarnation, state, tables, left_out, …}}; rows never change.

        `missed`, `trimmed`: of messages, what the member could not tell, and the oldest that are not kept here.

        `epoch`: when its clock was 0, in seconds since 1970; None until it has told.
        """
        over: dict[str, Any] = {} if self._agent.running else {"state": "left"}
        with self._lock:
            return {
                id_: {**member, **over, "tables": {name: dict(rows) for name, rows in member["tables"].items()}}
                for id_, member in sorted(self._world.items())
            }

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """Wait until all members that are up have told what they had to tell when this was called. False: not all."""
        deadline = time.monotonic() + timeout
        with self._lock:
            up = [id_ for id_, member in self._world.items() if member["state"] == "up" and self._agent.running]
        waits = [self._probes.ask(id_) for id_ in up]
        with self._lock:
            gone = [id_ for id_ in up if id_ in self._world and self._world[id_]["state"] in GONE]
        for id_ in gone:  # before it was asked: it will not answer, and nobody will say so again
            self._probes.forget(id_)
        return all(self._probes.wait(asked, deadline - time.monotonic()) for asked in waits)

    def _watch(self, member: int) -> None:
        with self._lock:
            level = self._level
            if level:
                self._world.setdefault(member, self._empty(member))
        self._agent.notify(member, WATCH, level)

    def _empty(self, member: int) -> dict[str, Any]:
        name = self._agent.member(member).name
        told: dict[str, Any] = {"name": name, "id": member, "incarnation": 0, "state": "up", "tables": {}}
        return {**told, "left_out": 0, "missed": 0, "trimmed": 0, "clock": SHARED, "epoch": None}

    def _member(self, kind: str, who: WorkerInfo, reason: str) -> None:
        with self._lock:
            if not self._wakes:
                return
            if kind == "joined":
                self._world.pop(who.id, None)
            elif who.id in self._world:
                self._world[who.id]["state"] = "up" if kind == "recovered" else kind
            if kind in GONE:
                self._batch.pop(who.id, None)
        if kind in GONE:
            self._probes.forget(who.id)
        if kind == "joined":
            self._watch(who.id)
        self._wake()

    def _heard(self, source: int, data: dict[str, Any]) -> None:
        if "probe" in data:
            self._measured(source, self._probes.answered(source, data["heard"], data["said"], data["probe"]))
            return
        with self._lock:
            member = self._world.get(source)
            if member is None:
                return
            missed = False
            if "snapshot" in data:
                self._begin(source, member, data)
            else:
                missed = self._apply(source, member, data)
        if missed:
            self._watch(source)
        self._probes.refresh(source)
        self._wake()

    def _begin(self, source: int, member: dict[str, Any], data: dict[str, Any]) -> None:
        messages = {name: rows for name, rows in member["tables"].items() if name == "messages"}
        epoch = time.time() - data["clock"]
        member.update(tables={**data["snapshot"], **messages}, incarnation=data["incarnation"], epoch=epoch)
        self._batch[source] = data["batch"]

    def _apply(self, source: int, member: dict[str, Any], data: dict[str, Any]) -> bool:
        """Carry a batch out; True where rows are missing between the last and this."""
        if self._level == MESSAGES:
            member["trimmed"] += gather(member["tables"].setdefault("messages", {}), source, data["messages"])
            member["missed"] += data["missed"]
            member["left_out"] += data["missed"]
        member["left_out"] += data["dropped"]
        last, batch = self._batch.get(source), data["batch"]
        if last is None or batch <= last:
            return False  # the snapshot that was asked for will have it, or had it
        if batch != last + 1 or data["dropped"]:
            del self._batch[source]
            return True
        for table, rows in data["rows"].items():
            for key, row in rows.items():
                apply(member["tables"], table, key, row)
        self._batch[source] = batch
        return False

    def _measured(self, source: int, clock: Clock | None) -> None:
        """Keep the best estimate of a clock on another host."""
        with self._lock:
            member = self._world.get(source)
            if member is None or clock is None:
                return
            old = Clock(*member["clock"])
            member["clock"] = better(None if old == SHARED else old, clock)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            wakes = [wake for wake, _ in self._wakes.values()]
        for wake in wakes:
            wake()


class Traced:
    """A collector as a source of worlds with every message in them, and the collectives of that time alone."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._began = time.monotonic()

    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """As the collector's, at the level of messages."""
        return self._collector.subscribe(wake, MESSAGES)

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """As the collector's."""
        return self._collector.settle(timeout)

    def world(self) -> World:
        """As the collector's, from when this was made; what was under way then is there."""
        return {id_: began_since(member, self._began) for id_, member in self._collector.world().items()}


def current_collector() -> Collector:
    """The collector of the current agent. RuntimeError where RPC is not initialized."""
    return agents.current().part(Collector)


class HealthPoller:
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


def current_poller() -> HealthPoller:
    """That of the current agent. RuntimeError where RPC is not initialized."""
    return agents.current().part(HealthPoller)

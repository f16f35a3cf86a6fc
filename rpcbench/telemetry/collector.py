"""The collector: tables of all members of a world, kept current by their reports of changes. Rules:

- Members report only while this process has subscribers, and report messages only while one has subscribed to those.
- Reports of a former incarnation on ended things stay: messages, collectives, metrics, pipeline steps and their
  operations. A message that is under way when its sender or receiver is lost stays lost.
- A member's tables begin with a snapshot. A batch that is missing or incomplete leads to a new snapshot.
- No function waits for a worker except `settle`, which also runs before this process leaves the world.
- Once this process leaves, the world is that of the moment before: what follows is only the end, not the program.
- `HealthPoller` requests the state of all members twice a second while it has subscribers, but never has two requests
  at one member: a busy or stopped member must not find a queue of them. The numbers of requests and answers give the
  duration of its silence. Each answer also goes to the history of figures, which lasts as long as this process.
- A member answers a request of `LatencyProbes` after all reports that were due before it. So an answer means that these
  have arrived, and it has the time of the member's clock.
"""
# Protocol between the collector (c) and the publisher (p) of one member, in notices:
#     c ── WATCH level ───────────> p     begin (CHANGES, MESSAGES) or end (QUIET)
#     c <── TELEMETRY snapshot ──── p     all tables, number of the batch
#     c <── TELEMETRY batch n ───── p     rows that have changed; batch n + 2 after n: a WATCH asks for a snapshot
#     c ── WATCH probe ───────────> p     answered after all batches before it: `settle`, and measurement of the clock
#     c ── LOOK number ───────────> p     answered by a row of table "health"

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import CHANGES, MESSAGES, QUIET, Counter, Row, Table, apply_change
from rpcbench.protocol.node import Node
from rpcbench.runtime import current as agents
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.publisher import LOOK, TELEMETRY, WATCH
from rpcbench.telemetry.message_counts import MessageCount
from rpcbench.telemetry.message_views import (
    SHARED,
    ClockOffset,
    choose_better_clock,
    drop_earlier_collectives,
    estimate_clock,
    first_report,
    gather,
)
from rpcbench.telemetry.resource_history import ResourceHistory
from rpcbench.telemetry.views import PERIOD, World

MEASURE_SECONDS = 5.0  # between two measurements of a member's clock


class LatencyProbes:
    """Requests that a member answers after all its earlier reports."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._changes = Condition()  # notified when a request ends
        self._numbers = Counter()
        self._open: dict[int, tuple[int, float]] = {}  # unanswered: number -> member, time of sending
        self._latest: dict[int, float] = {}  # time of the latest request, by member

    def is_on_this_host(self, member: int) -> bool:
        """Return whether a member is on this host, and so shares its clock."""

        def is_same_host(node: Node) -> bool:
            other = node.members.members.get(member)
            return other is None or other.host == node.members.me.host

        return self._agent.machine.read_node(is_same_host)

    def send_probe(self, member: int) -> int:
        """Send a request, and return its number."""
        number, now = self._numbers.next(), time.monotonic()
        with self._lock:
            self._open[number] = member, now
            self._latest[member] = now
        self._agent.notify(member, WATCH, {"probe": number})
        return number

    def refresh_clock(self, member: int) -> None:
        """Measure the clock of a member on another host, unless the last measurement is recent."""
        with self._lock:
            lately = time.monotonic() - self._latest.get(member, -MEASURE_SECONDS) < MEASURE_SECONDS
        if not lately and not self.is_on_this_host(member):
            self.send_probe(member)

    def probe_answered(self, source: int, request_received: float, said: float, number: int) -> ClockOffset | None:
        """Handle an answer; return an estimate of that member's clock, None where it shares ours."""
        reply_received = time.monotonic()
        with self._lock:
            _, request_sent = self._open.pop(number, (source, None))
        self._changes.notify_all()
        return (
            None
            if request_sent is None or self.is_on_this_host(source)
            else estimate_clock(request_sent, request_received, said, reply_received)
        )

    def forget_member(self, member: int) -> None:
        """End the requests to a member that has left or is lost, as it will not answer."""
        with self._lock:
            self._latest.pop(member, None)
            self._open = {number: one for number, one in self._open.items() if one[0] != member}
        self._changes.notify_all()

    def wait_for_answer(self, number: int, timeout: float) -> bool:
        """Wait until a request is answered or its member has left; return False after the timeout."""
        return self._changes.wait_for(lambda: number not in self._open, max(0.0, timeout))


class Phase(NamedTuple):
    """Whether a source of worlds still changes: `live`, `stopped` at a time in seconds since 1970, a `record`, or
    `simulated`."""

    name: str
    at: float = 0.0


LIVE, RECORD, SIMULATED = Phase("live"), Phase("record"), Phase("simulated")
Wake = Callable[[], None]
SETTLE_SECONDS = 5.0
"""Default limit of waits for members' reports: a stopped process sends none."""
LAST_REPORT_SECONDS = 0.5
"""Limit of the wait for last reports before this process leaves, so that panels show the end of the world."""


class Collector:
    """The current state of one world, for panels. One for each agent: `agent.part(Collector)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Held from a change of `_wakes` until all members have got its requests; taken before `_lock`.
        self._level_lock = threading.RLock()
        self._lock = threading.Lock()  # guards all fields below; no subscriber is called under it
        self._world: World = {}
        self._batch: dict[int, int] = {}  # number of the last batch, by member; without one a snapshot is due
        self._wakes: dict[object, tuple[Wake, int]] = {}  # subscribers: callback, level
        self._level = QUIET  # the highest level of a subscriber
        self._probes = LatencyProbes(agent)
        self._earlier: dict[int, dict[str, Table]] = {}  # of former incarnations, by member
        self._count = MessageCount()
        self._last: World | None = None  # the world before this process left it
        self.phase = LIVE
        agent.on_notice(TELEMETRY, self._report_received)
        agent.on_member(self._member_changed)
        agent.hooks.on_leave.append(lambda: self.settle(LAST_REPORT_SECONDS))
        agent.hooks.on_leave.append(self._keep_last_world)
        agent.hooks.on_end.append(self._keep_last_world)

    @property
    def agent(self) -> Agent:
        return self._agent

    def subscribe(self, wake: Wake, level: int = CHANGES) -> Callable[[], None]:
        """Subscribe to changes.

        Args:
            wake: Called after each change, in any thread.
            level: `base.ids.MESSAGES` for changes and all messages; by default only changes.

        Returns:
            A function that ends the subscription.
        """
        key = object()
        with self._level_lock:
            with self._lock:
                self._wakes[key] = wake, level
            self._update_level()
        return lambda: self._remove_subscriber(key)

    def _remove_subscriber(self, key: object) -> None:
        with self._level_lock:
            with self._lock:
                if self._wakes.pop(key, None) is None:
                    return
                if not self._wakes:  # without a subscriber the tables would become stale
                    self._world.clear()
                    self._batch.clear()
                    self._earlier.clear()
                    self._last = None if self._last is None else {}
            self._update_level()

    def _keep_last_world(self) -> None:
        if self._last is None:
            self._last, self.phase = self.world(), Phase("stopped", time.time())
        self._notify_subscribers()

    def _update_level(self) -> None:
        """Request the highest level of the subscribers from all members, if it has changed."""
        with self._lock:
            level = max((level for _, level in self._wakes.values()), default=QUIET)
            before, self._level = self._level, level
            if level < MESSAGES:  # rows of messages would have gaps when a subscriber wants them again
                for member in self._world.values():
                    member["tables"].pop("messages", None)
                    member["missed"] = member["trimmed"] = member["counted"] = 0
                for earlier in self._earlier.values():
                    earlier.pop("messages", None)
                self._count = MessageCount()
        if level != before and self._agent.running:
            for info in self._agent.members():
                self._watch_member(info.id)

    def world(self) -> World:
        """Return {worker id: {name, id, incarnation, state, tables, left_out, …}}; rows are never modified.

        `missed`: messages that the member could not report; `trimmed`: oldest messages that were dropped here;
        `counted`: all messages that it was the first to report; `met`: the latest number of its ended collectives by
        scope. The last three, and `left_out`, go on when it is restarted. `epoch`: seconds since 1970 when the member's
        clock was 0; None before its first report. `since`: from when on, by our clock, this incarnation reports; 0
        before that.
        """
        if self._last is not None:
            return self._last
        with self._lock:
            return {
                id_: {**member, "tables": {name: dict(rows) for name, rows in member["tables"].items()}}
                for id_, member in sorted(self._world.items())
            }

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """Wait until all members that are up have sent the reports due at this call; return False after the timeout."""
        deadline = time.monotonic() + timeout
        with self._lock:
            up = [id_ for id_, member in self._world.items() if member["state"] == "up" and self._agent.running]
        waits = [self._probes.send_probe(id_) for id_ in up]
        with self._lock:
            gone = [id_ for id_ in up if id_ in self._world and self._world[id_]["state"] in GONE]
        for id_ in gone:  # lost before the request was sent: no event will end that request
            self._probes.forget_member(id_)
        return all(self._probes.wait_for_answer(number, deadline - time.monotonic()) for number in waits)

    def _watch_member(self, member: int) -> None:
        with self._level_lock:
            with self._lock:
                level = self._level
                if level and member not in self._world:
                    try:
                        self._world[member] = self._empty_member(member, self._agent.member(member).name)
                    except RpcError:  # it has left meanwhile
                        return
            self._agent.notify(member, WATCH, level)

    def _empty_member(self, member: int, name: str) -> dict[str, Any]:
        tables = {name: dict(rows) for name, rows in self._earlier.get(member, {}).items()}
        fields: dict[str, Any] = {"name": name, "id": member, "incarnation": 0, "state": "up", "tables": tables}
        fields |= {"left_out": 0, "missed": 0, "trimmed": 0, "counted": 0, "met": {}}
        fields |= {"clock": SHARED, "epoch": None, "since": 0.0}
        return fields

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        with self._lock:
            if not self._wakes:
                return
            if kind == "joined" and (former := self._world.get(who.id)) is not None:
                # A new incarnation: the state of the old one is gone, and its last receipts will not come.
                self._earlier[who.id] = _ended_rows(former["tables"], former["incarnation"])
                # In its place at once: without it a total would be too low for a moment.
                totals = {name: former[name] for name in ("left_out", "trimmed", "counted", "met")}
                self._world[who.id] = {**self._empty_member(who.id, who.name), **totals}
            elif kind != "joined" and who.id in self._world:
                self._world[who.id]["state"] = "up" if kind == "recovered" else kind
            if kind in GONE:
                self._batch.pop(who.id, None)
        if kind in GONE:
            self._probes.forget_member(who.id)
        if kind == "joined":
            self._watch_member(who.id)
        self._notify_subscribers()

    def _report_received(self, source: int, data: dict[str, Any]) -> None:
        if "probe" in data:
            self._store_clock(source, self._probes.probe_answered(source, data["heard"], data["said"], data["probe"]))
            return
        with self._lock:
            member = self._world.get(source)
            if member is None:
                return
            missed = False
            if "snapshot" in data:
                self._apply_snapshot(source, member, data)
            else:
                missed = self._apply_batch(source, member, data)
        if missed:
            self._watch_member(source)
        self._probes.refresh_clock(source)
        self._notify_subscribers()

    def _apply_snapshot(self, source: int, member: dict[str, Any], data: dict[str, Any]) -> None:
        # A snapshot has no messages: those collected so far stay.
        messages = {name: rows for name, rows in member["tables"].items() if name == "messages"}
        earlier = {name: rows for name, rows in self._earlier.get(source, {}).items() if name != "messages"}
        tables = {name: {**earlier.get(name, {}), **rows} for name, rows in data["snapshot"].items()}
        epoch = time.time() - data["clock"]
        about = {"incarnation": data["incarnation"], "epoch": epoch, "since": time.monotonic()}
        member.update(tables={**earlier, **tables, **messages}, **about)
        member["met"] = _note_collectives(member["met"], data["snapshot"].get("collectives", {}))
        self._batch[source] = data["batch"]

    def _apply_batch(self, source: int, member: dict[str, Any], data: dict[str, Any]) -> bool:
        """Apply a batch; return True where rows are missing before it or in it."""
        if self._level == MESSAGES:
            member["trimmed"] += gather(member["tables"].setdefault("messages", {}), source, data["messages"])
            member["counted"] += self._count.count_new(source, data["messages"])
            member["missed"] += data["missed"]
            member["left_out"] += data["missed"]
        member["left_out"] += data["dropped"]
        last, batch = self._batch.get(source), data["batch"]
        if last is None or batch <= last:
            return False  # the requested snapshot will contain it, or has contained it
        if batch != last + 1 or data["dropped"]:
            del self._batch[source]
            return True
        for table, rows in data["rows"].items():
            for key, row in rows.items():
                apply_change(member["tables"], table, key, row)
        member["met"] = _note_collectives(member["met"], data["rows"].get("collectives", {}))
        self._batch[source] = batch
        return False

    def _store_clock(self, source: int, clock: ClockOffset | None) -> None:
        """Store the best estimate of a clock on another host."""
        with self._lock:
            member = self._world.get(source)
            if member is None or clock is None:
                return
            old = ClockOffset(*member["clock"])
            member["clock"] = choose_better_clock(None if old == SHARED else old, clock)
        self._notify_subscribers()

    def _notify_subscribers(self) -> None:
        with self._lock:
            wakes = [wake for wake, _ in self._wakes.values()]
        for wake in wakes:  # outside the lock: a subscriber may call `world`
            wake()


def _note_collectives(met: dict[str, int], rows: Mapping[str, Row | None]) -> dict[str, int]:
    """Return the latest number in each scope of the collectives that have ended: their rows are dropped some day."""
    met = dict(met) if rows else met
    for key, row in rows.items():
        if row is not None and row["end"] is not None:  # before, its scope may still change
            scope = key.rpartition(".")[0]
            met[scope] = max(met.get(scope, 0), row["number"])
    return met


def _ended_rows(tables: dict[str, Table], incarnation: int) -> dict[str, Table]:
    """Return the messages, metrics, and the ended steps, operations and collectives, of an incarnation that has ended.

    Rows of metrics get its number, also in their keys, which its successor uses again."""
    steps = {key: row for key, row in tables.get("steps", {}).items() if row["state"] != "running"}
    ops = {key: row for key, row in tables.get("ops", {}).items() if row["end"] is not None}
    met = {key: row for key, row in tables.get("collectives", {}).items() if row["end"] is not None}
    metrics = {
        key if "incarnation" in row else f"{incarnation}/{key}": {"incarnation": incarnation, **row}
        for key, row in tables.get("metrics", {}).items()
    }
    messages = tables.get("messages", {})
    kept = {"steps": steps, "ops": ops, "collectives": met, "metrics": metrics, "messages": messages}
    return {name: rows for name, rows in kept.items() if rows}


class TracedCollector:
    """A collector as a source of worlds with all messages, and with the collectives since its creation only.

    Once something was reported, the `zero` of each member is the time of the first row that there was, by our clock and
    in seconds since 1970. It stays when that row is dropped."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._began = time.monotonic()
        self._zero: tuple[float, float] | None = None

    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """Subscribe to changes and messages."""
        return self._collector.subscribe(wake, MESSAGES)

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """As `Collector.settle`."""
        return self._collector.settle(timeout)

    @property
    def phase(self) -> Phase:
        return self._collector.phase

    @property
    def agent(self) -> Agent:
        return self._collector.agent

    def world(self) -> World:
        """Return the collector's world without collectives that ended before the creation of this object."""
        world = {id_: drop_earlier_collectives(member, self._began) for id_, member in self._collector.world().items()}
        if self._zero is None and (first := first_report(world.values())) is not None:
            self._zero = first, first + time.time() - time.monotonic()
        return world if self._zero is None else {id_: {**member, "zero": self._zero} for id_, member in world.items()}


def current_collector() -> Collector:
    """Return the collector of the current agent. Raises RuntimeError where RPC is not initialized."""
    return agents.current_agent().part(Collector)


class HealthPoller:
    """Periodic requests for the state of all members. One for each agent: `agent.part(HealthPoller)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._collector = agent.part(Collector)
        self._lock = threading.Lock()
        self._subscribers: set[object] = set()  # one key for each subscriber
        self._is_polling = False  # whether the thread runs
        self._changes = Condition()  # wakes the thread so that it can end
        self._question = 0  # number of the latest request
        self._latest_requests: dict[int, int] = {}  # number of the latest request to each member
        self.history = ResourceHistory(agent.links.bus)
        agent.on_member(self._member_changed)
        agent.hooks.on_end.append(self._changes.notify_all)

    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """Subscribe as with the collector, and request the members' state until the end of the subscription."""
        stop = self._collector.subscribe(wake)
        key = object()
        with self._lock:
            if not self._subscribers:
                # without subscribers the collector has dropped the answers to older requests
                self._latest_requests.clear()
            self._subscribers.add(key)
            begins, self._is_polling = not self._is_polling, True  # the old thread may still run, and then goes on
        if begins:
            threading.Thread(target=self._poll_loop, name="rpcbench-health", daemon=True).start()

        def end_subscription() -> None:
            with self._lock:
                self._subscribers.discard(key)
            self._changes.notify_all()
            stop()

        return end_subscription

    def settle(self, timeout: float = SETTLE_SECONDS) -> bool:
        """Request the state of all members that are up, and wait for it and all reports; False after the timeout."""
        deadline = time.monotonic() + timeout
        changes = Condition()
        stop = self._collector.subscribe(changes.notify_all)
        try:
            self._send_requests()
            all_answered = changes.wait_for(self._has_all_answers, timeout)
        finally:
            stop()
        return self._collector.settle(deadline - time.monotonic()) and all_answered

    @property
    def phase(self) -> Phase:
        return self._collector.phase

    def world(self) -> World:
        return self._collector.world()

    def _poll_loop(self) -> None:
        while self._goes_on():
            self.history.add_answers(self._send_requests(), time.monotonic())
            self._changes.wait_for(lambda: not (self._subscribers and self._agent.running), PERIOD)

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_polling = bool(self._subscribers) and self._agent.running
            return self._is_polling

    def _send_requests(self) -> World:
        """Send a request to each member that has answered its last one. Return the world that has their answers."""
        world = self._collector.world() if self._agent.running else {}
        with self._lock:
            self._question += 1
            free = [
                id_ for id_, one in world.items() if one["state"] in ("up", "suspect") and self._has_answered(id_, one)
            ]
            self._latest_requests.update(dict.fromkeys(free, self._question))
            question = self._question
        for id_ in free:
            self._agent.notify(id_, LOOK, question)
        return world

    def _has_answered(self, id_: int, member: dict[str, Any]) -> bool:
        answered: int = member["tables"].get("health", {}).get(str(id_), {}).get("question", 0)
        return answered >= self._latest_requests.get(id_, 0)

    def _has_all_answers(self) -> bool:
        world = self._collector.world().items()
        return not self._agent.running or all(
            self._has_answered(id_, one) for id_, one in world if one["state"] == "up"
        )

    def _member_changed(self, kind: str, who: WorkerInfo, _reason: str) -> None:
        if kind == "joined":
            self._latest_requests.pop(who.id, None)


def current_poller() -> HealthPoller:
    """Return the poller of the current agent. Raises RuntimeError where RPC is not initialized."""
    return agents.current_agent().part(HealthPoller)

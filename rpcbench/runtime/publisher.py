"""Sends the changes of this member's tables to its watchers, and measures the member's health on request.

Guarantees
- Without watchers no thread runs and no event is kept. Watchers that do not read delay only the publisher.
- A watcher gets all tables, then at most five times a second the rows that have changed, each once, with their value at
  that time. Messages are included only while a watcher asks for them.
- All data are plain msgpack, so this works even where user data cannot be unpickled.
- A probe is answered with this member's clock, after the replies to earlier requests and all events waiting by then.
- `Health` measures only on request. The reply repeats the number of its question: a panel shows silent members.
"""

# Theory of operation
#
#   watcher                          publisher of one member
#      │ notice WATCH, level 1 or 2     │
#      ├───────────────────────────────►│ agent.listen(True): the event log keeps changed rows from now on
#      │ snapshot: all tables, batch n  │
#      │◄───────────────────────────────┤ then the thread `rpcbench-publish` starts, if it does not run
#      │ rows that changed, batch n + 1 │
#      │◄───────────────────────────────┤ every PERIOD seconds, only if there are any
#      │ notice WATCH, {"probe": 7}     │
#      ├───────────────────────────────►│ drain the log to the end and send it, then reply with two clock readings
#      │◄───────────────────────────────┤
#      │ notice WATCH, level 0          │
#      ├───────────────────────────────►│ no watcher left: the log keeps nothing, the thread ends
#
# Batches are numbered. A watcher that sees a gap has missed rows and sends WATCH again, which gives it a new snapshot.
# The lock `_send_lock` is held from draining the log until the batch is sent, so batches leave in the order of their
# numbers. A send waits while a watcher is far behind in reading (backpressure); then the log drops its oldest rows.

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psutil

from rpcbench.base.ids import MESSAGES, Row, Table
from rpcbench.protocol.node import Node
from rpcbench.runtime import gpus
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import GONE
from rpcbench.transport.hosts import host_id

LOOK = "look"
"""The channel of the request; its data are the number of the question."""
MEMORY_SECONDS = 5.0  # at most one measurement of memory in this time, as each takes milliseconds


class Health:
    """The health of one agent, made by `agent.part(Health)`: its row of the table "health", empty until a request."""

    def __init__(self, agent: Agent) -> None:
        self.cells: list[Callable[[], int]] = []  # each returns how many cells run or wait here
        self.others: list[Callable[[], object]] = []  # called with each request, to measure at the same moment
        self.waits: list[Callable[[], Iterable[int]]] = []  # ids of members that threads wait for in ways of their own
        self._agent = agent
        self._lock = threading.Lock()  # guards `_rows`
        self._rows: Table = {}
        self._before: tuple[float, float] | None = None  # (time, CPU seconds) at the last request
        self._memory: tuple[float, int | None] = float("-inf"), None  # (time, bytes) of the last measurement
        self._process, self._ram, self._cores = psutil.Process(), psutil.virtual_memory().total, os.cpu_count()
        agent.links.bus.register_table("health", self.health_table)
        agent.on_notice(LOOK, self._probe_received)

    def health_table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def count_cells(self) -> int:
        return sum(count() for count in self.cells)

    def _probe_received(self, _source: int, question: int) -> None:
        for other in self.others:
            other()
        key, row = str(self._agent.id), self._measure_health(question)
        with self._lock:
            self._rows[key] = row
        self._agent.links.bus.record_change("Measured", "health", key, partial(self._rows.get, key))

    def _measure_health(self, question: int) -> Row:
        agent = self._agent
        counts = sorted(agent.links.peers.traffic_by_member().items())
        peers = {str(peer): [count.sent, count.received] for peer, count in counts}
        lent = {str(peer): count.lent for peer, count in counts if count.lent}
        return {
            "question": question, "pid": os.getpid(), "host": host_id(), "cpu": self._cpu_share(),
            "memory": self._unshared_memory(), "clock": round(time.monotonic(), 3), "cores": self._cores,
            "ram": self._ram, "busy": agent.calls.pool.busy, "waiting": agent.calls.pool.waiting,
            "queued": agent.machine.read_node(_count_queued_calls), "cells": self.count_cells(), "peers": peers,
            "lent": lent, "awaits": self._awaited_members(), "gpu": gpus.gpu_report(),
        }  # fmt: skip

    def _awaited_members(self) -> list[int]:
        """Return the members for which a thread here waits, by id; calls that nobody waits for have none."""
        return sorted(self._agent.part(Watchdog).awaited_members().union(*(ids() for ids in list(self.waits))))

    def _cpu_share(self) -> float:
        """Return the share of one core that all threads have used since the last call; at first, since the start."""
        now, used = time.time(), time.process_time()
        at, before = self._before or (self._process.create_time(), 0.0)
        self._before = now, used
        return round((used - before) / max(now - at, 1e-3), 3)

    def _unshared_memory(self) -> int | None:
        """Return the bytes that no other process shares; None if the system refuses to report them."""
        now = time.monotonic()
        at, size = self._memory
        if now - at >= MEMORY_SECONDS:
            try:
                size = int(self._process.memory_full_info().uss)
            except psutil.AccessDenied:
                size = None
            self._memory = now, size
        return size


def _count_queued_calls(node: Node) -> int:
    """Count the calls that have arrived and not begun."""
    return sum(call.message is not None for call in node.calls.serving.values())


WATCH, TELEMETRY = "watch", "telemetry"  # channels: requests to a publisher, and its replies
PERIOD = 0.2  # seconds between batches
_BATCH = 2000  # rows per batch
_ALL = 1 << 30  # rows: no limit, for a probe


class Publisher:
    """Publishes the tables of one agent; see the theory of operation above."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards the watchers and the thread
        self._send_lock = threading.Lock()  # held from draining to sending, so that batches leave in order
        self._watchers: dict[int, int] = {}  # id → level: what it asks for
        self._thread: threading.Thread | None = None
        agent.links.bus.hide(WATCH, TELEMETRY)  # else each batch would be an event of the next one
        agent.on_notice(WATCH, self._request_received)
        agent.on_member(lambda kind, who, reason: self._remove_watcher(who.id) if kind in GONE else None)

    def _request_received(self, source: int, request: int | dict[str, int]) -> None:
        """Handle a request: to watch, to watch at another level (0: no more), or a probe."""
        if isinstance(request, dict):
            self._answer_probe(source, request["probe"])
            return
        if not request:
            self._remove_watcher(source)
            return
        with self._lock:
            self._watchers[source] = request
            self._update_recording()
        self._watch_changed()
        with self._send_lock:
            self._send_snapshot()  # after the log has begun to keep changes, so that none is missed
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish_loop, name="rpcbench-publish", daemon=True)
                self._thread.start()

    def _remove_watcher(self, watcher: int) -> None:
        with self._lock:
            if self._watchers.pop(watcher, None) is None:
                return
            self._update_recording()
            if not self._watchers:
                self._agent.links.bus.changes_ready.notify_all()  # wakes the thread, which ends
        self._watch_changed()

    def _watch_changed(self) -> None:
        """Let features begin or end to report. Without a lock, as they may block."""
        for changed in self._agent.links.bus.on_watch:
            changed()

    def _update_recording(self) -> None:
        """Have the log keep as much as the most demanding watcher asks for. The caller holds the lock."""
        messages = MESSAGES in self._watchers.values()
        self._agent.listen(bool(self._watchers), messages)
        if not messages:
            self._agent.links.bus.forget_messages()

    def _publish_loop(self) -> None:
        bus = self._agent.links.bus
        while True:
            bus.changes_ready.wait_for(lambda: bus.filled or self._has_ended())
            with self._lock:
                if self._has_ended():
                    self._thread = None
                    bus.restart_batches()
                    return
            self._send_batch(_BATCH)
            # All members of a host send at the same moments, so that a panel shows one state of all of them.
            time.sleep(PERIOD - time.monotonic() % PERIOD)

    def _has_ended(self) -> bool:
        return not self._watchers or not self._agent.running

    def _send_batch(self, most: int) -> None:
        with self._send_lock:
            batch = self._agent.machine.read_node(lambda _: self._agent.links.bus.drain_changes(most))
            messages, missed = self._agent.links.bus.drain_messages(most)
            if batch.rows or messages:
                report = {"rows": batch.rows, "batch": batch.number, "dropped": batch.dropped}
                self._send_to_watchers({**report, "messages": [tuple(row) for row in messages], "missed": missed})

    def _answer_probe(self, source: int, number: int) -> None:
        received_at = time.monotonic()
        self._send_batch(_ALL)
        answer = {"probe": number, "heard": received_at, "said": time.monotonic()}
        self._agent.notify(source, TELEMETRY, answer, may_wait=True)

    def _send_snapshot(self) -> None:
        batch, tables = self._agent.snapshot()
        clock = time.monotonic()  # not the clock of the links, which stands still while a stepper holds messages
        self._send_to_watchers(
            {"snapshot": tables, "batch": batch, "incarnation": self._agent.incarnation, "clock": clock}
        )

    def _send_to_watchers(self, data: dict[str, Any]) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            self._agent.notify(watcher, TELEMETRY, data, may_wait=True)

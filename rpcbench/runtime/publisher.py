"""Sends what happens on this member to those who watch it.

Nobody watches: no thread, no events. Watchers that do not read hold this back, and nothing else: what they miss is
dropped. A watcher gets all tables, then at most five times a second the rows that have changed, each once, as they are
by then. It asks again when it has missed a batch. Messages are told of only while a watcher asks for these besides.
All of it is plain msgpack, so it works even where user data does not travel.

A probe, a question on the same channel, is answered with this member's clock, after everything that it had to tell when
the probe came, and after what whoever probes has asked for before.

`Health` measures this member when somebody asks: its row of the table "health". Nobody asks: nothing is measured, and
the table is empty. Memory takes milliseconds to measure, so it is measured once in `MEMORY_SECONDS` at most. A question
has a number, and the answer says to which one it belongs, so that it is seen which members do not answer. `others`
measure something else at the same moments, say the processes that this member has started.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from rpcbench.base.conditions import Flag
from rpcbench.base.events import MESSAGES, Row, Table
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE
from rpcbench.transport.hosts import host_id

LOOK = "look"
"""The notice that asks: the number of the question."""
MEMORY_SECONDS = 5.0


class Health:
    """One for each agent: `agent.part(Health)`. `cells` says how many cells run or wait here."""

    def __init__(self, agent: Agent) -> None:
        self.cells: Callable[[], int] = lambda: 0
        self.others: list[Callable[[], object]] = []
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: Table = {}
        self._before: tuple[float, float] | None = None  # when it was last asked, and what it had computed until then
        self._memory: tuple[float, int | None] = float("-inf"), None
        self._process = psutil.Process()
        agent.bus.register("health", self.table)
        agent.on_notice(LOOK, self._asked)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def _asked(self, _source: int, question: int) -> None:
        for other in self.others:
            other()
        key, row = str(self._agent.id), self._measure(question)
        with self._lock:
            self._rows[key] = row
        self._agent.bus.note("Measured", "health", key, partial(self._rows.get, key))

    def _measure(self, question: int) -> Row:
        agent = self._agent
        peers = {str(peer): list(count) for peer, count in sorted(agent._peers.traffic().items())}
        return {
            "question": question, "pid": os.getpid(), "host": host_id(), "cpu": self._cpu(), "memory": self._uss(),
            "busy": agent._pool.busy, "waiting": agent._pool.waiting, "queued": agent.machine.ask(_queued),
            "cells": self.cells(), "peers": peers,
        }  # fmt: skip

    def _cpu(self) -> float:
        """The share of one core that all threads have used since the last time; the first time since the start."""
        now, used = time.time(), time.process_time()
        at, before = self._before or (self._process.create_time(), 0.0)
        self._before = now, used
        return round((used - before) / max(now - at, 1e-3), 3)

    def _uss(self) -> int | None:
        """Bytes that no other process shares; None where the system does not tell."""
        now = time.monotonic()
        at, size = self._memory
        if now - at >= MEMORY_SECONDS:
            try:
                size = int(self._process.memory_full_info().uss)
            except psutil.AccessDenied:
                size = None
            self._memory = now, size
        return size


def _queued(node: Node) -> int:
    """Calls that have come and not begun."""
    return sum(call.message is not None for call in node.calls.serving.values())


WATCH, TELEMETRY = "watch", "telemetry"
PERIOD = 0.2
_BATCH = 2000
_ALL = 1 << 30


class Publisher:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # from draining to sending: batches go out in order
        self._watchers: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._pause = Flag()
        agent.bus.hidden |= {WATCH, TELEMETRY}
        agent.on_notice(WATCH, self._asked)
        agent.on_member(lambda kind, who, reason: self._remove(who.id) if kind in GONE else None)

    def _asked(self, source: int, asked: int | dict[str, int]) -> None:
        """Somebody begins to watch (or has missed something), or for more or less, or stops; or it is a probe."""
        if isinstance(asked, dict):
            self._probed(source, asked["probe"])
        else:
            self._watch(source, asked)

    def _watch(self, source: int, level: int) -> None:
        if not level:
            self._remove(source)
            return
        with self._lock:
            self._watchers[source] = level
            self._listen()
        with self._telling:
            self._send_snapshot()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish, name="rpcbench-publish", daemon=True)
                self._thread.start()

    def _remove(self, watcher: int) -> None:
        with self._lock:
            if self._watchers.pop(watcher, None) is None:
                return
            self._listen()
            if not self._watchers:
                self._agent.bus.filled.set()  # the thread is to see it

    def _listen(self) -> None:
        """As much as the watcher that wants most."""
        messages = MESSAGES in self._watchers.values()
        self._agent.listen(bool(self._watchers), messages)
        if not messages:
            self._agent.bus.forget_messages()

    def _publish(self) -> None:
        bus = self._agent.bus
        while True:
            bus.filled.wait()
            with self._lock:
                if not self._watchers or not self._agent.running:
                    self._thread = None
                    bus.restart()
                    return
            self._send_batch(_BATCH)
            # All members of a host at the same moments, so that a panel does not show half of what they do together.
            self._pause.wait(PERIOD - time.monotonic() % PERIOD)

    def _send_batch(self, most: int) -> None:
        """The rows that have changed since the last one, to all who watch."""
        with self._telling:
            batch = self._agent.machine.ask(lambda _: self._agent.bus.drain(most))
            messages, missed = self._agent.bus.drain_messages(most)
            if batch.rows or messages:
                told = {"rows": batch.rows, "batch": batch.number, "dropped": batch.dropped}
                self._send({**told, "messages": [tuple(row) for row in messages], "missed": missed})

    def _probed(self, source: int, number: int) -> None:
        heard = time.monotonic()
        self._send_batch(_ALL)
        answer = {"probe": number, "heard": heard, "said": time.monotonic()}
        self._agent.notify(source, TELEMETRY, answer, may_wait=True)

    def _send_snapshot(self) -> None:
        batch, tables = self._agent.snapshot()
        clock = self._agent.clock()
        self._send({"snapshot": tables, "batch": batch, "incarnation": self._agent.incarnation, "clock": clock})

    def _send(self, data: dict[str, Any]) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            self._agent.notify(watcher, TELEMETRY, data, may_wait=True)

"""How this member is, measured when somebody asks: its row of the table "health".

Nobody asks: nothing is measured, and the table is empty. Memory takes milliseconds to measure, so it is at most once in
`MEMORY_SECONDS`, and stands until then. Whoever asks counts its questions; the answer says to which one it belongs, so
that it is seen who does not answer. `others` measure something else at the same moments, say the processes that this
member has started.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial

import psutil

from rpcbench.agent.core import Agent
from rpcbench.base.events import Row, Table
from rpcbench.protocol.node import Node
from rpcbench.transport.addresses import host_id

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

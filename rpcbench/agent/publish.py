"""Sends what happens on this member to those who watch it.

Nobody watches: no thread, no events. Watchers that do not read hold this back, and nothing else: what they miss is
dropped. A watcher gets all tables, then batches of the changes since, at most ten times
a second. It asks again when it has missed a batch. All of it is plain msgpack, so it works even where user data does
not travel.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from rpcbench.agent.core import Agent
from rpcbench.agent.roster import GONE
from rpcbench.words.changes import Flag

WATCH, TELEMETRY = "watch", "telemetry"
PERIOD = 0.1
_BATCH = 2000


class Publisher:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._watchers: set[int] = set()
        self._thread: threading.Thread | None = None
        self._pause = Flag()
        agent.on_notice(WATCH, self._asked)
        agent.on_member(lambda kind, who, reason: self._remove(who.id) if kind in GONE else None)

    def _asked(self, source: int, on: bool) -> None:
        """Somebody begins to watch (or has missed something), or stops."""
        if not on:
            self._remove(source)
            return
        with self._lock:
            self._watchers.add(source)
            self._agent.listen(True)
        self._send_snapshot()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish, name="rpcbench-publish", daemon=True)
                self._thread.start()

    def _remove(self, watcher: int) -> None:
        with self._lock:
            if watcher not in self._watchers:
                return
            self._watchers.remove(watcher)
            if not self._watchers:
                self._agent.listen(False)
                self._agent.bus.filled.set()  # the thread is to see it

    def _publish(self) -> None:
        bus = self._agent.bus
        while True:
            bus.filled.wait()
            with self._lock:
                if not self._watchers or not self._agent.running:
                    self._thread = None
                    bus.restart()
                    return
            events, dropped = bus.drain(_BATCH)
            if events:
                self._send({"events": [tuple(event) for event in events], "dropped": dropped})
            # All members of a host at the same moments, so that a panel does not show half of what they do together.
            self._pause.wait(PERIOD - time.monotonic() % PERIOD)

    def _send_snapshot(self) -> None:
        seq, tables = self._agent.snapshot()
        self._send({"snapshot": tables, "seq": seq, "incarnation": self._agent.incarnation})

    def _send(self, data: dict[str, Any]) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            self._agent.notify(watcher, TELEMETRY, data, may_wait=True)

"""The messages that were shown by a panel which no browser shows any more: for some seconds they are still collected.

A page that is loaded again closes its panels and opens new ones moments later. Without this its messages panel would be
empty then: a member keeps no messages without a watcher, and those in flight would be in flight for nobody. After
`SECONDS`, or when the agent ends, the members report no more, unless a panel is open again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rpcbench.runtime.agent import Agent
from rpcbench.telemetry.collector import Collector, TracedCollector

SECONDS = 30.0
"""Longer than JupyterLab takes to load a page and to open its panels."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A source with a subscription of ours, which ends after a time."""

    source: TracedCollector
    unsubscribe: Callable[[], None]
    timer: threading.Timer


class LastTrace:
    """The latest source of a closed panel. One for each agent: `agent.part(LastTrace)`."""

    def __init__(self, agent: Agent) -> None:
        self._collector = agent.part(Collector)
        self._lock = threading.Lock()  # guards `_kept`
        self._kept: _Kept | None = None
        agent.hooks.on_end.append(self.end)

    def source(self) -> TracedCollector:
        """Return the source for a new panel: that of the closed one, while it goes on."""
        with self._lock:
            return TracedCollector(self._collector) if self._kept is None else self._kept.source

    def keep(self, source: TracedCollector) -> None:
        """Let a source go on for some seconds."""
        made = _Kept(source, source.subscribe(lambda: None), threading.Timer(SECONDS, self.end))
        made.timer.name, made.timer.daemon = "rpcbench-last-trace", True
        self._replace(made)
        made.timer.start()

    def end(self) -> None:
        """Let no source go on. Idempotent."""
        self._replace(None)

    def _replace(self, kept: _Kept | None) -> None:
        with self._lock:
            before, self._kept = self._kept, kept
        if before is not None:
            before.timer.cancel()
            before.unsubscribe()

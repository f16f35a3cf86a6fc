"""What a click asks of a cluster: interrupt or restart a worker, have more or fewer of them.

Guarantees
- `begin` returns at once, from any thread, also while a cell runs; the deed is done on a thread of the pool.
- The same deed is not begun again while it runs, so two people may click at once.
- What runs, and what failed and why, are rows of the table "actions": every panel of every browser shows the same. A
  failure stays until the same is done well, or `LONGEST` others failed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

from rpcbench.agent.core import Agent
from rpcbench.words.events import Row, Table

logger = logging.getLogger(__name__)

LONGEST = 8


@runtime_checkable
class Workers(Protocol):
    """What a cluster offers."""

    def interrupt(self, name: str) -> None: ...

    def restart(self, name: str) -> Any: ...

    def scale(self, n: int) -> None: ...


class Actions:
    """One for each agent: `agent.part(Actions)`; what the agent belongs to is the cluster."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: Table = {}
        agent.bus.register("actions", self.table)

    @property
    def offered(self) -> bool:
        """Whether the agent belongs to something that has workers."""
        return isinstance(self._agent.owner, Workers)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def begin(self, action: str, target: str) -> None:
        """`begin("restart", "worker2")`, `begin("interrupt", "worker1")`, `begin("scale", "3")`. ValueError for another
        action; whatever else goes wrong is in the table."""
        deed = self._deed(action, target)
        key = f"{action} {target}"
        with self._lock:
            if self._rows.get(key, {}).get("state") == "runs":
                return
            self._set(key, {"action": action, "target": target, "state": "runs", "error": ""})
        self._agent.submit(functools.partial(self._do, key, deed))

    def _deed(self, action: str, target: str) -> Callable[[], object]:
        workers = cast(Workers, self._agent.owner)
        match action:
            case "interrupt":
                return lambda: workers.interrupt(target)
            case "restart":
                return lambda: workers.restart(target)
            case "scale":
                return lambda: workers.scale(int(target))
        raise ValueError(f"no action is called {action!r}: there are interrupt, restart, scale")

    def _do(self, key: str, deed: Callable[[], object]) -> None:
        try:
            deed()
            failure = ""
        except Exception as error:  # whatever it is, who clicked is told
            logger.info("%s failed", key, exc_info=error)
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            done = not failure
            self._set(key, None if done else {**self._rows[key], "state": "failed", "error": failure})
            failed = [name for name, row in self._rows.items() if row["state"] == "failed"]
            for old in failed[:-LONGEST]:
                self._set(old, None)

    def _set(self, key: str, row: Row | None) -> None:
        self._rows.pop(key, None)  # the latest stands last
        if row is not None:
            self._rows[key] = row
        self._agent.bus.note("ActionChanged", "actions", key, lambda: row)

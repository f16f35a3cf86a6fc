"""What a click in a panel or the sidebar asks of a cluster: interrupt or restart a worker, have more or fewer, stop.

Guarantees
- `begin` returns at once, from any thread, also while a cell runs; the deed is done on a thread of its own.
- The same deed is not begun again while it runs, so two people may click at once: both hear what comes of it.
- What runs, and what failed and why, are rows of the table "actions": every panel of every browser shows the same. A
  failure stays until the same is done well, or `LONGEST` others failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, cast, runtime_checkable

from rpcbench.base.events import Row, Table
from rpcbench.runtime.agent import Agent

logger = logging.getLogger(__name__)

LONGEST = 8
ALL = "all"


@runtime_checkable
class Workers(Protocol):
    """What a cluster offers."""

    @property
    def workers(self) -> list[str]: ...

    def interrupt(self, name: str) -> None: ...

    def restart(self, name: str) -> Any: ...

    def scale(self, n: int) -> None: ...

    def shutdown(self) -> None: ...


class Actions:
    """One for each agent: `agent.part(Actions)`; what the agent belongs to is the cluster."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: Table = {}
        self._running: dict[str, Future[None]] = {}
        agent.bus.register("actions", self.table)

    @property
    def offered(self) -> bool:
        """Whether the agent belongs to something that has workers."""
        return isinstance(self._agent.owner, Workers)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def begin(self, action: str, target: str) -> Future[None]:
        """`begin("restart", "worker2")`, `begin("interrupt", "all")`, `begin("scale", "3")`, `begin("stop", "all")`.

        The future of the one that runs now, as it may have been begun before. ValueError for another action; whatever
        else goes wrong is in the table, and raised by the future.
        """
        deed = self._deed(action, target)
        key = f"{action} {target}"
        with self._lock:
            if key in self._running:
                return self._running[key]
            self._running[key] = future = Future[None]()
            self._set(key, {"action": action, "target": target, "state": "runs", "error": ""})
        # Not one of the agent's own: these end with it, and so may the deed.
        threading.Thread(target=self._do, args=(key, deed, future), name="rpcbench-action", daemon=True).start()
        return future

    def _deed(self, action: str, target: str) -> Callable[[], object]:
        workers = cast(Workers, self._agent.owner)
        match action:
            case "interrupt":
                return lambda: interrupt(workers, workers.workers if target == ALL else [target])
            case "restart":
                return lambda: workers.restart(target)
            case "scale":
                return lambda: workers.scale(int(target))
            case "stop":
                return workers.shutdown
        raise ValueError(f"no action is called {action!r}: there are interrupt, restart, scale, stop")

    def _do(self, key: str, deed: Callable[[], object], future: Future[None]) -> None:
        try:
            deed()
        except Exception as error:  # whatever it is, who clicked is told
            logger.info("%s failed", key, exc_info=error)
            self._over(key, f"{type(error).__name__}: {error}")
            future.set_exception(error)
        else:
            self._over(key, "")
            future.set_result(None)

    def _over(self, key: str, failure: str) -> None:
        with self._lock:
            del self._running[key]
            self._set(key, {**self._rows[key], "state": "failed", "error": failure} if failure else None)
            failed = [name for name, row in self._rows.items() if row["state"] == "failed"]
            for old in failed[:-LONGEST]:
                self._set(old, None)

    def _set(self, key: str, row: Row | None) -> None:
        self._rows.pop(key, None)  # the latest stands last
        if row is not None:
            self._rows[key] = row
        self._agent.bus.note("ActionChanged", "actions", key, lambda: row)


def interrupt(workers: Workers, names: list[str]) -> None:
    for name in names:
        workers.interrupt(name)

"""Actions that a click in a panel or the sidebar starts: interrupt or restart a worker, show its stacks, scale or stop.

Guarantees
- `begin_action` returns at once, on any thread, also while a cell runs; the action runs on a thread of its own.
- An action is not begun again while it runs, so two people may click at once: both get the same result.
- Running actions, failed ones with their error, and stacks as text are rows of the table "actions", so all panels show
  the same. Such a row stays until the same action runs again, or until there are `LONGEST` newer ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

from rpcbench.base.ids import Row, Table
from rpcbench.launch import stacks
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.runtime.agent import Agent

logger = logging.getLogger(__name__)

LONGEST = 8  # rows of actions that have ended, in the table
ALL = "all"  # the target of actions on all workers


def interrupt_workers(cluster: BaseCluster, names: Sequence[str]) -> str:
    """Interrupt the cells of workers; return which workers ran one, and what to do about calls to the others."""
    had_cell = {name: cluster.interrupt(name) for name in names}
    interrupted = [name for name in names if had_cell[name]]
    others = [name for name in names if not had_cell[name]]
    texts = [f"Interrupted: {', '.join(interrupted)}."] if interrupted else []
    if others:
        runs = "runs" if len(others) == 1 else "run"
        texts.append(
            f"{', '.join(others)} {runs} no cell of this notebook. A call, or a step of a pipeline, ends with the cell "
            "here that waits for it: use the notebook's stop button."
        )
    return " ".join(texts)


class Actions:
    """The actions on the cluster that owns an agent. One for each agent: `agent.part(Actions)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards `_rows` and `_running`; not held while an action runs
        self._rows: Table = {}  # the latest last
        self._running: dict[str, Future[str]] = {}
        agent.links.bus.register_table("actions", self.table)

    @property
    def is_offered(self) -> bool:
        """Whether a cluster owns the agent."""
        return isinstance(self._agent.owner, BaseCluster)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def begin_action(self, action: str, target: str) -> Future[str]:
        """Begin an action, unless it runs, and return its future: of a text on its outcome, or "". The text is also in
        the table, as the error of an action is.

        `begin_action("restart", "worker2")`, `begin_action("interrupt", "all")`, `begin_action("stacks", "worker2")`,
        `begin_action("scale", "3")`, `begin_action("stop", "all")`; ValueError for another action.
        """
        deed = self._function_for_action(action, target)
        key = f"{action} {target}"
        with self._lock:
            if key in self._running:
                return self._running[key]
            self._running[key] = future = Future[str]()
            self._set_row(key, {"action": action, "target": target, "state": "runs", "error": ""})
        # Not a pool thread of the agent: those end with the agent, which the action "stop" ends.
        threading.Thread(target=self._run_action, args=(key, deed, future), name="rpcbench-action", daemon=True).start()
        return future

    def _function_for_action(self, action: str, target: str) -> Callable[[], object]:
        cluster = cast(BaseCluster, self._agent.owner)
        match action:
            case "interrupt":
                return lambda: interrupt_workers(cluster, cluster.workers if target == ALL else [target])
            case "restart":
                return lambda: cluster.restart(target)
            case "stacks":
                watched = cluster.watched if self.is_offered else list
                return lambda: f"At {time.strftime('%X')}, {stacks.stack_report(self._agent, [target], watched())}"
            case "scale":
                return lambda: cluster.scale(int(target))
            case "stop":
                return lambda: self._stop_cluster(cluster)
        raise ValueError(f"unknown action {action!r}: use interrupt, restart, stacks, scale or stop")

    def _stop_cluster(self, cluster: BaseCluster) -> None:
        self._agent.ending = "a click on Stop has stopped the cluster while this ran"
        cluster.shutdown()

    def _run_action(self, key: str, deed: Callable[[], object], future: Future[str]) -> None:
        try:
            said = deed()
        except Exception as error:  # any error is shown in the panel
            logger.info("%s failed", key, exc_info=error)
            self._action_ended(key, {"state": "failed", "error": f"{type(error).__name__}: {error}"})
            future.set_exception(error)
        else:
            self._action_ended(key, {"state": "done", "text": said} if isinstance(said, str) else None)
            future.set_result(said if isinstance(said, str) else "")

    def _action_ended(self, key: str, outcome: Row | None) -> None:
        with self._lock:
            del self._running[key]
            self._set_row(key, None if outcome is None else {**self._rows[key], **outcome, "ended": time.time()})
            ended = [name for name, row in self._rows.items() if row["state"] != "runs"]
            for old in ended[:-LONGEST]:
                self._set_row(old, None)

    def _set_row(self, key: str, row: Row | None) -> None:
        self._rows.pop(key, None)  # so that it is inserted as the last
        if row is not None:
            self._rows[key] = row
        self._agent.links.bus.record_change("ActionChanged", "actions", key, lambda: row)

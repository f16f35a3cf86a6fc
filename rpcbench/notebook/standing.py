"""How the clusters of a notebook stand, as a small dict: what a sidebar shows of them.

Nothing is asked of the workers. Figures are rounded, so that what stands still does not look changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcbench.launch.status import Looks, WorkerStatus
from rpcbench.launch.workforce import Workforce

State = dict[str, Any]


class Standing:
    """Looks at clusters again and again: a worker's share of a core is that since the last look."""

    def __init__(self) -> None:
        self._looks = Looks(memory=False)

    def at(self, clusters: Mapping[str, Workforce], current: Workforce | None) -> list[State]:
        """One dict for each cluster, by name."""
        return [
            {"name": name, "kind": one.kind, "current": one is current, "workers": self._workers(one)}
            for name, one in clusters.items()
        ]

    def _workers(self, one: Workforce) -> list[State]:
        serving = {*one.workers}
        return [worker(row, row.name in serving) for row in self._looks.at(one.watched())]


def worker(row: WorkerStatus, serves: bool) -> State:
    """One worker. `state`: ready, busy (calls from here wait for it), starting, stopped or lost; `note`: how it was
    lost; `start`: 1 for the first of its name, 2 once it has been started again; `cpu`: per cent of a core, 0
    where that is not known."""
    note = "" if row.state in ("serves", "stopped") else row.state
    state = "lost" if note else row.state if row.state == "stopped" else _serving(row, serves)
    return {
        "name": row.name,
        "state": state,
        "note": note,
        "start": row.incarnation + 1,
        "cpu": round(100 * (row.cpu or 0)),
        "calls": row.calls,
    }


def _serving(row: WorkerStatus, serves: bool) -> str:
    return "starting" if not serves else "busy" if row.calls else "ready"

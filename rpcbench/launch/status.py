"""How the workers of a cluster are: what the system knows of their processes, and how many calls of ours wait for them.

Nothing is asked of a worker, so a busy or stopped one is seen like any other.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from rpcbench.launch.worker import Place
from rpcbench.transport.hosts import host_id

_MB = 1 << 20


class WorkerStatus(NamedTuple):
    """One worker. uptime in seconds, memory in bytes that no other process shares (None where the system does not
    tell), cpu as a share of one core since the last look (the first one: since its start); calls of this process that
    wait for an answer. On another host uptime, memory and cpu are None: the system here does not know them."""

    name: str
    pid: int
    state: str
    incarnation: int
    host: str
    uptime: float | None
    memory: int | None
    cpu: float | None
    calls: int


class ClusterStatus(tuple[WorkerStatus, ...]):
    """A row for each worker, drawn as a table."""

    __slots__ = ()

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("worker", "process", "state", "start", "host", "up", "memory", "cpu", "calls")
        return [head, *map(_words, self)]

    def __repr__(self) -> str:
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head, *rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._cells()]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        top = f"<caption>Workers</caption><thead><tr>{head.replace('td>', 'th>')}</tr></thead>"
        return f"<table>{top}<tbody>{body}</tbody></table>"


def _words(row: WorkerStatus) -> tuple[str, ...]:
    memory = "?" if row.memory is None else f"{row.memory / _MB:.0f} MB"
    start = str(row.incarnation + 1)
    cpu = "?" if row.cpu is None else f"{row.cpu * 100:.0f} %"
    up = "?" if row.uptime is None else _span(row.uptime)
    return row.name, str(row.pid), row.state, start, row.host, up, memory, cpu, str(row.calls)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Watched(NamedTuple):
    """What the cluster knows of a worker. `lost`: how it ended; empty while it serves."""

    name: str
    incarnation: int
    place: Place
    lost: str
    calls: int


class Looks:
    """Remembers the last look at each process. `memory=False` leaves that out, which takes longest to read."""

    def __init__(self, memory: bool = True) -> None:
        self._memory = memory
        self._before: dict[int, tuple[float, float]] = {}  # by process: when, and the seconds it had computed

    def at(self, workers: Iterable[Watched]) -> ClusterStatus:
        return ClusterStatus([self._at(worker) for worker in workers])

    def _at(self, worker: Watched) -> WorkerStatus:
        if worker.place.host == host_id():
            return self._near(worker)
        seen = (0.0, None, 0.0) if worker.lost else (None, None, None)
        return _status(worker, worker.lost or "serves", *seen)

    def _near(self, worker: Watched) -> WorkerStatus:
        uptime, memory, cpu, state = 0.0, None, 0.0, worker.lost
        try:
            process = psutil.Process(worker.place.pid)
            with process.oneshot():
                state = state or ("stopped" if process.status() == psutil.STATUS_STOPPED else "serves")
                uptime, cpu = self._times(process)
            memory = int(process.memory_full_info().uss) if self._memory else None
        except psutil.NoSuchProcess:
            state = state or "has ended"
        except psutil.AccessDenied:
            pass
        lost = worker.lost or state == "has ended"
        seen = (0.0, None, 0.0) if lost else (uptime, memory, cpu)
        return _status(worker, state, *seen)

    def _times(self, process: psutil.Process) -> tuple[float, float]:
        """Seconds since its start, and the share of a core that it has used since the last look."""
        now, began, times = time.time(), process.create_time(), process.cpu_times()
        used = times.user + times.system
        at, before = self._before.get(process.pid, (began, 0.0))
        self._before[process.pid] = now, used
        return max(0.0, now - began), max(0.0, used - before) / max(now - at, 1e-3)


def _status(worker: Watched, state: str, up: float | None, memory: int | None, cpu: float | None) -> WorkerStatus:
    place = worker.place
    return WorkerStatus(
        worker.name, place.pid, state, worker.incarnation, place.hostname, up, memory, cpu, worker.calls
    )

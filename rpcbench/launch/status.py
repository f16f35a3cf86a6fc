"""How the workers of a cluster are: what the system and their logs say, and how many calls of ours wait for them.

Nothing is asked of a worker, so a busy or stopped one is seen like any other. The processes that a cluster has started
are the table "launched" of the member that did; it is looked at when `Health` is, never of itself. Whether the kernel
has killed for want of memory is the only sign by which a SIGKILL can be told for its own. Whether this machine has room
for so many workers is said before they start, as afterwards all is merely slow; the memory that a worker needs is a
rough figure, that of one which has run a few small cells.
"""

from __future__ import annotations

import contextlib
import html
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from rpcbench.base.errors import RpcError, counted
from rpcbench.base.events import Row, Table
from rpcbench.cells.worker_main import Place
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.publisher import Health
from rpcbench.transport.hosts import host_id

_COUNTS = Path("/proc/vmstat")


def oom_kills() -> int:
    """How many processes of this host were killed for want of memory since it started; 0 where that is not known."""
    with contextlib.suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


DESCRIPTORS = 6
"""Files that this process opens for each worker, about: sockets, shared memory, bells."""
EACH = {"fork": 60 << 20, "spawn": 300 << 20, "kernel": 300 << 20}
_GB = 1 << 30


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_descriptors(n: int) -> None:
    """RpcError where this process may not open as many files as the connections to `n` more workers need."""
    if not hasattr(psutil, "RLIMIT_NOFILE"):  # Windows knows no such limit, and macOS does not tell
        return
    process = psutil.Process()
    left = process.rlimit(psutil.RLIMIT_NOFILE)[0] - process.num_fds()
    if left < n * DESCRIPTORS:
        raise RpcError(
            f"Too many open files: to start {counted(n, 'worker')} opens about {n * DESCRIPTORS} in this process, and "
            f"it may open {max(0, left)} more; allow more with `ulimit -n` before it starts, or close some"
        )


def resource_warnings(n: int, mode: str) -> Iterator[str]:
    """A sentence for each thing that `n` workers, started by "fork" or "spawn" or as a "kernel", have too little of;
    none of workers started in another way, which may be elsewhere."""
    if mode not in EACH:
        return
    there = cores()
    if n > there:
        yield f"{counted(n, 'worker')} on {counted(there, 'core')}: when all compute, they take turns."
    free, needed = psutil.virtual_memory().available, n * EACH[mode]
    if needed > free:
        many = f"{counted(n, 'worker')} need{'s' if n == 1 else ''}"
        room = f"there is room for {free // EACH[mode] or 'none'}"
        yield f"{many} about {needed / _GB:.1f} GB of memory, and {free / _GB:.1f} GB are free: {room}."


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


LINES = 8
_WIDEST = 300


class Started(NamedTuple):
    """One of them. `ending` says how it ended, empty while it runs; `log` is what it wrote outside cells and calls."""

    id: int
    name: str
    place: Place
    incarnation: int
    ending: str
    log: str


class Launched:
    """`started` tells of all that belong to the cluster now."""

    def __init__(self, agent: Agent, started: Callable[[], Iterable[Started]]) -> None:
        self._bus = agent.bus
        self._started = started
        self._lock = threading.Lock()
        self._rows: Table = {}
        agent.bus.register("launched", self.table)
        agent.part(Health).others.append(self.look)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def look(self) -> None:
        """Bring the table up to date."""
        now = {str(one.id): _row(one) for one in self._started()}
        with self._lock:
            before, self._rows = self._rows, now
        for key in before.keys() - now.keys():
            self._bus.note("ProcessForgotten", "launched", key, lambda: None)
        for key, row in now.items():
            if before.get(key) != row:
                self._bus.note("ProcessChanged", "launched", key, partial(now.get, key))


def _row(one: Started) -> Row:
    lines = [line[:_WIDEST] for line in one.log.splitlines()[-LINES:]]
    state = one.ending or _state(one.place)
    who = {"name": one.name, "pid": one.place.pid, "incarnation": one.incarnation}
    return {**who, "state": state, "log": "\n".join(lines)}


def _state(place: Place) -> str:
    """What the system says of a process: serves, stopped, has ended. Of one elsewhere it knows nothing."""
    if place.host != host_id():
        return "serves"
    try:
        return "stopped" if psutil.Process(place.pid).status() == psutil.STATUS_STOPPED else "serves"
    except psutil.NoSuchProcess:
        return "has ended"

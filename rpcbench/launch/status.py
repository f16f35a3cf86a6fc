"""The status of a cluster's workers, from the operating system, their logs, and the calls that wait for them.

Rules
- No request goes to a worker, so a busy or stopped one is shown like any other.
- The processes that a cluster started are the table "launched" of the member that started them; it is updated when
  `Health` is, never by itself.
- Warnings that a host has too few cores or too little memory come before workers start: later, all is merely slow.
"""

from __future__ import annotations

import contextlib
import html
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rpcbench.base.errors import RpcError, count_noun, format_bytes, format_part
from rpcbench.base.ids import Row, Table
from rpcbench.launch.worker_main import WorkerLocation
from rpcbench.runtime import gpus
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.gpus import Gpu
from rpcbench.runtime.publisher import Health
from rpcbench.transport.hosts import host_id

_COUNTS = Path("/proc/vmstat")


def oom_kill_count() -> int:
    """Return how many processes of this host the system killed for lack of memory since boot; 0 if unknown."""
    # A change of this count is the only sign that a SIGKILL came from the system.
    with contextlib.suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


DESCRIPTORS = 6
"""Files that this process opens for each worker, about: sockets, shared memory, event descriptors."""
EACH = {"fork": 60 << 20, "spawn": 300 << 20, "kernel": 300 << 20}  # bytes, roughly: after a few small cells


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_descriptors(n: int) -> None:
    """Raise RpcError if this process may not open enough files for the connections to `n` more workers."""
    if not hasattr(psutil, "RLIMIT_NOFILE"):  # Windows has no such limit, and psutil cannot read it on macOS
        return
    process = psutil.Process()
    left = process.rlimit(psutil.RLIMIT_NOFILE)[0] - process.num_fds()
    if left < n * DESCRIPTORS:
        raise RpcError(
            f"Too many open files: to start {count_noun(n, 'worker')} opens about {n * DESCRIPTORS} in this process, "
            f"and it may open {max(0, left)} more; allow more with `ulimit -n` before it starts, or close some"
        )


def describe_cores(n: int, mode: str) -> str:
    """Return a sentence if `n` workers, started by "fork" or "spawn" or as a "kernel", share cores; else an empty one.
    That is no mistake: it explains times."""
    there = cores()
    if mode not in EACH or n <= there:  # of other modes workers may be on other hosts
        return ""
    return f"{count_noun(n, 'worker')} on {count_noun(there, 'core')}: when all compute, they take turns."


def warn_of_memory(n: int, mode: str) -> str:
    """Return a warning if such workers have too little memory; else an empty text."""
    if mode not in EACH:
        return ""
    free, needed = psutil.virtual_memory().available, n * EACH[mode]
    if needed > free:
        many = f"{count_noun(n, 'worker')} need{'s' if n == 1 else ''}"
        room = f"there is room for {free // EACH[mode] or 'none'}"
        return f"{many} about {format_bytes(needed)} of memory, and {format_bytes(free)} are free: {room}."
    return ""


class WorkerStatus(NamedTuple):
    """The status of one worker. `uptime`, `memory` and `cpu` are None for a worker on another host."""

    name: str
    pid: int
    state: str  # "ready", "stopped", or how it ended
    incarnation: int
    host: str
    uptime: float | None  # seconds
    memory: int | None  # bytes that no other process shares; None if the system does not report them
    cpu: float | None  # the share of one core since the last look, at first since the start
    calls: int  # of this process that wait for a reply
    gpu: Gpu | None = None  # its own, if it has one; without figures for a worker on another host


class ClusterStatus(tuple[WorkerStatus, ...]):
    """The status of all workers, displayed as a table, with columns for GPUs if a worker has one."""

    __slots__ = ()

    def _table_rows(self) -> list[tuple[str, ...]]:
        head = ("worker", "process", "state", "start", "host", "up", "memory", "cpu", "calls")
        if not any(row.gpu for row in self):
            return [head, *map(_format_row, self)]
        return [(*head, *_GPU_HEAD), *((*_format_row(row), *_gpu_words(row.gpu)) for row in self)]

    def json(self) -> dict[str, Any]:
        """Return the table as a dict of plain values: `workers` has a row for each, with the fields of `WorkerStatus`.
        `at`: seconds since 1970. `version` changes where a field goes or means something else."""
        rows = [{**row._asdict(), "gpu": row.gpu and row.gpu._asdict()} for row in self]
        return {"format": "rpcbench status", "version": 1, "at": time.time(), "workers": rows}

    def __repr__(self) -> str:
        return text_table(self._table_rows())

    def _repr_html_(self) -> str:
        return html_table("Workers", self._table_rows())


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, of which the first is the head, as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def html_table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, of which the first is the head, as an HTML table."""
    head, *others = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in others)
    top = f"<caption>{caption}</caption><thead><tr>{head.replace('td>', 'th>')}</tr></thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _format_row(row: WorkerStatus) -> tuple[str, ...]:
    memory = "?" if row.memory is None else format_bytes(row.memory)
    start = str(row.incarnation + 1)
    cpu = "?" if row.cpu is None else f"{row.cpu * 100:.0f} %"
    up = "?" if row.uptime is None else _format_duration(row.uptime)
    return row.name, str(row.pid), row.state, start, row.host, up, memory, cpu, str(row.calls)


_GPU_HEAD = ("GPU", "GPU memory", "GPU use")


def _gpu_words(gpu: Gpu | None) -> tuple[str, str, str]:
    if gpu is None:
        return "", "", ""
    memory = "?" if gpu.memory is None or gpu.total is None else format_part(gpu.memory, gpu.total)
    return gpu.gpu_label, memory, "?" if gpu.use is None else f"{gpu.use * 100:.0f} %"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class WorkerRecord(NamedTuple):
    """The data of a worker that its cluster has without a look at the process."""

    id: int
    name: str
    incarnation: int
    place: WorkerLocation
    lost: str  # how it ended; empty while it serves
    calls: int  # that wait for a reply


class ProcessSampler:
    """A sampler of processes, which keeps their last CPU times."""

    def __init__(self, memory: bool = True) -> None:
        self._memory = memory  # False: skip it, as it takes longest to read
        self._before: dict[int, tuple[float, float]] = {}  # by pid: time of the last look, CPU seconds until then

    def sample_workers(self, workers: Iterable[WorkerRecord]) -> ClusterStatus:
        return ClusterStatus([self._sample_worker(worker) for worker in workers])

    def _sample_worker(self, worker: WorkerRecord) -> WorkerStatus:
        place, state = worker.place, worker.lost or _process_state(worker.place)
        figures: tuple[float | None, int | None, float | None] = 0.0, None, 0.0  # of a process that has ended
        gpu = None
        if not worker.lost and state != "has ended":
            here, gpu = place.host == host_id(), place.gpu
            figures = self._measure_process(place.pid) if here else (None, None, None)
            gpu = gpus.measure_gpu(gpu) if here and gpu else gpu
        return WorkerStatus(
            worker.name, place.pid, state, worker.incarnation, place.hostname, *figures, worker.calls, gpu
        )

    def _measure_process(self, pid: int) -> tuple[float, int | None, float]:
        """Return uptime, memory and CPU share of a process of this host."""
        uptime, memory, cpu = 0.0, None, 0.0
        with contextlib.suppress(psutil.Error):  # it has ended, or must not be read: the values read before stay
            process = psutil.Process(pid)
            with process.oneshot():
                uptime, cpu = self._measure_times(process)
            memory = int(process.memory_full_info().uss) if self._memory else None
        return uptime, memory, cpu

    def _measure_times(self, process: psutil.Process) -> tuple[float, float]:
        """Return the seconds since the start, and the share of a core that was used since the last look."""
        now, began, times = time.time(), process.create_time(), process.cpu_times()
        used = times.user + times.system
        at, before = self._before.get(process.pid, (began, 0.0))
        self._before[process.pid] = now, used
        return max(0.0, now - began), max(0.0, used - before) / max(now - at, 1e-3)


LINES = 8  # of a log, in the table
_WIDEST = 300  # characters of a line


class LaunchedTable:
    """The table "launched": the workers that `started()` returns, each with the last lines of `log(name)`."""

    def __init__(self, agent: Agent, started: Callable[[], Iterable[WorkerRecord]], log: Callable[[str], str]) -> None:
        self._bus = agent.links.bus
        self._started, self._log = started, log
        self._lock = threading.Lock()  # guards `_rows`: panels read them on other threads
        self._rows: Table = {}
        agent.links.bus.register_table("launched", self.table)
        agent.part(Health).others.append(self.update_rows)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def update_rows(self) -> None:
        now = {str(one.id): _make_row(one, self._log(one.name)) for one in self._started()}
        with self._lock:
            before, self._rows = self._rows, now
        for key in before.keys() - now.keys():
            self._bus.record_change("ProcessForgotten", "launched", key, lambda: None)
        for key, row in now.items():
            if before.get(key) != row:
                self._bus.record_change("ProcessChanged", "launched", key, partial(now.get, key))


def _make_row(one: WorkerRecord, log: str) -> Row:
    lines = [line[:_WIDEST] for line in log.splitlines()[-LINES:]]
    state = one.lost or _process_state(one.place)
    who = {"name": one.name, "pid": one.place.pid, "incarnation": one.incarnation}
    return {**who, "state": state, "log": "\n".join(lines)}


def _process_state(place: WorkerLocation) -> str:
    """Return the state of a process: "ready", "stopped" or "has ended"."""
    if place.host != host_id():  # out of sight; its cluster reports its end
        return "ready"
    try:
        return "stopped" if psutil.Process(place.pid).status() == psutil.STATUS_STOPPED else "ready"
    except psutil.NoSuchProcess:
        return "has ended"

"""Reports where the threads of workers are, also of workers that do not respond: `%cluster stack`, `Cluster.stack`.

Guarantees
- A worker reports itself, within a second (`runtime.deadlocks`): its threads, the calls that they serve and wait for,
  with stacks. Python code that keeps its main thread busy does not hinder that.
- A worker of this host that does not respond, as C code there holds Python's lock, is sent a signal, at which
  faulthandler writes the stacks of its threads. A process that is stopped, and one without a handler for the signal, is
  sent none, and the report says so.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from rpcbench.cells.client import CellClient
from rpcbench.launch.status import WorkerRecord
from rpcbench.launch.worker_main import STACKS_SIGNAL, stacks_file
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog, is_idle
from rpcbench.runtime.handles import is_user_file
from rpcbench.transport.hosts import host_id

_DUMP_SECONDS = 5.0  # for a process to handle the signal
_QUIET_SECONDS = 0.05  # without new text, after which a report counts as complete
_WIDEST = 60  # characters of a cell's first line


class StackReport(str):
    """A report. Its repr is its text, so that a cell shows it line by line."""

    __slots__ = ()
    __repr__ = str.__str__


def stack_report(agent: Agent, names: Sequence[str], watched: Iterable[WorkerRecord]) -> StackReport:
    """Report where the threads of these workers are. `watched` has the locations of the workers, as far as the cluster
    has them. UnknownWorkerError; WorkerLostError for one that is lost."""
    return StackReport("\n".join(stack_texts(agent, names, watched).values()))


def stack_texts(agent: Agent, names: Sequence[str], watched: Iterable[WorkerRecord]) -> dict[str, str]:
    """Return the report of each worker, as `stack_report` has it."""
    ids = {name: agent.member(name).id for name in names}  # before the wait: one may be lost meanwhile
    told = agent.part(Watchdog).thread_stacks(names)
    places = {record.name: record for record in watched}
    client = agent.part(CellClient) if agent.has(CellClient) else None
    texts = {}
    for name in names:
        code = client.code_on_worker(ids[name]) if client else ""
        text = told.get(name) or _from_outside(agent, name, places.get(name), code)
        if code:
            first, *rest = text.split("\n")
            text = "\n".join([first.replace(_IDLE, ":"), f"  runs the cell: {shorten_code(code)}", *rest])
        texts[name] = text
    return texts


_IDLE = ": nothing to do, and no thread waits"  # of a kernel whose cell awaits: no thread is in it


def shorten_code(code: str) -> str:
    """Return the first line of a cell, in short."""
    first, *rest = code.strip().splitlines() or [""]
    return f"{first[:_WIDEST]} …" if rest or len(first) > _WIDEST else first


_BUSY = "it is stopped, or busy in code that lets no other thread run"


def _from_outside(agent: Agent, name: str, record: WorkerRecord | None, code: str) -> str:
    """Report on a worker that does not respond, from what its host shows."""
    if record is None or record.place.host != host_id():
        where = f", and runs on another host, {record.place.hostname}," if record is not None else ","
        return f"{name} does not respond{where} where no signal from here reaches it: {_BUSY}"
    pid = record.place.pid
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):  # it ends just now
        state = psutil.Process(pid).status()
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return f"{name} is stopped, by a signal or a debugger: kill -CONT {pid} lets its process go on"
        if state != psutil.STATUS_ZOMBIE:
            return _report_from_dump(name, pid, stacks_file(agent.config.directory, name), code)
    return f"{name} has ended: there is no process {pid} any more"


def _report_from_dump(name: str, pid: int, file: Path, code: str) -> str:
    if not _handles_signal(pid) or not file.exists():
        return f"{name} does not respond: {_BUSY}; its process {pid} has no handler that would report more"
    before = file.stat().st_size
    os.kill(pid, STACKS_SIGNAL)
    if not (text := _await_report(file, before)):
        return f"{name} does not respond, and its process {pid} handled no signal within {_DUMP_SECONDS:g} s"
    why = "its code lets no other thread run, or its host is overloaded"
    lines = [f"{name} does not respond: {why}. From outside:"]
    for thread in parse_dump(text):
        lines += [f"  {thread.name}", *(f"      {frame}" for frame in thread.report_lines(name, code))]
    return "\n".join(lines)


def _handles_signal(pid: int) -> bool:
    """Return whether a process has a handler for STACKS_SIGNAL: it would end by the signal otherwise."""
    status = Path(f"/proc/{pid}/status")
    if not Path("/proc/self/status").exists():  # macOS does not tell; the file of the worker has to suffice
        return True
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _await_report(file: Path, before: int) -> str:
    """Wait for a report to appear in a file after `before` bytes, and return it; empty if none does."""
    deadline, size = time.monotonic() + _DUMP_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)  # nothing tells the end of a report, or its beginning
        seen, size = size, file.stat().st_size
        if seen == size > before:
            break
    with file.open("rb") as written:
        written.seek(before)
        return written.read().decode(errors="replace")


class StackLine(NamedTuple):
    """One frame of a report by faulthandler."""

    file: str
    line: int
    function: str


_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_CELL = re.compile(r"<ipython-input-(\d+)-\w+>|.*/ipykernel_\d+/\d+\.py")


class DumpedThread(NamedTuple):
    """One thread of a report by faulthandler, innermost frame first."""

    name: str
    frames: tuple[StackLine, ...]

    @property
    def is_the_users(self) -> bool:
        """Whether it is in the user's program, as for `runtime.deadlocks`."""
        return any(is_user_file(frame.file) and not is_idle(frame.file) for frame in self.frames)

    def report_lines(self, worker: str, code: str) -> list[str]:
        """Return its frames of the user's program, without those of IPython, which run the cell; all if there are none.
        `code`: the cell that runs."""
        frames = [frame for frame in self.frames if is_user_file(frame.file)] if self.is_the_users else [*self.frames]
        outermost = max((n for n, frame in enumerate(frames) if _CELL.fullmatch(frame.file)), default=len(frames))
        return [_format_frame(frame, worker, code) for frame in frames[: outermost + 1]]


def _format_frame(frame: StackLine, worker: str, code: str) -> str:
    inside = "" if frame.function == "<module>" else f" in {frame.function}"
    if (cell := _CELL.fullmatch(frame.file)) is None:
        place, text = f"{frame.file}:{frame.line}", linecache.getline(frame.file, frame.line).strip()
    else:
        # Only the cell that runs has a frame of a module, and its code is known. IPython drops empty lines before it.
        lines = code.lstrip("\n").splitlines() if not inside else []
        place = f"Cell {worker}[{cell[1]}], line {frame.line}" if cell[1] else f"Cell {worker}, line {frame.line}"
        text = lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
    return f"{place}{inside}{f': {text}' if text else ''}"


def parse_dump(dump: str) -> list[DumpedThread]:
    """Return the threads of a report by faulthandler that are in the user's program; all if none is."""
    blocks = [block.splitlines() for block in dump.split("\n\n") if block.strip()]
    threads = []
    for number, (head, *lines) in enumerate(blocks, 1):
        frames = [StackLine(found[1], int(found[2]), found[3]) for line in lines if (found := _FRAME.fullmatch(line))]
        # Python lists the latest thread first, so the main one is the last.
        name = "MainThread" if number == len(blocks) else f"Thread {head.partition('0x')[2].split()[0]}"
        threads.append(DumpedThread(name, tuple(frames)))
    return [thread for thread in threads if thread.is_the_users] or threads

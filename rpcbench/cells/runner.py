"""Cells on a worker: taken from a queue, run one after the other on the worker's main thread.

In a process worker that thread does nothing else (`serve`); in a kernel worker it is the kernel's event loop, which
performs one job after the other (see `kernel_worker`).

Rules
- An interrupt names its cell. It raises KeyboardInterrupt on the main thread while that very cell runs; a cell that
  still waits is dropped; one that is over is left alone, and so is whatever runs next. A send is not cut in half.
- Who asked is told once the main thread has heard of it, as it has not where code holds it and looks at no signal.
- Nothing that a cell does, and no moment at which an interrupt comes, ends the loop.
- A cell's error is raised in `run_cell`, so it travels as any error of a call does; its rendered traceback goes ahead
  with the output.

What cells say to the user besides output, and hear (questions, help, debuggers, widgets), goes through one
`CellMessages` for each process, whatever the shell that runs its cells.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rpcbench.base.errors import CallCancelled
from rpcbench.base.futures import blocked
from rpcbench.base.rebuild import cut
from rpcbench.cells import debugger, stdin
from rpcbench.cells.output import CellKey, CellStream, Notice, OutputStream, log_tail
from rpcbench.cells.stdin import ANSWER, Stdin
from rpcbench.cells.widgets import COMM, WorkerComms
from rpcbench.runtime.current import caller, current
from rpcbench.runtime.publisher import Health
from rpcbench.wire.messages import Origin

if TYPE_CHECKING:
    from rpcbench.cells.shell import CellShell, Outcome
    from rpcbench.runtime.agent import Agent


class CellMessages:
    """Listens to the notebook from the beginning on."""

    def __init__(self, agent: Agent, outbox: OutputStream) -> None:
        self._outbox = outbox
        self._stdin = Stdin(outbox)
        self._comms = WorkerComms(outbox)
        agent.on_notice(ANSWER, self._stdin.answered)
        agent.on_notice(COMM, self._comms.heard)

    def in_charge(self) -> AbstractContextManager[None]:
        """Inside, `input` and `getpass` ask the notebook."""
        return self._stdin.installed()

    def equip(self, shell: Any) -> None:
        """Before the first cell runs in this shell. For good: a kernel takes `input` back while another client runs."""
        self._stdin.install()
        stdin.install_pager(shell, self._outbox)
        debugger.install_debugger()
        self._comms.install(shell)

    def end(self) -> None:
        """A cell is over."""
        self._stdin.end()


OUTPUT = "cell"
SHOWN = "shown"
INTERRUPT = "interrupt"
HEARD = "heard"
_RUNTIME = tuple(
    f"{Path(__file__).parents[1] / floor}{os.sep}"
    for floor in ("wire", "serialization", "protocol", "transport", "runtime")
)
_PATIENCES = [0.02 * 2**i for i in range(7)]
_CALM_SECONDS = 0.2
"""After a KeyboardInterrupt was raised in a cell no second one is for so long: the first must find its way out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What to run: `push` are variables set before, `want` names of variables to bring back after, `leave` of those
    to bring an RRef of.

    `value` asks for the value of the last expression under the name "", and for it not to be shown. `origin` is the
    notebook's cell that it is.
    """

    number: int
    code: str
    push: dict[str, Any] = field(default_factory=dict)
    want: tuple[str, ...] = ()
    value: bool = False
    leave: tuple[str, ...] = ()
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A cell that somebody waits for."""

    key: CellKey
    cell: Cell
    reply: Future[dict[str, Any]] = field(default_factory=Future)


class CellRunner:
    """Runs cells on the main thread.

    `shell`: where; a worker without one makes its own. `elsewhere`: called by an interrupt that finds the main thread
    outside the cell's code, as the cell awaits something on a loop that is not its own. `interrupted_by`: the signal
    that interrupts a cell.
    """

    shell: CellShell | None = None
    elsewhere: Callable[[], object] | None = None
    interrupted_by: int = signal.SIGINT

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._logs = _logs()
        self.outbox = OutputStream(self._notify, self._logs, log_tail(agent.name, agent.incarnation))
        self.talk = CellMessages(agent, self.outbox)
        self._gate = threading.Lock()
        self._running: CellKey | None = None
        self._open = 0  # cells that wait or run
        self._stopping = False
        self._given_up: deque[CellKey] = deque(maxlen=64)
        self._raised = float("-inf")
        self._insisting = False
        self._heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
        agent.part(Health).cells = lambda: self._open
        agent.on_notice(INTERRUPT, self._interrupt)
        agent.on_notice(SHOWN, self.outbox.shown)

    def serve(self) -> None:
        """Run cells on this thread until `stop`."""
        with self.talk.in_charge(), self.in_charge():
            for job in self.jobs():
                _finish(self.perform(job))

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """The signal, `sys.stdout` and `sys.stderr` are ours meanwhile. On the main thread."""
        streams, before = (sys.stdout, sys.stderr), signal.signal(self.interrupted_by, self._on_signal)
        sys.stdout, sys.stderr = (CellStream(name, self.outbox, log) for name, log in self._logs.items())
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            signal.signal(self.interrupted_by, before)

    def jobs(self) -> Iterator[Job]:
        """Those that come, until `stop`."""
        while (job := self._jobs.get()) is not None:
            yield job

    async def perform(self, job: Job) -> None:
        """Run a cell, while `in_charge`. Waits only for what the cell awaits, and if that has a loop not its own."""
        self._reply(job, await self._attempt(job))

    def stop(self) -> None:
        """End `serve`: the cell that runs is interrupted, those that wait do not begin. From any thread; returns when
        the cell has heard of that, or has not within two seconds."""
        with self._gate:
            self._stopping, running = True, self._running
        self._jobs.put(None)
        if running is not None:
            for _ in self._pursue(running):
                pass

    def run(self, key: CellKey, cell: Cell) -> dict[str, Any]:
        """Queue the cell and wait for its values; its error is raised. Called on a pool thread."""
        job = Job(key, cell)
        with self._gate:
            self._open += 1
        try:
            self._jobs.put(job)
            with blocked():
                return job.reply.result()
        finally:
            with self._gate:
                self._open -= 1

    async def _attempt(self, job: Job) -> Outcome:
        """The outcome of the cell, whatever happens in it and whenever an interrupt comes."""
        from rpcbench.cells.shell import Outcome

        self.outbox.begin(job.key)
        try:
            try:
                self._admit(job.key)
                self._agent.values.remote_cell = job.cell.origin
                return await self._run(job.cell)
            finally:
                self._dismiss()
        except BaseException as error:  # noqa: BLE001  (an interrupt that came just before or after the cell's own code)
            self._dismiss()
            return Outcome(error=error, traceback=(f"{type(error).__name__}: {error}",))

    async def _run(self, cell: Cell) -> Outcome:
        from rpcbench.cells.shell import WorkerShell
        from rpcbench.rpc import RRef

        if self.shell is None:
            self.shell = WorkerShell.start(self._agent.name, self.outbox)
            self.talk.equip(self.shell)
        outcome = await self.shell.run(cell.code, cell.push, (*cell.want, *cell.leave), cell.value)
        if outcome.error is None:
            outcome.values.update((name, RRef(outcome.values[name])) for name in cell.leave)
        return outcome

    def _admit(self, key: CellKey) -> None:
        signal.signal(self.interrupted_by, self._on_signal)  # a debugger in the cell before may have left its own
        with self._gate:
            given_up = self._stopping or key in self._given_up
            self._running = None if given_up else key
            self._raised = float("-inf")
        if given_up:
            raise KeyboardInterrupt("the cell was interrupted before it began")

    def _dismiss(self) -> None:
        self._agent.values.remote_cell = None
        with self._gate:
            self._running = None

    def _reply(self, job: Job, outcome: Outcome) -> None:
        error = outcome.error
        kind = None if error is None else type(error).__name__
        lines = [cut(line) for line in outcome.traceback]
        self.outbox.end(job.key, json.dumps({"error": kind, "traceback": lines}))
        self.talk.end()
        if error is None:
            job.reply.set_result(outcome.values)
        elif isinstance(error, Exception):
            job.reply.set_exception(error)
        else:
            job.reply.set_exception(CallCancelled(f"the cell on {self._agent.name} ended by {kind}"))

    def _interrupt(self, asker: int, notice: Notice) -> None:
        number = notice["cell"]
        for runs in self._pursue(CellKey(asker, number)):
            self._agent.notify(asker, HEARD, {"cell": number, "runs": runs})

    def _pursue(self, key: CellKey) -> Iterator[bool]:
        """Interrupt the cell until it ends; yields whether it runs, each time that the main thread has heard of it."""
        heard = self._heard = queue.SimpleQueue()
        for patience in _PATIENCES:
            self._insisting = patience == _PATIENCES[-1]
            if not self._signal(key):
                yield False
                return
            # A signal that comes just before the main thread begins to block does not end that wait: send another.
            until = time.monotonic() + patience
            with contextlib.suppress(queue.Empty):
                while (left := until - time.monotonic()) > 0:
                    ends = heard.get(timeout=left)
                    yield True
                    if ends:
                        return

    def _signal(self, key: CellKey) -> bool:
        """The signal for the main thread if that cell runs there; a cell that has not begun is not to begin."""
        with self._gate:
            if self._running == key:
                self.rouse()
                return True
            self._given_up.append(key)
            return False

    def rouse(self) -> None:
        """Interrupt whatever runs on the main thread. From any thread."""
        signal.pthread_kill(threading.main_thread().ident or 0, self.interrupted_by)

    def _on_signal(self, _signal: int, frame: FrameType | None) -> None:
        """On the main thread, between two of its bytecodes; takes no lock, which that thread may hold."""
        now, running = time.monotonic(), self._running is not None
        if running and (now - self._raised < _CALM_SECONDS or (_in_runtime(frame) and not self._insisting)):
            self._heard.put(False)  # not now, so another one comes soon
            return
        self._heard.put(True)
        if running:
            self._raised = now
            if self.elsewhere is None or _under(frame, CellRunner._attempt.__code__):
                raise KeyboardInterrupt
            self.elsewhere()

    def _notify(self, member: int, notice: Notice) -> None:
        self._agent.notify(member, OUTPUT, notice)


def _in_runtime(frame: FrameType | None) -> bool:
    """Whether this is code of the runtime, or was called by it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_RUNTIME):
            return True
        frame = frame.f_back
    return False


def _under(frame: FrameType | None, code: CodeType) -> bool:
    """Whether that code, or what it called, runs in this frame."""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run to its end what never has to wait for a loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("this worker has no loop on which a cell could wait")


def _logs() -> dict[str, TextIO]:
    """The process's own output, by name, whatever stands in for it in `sys`."""
    assert sys.__stdout__ is not None and sys.__stderr__ is not None
    return {"stdout": sys.__stdout__, "stderr": sys.__stderr__}


def run_cell(cell: Cell) -> dict[str, Any]:
    """On a worker, through a call: run the cell on its main thread; the values asked for, or the cell's error."""
    agent = current()
    if not agent.has(CellRunner):
        raise RuntimeError(f"{agent.name} runs no cells: it is not a worker of a cluster")
    return agent.part(CellRunner).run(CellKey(caller(), cell.number), cell)

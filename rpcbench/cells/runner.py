"""Runs cells on a worker, one after the other on its main thread.

In a process worker that thread does nothing else (`serve_cells`). In a kernel worker the kernel's event loop runs on it
and performs one job after the other (see `kernel_worker`).

Rules
- An interrupt names its cell. It raises KeyboardInterrupt on the main thread only while that cell runs. A queued cell
  is dropped. A cell that has ended, and the code that runs next, are left alone. It never cuts a send in half.
- An interrupt waits for the end of an import: half of a package in `sys.modules` would fail all later cells that need
  it. A second interrupt of the cell, while the first one waits, cuts the import.
- The client is notified once the main thread has handled the signal. Code that blocks that thread and polls no signals
  delays this.
- Neither a cell nor an interrupt, at any moment, ends the loop.
- `run_cell` raises the cell's error, which travels like the error of any call. The output carries its traceback ahead.
"""

# Theory of operation
#
#     pool thread (run_cell)           main thread                              output thread
#     ──────────────────────           ───────────                              ─────────────
#     run: queue a Job ──────────────► jobs → perform → _attempt_job
#     notify the client: QUEUED          _mark_running
#     wait for job.reply                 _run_in_shell: shell.run(code) ──────► OutputStream ─► client
#                                        _clear_running
#     return values, or raise ◄───────── _send_reply queues "end", then resolves the reply
#
#     INTERRUPT from the client        signal handler, on the main thread       _interrupt_until_handled
#     ─────────────────────────        ──────────────────────────────────       ────────────────────────
#     _signal_cell: it runs ─────────► no cell runs ── heard: True ───────────► stop
#       (else add it to _given_up,     raised one < 0.2 s ago, or
#        which _mark_running refuses)    inside the runtime ── heard: False ──► send again after a backoff
#                                      inside an import ── heard: False ─────► send again until it has ended
#                                      in the cell's code ── heard: True, KeyboardInterrupt
#                                      outside it ── heard: True, `elsewhere` (a kernel cancels the task)
#
# `_signal` compares the cell with `_running` and sends the signal under one lock, which `_clear_running` needs to clear
# `_running`. So the signal for a cell is pending before that cell can end, and is handled before the next one begins.
# An interrupt that arrives just before or after the cell's own code is caught in `_attempt_job` and ends that cell
# only. The last attempt of `_interrupt_until_handled` interrupts runtime code as well: a cell may be blocked there, in
# a call that never ends. A signal that this process has not sent is handled as the first one of such attempts.

from __future__ import annotations

import _thread
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
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rpcbench.base.errors import CallCancelled
from rpcbench.base.futures import release_slot
from rpcbench.base.rebuild import cut_text
from rpcbench.cells import debugger, stdin
from rpcbench.cells.output import SHOWN, CellKey, CellStream, Notice, OutputStream, find_log_tail
from rpcbench.cells.stdin import ANSWER, Stdin
from rpcbench.cells.widgets import COMM, WorkerComms
from rpcbench.runtime.current import caller_id, current_agent
from rpcbench.runtime.operator_profile import measured_allocations
from rpcbench.runtime.publisher import Health
from rpcbench.runtime.server import end_fork
from rpcbench.wire.messages import Origin

if TYPE_CHECKING:
    from rpcbench.cells.shell import CellShell, Outcome
    from rpcbench.runtime.agent import Agent


class CellMessages:
    """The messages of a process's cells besides output: questions, help pages, debuggers and widgets."""

    def __init__(self, agent: Agent, output_stream: OutputStream) -> None:
        self._output_stream = output_stream
        self.stdin = Stdin(output_stream)
        self._comms = WorkerComms(output_stream)
        agent.on_notice(ANSWER, self.stdin.answer_received)
        agent.on_notice(COMM, self._comms.message_received)

    def install_hooks(self, shell: Any) -> None:
        """Install the hooks in a shell before its first cell runs, and leave them there."""
        self.stdin.install_input()  # not undone: a kernel restores its own `input` while another client's code runs
        stdin.install_pager(shell, self._output_stream)
        debugger.install_debugger()
        self._comms.install_comms(shell)


# Channels of one-way messages between a worker and its client.
OUTPUT = "cell"  # worker → client: one numbered item of output
QUEUED = "queued"  # worker → client: this cell is queued, and later ones will not overtake it
INTERRUPT = "interrupt"  # client → worker: stop this cell
INTERRUPT_HANDLED = "heard"  # worker → client: the main thread has handled the interrupt
_RUNTIME = tuple(  # folders whose code an interrupt must not cut: it may be in the middle of a send
    f"{Path(__file__).parents[1] / floor}{os.sep}"
    for floor in ("wire", "serialization", "protocol", "transport", "runtime")
)
_RENDERING = (str(Path(__file__).with_name("shell.py")), "showtraceback")  # a cut traceback would be lost
_BACKOFFS = [0.02 * 2**i for i in range(7)]  # seconds between two signals: exponential backoff, 2.5 s in all
_IMPORT = "<frozen importlib._bootstrap>"  # the file of the code that imports: its frames are below all that it runs
_IMPORT_SECONDS = 0.05  # between two signals during an import
_NO_CLIENT = -1  # in the key of a block
_MIN_INTERVAL_SECONDS = 0.2
"""Minimum time between two KeyboardInterrupts in one cell, so that the first can leave the cell's code."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Code to run on a worker, with the variables that it needs and returns."""

    number: int  # unique per client
    code: str
    push: dict[str, Any] = field(default_factory=dict)  # variables to set first
    want: tuple[str, ...] = ()  # names of variables to return
    value: bool = False  # return the last expression's value, under the name "", instead of showing it
    leave: tuple[str, ...] = ()  # names of variables that stay on the worker; an RRef of each is returned
    origin: Origin | None = None  # the notebook cell that it came from


@dataclass(frozen=True, slots=True)
class Job:
    """A queued cell and the future of the call that waits for it."""

    key: CellKey
    cell: Cell
    reply: Future[dict[str, Any]] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Interrupt:
    """An interrupt on its way: signals are sent until the handler reports that it needs no more."""

    key: CellKey
    cuts_import: bool
    cuts_runtime: bool = False  # code of the runtime, too
    awaits_import: bool = False  # the last signal came inside an import
    reports: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)  # the handler's reports

    def backoff_seconds(self) -> Iterator[float]:
        """Yield the seconds to wait for a report after each signal."""
        for seconds in _BACKOFFS:
            self.cuts_runtime = seconds == _BACKOFFS[-1]
            yield seconds
            while self.awaits_import:
                yield _IMPORT_SECONDS


class CellRunner:
    """Runs cells on the main thread."""

    shell: CellShell | None = None  # a process worker makes its own for the first cell
    # Called by an interrupt that finds the main thread outside the cell's code: the cell awaits on the kernel's loop.
    elsewhere: Callable[[], object] | None = None
    interrupted_by: int = signal.SIGINT

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None ends `queued_jobs`
        assert sys.__stdout__ is not None and sys.__stderr__ is not None
        # By stream name; output outside cells goes there. The process's own streams, not their replacements in `sys`.
        self._logs: dict[str, TextIO] = {"stdout": sys.__stdout__, "stderr": sys.__stderr__}
        self.output_stream = OutputStream(
            self._send_output,
            self._logs,
            find_log_tail(agent.name, agent.incarnation),
            agent.incarnation,
        )
        self.cell_messages = CellMessages(agent, self.output_stream)
        self._gate = threading.Lock()  # guards the next six; the signal handler reads them without it
        self._running: CellKey | None = None  # the cell whose code is on the main thread
        self._block: CellKey | None = None  # the part of it that `interruptible_block` yields to
        self._open = 0  # cells that are queued or run
        self._stopping = False
        self._given_up: deque[CellKey] = deque(maxlen=64)  # not to begin; bounded, as ended cells come here, too
        self._raised = float("-inf")  # when the last KeyboardInterrupt was raised, in monotonic seconds
        self._interrupts: list[_Interrupt] = []  # on their way; a report of the handler goes to all of them
        self._signalled = False  # by this process, since the handler ran last
        agent.part(Health).cells.append(lambda: self._open)
        agent.on_notice(INTERRUPT, self._interrupt_received)
        agent.on_notice(SHOWN, self.output_stream.items_shown)
        agent.hooks.on_called.append(self.output_stream.wait_until_shown)
        agent.hooks.on_deferred.append(self.output_stream.wait_until_calls_shown)

    def _send_output(self, client_id: int, item: Notice) -> None:
        """Send an item to its client. UnknownWorkerError if it has left: nobody would acknowledge the item."""
        self._agent.member(client_id)
        self._agent.notify(client_id, OUTPUT, item)

    def serve_cells(self) -> None:
        """Run cells on this thread until `stop_serving`."""
        with self.cell_messages.stdin.divert_input(), self.handling_signals():
            for job in self.queued_jobs():
                _run_coroutine(self.perform_job(job))

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take over the signal, `sys.stdout` and `sys.stderr` meanwhile. On the main thread."""
        streams, before = (sys.stdout, sys.stderr), signal.signal(self.interrupted_by, self._on_signal)
        sys.stdout, sys.stderr = (CellStream(name, self.output_stream, log) for name, log in self._logs.items())
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            signal.signal(self.interrupted_by, before)

    def queued_jobs(self) -> Iterator[Job]:
        """Yield queued jobs until `stop_serving`."""
        while (job := self._jobs.get()) is not None:
            yield job

    async def perform_job(self, job: Job) -> None:
        """Run a cell, while `handling_signals`. Suspends only where the cell awaits on a loop that is not its own."""
        began = time.monotonic()
        outcome = await self._attempt_job(job)
        end_fork(self._agent, outcome.error)
        self._send_reply(job, outcome, time.monotonic() - began)

    def stop_serving(self) -> None:
        """End `serve_cells`: interrupt the running cell, for at most the sum of `_BACKOFFS`, and drop queued ones."""
        with self._gate:
            self._stopping, running = True, self._running
        self._jobs.put(None)
        if running is not None:
            deque(self._interrupt_until_handled(running, cuts_import=True), 0)  # no later cell will miss the import

    def run_queued(self, key: CellKey, cell: Cell) -> dict[str, Any]:
        """Queue the cell and wait for its values, or raise its error. Called on a pool thread."""
        job = Job(key, cell)
        with self._gate:
            self._open += 1
        try:
            self._jobs.put(job)
            self._agent.notify(key.client_id, QUEUED, {"cell": key.number})
            with release_slot():  # lets the pool start another thread: a cell may run for hours
                return job.reply.result()
        finally:
            with self._gate:
                self._open -= 1

    async def _attempt_job(self, job: Job) -> Outcome:
        """Return the outcome of the cell; never raises."""
        from rpcbench.cells.shell import Outcome

        self.output_stream.begin_cell(job.key)
        try:
            try:
                self._mark_running(job.key)
                self._agent.calls.values.remote_cell = job.cell.origin
                return await self._run_in_shell(job.cell)
            finally:
                self._clear_running()
        except BaseException as error:  # noqa: BLE001  (an interrupt just before or after the cell's own code)
            self._clear_running()
            return Outcome(error=error, traceback=(f"{type(error).__name__}: {error}",))

    async def _run_in_shell(self, cell: Cell) -> Outcome:
        from rpcbench.cells.shell import WorkerShell
        from rpcbench.rpc import RRef

        if self.shell is None:
            self.shell = WorkerShell.start_worker_shell(self._agent.name, self.output_stream)
            self.cell_messages.install_hooks(self.shell)
        with measured_allocations(self._agent):
            outcome = await self.shell.execute_worker_cell(cell.code, cell.push, (*cell.want, *cell.leave), cell.value)
        if outcome.error is None:
            outcome.values.update((name, RRef(outcome.values[name])) for name in cell.leave)
        return outcome

    def _mark_running(self, key: CellKey) -> None:
        signal.signal(self.interrupted_by, self._on_signal)  # a debugger in the previous cell may have replaced it
        with self._gate:
            given_up = self._stopping or key in self._given_up
            self._running = None if given_up else key
            self._raised = float("-inf")
        if given_up:
            raise KeyboardInterrupt("the cell was interrupted before it began")

    def _clear_running(self) -> None:
        self._agent.calls.values.remote_cell = None
        with self._gate:
            self._running = None

    def _send_reply(self, job: Job, outcome: Outcome, seconds: float) -> None:
        error = outcome.error
        kind = None if error is None else type(error).__name__
        lines = [cut_text(line) for line in outcome.traceback]
        # Before the reply: the client shows the traceback that this carries when the call's error arrives.
        end = {"error": kind, "traceback": lines, "number": outcome.number, "seconds": round(seconds, 6)}
        self.output_stream.end_cell(job.key, json.dumps(end))
        self.cell_messages.stdin.end_questions()
        if error is None:
            job.reply.set_result(outcome.values)
        elif isinstance(error, Exception):
            job.reply.set_exception(error)
        else:  # KeyboardInterrupt, SystemExit: no call carries these as themselves
            job.reply.set_exception(CallCancelled(f"the cell on {self._agent.name} ended by {kind}"))

    def _interrupt_received(self, client_id: int, notice: Notice) -> None:
        number = notice["cell"]

        def interrupt() -> None:
            for runs in self._interrupt_until_handled(CellKey(client_id, number)):
                self._agent.notify(client_id, INTERRUPT_HANDLED, {"cell": number, "runs": runs})

        self._agent.submit(interrupt)  # a second notice, to cut an import, must not wait until the first one is handled

    def _interrupt_until_handled(self, key: CellKey, cuts_import: bool = False) -> Iterator[bool]:
        """Signal the cell until the handler accepts it; yield whether it runs, each time the handler reports, but only
        once for an import."""
        second = any(other.key == key for other in self._interrupts)
        mine, import_reported = _Interrupt(key, cuts_import or second), False
        self._interrupts.append(mine)
        try:
            for patience in mine.backoff_seconds():
                if not self._signal_cell(key):
                    yield not mine.reports.empty()  # handled in the moment in which the wait for it ended
                    return
                # A signal that arrives just before the main thread begins to block does not end that wait: repeat it.
                until = time.monotonic() + patience
                with contextlib.suppress(queue.Empty):
                    while (left := until - time.monotonic()) > 0:
                        ends = mine.reports.get(timeout=left)
                        if not (import_reported and mine.awaits_import):
                            yield True
                        import_reported = True
                        if ends:
                            return
        finally:
            self._interrupts.remove(mine)

    def _signal_cell(self, key: CellKey) -> bool:
        """Signal the main thread if that cell or block runs there; otherwise keep the cell from beginning."""
        with self._gate:
            if key in (self._running, self._block):
                self._signalled = True
                self.interrupt_main_thread()
                return True
            self._given_up.append(key)
            return False

    @contextlib.contextmanager
    def interruptible_block(self) -> Iterator[Callable[[], object]]:
        """Yield a function that interrupts the block, which code of a cell runs, and does nothing after it. Called on
        any other thread, it waits until the main thread has handled that."""
        assert self._running is not None, "only a cell has a block to interrupt"
        block = self._block = CellKey(_NO_CLIENT, self._running.number)
        try:
            yield lambda: deque(self._interrupt_until_handled(block), 0)
        finally:
            with self._gate:
                self._block = None

    def interrupt_main_thread(self) -> None:
        """Interrupt the main thread, with or without a cell. From any thread."""
        signal.pthread_kill(threading.main_thread().ident or 0, self.interrupted_by)

    def _on_signal(self, _signal: int, frame: FrameType | None) -> None:
        """Handle the signal on the main thread, between two bytecodes. Takes no lock: that thread may hold it."""
        now, running = time.monotonic(), self._running
        ours, self._signalled = self._signalled, False
        interrupts = self._interrupts.copy()  # other threads change it
        codes = list(_codes_of_stack(frame))
        in_import = any(code.co_filename == _IMPORT for code in codes) and not any(
            each.cuts_import for each in interrupts
        )
        in_runtime = any(map(_is_of_runtime, codes)) and not any(each.cuts_runtime for each in interrupts)
        late = in_import or in_runtime  # the interrupt
        handled = running is None or (now - self._raised >= _MIN_INTERVAL_SECONDS and not late)
        for each in interrupts:
            each.awaits_import = in_import and running is not None
            each.reports.put(handled)  # False: `_interrupt_until_handled` sends another signal
        if running is None:
            return
        if handled:
            self._raise_in_cell(now, frame)
        elif late and not ours:
            # Without `threading`, whose locks the main thread may hold.
            _thread.start_new_thread(deque, (self._interrupt_until_handled(running), 0))

    def _raise_in_cell(self, now: float, frame: FrameType | None) -> None:
        self._raised = now
        if self.elsewhere is None or any(code is CellRunner._attempt_job.__code__ for code in _codes_of_stack(frame)):
            raise KeyboardInterrupt
        self.elsewhere()


def _is_of_runtime(code: CodeType) -> bool:
    return code.co_filename.startswith(_RUNTIME) or (code.co_filename, code.co_name) == _RENDERING


def _codes_of_stack(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code of the frame and of all that called it."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _run_coroutine(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends to its end."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("this worker has no loop on which a cell could wait")


def is_busy() -> bool:
    """Return whether a cell runs or waits on this worker; called through RPC."""
    return current_agent().part(Health).count_cells() > 0


def run_cell(cell: Cell) -> dict[str, Any]:
    """Run the cell on this worker's main thread; called through RPC. Return its values by name, or raise its error."""
    agent = current_agent()
    if not agent.has(CellRunner):
        raise RuntimeError(f"{agent.name} runs no cells: it is not a worker of a cluster")
    return agent.part(CellRunner).run_queued(CellKey(caller_id(), cell.number), cell)

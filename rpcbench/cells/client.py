"""The client of cells: sends a cell to workers and collects its results, for `%%remote` and `Cluster.run`.

Rules
- Output is shown while the cell runs, in the notebook cell that sent it. A cell is interrupted at its deadline; by
  default it has none.
- Ctrl-C interrupts the cell on all its workers, waits at most `PATIENCE` seconds for those that handle the interrupt,
  and always raises KeyboardInterrupt. A second Ctrl-C does not wait.
- A worker's error is raised here with its own type, after the results of all other workers were bound. While others
  still run the cell, a line in its output reports the error at once.
- A worker runs the cells of one client in the order in which they were begun here, whatever their inputs weigh. Inputs
  are pickled on a thread of the pool, in that order: a change meanwhile may be sent along.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from rpcbench.base.conditions import Event
from rpcbench.base.errors import CallCancelled, RemoteError, SerializationError, WorkerLostError
from rpcbench.base.ids import Counter
from rpcbench.base.sources import ipython_shell
from rpcbench.cells.cell_log import CellLog, CellRecord
from rpcbench.cells.display import (
    CallOutput,
    End,
    OutputArea,
    OutputAreas,
    OutputBuffer,
    OutputDisplay,
    OutputRouter,
    stacked_areas,
    unseen_areas,
)
from rpcbench.cells.history import CellHistories, Rerun, WorkerHistory, replay
from rpcbench.cells.partition import Dimension, combine_values
from rpcbench.cells.runner import INTERRUPT, QUEUED, Cell, run_cell
from rpcbench.cells.stdin import IN_BACKGROUND, InputRequests
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import (
    Failed,
    combined_error,
    error_message,
    interrupt_error,
    timeout_error,
    worker_lost_error,
)
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.publisher import Health

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

PATIENCE = 5.0  # seconds to wait for interrupted cells to end
_HANDLING_SECONDS = 0.35  # how long a worker may take to acknowledge an interrupt on a host that is not overloaded
_STRAGGLER_SECONDS = 1.0  # how far the first output of a failed cell may arrive behind its reply
_REPORT_DELAY_SECONDS = 0.3  # an error is reported apart if other workers still run the cell this long after it

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CellInputs:
    """The variables that a cell is given and returns. Fields without a comment are those of `cells.runner.Cell`."""

    push: Values = field(default_factory=dict)
    want: tuple[str, ...] = ()
    value: bool = False
    leave: tuple[str, ...] = ()
    own: Mapping[str, Values] = field(default_factory=dict)  # by worker: variables that it alone gets, beside `push`
    combined: Mapping[str, tuple[str, Dimension]] = field(default_factory=dict)  # by variable: how, and along what


class CellOptions(NamedTuple):
    """How a cell is run and shown."""

    seconds: float = math.inf  # deadline, relative to the start
    labelled: bool = False  # begin each line with the worker's name; always done for several workers
    areas: OutputAreas = stacked_areas  # makes the output area of each worker
    replayed: bool = True  # a restarted worker may run the cell again: it does not need the others
    on_stop: Callable[[], object] | None = None  # ends waits of the cell's code that no interrupt ends
    on_failure: Callable[[str, Exception], object] | None = None  # told of each worker that fails, on a pool thread
    listed: str | None = None  # its code in lists of cells, "" for none; None: its own


class CellResult(NamedTuple):
    """The results of a cell, in the order in which its workers were named."""

    values: dict[str, Values]  # by worker, then by variable
    failures: list[Failed]
    late: Exception | None = None  # an RpcTimeoutError if the cell passed its deadline on any worker

    def error_to_raise(self, shell: Any) -> BaseException | None:
        """Return the error to raise once the values are bound. `shell`: as in `tracebacks.combined_error`."""
        return self.late or (combined_error(self.failures, shell) if self.failures else None)

    def values_by_name(self, several: bool) -> Values:
        """Return the values by variable; of several workers, each value is a dict by worker."""
        if not several:
            return next(iter(self.values.values()), {})
        names = dict.fromkeys(name for values in self.values.values() for name in values)
        return {name: {worker: values[name] for worker, values in self.values.items()} for name in names}

    def combined_value(self, name: str, how: str, dim: Dimension) -> Any:
        """Return the values that a variable has on the workers as one. Raises ValueError as
        `partition.combine_values`."""
        return combine_values(name, {worker: values[name] for worker, values in self.values.items()}, how, dim)


class _WorkerRun:
    """A cell on one worker."""

    def __init__(
        self,
        member: WorkerInfo,
        area: OutputArea,
        prompts: InputRequests,
        on_settled: Callable[[_WorkerRun], object],
        remedy: str,
        own: Values | None = None,
    ) -> None:
        self.member = member
        self._own = own or {}  # variables for this worker alone
        self._remedy = remedy  # the advice in the error if the worker is lost; empty: restart it
        self._on_settled = on_settled
        self._prompts = prompts
        self.values: Values = {}
        self.error: Exception | None = None
        self.may_have_arrived = False  # the cell may have reached the worker
        self.stopped = False  # it was interrupted, so it is not sent any more
        self.replied = Event()  # set after `settled` and its callback, so threads that wait for it find these done
        self.settled = False  # `values` or `error` is final
        self.output_buffer = OutputBuffer(area, functools.partial(prompts.take_over_item, member, self.replied.is_set))

    def settle_outcome(self, answer: Callable[[], Values]) -> None:
        """Take the reply or error from `wait_for_result`, and wake all waits."""
        try:
            self.values = answer()
        except WorkerLostError as error:
            self.error = worker_lost_error(error, self.member.name, self._remedy)
        except Exception as error:  # noqa: BLE001  (any error of the cell is its result)
            self.error = error
        self.settled = True
        try:
            self._on_settled(self)  # before `replied`: nothing more is shown of a cell that counts as ended
        finally:
            self.replied.set()
            self.output_buffer.interrupt_handled.set()
            self._prompts.check_open_prompt()

    def cell_for_worker(self, cell: Cell) -> Cell:
        """Return the cell as this worker gets it."""
        return replace(cell, push={**cell.push, **self._own})

    @property
    def run_state(self) -> str:
        if not self.settled:
            return "runs"
        return "done" if self.error is None else type(self.error).__name__

    def wait(self, deadline: float = math.inf) -> bool:
        """Wait for the reply and all output; return False if `deadline` (monotonic seconds) passes first."""
        if not _wait_until(self.replied, deadline):
            return False
        if self.error is None:
            return _wait_until(self.output_buffer.over, deadline)
        # The output of a failed cell may arrive a little after its reply; a cell that never began there sends none.
        if isinstance(self.error.__cause__, RemoteError) and self.output_buffer.begun.wait(_STRAGGLER_SECONDS):
            return _wait_until(self.output_buffer.over, deadline)
        return True

    def wait_after_interrupt(self, hearing: float, deadline: float) -> bool:
        """Like `wait`, after an interrupt; return False at once if it is not acknowledged by `hearing` (monotonic)."""
        if not _wait_until(self.output_buffer.interrupt_handled, hearing):
            return False
        # A cell that does not run there, as it has ended or was dropped, needs no more than its late output.
        return self.wait(deadline if self.output_buffer.runs else hearing) or not self.output_buffer.runs

    def wait_with_prompts(self, deadline: float) -> bool:
        """Like `wait`, and ask the user the questions of workers meanwhile. Then show all output that was held back."""
        if not (self._prompts.prompt_until(self.replied, deadline) and self.wait(deadline)):
            return False
        self.output_buffer.output_area.finish_output()
        return True

    def failure(self) -> Failed | None:
        if self.error is None:
            return None
        end = self.output_buffer.end
        stopped = end is not None and end.error == "KeyboardInterrupt"
        return Failed(self.member.name, self.error, end.traceback if end else [], stopped)


def _wait_until(event: Event, deadline: float) -> bool:
    return event.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))


class _FailureReporter:
    """Reports, in the cell's output, each worker that failed while others still run the cell."""

    def __init__(self, display: OutputDisplay) -> None:
        self.parts: list[_WorkerRun] = []
        self._display = display
        self._timers: list[threading.Timer] = []
        self._ended = False

    def worker_failed(self, part: _WorkerRun) -> None:
        """Report the failure after a delay, unless all workers are through by then."""
        if self._ended or all(other.settled for other in self.parts):
            return
        # Delayed: the cell itself raises errors of all workers at about the same time, and reports them together.
        timer = threading.Timer(_REPORT_DELAY_SECONDS, self._report_failure, (part,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def stop_reporting(self) -> None:
        """Report no more: the cell is through, or is to stop, and raises the errors itself."""
        self._ended = True
        timers, self._timers, self.parts = self._timers, [], []  # no reference cycle keeps the cell's inputs alive
        for timer in timers:
            timer.cancel()

    def _report_failure(self, part: _WorkerRun) -> None:
        running = [other.member.name for other in self.parts if not other.settled]
        if running and not self._ended:
            report = f"[{part.member.name}] {error_message(part.error)}\nThe cell still runs on {', '.join(running)}.\n"
            self._display.write_text("stderr", report)


class SendOrder:
    """Sends each worker its cells in order: each one once that before it is queued there, or never will be.

    Else one with large inputs, which take long to pickle, would be overtaken by the cell that uses them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards the first cell of each worker; `queue_send` appends without it
        # By worker: the number of each cell, and its send. Of the first one, the send is None once it was begun.
        self._cells: dict[int, deque[tuple[int, Callable[[], object] | None]]] = defaultdict(deque)
        agent.on_notice(QUEUED, lambda worker, notice: self.release_next_cell(worker, notice["cell"]))

    def queue_send(self, worker: int, cell: int, send: Callable[[], object]) -> None:
        """Call `send` on a thread of the pool, in its turn: Ctrl-C must not cut a send in half."""
        self._cells[worker].append((cell, send))
        self._agent.submit(functools.partial(self._send_first, worker))

    def release_next_cell(self, worker: int, cell: int) -> None:
        """Let the next cell follow this one, which is queued or was answered."""
        with self._lock:
            cells = self._cells[worker]
            if not cells or cells[0] != (cell, None):
                return
            cells.popleft()
        if self._agent.running:
            self._agent.submit(functools.partial(self._send_first, worker))
        else:  # no thread runs jobs any more, and a send fails at once
            self._send_first(worker)

    def _send_first(self, worker: int) -> None:
        with self._lock:
            cells = self._cells[worker]
            cell, send = cells[0] if cells else (0, None)
            if send is None:
                return
            cells[0] = (cell, None)
        send()


class RunningCell:
    """A cell on its workers. `wait_for_result` is called once; `interrupt_and_wait` from any thread."""

    def __init__(
        self,
        agent: Agent,
        cell: Cell,
        parts: list[_WorkerRun],
        prompts: InputRequests,
        seconds: float,
        reporter: _FailureReporter,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        self._agent = agent
        self._on_stop = on_stop
        self._prompts = prompts
        self._cell = cell
        self._parts = reporter.parts = parts
        self._reporter = reporter
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def send_to_workers(self, relay: OutputRouter, order: SendOrder) -> None:
        for part in self._parts:
            part.may_have_arrived = True  # before the cell can run: Ctrl-C waits for all workers that may run it
            with uninterrupted:
                relay.open_buffer(part.member.id, self._cell.number, part.output_buffer)
                order.queue_send(
                    part.member.id, self._cell.number, functools.partial(self._send_to_worker, part, relay)
                )

    def wait_for_result(self) -> CellResult:
        """Wait for all workers until the deadline; then interrupt those that are late."""
        late = [part for part in self._parts if not part.wait_with_prompts(self._deadline)]
        self._reporter.stop_reporting()
        error = timeout_error(self._seconds, *self.interrupt_and_wait()) if late else None
        done = [part for part in self._parts if part.replied.is_set() and part.error is None]
        return CellResult({part.member.name: part.values for part in done}, self._collect_failures(), error)

    def interrupt(self) -> None:
        """Send an interrupt to all workers that have not replied."""
        self._reporter.stop_reporting()
        for part in self._parts:
            if not part.replied.is_set():
                part.stopped = True
                notice = {"cell": self._cell.number}
                # On a pool thread: a send may block, and a second Ctrl-C must not cut it in half.
                self._agent.submit(functools.partial(self._agent.notify, part.member.id, INTERRUPT, notice))

    def interrupt_and_wait(self) -> tuple[list[Failed], list[str]]:
        """Interrupt the cell everywhere and wait; return the failures, and the workers that still run it."""
        now = time.monotonic()
        self._prompts.close()
        sent_parts = [part for part in self._parts if part.may_have_arrived]
        try:
            self.interrupt()
            if self._on_stop is not None:
                self._on_stop()
            # A wait that `on_stop` ends is interrupted late, when that has arrived.
            hearing = now + (_handling_seconds() if self._on_stop is None else PATIENCE)
            busy = [part for part in sent_parts if not part.wait_after_interrupt(hearing, now + PATIENCE)]
        except KeyboardInterrupt:  # a second Ctrl-C: look, but do not wait
            self.interrupt()  # again: the first one waits if the cell imports
            busy = [part for part in sent_parts if not part.wait(time.monotonic())]
        for part in self._parts:
            part.output_buffer.output_area.finish_output()
        return self._collect_failures(), [part.member.name for part in busy]

    @property
    def code(self) -> str:
        return self._cell.code

    def pending_worker_ids(self) -> list[int]:
        """Return the ids of the workers that have not replied."""
        return [part.member.id for part in self._parts if not part.replied.is_set()]

    def states_by_member(self) -> dict[str, str]:
        """Return the state by worker: "runs", "done", or the name of the error's class."""
        return {part.member.name: part.run_state for part in self._parts}

    def _send_to_worker(self, part: _WorkerRun, relay: OutputRouter) -> None:
        worker = part.member.id
        try:
            if part.stopped:
                raise CallCancelled("the cell was interrupted before it was sent")
            # A timeout of 0 is none: the client itself counts the cell's time.
            cell = part.cell_for_worker(self._cell)
            for value in cell.push.values():
                self._agent.calls.sources.check_function(worker, value)
            future = self._agent.call(worker, run_cell, (cell,), timeout=0.0, label="this cell", own=True)
        except Exception as error:  # noqa: BLE001  (the other workers shall run it all the same)
            relay.drop_buffer(worker, self._cell.number)
            part.settle_outcome(functools.partial(_raise_error, _reword_error(error)))
        else:
            future.add_done_callback(lambda done: part.settle_outcome(done.value))

    def _collect_failures(self) -> list[Failed]:
        return [failed for part in self._parts if (failed := part.failure()) is not None]


class CellClient:
    """Runs cells on the workers of one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.history = CellHistories()
        self._relay = OutputRouter(agent, agent.part(CallOutput).open_call_buffer)
        self._order = SendOrder(agent)
        # Offset: a worker never takes a cell for one of an earlier notebook process with the same member id.
        self._numbers = Counter(agent.incarnation << 32)
        self._answering: list[RunningCell] = []  # cells that `run` waits for
        self._latest: deque[weakref.ref[RunningCell]] = deque(maxlen=64)  # cells that were sent
        agent.part(Health).waits.append(
            lambda: [id_ for cell in list(self._answering) for id_ in cell.pending_worker_ids()]
        )

    def run(
        self,
        display: OutputDisplay,
        workers: Sequence[str],
        code: str,
        inputs: CellInputs,
        options: CellOptions | None = None,
    ) -> CellResult:
        """Run the cell on all `workers` at once and wait for them.

        The result has the errors of workers and of the deadline. Raises UnknownWorkerError or WorkerLostError before
        the cell runs anywhere, and KeyboardInterrupt after Ctrl-C.
        """
        sent = self._prepare_cell(
            display, workers, code, inputs, options or CellOptions(), InputRequests(self.agent), lambda: None
        )
        self._answering.append(sent)
        try:
            sent.send_to_workers(self._relay, self._order)
            return sent.wait_for_result()
        except KeyboardInterrupt:
            raise interrupt_error(*sent.interrupt_and_wait()) from None
        finally:
            self._answering.remove(sent)

    def start_on_workers(
        self,
        display: OutputDisplay,
        workers: Sequence[str],
        code: str,
        inputs: CellInputs,
        options: CellOptions,
        changed: Callable[[], object],
    ) -> RunningCell:
        """Like `run`, without waiting. `changed` is called whenever a worker is through, on a pool thread."""
        sent = self._prepare_cell(
            display, workers, code, inputs, options, InputRequests(self.agent, IN_BACKGROUND), changed
        )
        sent.send_to_workers(self._relay, self._order)
        return sent

    def _prepare_cell(
        self,
        display: OutputDisplay,
        workers: Sequence[str],
        code: str,
        inputs: CellInputs,
        options: CellOptions,
        prompts: InputRequests,
        changed: Callable[[], object],
    ) -> RunningCell:
        origin = self.agent.calls.values.current_cell()
        cell = Cell(self._numbers.next(), code, inputs.push, inputs.want, inputs.value, inputs.leave, origin)
        members = [self.agent.member(name) for name in workers]
        prompts.pager &= len(members) == 1  # the notebook has one pager: several workers show pages as output
        areas = options.areas(display, [member.name for member in members], options.labelled or len(members) > 1)
        remedy = getattr(self.agent.owner, "inseparable", "")  # a cluster's
        reporter = _FailureReporter(display)

        record = self._record_cell(cell, members, options)

        def on_settled(part: _WorkerRun) -> None:
            try:
                if record is not None:
                    end = part.output_buffer.end
                    record.end_part(part.member.id, part.error, None if end is None else end.error)
                if part.error is not None:
                    reporter.worker_failed(part)
                    if options.on_failure is not None:
                        options.on_failure(part.member.name, part.error)
                elif options.replayed:
                    self.history.record_cell(part.member.name, part.cell_for_worker(cell))
                changed()
            finally:
                self._order.release_next_cell(part.member.id, cell.number)

        parts = [
            _WorkerRun(member, area, prompts, on_settled, remedy, inputs.own.get(member.name, {}))
            for member, area in zip(members, areas, strict=True)
        ]
        if record is not None:
            for part in parts:
                part.output_buffer.on_end = functools.partial(_tell_run, record, part.member.id)
        sent = RunningCell(self.agent, cell, parts, prompts, options.seconds, reporter, options.on_stop)
        self._latest.append(weakref.ref(sent))
        return sent

    def _record_cell(self, cell: Cell, members: Sequence[WorkerInfo], options: CellOptions) -> CellRecord | None:
        """Record that a cell is sent; None if it is not to be listed."""
        code = cell.code if options.listed is None else options.listed
        if not code:
            return None
        return self.agent.part(CellLog).begin_cell(code, [(one.id, one.name) for one in members], cell.origin)

    def record_change(self, worker: str, code: str, push: Values) -> None:
        """Record in the history a change of the worker's variables that no cell has made: the cell that repeats it."""
        self.history.record_cell(worker, Cell(self._numbers.next(), code, push))

    def code_on_worker(self, worker: int) -> str:
        """Return the code of the cell that runs on a worker, or waits there for that of another client; empty if this
        process has sent none."""
        return next((cell.code for cell in self._cells_on_worker(worker)), "")

    def has_cell_on(self, worker: int) -> bool:
        """Return whether a cell of this process runs on a worker, or waits there."""
        return any(self._cells_on_worker(worker))

    def _cells_on_worker(self, worker: int) -> Iterator[RunningCell]:
        sent = [cell for each in self._latest.copy() if (cell := each()) is not None]
        return (cell for cell in sent if worker in cell.pending_worker_ids())  # each worker runs them in order


def _tell_run(record: CellRecord, member: int, end: End) -> None:
    record.tell_run(member, end.number, 0.0 if end.number is None else end.seconds)  # no prompt: it never began


def _handling_seconds() -> float:
    """Return `_HANDLING_SECONDS`, scaled by the number of processes that share a core here."""
    load: float = psutil.getloadavg()[0]
    return _HANDLING_SECONDS * max(1.0, load / (os.cpu_count() or 1))


def _raise_error(error: Exception) -> Values:
    raise error


def _reword_error(error: Exception) -> Exception:
    """Reword an error about the values sent with a cell: a user calls these variables."""
    if isinstance(error, SerializationError):
        return SerializationError(re.sub(r"^\S*\.push\b", "variables", str(error)))
    return error


Words = str | Sequence[str]


def run_script_cell(
    agent: Agent, there: Sequence[str], workers: Words, code: str, push: Mapping[str, Any] | None, want: Iterable[str],
    timeout: float | None, listed: str | None = None,
) -> Any:  # fmt: skip
    """Run the cell on the workers that `workers` selects among those `there`. See `Cluster.run`; `listed` as in
    `CellOptions`."""
    names = Targets().select_workers([workers] if isinstance(workers, str) else workers, there)
    wanted = (want,) if isinstance(want, str) else tuple(want)
    inputs = CellInputs(dict(push or {}), wanted, value=not wanted)
    shell = ipython_shell()
    options = CellOptions(math.inf if timeout is None else timeout, listed=listed)
    answer = agent.part(CellClient).run(OutputDisplay(shell), names, code, inputs, options)
    if (error := answer.error_to_raise(shell)) is not None:
        raise error
    values = answer.values_by_name(several=[workers] != names)
    return values if wanted else values[""]


def rerun_script_cells(agent: Agent, worker: str, past: WorkerHistory) -> list[Rerun]:
    """Run a worker's history on its restarted process, without showing output."""
    client, options = agent.part(CellClient), CellOptions(areas=unseen_areas, listed="")

    def rerun_cell(code: str, push: dict[str, Any]) -> BaseException | None:
        failures = client.run(OutputDisplay(None), [worker], code, CellInputs(push), options).failures
        return failures[0].error if failures else None

    return replay(past, rerun_cell)

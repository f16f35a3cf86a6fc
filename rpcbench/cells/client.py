"""The client of cells: sends a cell to workers and waits for it or not: what `%%remote` and `Cluster.run` do.

Rules
- Output is shown while the cell runs, in the notebook cell that asked. A cell has no deadline unless it is given one;
  when that passes the cell is interrupted.
- Ctrl-C interrupts the cell on all its workers, waits for those whose code hears of it, at most `PATIENCE` seconds, and
  raises KeyboardInterrupt in any case; a second one does not wait.
- A worker's error is raised here with its own type, after the results of all other workers were kept. While others
  still run the cell, a line in it tells of the error at once.
- The history keeps what each worker has run without an error since it was started, as it was sent, so that the next
  worker of its name can run it again: the last `CELLS` cells, with variables of `BYTES` in all. A value that was
  changed here since it was sent goes as it is now. An RRef is never kept: it would keep what it refers to alive.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import psutil
import torch

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import RemoteError, SerializationError, WorkerLostError
from rpcbench.base.ids import Counter
from rpcbench.cells.display import (
    OutputArea,
    OutputAreas,
    OutputBuffer,
    OutputDisplay,
    OutputRouter,
    one_below_the_other,
    unseen,
)
from rpcbench.cells.runner import INTERRUPT, Cell, run_cell
from rpcbench.cells.stdin import BESIDE, InputRequests
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import Failed, interrupted, lost, message, raised, timed_out
from rpcbench.rpc.rref import RRef

if TYPE_CHECKING:
    from rpcbench.cells.runner import Cell
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo


CELLS = 1000
BYTES = 1 << 26


class Rerun(NamedTuple):
    """A cell that was run again; `error` is what it failed with, None if it did not."""

    code: str
    error: BaseException | None


class Kept(NamedTuple):
    """A cell with its variables, but for those that are `missing`: too large, or RRefs."""

    code: str
    push: dict[str, Any]
    bytes: float
    missing: tuple[str, ...]


class Past:
    """What one worker has run."""

    def __init__(self) -> None:
        self.cells: dict[int, Kept] = {}
        self.forgotten = 0
        self._bytes = 0.0

    def note(self, cell: Cell) -> None:
        kept, total = {}, 0.0
        for name, value in cell.push.items():
            size = _size(value)
            if size + total + self._bytes <= BYTES:
                kept[name] = value
                total += size
        missing = tuple(name for name in cell.push if name not in kept)
        self.cells[cell.number] = Kept(cell.code, kept, total, missing)
        self._bytes += total
        if len(self.cells) > CELLS:
            self._bytes -= self.cells.pop(min(self.cells)).bytes
            self.forgotten += 1


class History:
    """The past of all workers of one world. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Past] = {}

    def note(self, worker: str, cell: Cell) -> None:
        """It has run there."""
        with self._lock:
            self._of.setdefault(worker, Past()).note(cell)

    def take(self, worker: str) -> Past:
        """What it has run; from now on that is nothing."""
        with self._lock:
            return self._of.pop(worker, Past())


Run = Callable[[str, dict[str, Any]], BaseException | None]
"""(code, variables to set first) -> what the cell failed with."""


def replay(past: Past, run: Run) -> list[Rerun]:
    """Run all of it again, also after a cell that fails, unless the worker is lost."""
    done = []
    if past.forgotten:
        done.append(Rerun(f"({past.forgotten} earlier ones)", RuntimeError(f"only the last {CELLS} are kept")))
    for _, cell in sorted(past.cells.items()):
        done.append(Rerun(cell.code, _error(cell, run)))
        if isinstance(done[-1].error, WorkerLostError):
            break
    return done


def _error(cell: Kept, run: Run) -> BaseException | None:
    if cell.missing:
        names = ", ".join(cell.missing)
        return RuntimeError(f"not kept, as they are RRefs or too large: {names}; run it again with -i {names}")
    return run(cell.code, cell.push)


def _size(value: Any, inside: tuple[int, ...] = ()) -> float:
    """Bytes that are kept with it, about; of an RRef, or what holds one, without end."""
    if isinstance(value, RRef):
        return math.inf
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.nbytes
    if isinstance(value, torch.nn.Module):
        return sum(parameter.nbytes for parameter in value.parameters())
    if isinstance(value, dict | list | tuple | set | frozenset) and id(value) not in inside:
        held = value.values() if isinstance(value, dict) else value
        return sys.getsizeof(value) + sum(_size(each, (*inside, id(value))) for each in held)
    return sys.getsizeof(value)


PATIENCE = 5.0
_HEARING_SECONDS = 0.35
"""So long a worker may take to hear of an interrupt, where no more processes want to run than there are cores."""
_STRAGGLER_SECONDS = 1.0
_TELL_SECONDS = 0.3
"""An error is told on its own where other workers run on for longer than this after it."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CellInputs:
    """What goes along with a cell and what shall come back: as in `cells.runner.Cell`."""

    push: Values = field(default_factory=dict)
    want: tuple[str, ...] = ()
    value: bool = False
    leave: tuple[str, ...] = ()


class CellOptions(NamedTuple):
    """How a cell is run: for so many `seconds` at most, with the worker's name before each line or not (it is, among
    several), and shown on which panes."""

    seconds: float = math.inf
    labelled: bool = False
    panes: OutputAreas = one_below_the_other


class CellResult(NamedTuple):
    """What came of a cell: values by worker, and the failures, both in the order the workers were named in.

    `late` is the RpcTimeoutError of a cell that took too long somewhere."""

    values: dict[str, Values]
    failures: list[Failed]
    late: Exception | None = None

    def error(self, shell: Any) -> BaseException | None:
        """What went wrong, to be raised once the values are kept. `shell`: as in `tracebacks.raised`."""
        return self.late or (raised(self.failures, shell) if self.failures else None)

    def by_name(self, several: bool) -> Values:
        """Values by the name of the variable; of several workers, each is a dict by worker."""
        if not several:
            return next(iter(self.values.values()), {})
        names = dict.fromkeys(name for values in self.values.values() for name in values)
        return {name: {worker: values[name] for worker, values in self.values.items()} for name in names}


class _WorkerRun:
    """The cell on one worker."""

    def __init__(
        self,
        member: WorkerInfo,
        pane: OutputArea,
        prompts: InputRequests,
        on_settled: Callable[[_WorkerRun], object],
        remedy: str,
    ) -> None:
        self.member = member
        self._remedy = remedy
        self._on_settled = on_settled
        self._prompts = prompts
        self.values: Values = {}
        self.error: Exception | None = None
        self.asked = False
        self.replied = Flag()
        self.settled = False
        self.inbox = OutputBuffer(pane, functools.partial(prompts.take_over, member, self.replied.is_set))

    def settle(self, answer: Callable[[], Values]) -> None:
        """The reply is here, or never will be."""
        try:
            self.values = answer()
        except WorkerLostError as error:
            self.error = lost(error, self.member.name, self._remedy)
        except Exception as error:  # noqa: BLE001  (whatever the cell raised is what came of it)
            self.error = error
        self.settled = True
        try:
            self._on_settled(self)  # first: nothing more is shown of a cell that counts as ended
        finally:
            self.replied.set()
            self.inbox.heard.set()
            self._prompts.look()

    @property
    def state(self) -> str:
        if not self.settled:
            return "runs"
        return "done" if self.error is None else type(self.error).__name__

    def wait(self, deadline: float = math.inf) -> bool:
        """Until the reply and all output are here; False if that is not so by `deadline` (monotonic seconds)."""
        if not _wait(self.replied, deadline):
            return False
        if self.error is None:
            return _wait(self.inbox.over, deadline)
        # The output of a failed cell may be a little behind its reply; a cell that never began there sends none.
        if isinstance(self.error.__cause__, RemoteError) and self.inbox.begun.wait(_STRAGGLER_SECONDS):
            return _wait(self.inbox.over, deadline)
        return True

    def stops(self, hearing: float, deadline: float) -> bool:
        """As `wait`, after an interrupt that is heard of by `hearing` (monotonic seconds), if at all."""
        if not _wait(self.inbox.heard, hearing):
            return False
        return self.wait(deadline if self.inbox.runs else hearing) or not self.inbox.runs

    def finish(self, deadline: float) -> bool:
        """As `wait`; meanwhile the user is asked what workers ask. Then all that was held back is shown."""
        if not (self._prompts.attend(self.replied, deadline) and self.wait(deadline)):
            return False
        self.inbox.pane.finish()
        return True

    def failed(self) -> Failed | None:
        if self.error is None:
            return None
        end = self.inbox.end
        stopped = end is not None and end.error == "KeyboardInterrupt"
        return Failed(self.member.name, self.error, end.traceback if end else [], stopped)


def _wait(event: Flag, deadline: float) -> bool:
    return event.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))


class _News:
    """Tells, in the cell, of each worker that failed while others still run it."""

    def __init__(self, screen: OutputDisplay) -> None:
        self.parts: list[_WorkerRun] = []
        self._screen = screen
        self._timers: list[threading.Timer] = []
        self._ended = False

    def failed(self, part: _WorkerRun) -> None:
        """Tell of it in a moment: errors of all workers at about the same time are told together, at the end."""
        if self._ended or all(other.settled for other in self.parts):
            return
        timer = threading.Timer(_TELL_SECONDS, self._tell, (part,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def end(self) -> None:
        """All are through, or asked to stop: what is to be told is told by what the cell raises."""
        self._ended = True
        timers, self._timers, self.parts = self._timers, [], []  # no circle keeps what the cell was given alive
        for timer in timers:
            timer.cancel()

    def _tell(self, part: _WorkerRun) -> None:
        running = [other.member.name for other in self.parts if not other.settled]
        if running and not self._ended:
            told = f"[{part.member.name}] {message(part.error)}\nThe cell goes on on {', '.join(running)}.\n"
            self._screen.text("stderr", told)


class RunningCell:
    """A cell on its workers. `answer` begins once; `stop` may come from any thread."""

    def __init__(
        self, agent: Agent, cell: Cell, parts: list[_WorkerRun], prompts: InputRequests, seconds: float, news: _News
    ) -> None:
        self._agent = agent
        self._prompts = prompts
        self._cell = cell
        self._parts = news.parts = parts
        self._news = news
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def begin(self, relay: OutputRouter) -> None:
        for part in self._parts:
            part.asked = True  # before the cell can run: Ctrl-C waits for all that may run it
            # Not on this thread: Ctrl-C must not cut a send in half.
            self._agent.submit(functools.partial(self._send, part, relay))

    def answer(self) -> CellResult:
        """Wait for all workers, as long as the cell has time; then for what comes of its interrupt."""
        late = [part for part in self._parts if not part.finish(self._deadline)]
        self._news.end()
        error = timed_out(self._seconds, *self.stop()) if late else None
        done = [part for part in self._parts if part.replied.is_set() and part.error is None]
        return CellResult({part.member.name: part.values for part in done}, self._failures(), error)

    def interrupt(self) -> None:
        """Ask all workers that still run it to stop."""
        self._news.end()
        for part in self._parts:
            if not part.replied.is_set():
                notice = {"cell": self._cell.number}
                self._agent.submit(functools.partial(self._agent.notify, part.member.id, INTERRUPT, notice))

    def stop(self) -> tuple[list[Failed], list[str]]:
        """Interrupt the cell everywhere and wait a little: where it stood, and the workers that still run it."""
        now = time.monotonic()
        self._prompts.close()
        asked = [part for part in self._parts if part.asked]
        try:
            self.interrupt()
            busy = [part for part in asked if not part.stops(now + _hearing(), now + PATIENCE)]
        except KeyboardInterrupt:
            busy = [part for part in asked if not part.wait(time.monotonic())]
        for part in self._parts:
            part.inbox.pane.finish()
        return self._failures(), [part.member.name for part in busy]

    def states(self) -> dict[str, str]:
        """By worker: "runs", "done", or the name of the error."""
        return {part.member.name: part.state for part in self._parts}

    def _send(self, part: _WorkerRun, relay: OutputRouter) -> None:
        worker = part.member.id
        relay.open(worker, self._cell.number, part.inbox)
        try:
            future = self._agent.call(worker, run_cell, (self._cell,), timeout=0.0, label="this cell", own=True)
        except Exception as error:  # noqa: BLE001  (the others shall run it all the same)
            relay.close(worker, self._cell.number)
            part.settle(functools.partial(_raise, _named(error)))
        else:
            future.add_done_callback(lambda done: part.settle(done.value))

    def _failures(self) -> list[Failed]:
        return [failed for part in self._parts if (failed := part.failed()) is not None]


class CellClient:
    """Runs cells on the workers of one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.history = History()
        self._relay = OutputRouter(agent)
        self._numbers = Counter(agent.incarnation << 32)  # no cell is taken for one of a notebook before this one

    def run(
        self, screen: OutputDisplay, workers: Sequence[str], code: str, ask: CellInputs, way: CellOptions | None = None
    ) -> CellResult:
        """Run the cell on all `workers` at once and wait for them.

        Errors: UnknownWorkerError or WorkerLostError before anything runs; KeyboardInterrupt after Ctrl-C; what happens
        on a worker, or does not within `way.seconds`, is in the answer.
        """
        sent = self._sent(screen, workers, code, ask, way or CellOptions(), InputRequests(self.agent), lambda: None)
        try:
            sent.begin(self._relay)
            return sent.answer()
        except KeyboardInterrupt:
            raise interrupted(*sent.stop()) from None

    def start(
        self,
        screen: OutputDisplay,
        workers: Sequence[str],
        code: str,
        ask: CellInputs,
        way: CellOptions,
        changed: Callable[[], object],
    ) -> RunningCell:
        """As `run`, without waiting. `changed` is called whenever a worker is through."""
        sent = self._sent(screen, workers, code, ask, way, InputRequests(self.agent, BESIDE), changed)
        sent.begin(self._relay)
        return sent

    def _sent(
        self,
        screen: OutputDisplay,
        workers: Sequence[str],
        code: str,
        ask: CellInputs,
        way: CellOptions,
        prompts: InputRequests,
        changed: Callable[[], object],
    ) -> RunningCell:
        origin = self.agent.values.cell()
        cell = Cell(self._numbers.next(), code, ask.push, ask.want, ask.value, ask.leave, origin)
        members = [self.agent.member(name) for name in workers]
        prompts.pager &= len(members) == 1
        panes = way.panes(screen, [member.name for member in members], way.labelled or len(members) > 1)
        remedy = getattr(self.agent.owner, "inseparable", "")  # a cluster's
        news = _News(screen)

        def on_settled(part: _WorkerRun) -> None:
            if part.error is None:
                self.history.note(part.member.name, cell)
            else:
                news.failed(part)
            changed()

        parts = [
            _WorkerRun(member, pane, prompts, on_settled, remedy) for member, pane in zip(members, panes, strict=True)
        ]
        return RunningCell(self.agent, cell, parts, prompts, way.seconds, news)


def _hearing() -> float:
    """As long as `_HEARING_SECONDS`, times the processes that share a core here."""
    load: float = psutil.getloadavg()[0]
    return _HEARING_SECONDS * max(1.0, load / (os.cpu_count() or 1))


def _raise(error: Exception) -> Values:
    raise error


def _named(error: Exception) -> Exception:
    """An error about what goes along with a cell, in the user's words."""
    if isinstance(error, SerializationError):
        return SerializationError(re.sub(r"^\S*\.push\b", "variables", str(error)))
    return error


Words = str | Sequence[str]


def run_script_cell(
    agent: Agent, there: Sequence[str], workers: Words, code: str, push: Mapping[str, Any] | None, want: Iterable[str],
    timeout: float | None,
) -> Any:  # fmt: skip
    """Run the cell on those of the workers that are `there` whom `workers` means. See `Cluster.run`."""
    names = Targets().find([workers] if isinstance(workers, str) else workers, there)
    wanted = (want,) if isinstance(want, str) else tuple(want)
    ask = CellInputs(dict(push or {}), wanted, value=not wanted)
    shell = _shell()
    answer = agent.part(CellClient).run(
        OutputDisplay(shell), names, code, ask, CellOptions(math.inf if timeout is None else timeout)
    )
    if (error := answer.error(shell)) is not None:
        raise error
    values = answer.by_name(several=[workers] != names)
    return values if wanted else values[""]


def rerun_script_cells(agent: Agent, worker: str, past: Past) -> list[Rerun]:
    """Run what a worker had run again, on the one that is there now, unseen."""

    def run(code: str, push: dict[str, Any]) -> BaseException | None:
        failures = (
            agent.part(CellClient)
            .run(OutputDisplay(None), [worker], code, CellInputs(push), CellOptions(panes=unseen))
            .failures
        )
        return failures[0].error if failures else None

    return replay(past, run)


def _shell() -> Any:
    """IPython's, if that is where we are."""
    loaded = sys.modules.get("IPython")
    return None if loaded is None else loaded.get_ipython()

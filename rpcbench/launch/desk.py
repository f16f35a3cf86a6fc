"""Run a cell on workers, and wait for it or not: what `%%remote` does, without its syntax.

Rules
- Output is shown while the cell runs, in the notebook cell that asked. A cell has no deadline unless it is given one;
  when that passes the cell is interrupted.
- Ctrl-C interrupts the cell on all its workers, waits for those whose code hears of it, at most `PATIENCE` seconds, and
  raises KeyboardInterrupt in any case; a second one does not wait.
- A worker's error is raised here with its own type, after the results of all other workers were kept. While others
  still run the cell, a line in it tells of the error at once.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import RemoteError, SerializationError, WorkerLostError
from rpcbench.base.ids import Counter
from rpcbench.launch.cells import INTERRUPT, Cell, run_cell
from rpcbench.launch.history import History
from rpcbench.launch.prompts import BESIDE, Prompts
from rpcbench.launch.relay import Inbox, Relay
from rpcbench.launch.screen import Pane, Panes, Screen, one_below_the_other
from rpcbench.launch.tracebacks import Failed, interrupted, lost, message, raised, timed_out

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

PATIENCE = 5.0
_HEARING_SECONDS = 0.35
"""So long a worker may take to hear of an interrupt, where no more processes want to run than there are cores."""
_STRAGGLER_SECONDS = 1.0
_TELL_SECONDS = 0.3
"""An error is told on its own where other workers run on for longer than this after it."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """What goes along with a cell and what shall come back: as in `launch.cells.Cell`."""

    push: Values = field(default_factory=dict)
    want: tuple[str, ...] = ()
    value: bool = False
    leave: tuple[str, ...] = ()


class Way(NamedTuple):
    """How a cell is run: for so many `seconds` at most, with the worker's name before each line or not (it is, among
    several), and shown on which panes."""

    seconds: float = math.inf
    labelled: bool = False
    panes: Panes = one_below_the_other


class Answer(NamedTuple):
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


class _Part:
    """The cell on one worker."""

    def __init__(
        self,
        member: WorkerInfo,
        pane: Pane,
        prompts: Prompts,
        on_settled: Callable[[_Part], object],
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
        self.inbox = Inbox(pane, functools.partial(prompts.take_over, member, self.replied.is_set))

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

    def __init__(self, screen: Screen) -> None:
        self.parts: list[_Part] = []
        self._screen = screen
        self._timers: list[threading.Timer] = []
        self._ended = False

    def failed(self, part: _Part) -> None:
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

    def _tell(self, part: _Part) -> None:
        running = [other.member.name for other in self.parts if not other.settled]
        if running and not self._ended:
            told = f"[{part.member.name}] {message(part.error)}\nThe cell goes on on {', '.join(running)}.\n"
            self._screen.text("stderr", told)


class Sent:
    """A cell on its workers. `answer` begins once; `stop` may come from any thread."""

    def __init__(
        self, agent: Agent, cell: Cell, parts: list[_Part], prompts: Prompts, seconds: float, news: _News
    ) -> None:
        self._agent = agent
        self._prompts = prompts
        self._cell = cell
        self._parts = news.parts = parts
        self._news = news
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def begin(self, relay: Relay) -> None:
        for part in self._parts:
            part.asked = True  # before the cell can run: Ctrl-C waits for all that may run it
            # Not on this thread: Ctrl-C must not cut a send in half.
            self._agent.submit(functools.partial(self._send, part, relay))

    def answer(self) -> Answer:
        """Wait for all workers, as long as the cell has time; then for what comes of its interrupt."""
        late = [part for part in self._parts if not part.finish(self._deadline)]
        self._news.end()
        error = timed_out(self._seconds, *self.stop()) if late else None
        done = [part for part in self._parts if part.replied.is_set() and part.error is None]
        return Answer({part.member.name: part.values for part in done}, self._failures(), error)

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

    def _send(self, part: _Part, relay: Relay) -> None:
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


class CellDesk:
    """Runs cells on the workers of one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.history = History()
        self._relay = Relay(agent)
        self._numbers = Counter(agent.incarnation << 32)  # no cell is taken for one of a notebook before this one

    def run(self, screen: Screen, workers: Sequence[str], code: str, ask: Ask, way: Way | None = None) -> Answer:
        """Run the cell on all `workers` at once and wait for them.

        Errors: UnknownWorkerError or WorkerLostError before anything runs; KeyboardInterrupt after Ctrl-C; what happens
        on a worker, or does not within `way.seconds`, is in the answer.
        """
        sent = self._sent(screen, workers, code, ask, way or Way(), Prompts(self.agent), lambda: None)
        try:
            sent.begin(self._relay)
            return sent.answer()
        except KeyboardInterrupt:
            raise interrupted(*sent.stop()) from None

    def start(
        self, screen: Screen, workers: Sequence[str], code: str, ask: Ask, way: Way, changed: Callable[[], object]
    ) -> Sent:
        """As `run`, without waiting. `changed` is called whenever a worker is through."""
        sent = self._sent(screen, workers, code, ask, way, Prompts(self.agent, BESIDE), changed)
        sent.begin(self._relay)
        return sent

    def _sent(
        self,
        screen: Screen,
        workers: Sequence[str],
        code: str,
        ask: Ask,
        way: Way,
        prompts: Prompts,
        changed: Callable[[], object],
    ) -> Sent:
        origin = self.agent.values.cell()
        cell = Cell(self._numbers.next(), code, ask.push, ask.want, ask.value, ask.leave, origin)
        members = [self.agent.member(name) for name in workers]
        prompts.pager &= len(members) == 1
        panes = way.panes(screen, [member.name for member in members], way.labelled or len(members) > 1)
        remedy = getattr(self.agent.owner, "inseparable", "")  # a cluster's
        news = _News(screen)

        def on_settled(part: _Part) -> None:
            if part.error is None:
                self.history.note(part.member.name, cell)
            else:
                news.failed(part)
            changed()

        parts = [_Part(member, pane, prompts, on_settled, remedy) for member, pane in zip(members, panes, strict=True)]
        return Sent(self.agent, cell, parts, prompts, way.seconds, news)


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

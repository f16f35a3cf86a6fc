"""The steps of a pipeline, as its driver sees them: one message to each worker; two, if it looks at the gradients.

    step: ── run and apply ──►   the workers agree by themselves that all have all gradients, see `accord`
    run:  ── run ──► … apply: ── apply ──►   once all have told the driver

Guarantees
- The first failure of any worker is raised at once, and the others are woken.
- Optimizers step only when all workers have all gradients. Where one fails or is lost all the same, the error says
  which optimizer step each stage holds; nothing runs on stages that do not agree on it.
- Ctrl-C ends a step that was not agreed on; else it is raised when all have stepped. Whenever it comes, and however
  often, what became of a step is found out before the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import PipelineError, WorkerLostError
from rpcbench.base.futures import Future, collect_all, wait_all
from rpcbench.base.rebuild import add_note
from rpcbench.pipeline import requests
from rpcbench.pipeline.losses import Losses
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.phases import ANEW, Standing
from rpcbench.pipeline.tasks import Apply, Report, Task
from rpcbench.runtime.interrupts import uninterrupted

Ask = Callable[..., Future[Any]]
"""Of a worker's id, a function of `requests` and its arguments but the key."""
End = Callable[[int, int, str], object]
"""Tell a worker, by its id, that a step is not to go on, and why."""
Done = Callable[[list[Report], list[int]], object]
"""Hears of a step that all optimizers have done: what came of it, and who has let go of its context by itself."""
_Running = dict[int, Future[Any]]
_LAST_WORDS = 0.5
"""Seconds that the others are waited for, after one worker has failed."""


@dataclass(slots=True)
class _Open:
    """An optimizer step that may have been done by some. `going`: who does it, or may; None: that is not known yet."""

    number: int
    running: _Running = field(default_factory=dict)
    going: Collection[int] | None = None


class Steps:
    """`homes`: stage → id of its worker; `ids`: of the workers, first the one that decides.

    `standing`: which optimizer step each stage holds. `on_applied` is called, with its number, after each.
    """

    def __init__(
        self, ask: Ask, end: End, ids: Sequence[int], homes: Mapping[int, int], losses: Losses, standing: Standing
    ) -> None:
        self._ask, self._tell_end, self._ids, self._homes = ask, end, ids, homes
        self._losses, self.standing = losses, standing
        self.on_applied: Callable[[int], object] = lambda number: None
        self._open: _Open | None = None  # until it is known what became of it

    # -- a step
    def run(self, tasks: Mapping[int, Task]) -> list[Report]:
        """One step: worker id → what it does. The error of a worker's operation as it was; StageLostError."""
        self.check()
        self._losses.tasks = tasks
        running: _Running = {}
        try:
            return self._reports(running)
        except BaseException as error:
            for id_ in [id_ for id_ in tasks if not (id_ in running and _succeeded(running[id_]))]:
                self._end(id_, error)  # who waits for another one, perhaps; nobody waits for it
            self._not_run(error)
            raise

    def step(self, tasks: Mapping[int, Task], done: Done) -> None:
        """As `run`, then a step of every stage's optimizer. `done` hears of it before Ctrl-C is raised.

        Errors as of `run` or `apply`.
        """
        self.check()
        self._losses.tasks = tasks
        opened = self._begin(None)
        try:
            reports = self._reports(opened.running)
            with uninterrupted:
                self._applied(opened, done, reports)
        except BaseException as error:
            with uninterrupted:
                if self._open is opened:
                    self._after(error, opened, done)
            raise

    def apply(self, context: int, keeps: bool = False, last: bool = False) -> list[int]:
        """One step of every stage's optimizer, with the gradients of the latest `run` in this context.

        `keeps`: the workers keep these in place of those kept before. `last`: they need the context no more; returned
        are those that have let go of it by themselves.
        Where one fails, its error as it was, or StageLostError; either says what the stages hold.
        """
        self.check()
        opened = self._begin(self._ids)
        try:
            with uninterrupted:  # whenever Ctrl-C comes, it is known who has been told
                for id_ in self._ids:
                    what = Apply(self._losses.tasks[id_].step, context, keeps, last)
                    opened.running[id_] = self._ask(id_, requests.apply, *what)
            free = wait_all(opened.running.values())
        except BaseException as error:
            self._settle(_LAST_WORDS)
            self._not_applied(error, opened.number)
            raise
        self._applied(opened)
        return [id_ for id_, over in zip(opened.running, free, strict=True) if over]

    def after_applying(self, job: Callable[[], object]) -> None:
        """Run a job once nobody applies any more: now, or where Ctrl-C has ended the wait, when all have answered."""
        left = [] if self._open is None else [future for future in self._open.running.values() if not future.done()]
        if not left:
            job()
        else:
            collect_all(left).add_done_callback(lambda _: self.after_applying(job))

    # -- whether there can be one
    def check(self) -> None:
        """StageLostError where a stage is gone; PipelineError where the stages hold different optimizer steps."""
        self.check_there(changed=False)
        if self.standing.number is None:
            raise PipelineError(self._apart())

    def check_there(self, *, changed: bool) -> None:
        """StageLostError where a stage is gone."""
        self._losses.repeat()
        if self._open is not None and self._open.going is None:
            self._decide(self._open, PipelineError("nobody waits for it any more"), None)
        self._settle(None)
        self._losses.look(changed=changed)

    def _apart(self) -> str:
        return f"{self.standing.words(self._homes)}. Before the pipeline can go on, {ANEW}"

    # -- inside
    @property
    def _step(self) -> int:
        return next(iter(self._losses.tasks.values())).step

    def _begin(self, going: Collection[int] | None) -> _Open:
        """What may be done from now on; in this order, as Ctrl-C may come in between."""
        number = self.standing.number
        assert number is not None, "an optimizer step on top of different ones"
        opened = self._open = _Open(number + 1, going=going)
        self.standing.begin()
        return opened

    def _reports(self, running: _Running) -> list[Report]:
        """Begin what all do, and wait until it is done."""
        for id_, task in self._losses.tasks.items():
            with uninterrupted:  # what has gone out is known
                running[id_] = self._ask(id_, requests.run, *task.told)
        return [Report.heard(told) for told in wait_all(running.values())]

    def _end(self, id_: int, error: BaseException) -> None:
        self._tell_end(id_, self._step, _words(error))

    def _applied(self, opened: _Open, done: Done | None = None, reports: Sequence[Report] = ()) -> None:
        """All have."""
        self._open = None
        self.standing.reached(opened.number)
        if done is not None:
            done([*reports], [id_ for id_, report in zip(self._losses.tasks, reports, strict=True) if report.over])
        self.on_applied(opened.number)

    def _settle(self, seconds: float | None) -> None:
        """Take in who has applied, of those that were to, once all have answered, or after so many seconds."""
        opened = self._open
        if opened is None or opened.going is None:
            return
        applying = {id_: future for id_, future in opened.running.items() if id_ in opened.going}
        answered = _await(applying, seconds)
        for stage, id_ in self._homes.items():
            if id_ not in applying or _succeeded(applying[id_]):
                self.standing.reached(opened.number - (id_ not in applying), [stage])
        if answered:
            self._open = None

    # -- a step that fails
    def _after(self, error: BaseException, opened: _Open, done: Done) -> None:
        """Find out who does the step although there is an error; all have done it, where that is Ctrl-C, and too late.

        Raises another error where there is one to be raised in its stead.
        """
        self._decide(opened, error, _LAST_WORDS)
        if opened.going is None:
            self._losses.tell_of(error, f"in step {self._step}", changed=True)
            add_note(error, f"One worker has yet to say whether the step is done: {self.standing.words(self._homes)}.")
            return
        interrupted = not isinstance(error, Exception)
        self._settle(None if interrupted else _LAST_WORDS)
        if not opened.going or (self._ids[1:] and not set(opened.going) - {self._ids[0]}):
            self._not_run(error)
        elif not interrupted:
            self._not_applied(error, opened.number)
        elif all(map(_succeeded, opened.running.values())):
            self._applied(opened, done, [Report.heard(future.value()) for future in opened.running.values()])
        else:
            self._raise_failure(opened)

    def _raise_failure(self, opened: _Open) -> None:
        """Of a step that was to be done."""
        try:
            wait_all(opened.running.values())
        except Exception as failed:
            self._not_applied(failed, opened.number)
            raise

    def _decide(self, opened: _Open, error: BaseException, seconds: float | None) -> None:
        """End the step, unless all have agreed on it, and note who goes on; nothing where that is not known yet.

        As long as the first worker lives, it alone knows. If it has gone, each of the others says what it does.
        """
        first, *others = self._ids
        asked = self._asked_to_stop([first], error)
        _await(asked, seconds)
        stopped = _answer(asked.get(first))
        if stopped is not None:
            opened.going = [] if stopped else self._ids
            for id_ in others if stopped else ():
                self._end(id_, error)
        elif self._is_gone(first, asked):
            rest = self._asked_to_stop(others, error)
            _await(rest, seconds)
            going = [id_ for id_ in others if not _answer(rest.get(id_))]
            alone = self._losses.watch.has_ended(first, self._step)  # it may have agreed, and told nobody
            opened.going = [first, *going] if going or alone else []
        elif first in asked:
            asked[first].add_done_callback(partial(self._late, others, self._step, error))

    def _asked_to_stop(self, ids: Sequence[int], error: BaseException) -> _Running:
        """Whether the step does not go on there; of those that are there."""
        asked: _Running = {}
        for id_ in ids:
            with contextlib.suppress(WorkerLostError):
                self._end(id_, error)  # at once, even where other calls keep it from answering
                asked[id_] = self._ask(id_, requests.stop, self._step, _words(error))
        return asked

    def _is_gone(self, id_: int, asked: _Running) -> bool:
        """Whether a worker that has given no answer never will."""
        watch = self._losses.watch
        failed = id_ in asked and asked[id_].done()
        return id_ in (watch.await_gone() if failed else watch.gone())

    def _late(self, others: Sequence[int], step: int, error: BaseException, stopped: Future[bool]) -> None:
        """The first worker has answered, when nobody waited for it any more; by now another step may be under way."""
        for id_ in others if _answer(stopped) else ():
            self._tell_end(id_, step, _words(error))

    def _not_run(self, error: BaseException) -> None:
        """An error has come before all had their gradients. Raises StageLostError where it comes of a death."""
        changed = any(op.kind is Kind.UPDATE for task in self._losses.tasks.values() for op in task.ops)
        if changed:
            self.standing.unknown()
        self._losses.tell_of(error, f"in step {self._step}", changed=changed)

    def _not_applied(self, error: BaseException, number: int) -> None:
        """An error has come while optimizers stepped. Raises StageLostError where it comes of a death."""
        self._losses.tell_of(error, f"while optimizer step {number} was applied", changed=True)
        add_note(error, self._apart() if self.standing.number is None else self.standing.words(self._homes))


def _await(running: _Running, seconds: float | None) -> bool:
    """Wait until all have answered, or so many seconds; whether they have."""
    changes, futures = Changes(), list(running.values())
    for future in futures:
        future.add_done_callback(lambda _: changes.tell())
    return changes.wait_for(lambda: all(future.done() for future in futures), seconds)


def _answer(future: Future[bool] | None) -> bool | None:
    """None where there is none."""
    return future.value() if future is not None and _succeeded(future) else None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _succeeded(future: Future[Any]) -> bool:
    found = future.outcome()
    return found is not None and found[1] is None

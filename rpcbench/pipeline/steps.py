"""The steps of a pipeline, as its driver sees them: one message to each worker; two, if it looks at the gradients.

    step: ── run and apply ──►   the workers agree by themselves that all have all gradients, see `accord`
    run:  ── run ──► … apply: ── apply ──►   once all have told the driver

Guarantees
- The first failure of any worker is raised at once, and the others are woken.
- Optimizers step only when all workers have all gradients. Where one fails or is lost all the same, the error says
  which optimizer step each stage holds; nothing runs on stages that do not agree on it.
- Ctrl-C ends a step that was not agreed on; else it is raised when all have stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rpcbench.agent.interrupts import uninterrupted
from rpcbench.pipeline import requests
from rpcbench.pipeline.losses import Losses
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.phases import ANEW, Standing
from rpcbench.pipeline.tasks import Apply, Report, Task
from rpcbench.words.changes import Changes
from rpcbench.words.errors import PipelineError, WorkerLostError
from rpcbench.words.futures import Future, collect_all, wait_all

Ask = Callable[..., Future[Any]]
"""Of a worker's id, a function of `requests` and its arguments but the key."""
End = Callable[[int, int, str], object]
"""Tell a worker, by its id, that a step is not to go on, and why."""
_Running = dict[int, Future[Any]]
_LAST_WORDS = 0.5
"""Seconds that the others are waited for, after one worker has failed."""


class Stepped(NamedTuple):
    """A step that all optimizers have done. `over`: workers that have let go of its context by themselves.
    `interrupted`: Ctrl-C has come too late to end it, and is yet to be raised."""

    reports: list[Report]
    over: list[int]
    interrupted: BaseException | None


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
        self._applying: tuple[int, _Running] = (0, {})  # to which step, and who; until all have answered

    # -- a step
    def run(self, tasks: Mapping[int, Task]) -> list[Report]:
        """One step: worker id → what it does. The error of a worker's operation as it was; StageLostError."""
        running = self._begin(tasks)
        try:
            return self._reports(running)
        except BaseException as error:
            for id_ in [id_ for id_ in tasks if not (id_ in running and _succeeded(running[id_]))]:
                self._end(id_, error)  # who waits for another one, perhaps; nobody waits for it
            self._not_run(error)
            raise

    def step(self, tasks: Mapping[int, Task]) -> Stepped:
        """As `run`, then a step of every stage's optimizer. Errors as of `run` or `apply`."""
        interrupted, running = None, self._begin(tasks)
        try:
            reports = self._reports(running)
        except BaseException as error:
            with uninterrupted:
                done = self._done_all_the_same(error, running)
            if done is None:
                raise
            reports, interrupted = done, error
        self._applied(self.standing.begin() if interrupted is None else self.standing.least)
        return Stepped(reports, [id_ for id_, report in zip(tasks, reports, strict=True) if report.over], interrupted)

    def apply(self, context: int, keeps: bool = False, last: bool = False) -> list[int]:
        """One step of every stage's optimizer, with the gradients of the latest `run` in this context.

        `keeps`: the workers keep these in place of those kept before. `last`: they need the context no more; returned
        are those that have let go of it by themselves.
        Where one fails, its error as it was, or StageLostError; either says what the stages hold.
        """
        self.check()
        number = self.standing.begin()
        applying: _Running = {}
        self._applying = (number, applying)
        try:
            with uninterrupted:  # whenever Ctrl-C comes, it is known who has been told
                for id_ in self._ids:
                    what = Apply(self._losses.tasks[id_].step, context, keeps, last)
                    applying[id_] = self._ask(id_, requests.apply, *what)
            free = wait_all(applying.values())
        except BaseException as error:
            self._settle(_LAST_WORDS)
            self._not_applied(error, number)
            raise
        self._applied(number)
        return [id_ for id_, over in zip(applying, free, strict=True) if over]

    def after_applying(self, job: Callable[[], object]) -> None:
        """Run a job once nobody applies any more: now, or where Ctrl-C has ended the wait, when all have answered."""
        left = [future for future in self._applying[1].values() if not future.done()]
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
        self._settle(None)
        self._losses.look(changed=changed)

    def _apart(self) -> str:
        return f"{self.standing.words(self._homes)}. Before the pipeline can go on, {ANEW}"

    # -- inside
    @property
    def _step(self) -> int:
        return next(iter(self._losses.tasks.values())).step

    def _begin(self, tasks: Mapping[int, Task]) -> _Running:
        self.check()
        self._losses.tasks = tasks
        return {}

    def _reports(self, running: _Running) -> list[Report]:
        """Begin what all do, and wait until it is done."""
        for id_, task in self._losses.tasks.items():
            running[id_] = self._ask(id_, requests.run, *task.told)
        return [Report.heard(told) for told in wait_all(running.values())]

    def _end(self, id_: int, error: BaseException) -> None:
        self._tell_end(id_, self._step, _words(error))

    def _applied(self, number: int) -> None:
        self._applying = (0, {})
        self.standing.reached(number)
        self.on_applied(number)

    def _settle(self, seconds: float | None) -> None:
        """Take in who has applied, of those that were told to, once all have answered, or after so many seconds."""
        number, applying = self._applying
        if not applying:
            return
        answered = _answered(applying.values(), seconds)
        for stage, id_ in self._homes.items():
            if id_ not in applying or _succeeded(applying[id_]):
                self.standing.reached(number - (id_ not in applying), [stage])
        if answered:
            self._applying = (0, {})

    # -- a step that fails
    def _done_all_the_same(self, error: BaseException, running: _Running) -> list[Report] | None:
        """What came of a step that Ctrl-C did not end, as all had agreed on it. None, once it is known who has applied,
        where the error is to be raised as it is."""
        going = self._going(error)
        if not going:
            self._not_run(error)
            return None
        number = self.standing.begin()
        self._applying = (number, {id_: running[id_] for id_ in going if id_ in running})
        interrupted = isinstance(error, KeyboardInterrupt)
        self._settle(None if interrupted else _LAST_WORDS)
        if not interrupted:
            self._not_applied(error, number)
            return None
        try:
            return [Report.heard(future.value()) for future in running.values()]
        except Exception as failed:
            self._not_applied(failed, number)
            raise

    def _going(self, error: BaseException) -> list[int]:
        """Who applies the step although there is an error, or may do so; nobody else goes on with it."""
        first, *others = self._ids
        stopped = self._stop([first], error)[first]
        if stopped:
            for id_ in others:
                self._end(id_, error)
            return []
        if stopped is False:
            return list(self._ids)
        stopped_too = self._stop(others, error)
        going = [id_ for id_ in others if not stopped_too[id_]]
        if going:
            return [first, *going]
        if self._losses.watch.has_ended(first, self._step):  # it may have agreed, and told nobody
            self.standing.doubtful(stage for stage, id_ in self._homes.items() if id_ == first)
        return []

    def _stop(self, ids: Sequence[int], error: BaseException) -> dict[int, bool | None]:
        """Whether the step does not go on there; None where that is not known."""
        asked: _Running = {}
        for id_ in ids:
            with contextlib.suppress(WorkerLostError):  # which is among what is not known
                asked[id_] = self._ask(id_, requests.stop, self._step, _words(error))
        _answered(asked.values(), _LAST_WORDS)
        return {id_: asked[id_].value() if id_ in asked and _succeeded(asked[id_]) else None for id_ in ids}

    def _not_run(self, error: BaseException) -> None:
        """An error has come before all had their gradients. Raises StageLostError where it comes of a death."""
        changed = any(op.kind is Kind.UPDATE for task in self._losses.tasks.values() for op in task.ops)
        if changed:
            self.standing.unknown()
        self._losses.tell_of(error, f"in step {self._step}", changed=changed)

    def _not_applied(self, error: BaseException, number: int) -> None:
        """An error has come while optimizers stepped. Raises StageLostError where it comes of a death."""
        self._losses.tell_of(error, f"while optimizer step {number} was applied", changed=True)
        error.add_note(self._apart() if self.standing.number is None else self.standing.words(self._homes))


def _answered(futures: Iterable[Future[Any]], seconds: float | None) -> bool:
    """Wait until all have answered, or so many seconds; whether they have."""
    changes, futures = Changes(), list(futures)
    for future in futures:
        future.add_done_callback(lambda _: changes.tell())
    return changes.wait_for(lambda: all(future.done() for future in futures), seconds)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _succeeded(future: Future[Any]) -> bool:
    found = future.outcome()
    return found is not None and found[1] is None

"""The driver of a pipeline: the workers as it holds them, and the steps that it has them do.

    step: ── run and apply ──►   the workers agree by themselves that all have all gradients, see `mailboxes`
    run:  ── run ──► … apply: ── apply ──►   once all have told the driver

Guarantees
- The first failure of any worker is raised at once, and the others are woken.
- Optimizers step only when all workers have all gradients. Where one fails or is lost all the same, the error says
  which optimizer step each stage holds; nothing runs on stages that do not agree on it.
- Ctrl-C ends a step that was not agreed on; else it is raised when all have stepped. Whenever it comes, and however
  often, what became of a step is found out before the next one.
- Where a worker is lost, whatever the stages are asked for says so.
- What a stage holds comes back under the names of the un-split model.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import PipelineError, WorkerLostError
from rpcbench.base.futures import Future, collect_all, settle_all, wait_all
from rpcbench.base.rebuild import add_note
from rpcbench.pipeline import execution
from rpcbench.pipeline.failures import ANEW, CommitState, LostStages, ProcessWatch
from rpcbench.pipeline.gradient_sums import ties
from rpcbench.pipeline.lazy import built
from rpcbench.pipeline.mailboxes import end
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.placement import WorkerMesh
from rpcbench.pipeline.split import Groups, Stage, whole_name
from rpcbench.pipeline.stage import PrecisionConfig, StageWorker
from rpcbench.pipeline.stage_graph import inputs_of
from rpcbench.pipeline.tasks import Apply, LossFn, Report, Task
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import label_of
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


class StepDriver:
    """`homes`: stage → id of its worker; `ids`: of the workers, first the one that decides.

    `standing`: which optimizer step each stage holds. `on_applied` is called, with its number, after each.
    """

    def __init__(
        self,
        ask: Ask,
        end: End,
        ids: Sequence[int],
        homes: Mapping[int, int],
        losses: LostStages,
        standing: CommitState,
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
                    opened.running[id_] = self._ask(id_, execution.apply, *what)
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
                running[id_] = self._ask(id_, execution.run, *task.told)
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
                asked[id_] = self._ask(id_, execution.stop, self._step, _words(error))
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


OptimizerSpec = (
    tuple[type[torch.optim.Optimizer], dict[str, Any]] | tuple[type[torch.optim.Optimizer], dict[str, Any], Groups]
)
_NUMBERS = itertools.count()
T = TypeVar("T")


class WorkerGroup:
    """`homes`: stage → id of its worker; `modules` and `optimizers`: stage → RRef; `workers`: id → RRef of its loop.

    Stages are known here by their numbers in the `layout`: `row` has those of the first replica, whose parameters and
    gradients all others have, too.

    `standing`: which optimizer step each stage holds; `steps` moves them on.
    """

    def __init__(
        self,
        agent: Agent,
        stages: Sequence[Stage],
        loss_fn: LossFn | None,
        optimizer: OptimizerSpec | None,
        numerics: PrecisionConfig,
        replicas: int = 1,
    ) -> None:
        self._agent = agent
        self.stages = stages
        self.layout = WorkerMesh(len(stages) // replicas, replicas)
        self.row = stages[: self.layout.stages]
        self.homes = {stage.index: agent.member(stage.worker).id for stage in stages}
        self.standing = CommitState(self.homes, self.layout)
        self._key = f"pipeline {agent.id}.{agent.incarnation}.{next(_NUMBERS)}"
        self.modules = {stage.index: self._create(stage.index, built, stage.module, stage.tied) for stage in stages}
        self.workers: dict[int, Any] = {}
        self._taken: dict[int, list[int]] = {}
        self.ties = ties(self.row)
        ids = list(dict.fromkeys(self.homes.values()))
        watch = ProcessWatch(agent, ids)
        self._losses = LostStages(watch, self.homes, self.standing)
        self.steps = StepDriver(self._ask, self._end, ids, self.homes, self._losses, self.standing)
        with watch.opening() as records:
            for id_ in ids:
                modules = self._own(id_, self.modules)
                ports = {stage: self.row[stage].ports for stage in modules}
                homes = self.layout.homes(id_, self.homes)
                made = (self._key, modules, homes, loss_fn, ports, self.ties, records.get(id_, ""), numerics, ids)
                self.workers[id_] = agent.create(id_, StageWorker, made, timeout=0)
                self._taken[id_] = inputs_of(ports.values())
            self._await_made(self.workers.values())
        self.optimizers: dict[int, Any] = {}
        if optimizer is not None:
            make, names = execution.make_optimizer, self._names()
            self.optimizers = {
                s: self._create(s, make, m, names[self.layout.stage(s)], *optimizer) for s, m in self.modules.items()
            }
            self._await_made(self.optimizers.values())
            wait_all([self._ask(id_, execution.learn, self._own(id_, self.optimizers)) for id_ in self.workers])

    def _names(self) -> dict[int, Callable[[str], str]]:
        """Stage → what the un-split model calls its parameters; a copy of a tied weight has the name of the first."""
        first: dict[int, dict[str, str]] = {stage.index: {} for stage in self.row}
        for tie in self.ties:
            name = self.row[min(tie)].key(tie[min(tie)])
            for stage, own in tie.items():
                first[stage][own] = name
        return {stage.index: partial(whole_name, stage.prefixes, first[stage.index]) for stage in self.row}

    def _create(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._agent.create(self.homes[stage], function, args, timeout=0)

    def _await_made(self, rrefs: Any) -> None:
        wait_all([self._agent.call(rref._owner, execution.made, (rref,), timeout=0) for rref in rrefs])

    def _own(self, id_: int, each: Mapping[int, T]) -> dict[int, T]:
        """Of what is known by number, that of a worker's stages, as they are called there."""
        return {self.layout.stage(number): own for number, own in each.items() if self.homes[number] == id_}

    def _ask(self, id_: int, function: Callable[..., T], *args: Any) -> Future[T]:
        """`function(key, *args)` on a worker, which finds its part of this pipeline by the key."""
        return self._agent.call(id_, function, (self._key, *args), timeout=0)

    def _end(self, id_: int, step: int, reason: str) -> None:
        end(self._agent, id_, self._key, step, reason)

    def check_optimizer(self) -> None:
        """PipelineError where there is none."""
        if not self.optimizers:
            raise PipelineError("this pipeline has no optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")

    def check_may_update(self) -> None:
        """PipelineError where no schedule may step the optimizers within a step."""
        faults = {
            "takes no tied weights": bool(self.ties),
            "takes no replicas": self.layout.replicas > 1,
            "needs an optimizer": not self.optimizers,
        }
        for why, there in faults.items():
            if there:
                raise PipelineError(f"a schedule that updates within a step {why}")

    def inputs(self, id_: int, given: Sequence[Any]) -> tuple[Any, ...]:
        """Of the model's inputs those that this worker's stages take."""
        return tuple([given[number] for number in self._taken[id_]])

    # -- what stages hold
    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers."""
        return self._gather(execution.state)

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Those of all parameters that have one in this context; of a tied one under its first name."""
        return self._without_copies(self._gather(execution.gradients, context))

    def kept(self) -> dict[str, torch.Tensor]:
        """The gradients that were kept last; of a tied one under its first name."""
        own = {stage: gradients for each in self.on_row(execution.kept) for stage, gradients in each.items()}
        named = {stage.key(name): gradient for stage in self.row for name, gradient in own[stage.index].items()}
        return self._without_copies(named)

    def _without_copies(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A module that runs in two stages of a traced model has one name in both."""
        names = [[self.stages[stage].key(name) for stage, name in sorted(tie.items())] for tie in self.ties]
        copies = {copy for first, *others in names for copy in others if copy != first}
        return {name: tensor for name, tensor in named.items() if name not in copies}

    def _gather(self, function: Callable[..., dict[str, torch.Tensor]], *args: Any) -> dict[str, torch.Tensor]:
        found = self.on_stages(function, {stage.index: (self.modules[stage.index], *args) for stage in self.row})
        return {stage.key(own): t for stage in self.row for own, t in found[stage.index].items()}

    def stage(self, stage: int) -> tuple[Any, Any, Any]:
        """What a stage is there: RRefs of its worker's loop, of its module and of its optimizer, if it has one."""
        return self.workers[self.homes[stage]], self.modules[stage], self.optimizers.get(stage)

    def on_stages(self, function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """`function(*args[stage])` on each stage's worker, all at once: stage → what came of it. StageLostError."""
        there = partial(self._agent.call, function=function, timeout=0)
        found = self._all(lambda: [there(self.homes[stage], args=own) for stage, own in args.items()])
        return dict(zip(args, found, strict=True))

    def on_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function(its StageWorker, *args)` on each worker. StageLostError."""
        return self._on(self.workers, function, args)

    def on_row(self, function: Callable[..., T], *args: Any) -> list[T]:
        """As `on_workers`, on those of the first replica."""
        return self._on(dict.fromkeys(self.homes[stage.index] for stage in self.row), function, args)

    def _on(self, ids: Iterable[int], function: Callable[..., T], args: tuple[Any, ...]) -> list[T]:
        served = partial(self._agent.call, function=execution.served, timeout=0, label=label_of(function))
        return self._all(lambda: [served(id_, args=(self._key, function, args)) for id_ in ids])

    def scale(self, context: int, factor: float) -> None:
        """Multiply all gradients in this context."""
        self.on_workers(execution.scale, context, factor)

    def _all(self, calls: Callable[[], list[Future[T]]]) -> list[T]:
        """Calls of workers, all at once; what came of each."""
        self.steps.check_there(changed=True)
        try:
            return settle_all(calls())
        except WorkerLostError as error:
            self._losses.tell_of(error, "between two steps", changed=True)
            raise

"""The workers of one pipeline, as its driver holds them: modules, loops and optimizers of all stages, by RRefs.

Guarantees
- A step is one call to each worker; the first failure of any is raised at once, and the others are woken.
- Optimizers step only when all workers have all gradients, and all are there as far as is known. Where one is lost all
  the same, the error says which optimizer step each stage holds; nothing runs on stages that do not agree on it.
- What a stage holds comes back under the names of the un-split model.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from rpcbench import autograd
from rpcbench.agent.core import Agent
from rpcbench.agent.interrupts import uninterrupted
from rpcbench.agent.waiting import label_of
from rpcbench.pipeline import requests
from rpcbench.pipeline.layout import Layout
from rpcbench.pipeline.lazy import built
from rpcbench.pipeline.mail import end
from rpcbench.pipeline.numerics import Numerics
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.phases import ANEW, Lost, Standing, lost_error
from rpcbench.pipeline.ports import inputs_of
from rpcbench.pipeline.split import Stage
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.tasks import Apply, LossFn, Report, Task
from rpcbench.pipeline.ties import ties
from rpcbench.pipeline.watch import Watch
from rpcbench.words.changes import Changes
from rpcbench.words.errors import ConnectionLostError, PipelineError, StageLostError, WorkerLostError
from rpcbench.words.futures import Future, collect_all, settle_all, wait_all

OptimizerSpec = tuple[type[torch.optim.Optimizer], dict[str, Any]]
_NUMBERS = itertools.count()
T = TypeVar("T")
_Running = dict[int, Future[tuple[Any, ...]]]
_LAST_WORDS = 0.5
"""Seconds that optimizers are waited for, after one of them has failed."""


class Stepped(NamedTuple):
    """A step that all optimizers have done. `over`: workers that have let go of its context by themselves.
    `interrupted`: Ctrl-C has come too late to end it, and is yet to be raised."""

    reports: list[Report]
    over: list[int]
    interrupted: BaseException | None


class Crew:
    """`homes`: stage → id of its worker; `modules` and `optimizers`: stage → RRef; `workers`: id → RRef of its loop.

    Stages are known here by their numbers in the `layout`: `row` has those of the first replica, whose parameters and
    gradients all others have, too.

    `standing`: which optimizer step each stage holds. `on_applied` is called, with this and the number, after each.
    """

    def __init__(
        self,
        agent: Agent,
        stages: Sequence[Stage],
        loss_fn: LossFn | None,
        optimizer: OptimizerSpec | None,
        numerics: Numerics,
        replicas: int = 1,
    ) -> None:
        self._agent = agent
        self.stages = stages
        self.layout = Layout(len(stages) // replicas, replicas)
        self.row = stages[: self.layout.stages]
        self.homes = {stage.index: agent.member(stage.worker).id for stage in stages}
        self.standing = Standing(self.homes, self.layout)
        self.on_applied: Callable[[Crew, int], object] = lambda crew, number: None
        self._tasks: Mapping[int, Task] = {}  # of the last step
        self._applying: tuple[int, dict[int, Future[Any]]] = (0, {})  # to which step, and who; until all have answered
        self._told: StageLostError | None = None
        self._key = f"pipeline {agent.id}.{agent.incarnation}.{next(_NUMBERS)}"
        self.modules = {stage.index: self._create(stage.index, built, stage.module, stage.tied) for stage in stages}
        self.workers: dict[int, Any] = {}
        self._taken: dict[int, list[int]] = {}
        self.ties = ties(self.row)
        ids = list(dict.fromkeys(self.homes.values()))
        self._watch = Watch(agent, ids)
        with self._watch.opening() as records:
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
            make = requests.make_optimizer
            self.optimizers = {s: self._create(s, make, m, *optimizer) for s, m in self.modules.items()}
            self._await_made(self.optimizers.values())
            wait_all([self._ask(id_, requests.learn, self._own(id_, self.optimizers)) for id_ in self.workers])

    def _create(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._agent.create(self.homes[stage], function, args, timeout=0)

    def _await_made(self, rrefs: Any) -> None:
        wait_all([self._agent.call(rref._owner, requests.made, (rref,), timeout=0) for rref in rrefs])

    def _own(self, id_: int, each: Mapping[int, T]) -> dict[int, T]:
        """Of what is known by number, that of a worker's stages, as they are called there."""
        return {self.layout.stage(number): own for number, own in each.items() if self.homes[number] == id_}

    def _ask(self, id_: int, function: Callable[..., T], *args: Any) -> Future[T]:
        """`function(key, *args)` on a worker, which finds its part of this pipeline by the key."""
        return self._agent.call(id_, function, (self._key, *args), timeout=0)

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

    # -- a step
    def run(self, tasks: dict[int, Task]) -> list[Report]:
        """One step: worker id → what it does. The error of a worker's operation as it was; StageLostError."""
        running = self._begin(tasks)
        try:
            return self._reports(running)
        except BaseException as error:
            for id_ in [id_ for id_ in tasks if not (id_ in running and _succeeded(running[id_]))]:
                self._end(id_, error)  # who waits for another one, perhaps; nobody waits for it
            self._not_run(error)
            raise

    def step(self, tasks: dict[int, Task]) -> Stepped:
        """As `run`, and when all have gradients a step of every stage's optimizer. Errors as of `run` or `apply`."""
        self.check_optimizer()
        interrupted, running = None, self._begin(tasks)
        try:
            reports = self._reports(running)
        except BaseException as error:
            with uninterrupted:
                done = self._done_all_the_same(error, running)
            if done is None:
                raise
            reports, interrupted = done, error
        number = self.standing.begin()
        self._applied(number)
        return Stepped(reports, [id_ for id_, report in zip(tasks, reports, strict=True) if report.over], interrupted)

    def _begin(self, tasks: dict[int, Task]) -> _Running:
        self.check()
        self._tasks = tasks
        return {}

    def _reports(self, running: _Running) -> list[Report]:
        """Begin what all do, and wait until it is done; the first failure at once, whichever worker it comes from."""
        for id_, task in self._tasks.items():
            running[id_] = self._ask(id_, requests.run, *task.told)
        return [Report.heard(told) for told in wait_all(running.values())]

    def _end(self, id_: int, error: BaseException) -> None:
        end(self._agent, id_, self._key, self._step, _words(error))

    @property
    def _step(self) -> int:
        return next(iter(self._tasks.values())).step

    # -- a step that fails
    def _done_all_the_same(self, error: BaseException, running: _Running) -> list[Report] | None:
        """Of a step that goes on in spite of Ctrl-C, as all had agreed on it; else None, once it is known who did."""
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
        """Who applies this step although there is an error, or may do so; nobody else goes on with it. See `accord`."""
        first, *others = self.workers
        stopped = self._stop([first], error)[first]
        if stopped:
            for id_ in others:
                self._end(id_, error)
            return []
        if stopped is False:
            return list(self.workers)
        rest = self._stop(others, error)
        may = self._watch.has_ended(first, self._step)
        return [id_ for id_ in self.workers if (may if id_ == first else not rest[id_])]

    def _stop(self, ids: Sequence[int], error: BaseException) -> dict[int, bool | None]:
        """Whether the step does not go on there; None where that is not known."""
        asked: dict[int, Future[bool]] = {}
        for id_ in ids:
            with contextlib.suppress(WorkerLostError):  # which is among what is not known
                asked[id_] = self._ask(id_, requests.stop, self._step, _words(error))
        _answered(asked.values(), _LAST_WORDS)
        return {id_: asked[id_].value() if id_ in asked and _succeeded(asked[id_]) else None for id_ in ids}

    def _not_run(self, error: BaseException) -> None:
        """An error has come before all had their gradients. Raises StageLostError where it comes of a death."""
        changed = any(op.kind is Kind.UPDATE for task in self._tasks.values() for op in task.ops)
        if changed:
            self.standing.unknown()
        self._tell_of_the_lost(error, f"in step {self._step}", changed)

    def _not_applied(self, error: BaseException, number: int) -> None:
        """An error has come while optimizers stepped. Raises StageLostError where it comes of a death."""
        self._tell_of_the_lost(error, f"while optimizer step {number} was applied", changed=True)
        error.add_note(self._apart() if self.standing.number is None else self.standing.words(self.homes))

    def _applied(self, number: int) -> None:
        self._applying = (0, {})
        self.standing.reached(number)
        self.on_applied(self, number)

    def apply(self, context: int, keeps: bool = False, last: bool = False) -> list[int]:
        """One step of every stage's optimizer, with the gradients in this context.

        `keeps`: the workers keep these in place of those kept before. `last`: they need the context no more; returned
        are those that have let go of it by themselves.
        Where one fails, its error as it was, or StageLostError; either says what the stages hold.
        """
        autograd.recorder(self._agent).recorded(context)  # raises where it is over, before anything is sent
        self.check()
        number = self.standing.begin()
        applying: dict[int, Future[bool]] = {}
        self._applying = (number, applying)
        try:
            with uninterrupted:  # whenever Ctrl-C comes, it is known who has been told
                for id_ in self.workers:
                    what = Apply(self._tasks[id_].step, context, keeps, last)
                    applying[id_] = self._ask(id_, requests.apply, *what)
            free = wait_all(applying.values())
        except BaseException as error:
            self._settle(_LAST_WORDS)
            self._not_applied(error, number)
            raise
        self._applied(number)
        return [id_ for id_, over in zip(applying, free, strict=True) if over]

    def _settle(self, seconds: float | None) -> None:
        """Take in who has applied, of those that were told to, once all have answered, or after so many seconds."""
        number, applying = self._applying
        if not applying:
            return
        answered = _answered(applying.values(), seconds)
        for stage, id_ in self.homes.items():
            if id_ not in applying or _succeeded(applying[id_]):
                self.standing.reached(number - (id_ not in applying), [stage])
        if answered:
            self._applying = (0, {})

    def after_applying(self, job: Callable[[], object]) -> None:
        """Run a job once nobody applies any more: now, or where Ctrl-C has ended the wait, when all have answered."""
        left = [future for future in self._applying[1].values() if not future.done()]
        if not left:
            job()
        else:
            collect_all(left).add_done_callback(lambda _: self.after_applying(job))

    # -- who is there
    def check(self) -> None:
        """StageLostError where a stage is gone; PipelineError where the stages hold different optimizer steps."""
        self._check_there(changed=False)
        if self.standing.number is None:
            raise PipelineError(self._apart())

    def _check_there(self, *, changed: bool) -> None:
        if self._told is not None:
            raise StageLostError(*self._told.args)
        self._settle(None)
        if gone := self._watch.gone():
            raise self._lost(gone, "between two steps", changed)

    def _apart(self) -> str:
        return f"{self.standing.words(self.homes)}. Before the pipeline can go on, {ANEW}"

    def _tell_of_the_lost(self, error: BaseException, when: str, changed: bool) -> None:
        """Raise StageLostError where an error comes of a death; else return."""
        if isinstance(error, WorkerLostError | ConnectionLostError) and (gone := self._watch.await_gone()):
            raise self._lost(gone, when, changed) from error

    def _lost(self, gone: Sequence[int], when: str, changed: bool) -> StageLostError:
        """What to raise now; from then on, `check` says it again."""
        lost = []
        for id_ in gone:
            task = self._tasks.get(id_)
            at = self._watch.at(id_, task.step if task else 0, task.ops if task else ())
            stages = tuple(stage for stage, home in self.homes.items() if home == id_)
            lost.append(Lost(self._watch.name(id_), at, self._watch.reason(id_), stages))
        error = lost_error(lost, when, self.standing, changed)
        self._told = StageLostError(*error.args)  # one that no traceback keeps anything alive through
        return error

    # -- what stages hold
    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers."""
        return self._gather(requests.state)

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Those of all parameters that have one in this context; of a tied one under its first name."""
        return self._without_copies(self._gather(requests.gradients, context))

    def kept(self) -> dict[str, torch.Tensor]:
        """The gradients that were kept last; of a tied one under its first name."""
        own = {stage: gradients for each in self.on_row(requests.kept) for stage, gradients in each.items()}
        named = {stage.key(name): gradient for stage in self.row for name, gradient in own[stage.index].items()}
        return self._without_copies(named)

    def _without_copies(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {self.stages[stage].key(name) for tie in self.ties for stage, name in sorted(tie.items())[1:]}
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
        served = partial(self._agent.call, function=requests.served, timeout=0, label=label_of(function))
        return self._all(lambda: [served(id_, args=(self._key, function, args)) for id_ in ids])

    def scale(self, context: int, factor: float) -> None:
        """Multiply all gradients in this context."""
        self.on_workers(requests.scale, context, factor)

    def _all(self, calls: Callable[[], list[Future[T]]]) -> list[T]:
        """Calls of workers, all at once; what came of each."""
        self._check_there(changed=True)
        try:
            return settle_all(calls())
        except WorkerLostError as error:
            self._tell_of_the_lost(error, "between two steps", changed=True)
            raise


def _answered(futures: Iterable[Future[Any]], seconds: float | None) -> bool:
    """Wait until all have answered, or so many seconds; whether they have."""
    changes = Changes()
    for future in futures:
        future.add_done_callback(lambda _: changes.tell())
    return changes.wait_for(lambda: all(future.done() for future in futures), seconds)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _succeeded(future: Future[Any]) -> bool:
    found = future.outcome()
    return found is not None and found[1] is None

"""The driver of a pipeline: its handles of the workers, and the steps that it runs on them.

Guarantees
- The first failure of any worker is raised at once, and the other workers are woken.
- Optimizers step only when all workers have all gradients. If one fails or is lost all the same, the error says which
  optimizer step each stage holds; nothing runs on stages that do not agree on it.
- Ctrl-C aborts a step that was not committed; else it is raised when all optimizers have stepped. Whenever it comes,
  and however often, the outcome of a step is found out before the next one.
- After the loss of a worker every request to the stages raises the same error.
- Values that stages hold are returned under the names of the un-split model.
"""

# step: ── run and apply ──►   the workers commit among themselves, see `mailboxes`
# run:  ── run ──► … apply: ── apply ──►   once all have reported to the driver

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import ConnectionLostError, PipelineError, WorkerLostError
from rpcbench.base.futures import Future, collect_all, settle_all, wait_all
from rpcbench.base.rebuild import add_note
from rpcbench.pipeline import execution
from rpcbench.pipeline.failures import RECOVERY_ADVICE, CommitState, LostStages, ProcessWatch
from rpcbench.pipeline.gradient_sums import find_ties
from rpcbench.pipeline.lazy import build_stage
from rpcbench.pipeline.placement import WorkerMesh
from rpcbench.pipeline.split import Groups, Stage, whole_name
from rpcbench.pipeline.stage import PrecisionConfig, StageWorker
from rpcbench.pipeline.stage_graph import inputs_of_stages
from rpcbench.pipeline.tasks import ENDS, Apply, LossFn, StepReport, Task, error_text
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.requests import function_label

Ask = Callable[..., Future[Any]]
"""Calls a function of `execution` on a worker, by its id: the arguments are those after the key."""
End = Callable[[int, int, str], object]
"""Notifies a worker, by its id, that a step is aborted, and why."""
Done = Callable[[list[StepReport], list[int]], object]
"""Called after a step that all optimizers have done, with the reports and the ids that have released its context."""
_Running = dict[int, Future[Any]]  # worker id → its answer
_GRACE_SECONDS = 0.5
"""Seconds to wait for the other workers after one has failed."""


@dataclass(slots=True)
class _OpenStep:
    """An optimizer step that some workers may have done."""

    number: int
    running: _Running = field(default_factory=dict)
    going: Collection[int] | None = None  # ids that do it, or may; None: not known yet


class StepDriver:
    """Runs steps on the workers. `placement`: stage → id of its worker; `ids`: of all workers, the coordinator first;
    `commit_state`: which optimizer step each stage holds. `on_applied` is called after each, with its number."""

    def __init__(
        self,
        call_worker: Ask,
        end: End,
        ids: Sequence[int],
        placement: Mapping[int, int],
        losses: LostStages,
        commit_state: CommitState,
    ) -> None:
        self._call_worker, self._notify_end, self._ids, self._placement = call_worker, end, ids, placement
        self._losses, self.commit_state = losses, commit_state
        self.on_applied: Callable[[int], object] = lambda number: None
        self._open: _OpenStep | None = None  # until its outcome is known

    # -- a step
    def run_step(self, tasks: Mapping[int, Task]) -> list[StepReport]:
        """Run one step: worker id → its task. Raises the error of a worker's operation as it was, or StageLostError."""
        self.check_ready()
        self._losses.tasks = tasks
        running: _Running = {}
        try:
            return self._gather_reports(running)
        except BaseException as error:
            for id_ in [id_ for id_ in tasks if not (id_ in running and _has_succeeded(running[id_]))]:
                self._notify_abort(id_, error)  # it may wait for another worker; its answer is not needed
            self._not_run(error)
            raise

    def run_and_commit(self, tasks: Mapping[int, Task], done: Done) -> None:
        """As `run_step`, then step all optimizers. `done` is called before a Ctrl-C. Raises as `run_step` and
        `apply_gradients`."""
        self.check_ready()
        self._losses.tasks = tasks
        opened = self._begin_commit(None)  # the workers decide
        try:
            reports = self._gather_reports(opened.running)
            with uninterrupted:
                self._step_applied(opened, self._bind_reports(done, reports))
        except BaseException as error:
            with uninterrupted:
                if self._open is opened:
                    self._handle_error(error, opened, done)
            raise

    def apply_gradients(
        self, context: int, keeps: bool = False, last: bool = False, done: Callable[[list[int]], object] | None = None
    ) -> None:
        """Step every stage's optimizer, with the gradients of the latest `run_step` in this context. `keeps`: the
        workers keep these in place of those kept before. `last`: they need the context no more. `done` gets the ids of
        workers that have released it. Raises a worker's error as it was, or StageLostError; both have the step of each
        stage, and the error of a checkpoint after `done`."""
        self.check_ready()
        opened = self._begin_commit(self._ids)
        try:
            with uninterrupted:  # a Ctrl-C comes after the requests are recorded
                for id_ in self._ids:
                    what = Apply(self._losses.tasks[id_].step, context, keeps, last)
                    opened.running[id_] = self._call_worker(id_, execution.step_optimizers, *what)
            free = wait_all(opened.running.values())
        except BaseException as error:
            self._await_outcomes(_GRACE_SECONDS)
            self._not_applied(error, opened.number)
            raise
        over = [id_ for id_, released in zip(opened.running, free, strict=True) if released]
        self._step_applied(opened, lambda: done(over) if done is not None else None)

    def run_after_applying(self, job: Callable[[], object]) -> None:
        """Run a job once no worker applies any more: now, or when the last worker has answered after a Ctrl-C."""
        left = [] if self._open is None else [future for future in self._open.running.values() if not future.done()]
        if not left:
            job()
        else:
            collect_all(left).add_done_callback(lambda _: self.run_after_applying(job))

    # -- whether there can be one
    def check_ready(self) -> None:
        """Raise StageLostError if a stage is lost, PipelineError if the stages hold different optimizer steps."""
        self.check_stages_alive(changed=False)
        if self.commit_state.common_step is None:
            raise PipelineError(self._difference_text())

    def check_stages_alive(self, *, changed: bool) -> None:
        """Raise StageLostError if a stage is lost."""
        self._losses.raise_known_loss()
        if self._open is not None and self._open.going is None:  # a Ctrl-C left it undecided
            self._abort_or_record(self._open, PipelineError("its driver no longer waits for it"), None)
        self._await_outcomes(None)
        self._losses.check_for_losses(changed=changed)

    def _difference_text(self) -> str:
        return f"{self.commit_state.describe_stages(self._placement)}. Before the pipeline can go on, {RECOVERY_ADVICE}"

    # -- inside
    @property
    def _current_step(self) -> int:
        return next(iter(self._losses.tasks.values())).step

    def _begin_commit(self, going: Collection[int] | None) -> _OpenStep:
        # first: a Ctrl-C may come before the next line
        opened = self._open = _OpenStep(self.commit_state.least_step + 1, going=going)
        self.commit_state.mark_stepping()
        return opened

    def _gather_reports(self, running: _Running) -> list[StepReport]:
        """Start the tasks of all workers, and wait for their reports."""
        for id_, task in self._losses.tasks.items():
            with uninterrupted:  # each request that was sent is in `running`
                running[id_] = self._call_worker(id_, execution.run_step, task)
        return wait_all(running.values())

    def _notify_abort(self, id_: int, error: BaseException) -> None:
        self._notify_end(id_, self._current_step, error_text(error))

    def _bind_reports(self, done: Done, reports: Sequence[StepReport]) -> Callable[[], object]:
        over = [id_ for id_, report in zip(self._losses.tasks, reports, strict=True) if report.over]
        return lambda: done([*reports], over)

    def _step_applied(self, opened: _OpenStep, done: Callable[[], object]) -> None:
        """Record that all stages have done the step, before a checkpoint of it, which may fail."""
        self._open = None
        self.commit_state.record_step(opened.number)
        done()
        self.on_applied(opened.number)

    def _await_outcomes(self, seconds: float | None) -> None:
        """Wait until all that apply have answered, or `seconds`, and record which stages have stepped."""
        opened = self._open
        if opened is None or opened.going is None:
            return
        applying = {id_: future for id_, future in opened.running.items() if id_ in opened.going}
        answered = _await_answers(applying, seconds)
        for stage, id_ in self._placement.items():
            if id_ not in applying or _has_succeeded(applying[id_]):
                self.commit_state.record_step(opened.number - (id_ not in applying), [stage])
        if answered:
            self._open = None

    # -- a step that fails
    def _handle_error(self, error: BaseException, opened: _OpenStep, done: Done) -> None:
        """Find out which workers do the step in spite of an error: all, if it is a late Ctrl-C. May raise another."""
        self._abort_or_record(opened, error, _GRACE_SECONDS)
        if opened.going is None:
            self._losses.raise_if_lost(error, f"in step {self._current_step}", changed=True)
            add_note(
                error,
                "A worker has not reported whether the step is done: "
                f"{self.commit_state.describe_stages(self._placement)}.",
            )
            return
        interrupted = not isinstance(error, Exception)  # Ctrl-C: the workers are alive, so wait for all
        self._await_outcomes(None if interrupted else _GRACE_SECONDS)
        if not opened.going or (self._ids[1:] and not set(opened.going) - {self._ids[0]}):
            self._not_run(error)  # no worker that is left applies it
        elif not interrupted:
            self._not_applied(error, opened.number)
        elif all(map(_has_succeeded, opened.running.values())):
            reports = [future.value() for future in opened.running.values()]
            self._step_applied(opened, self._bind_reports(done, reports))
        else:
            try:
                wait_all(opened.running.values())
            except Exception as failed:  # of a worker that failed to apply
                self._not_applied(failed, opened.number)
                raise

    def _abort_or_record(self, opened: _OpenStep, error: BaseException, seconds: float | None) -> None:
        """Abort the step, unless it is committed, and record in `going` which workers do it, if that can be found out.
        While the first worker lives, only it has the answer. If it is lost, each of the others reports for itself."""
        first, *others = self._ids
        requests = self._request_aborts([first], error)
        _await_answers(requests, seconds)
        stopped = _answer_or_none(requests.get(first))
        if stopped is not None:
            for id_ in others if stopped else ():  # wakes those that wait for it
                self._notify_abort(id_, error)
            opened.going = [] if stopped else self._ids  # last: a Ctrl-C before it repeats all this
        elif self._is_gone(first, requests):
            rest = self._request_aborts(others, error)
            _await_answers(rest, seconds)
            going = [id_ for id_ in others if not _answer_or_none(rest.get(id_))]
            # it may have committed without notifying any
            alone = self._losses.watch.may_have_ended(first, self._current_step)
            opened.going = [first, *going] if going or alone else []
        elif first in requests:  # alive, but slow: its answer comes later
            requests[first].add_done_callback(partial(self._late_answer_received, self._current_step, error))

    def _request_aborts(self, ids: Sequence[int], error: BaseException) -> _Running:
        """Ask the workers that are left to abort the step: id → future, True if it is aborted there."""
        requests: _Running = {}
        for id_ in ids:
            with contextlib.suppress(WorkerLostError):
                self._notify_abort(id_, error)  # a notice, as calls may fill its thread pool
                requests[id_] = self._call_worker(id_, execution.abort_step, self._current_step, error_text(error))
        return requests

    def _is_gone(self, id_: int, requests: _Running) -> bool:
        """Return whether a worker that has not answered is lost."""
        watch = self._losses.watch
        found = requests[id_].known_outcome() if id_ in requests else None
        # a call fails before the report comes
        return id_ in (watch.wait_for_lost_workers(found[1]) if found else watch.lost_workers())

    def _late_answer_received(self, step: int, error: BaseException, stopped: Future[bool]) -> None:
        """Handle the coordinator's late answer. Another step may run by now, so only this step's number is used."""
        first, *others = self._ids
        for id_ in others if _answer_or_none(stopped) else ():
            self._notify_end(id_, step, error_text(error))
        found = stopped.known_outcome()
        if found is not None and isinstance(found[1], ConnectionLostError):  # no answer, but it lives: ask again
            with contextlib.suppress(WorkerLostError):
                again = self._call_worker(first, execution.abort_step, step, error_text(error))
                again.add_done_callback(partial(self._late_answer_received, step, error))

    def _not_run(self, error: BaseException) -> None:
        """Handle an error before the commit. Raises StageLostError if its cause is the loss of a worker."""
        self._losses.raise_if_lost(error, f"in step {self._current_step}", changed=False)

    def _not_applied(self, error: BaseException, number: int) -> None:
        """Handle an error while optimizers stepped. Raises StageLostError if its cause is the loss of a worker."""
        self._losses.raise_if_lost(error, f"while optimizer step {number} was applied", changed=True)
        add_note(
            error,
            self._difference_text()
            if self.commit_state.common_step is None
            else self.commit_state.describe_stages(self._placement),
        )


def _await_answers(running: _Running, seconds: float | None) -> bool:
    """Wait until all have answered, or `seconds`. Returns whether they have."""
    changes, futures = Condition(), list(running.values())
    for future in futures:
        future.add_done_callback(lambda _: changes.notify_all())
    return changes.wait_for(lambda: all(future.done() for future in futures), seconds)


def _answer_or_none(future: Future[bool] | None) -> bool | None:
    """Return the value of a future; None if it has none."""
    return future.value() if future is not None and _has_succeeded(future) else None


def _has_succeeded(future: Future[Any]) -> bool:
    found = future.known_outcome()
    return found is not None and found[1] is None


OptimizerSpec = (
    tuple[type[torch.optim.Optimizer], dict[str, Any]] | tuple[type[torch.optim.Optimizer], dict[str, Any], Groups]
)
_SETUP = "the setup of the pipeline"  # the label of calls, in errors
_NUMBERS = itertools.count()
T = TypeVar("T")


class WorkerGroup:
    """The workers of one pipeline. `placement`: stage → id of its worker; `modules` and `optimizers`: stage → RRef;
    `workers`: id → RRef of its `StageWorker`; `commit_state`: which optimizer step each stage holds, kept by `steps`.
    Stages have their numbers in the `layout`: `row` has those of the first replica, and all replicas are equal."""

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
        self.placement = {stage.index: agent.member(stage.worker).id for stage in stages}
        self.commit_state = CommitState(self.placement, self.layout)
        self._key = f"pipeline {agent.id}.{agent.incarnation}.{next(_NUMBERS)}"
        self.modules = {
            stage.index: self._create_on_stage(stage.index, build_stage, stage.module, stage.tied) for stage in stages
        }
        self.workers: dict[int, Any] = {}
        self._inputs_by_worker: dict[int, list[int]] = {}  # id → numbers of the model inputs that its stages take
        self.ties = find_ties(self.row)  # within a replica; the all-reduce keeps replicas equal
        ids = list(dict.fromkeys(self.placement.values()))
        watch = ProcessWatch(agent, ids)
        processes = watch.processes | {agent.id: agent.incarnation}
        self._losses = LostStages(watch, self.placement, self.commit_state)
        self.steps = StepDriver(
            self._call_worker, self._notify_abort, ids, self.placement, self._losses, self.commit_state
        )
        with watch.open_records() as records:  # the files are removed once both processes have mapped them
            for id_ in ids:
                modules = self._values_of_worker(id_, self.modules)
                ports = {stage: self.row[stage].ports for stage in modules}
                placement, record = self.layout.placement_for(id_, self.placement), records.get(id_, "")
                made = (self._key, modules, placement, loss_fn, ports, self.ties, record, numerics, ids, processes)
                self.workers[id_] = agent.create(id_, StageWorker, made, timeout=0, label=_SETUP)
                self._inputs_by_worker[id_] = inputs_of_stages(ports.values())
            self._await_made(self.workers.values())
        self.optimizers: dict[int, Any] = {}
        if optimizer is not None:  # after the modules, whose errors are to be raised first
            make, names = execution.make_optimizer, self._names_by_stage()
            self.optimizers = {
                s: self._create_on_stage(s, make, m, names[self.layout.stage_of(s)], *optimizer)
                for s, m in self.modules.items()
            }
            self._await_made(self.optimizers.values())
            wait_all(
                [
                    self._call_worker(id_, execution.set_optimizers, self._values_of_worker(id_, self.optimizers))
                    for id_ in self.workers
                ]
            )

    def _names_by_stage(self) -> dict[int, Callable[[str], str]]:
        """Return stage → a function from own name to un-split name. All copies of a tied weight have one name."""
        first: dict[int, dict[str, str]] = {stage.index: {} for stage in self.row}
        for tie in self.ties:
            name = self.row[min(tie)].unsplit_name(tie[min(tie)])
            for stage, own in tie.items():
                first[stage][own] = name
        return {stage.index: partial(whole_name, stage.prefixes, first[stage.index]) for stage in self.row}

    def _create_on_stage(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._agent.create(self.placement[stage], function, args, timeout=0, label=_SETUP)

    def _await_made(self, rrefs: Any) -> None:
        call = partial(self._agent.call, function=execution.wait_until_created, timeout=0, label=_SETUP)
        wait_all([call(rref._owner, args=(rref,)) for rref in rrefs])

    def _values_of_worker(self, id_: int, each: Mapping[int, T]) -> dict[int, T]:
        """Return the values of a worker's stages, by the stage numbers that it uses itself."""
        return {self.layout.stage_of(number): own for number, own in each.items() if self.placement[number] == id_}

    def _call_worker(self, id_: int, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(key, *args)` on a worker, which finds its part of this pipeline by the key."""
        return self._agent.call(id_, function, (self._key, *args), timeout=0, label=f"pipeline {function.__name__}")

    def _notify_abort(self, id_: int, step: int, reason: str) -> None:
        self._agent.notify(id_, ENDS, (self._key, step, reason))

    def check_optimizer(self) -> None:
        if not self.optimizers:
            raise PipelineError("this pipeline has no optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")

    def inputs_of_worker(self, id_: int, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the model inputs that a worker's stages take."""
        return tuple([given[number] for number in self._inputs_by_worker[id_]])

    # -- what stages hold
    def gather_state(self) -> dict[str, torch.Tensor]:
        return self._gather_tensors(execution.stage_state)

    def gather_gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Return the gradients in a context; that of a tied weight under its first name."""
        return self._without_copies(self._gather_tensors(execution.stage_gradients, context))

    def gather_kept_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the workers kept last; that of a tied weight under its first name."""
        own = {
            stage: gradients
            for each in self.call_on_row(StageWorker.kept_gradients)
            for stage, gradients in each.items()
        }
        named = {
            stage.unsplit_name(name): gradient for stage in self.row for name, gradient in own[stage.index].items()
        }
        return self._without_copies(named)

    def _without_copies(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [[self.stages[stage].unsplit_name(name) for stage, name in sorted(tie.items())] for tie in self.ties]
        # a module that runs in two stages of a traced model has one name in both
        copies = {copy for first, *others in names for copy in others if copy != first}
        return {name: tensor for name, tensor in named.items() if name not in copies}

    def _gather_tensors(self, function: Callable[..., dict[str, torch.Tensor]], *args: Any) -> dict[str, torch.Tensor]:
        found = self.call_on_stages(function, {stage.index: args for stage in self.row})
        return {stage.unsplit_name(own): t for stage in self.row for own, t in found[stage.index].items()}

    def call_on_stages(self, function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call `function(its StageWorker, stage there, *args[stage])` for each stage, all at once: stage → result.
        Raises StageLostError."""
        found = self._call_workers(
            [(self.placement[s], (self.layout.stage_of(s), *own)) for s, own in args.items()], function
        )
        return dict(zip(args, found, strict=True))

    def call_on_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(its StageWorker, *args)` on each worker. Raises StageLostError."""
        return self._call_workers([(id_, args) for id_ in self.workers], function)

    def call_on_row(self, function: Callable[..., T], *args: Any) -> list[T]:
        """As `call_on_workers`, on the workers of the first replica."""
        return self._call_workers(
            [(id_, args) for id_ in dict.fromkeys(self.placement[s.index] for s in self.row)], function
        )

    def scale_gradients(self, context: int, factor: float) -> None:
        self.call_on_workers(execution.scale_gradients, context, factor)

    def _call_workers(self, calls: Iterable[tuple[int, tuple[Any, ...]]], function: Callable[..., T]) -> list[T]:
        """Call a function on workers, all at once. `calls`: ids, with the arguments after the `StageWorker`."""
        self.steps.check_stages_alive(changed=True)
        served = partial(
            self._agent.call, function=execution.call_with_worker, timeout=0, label=function_label(function)
        )
        try:
            return settle_all([served(id_, args=(self._key, function, args)) for id_, args in calls])
        except WorkerLostError as error:
            self._losses.raise_if_lost(error, "between two steps", changed=True)
            raise

"""A step in the open: gradients of one batch, or of several, on the workers; then a look at them, and one apply.

Guarantees
- The gradients are those of all samples added so far, as if they were one batch, however many each `add` brought.
- They are applied once or not at all: after an `add` that failed nothing can be applied.
- A run is one call to each worker. It changes no parameter; a run that trains leaves gradients in the autograd context
  that it is made in.
- The norm of all gradients, and clipping by it, is as torch.nn.utils.clip_grad_norm_. Workers send their norms, never
  gradients. A parameter counts once, however many stages have a copy of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpcbench.autograd import recorder
from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.base.errors import PipelineError, counted
from rpcbench.base.events import Row
from rpcbench.optim.clip import clip_factor, local_norm, total_norm
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.mailboxes import window
from rpcbench.pipeline.ops import ops_in
from rpcbench.pipeline.plan import Orders, ScheduleCache
from rpcbench.pipeline.recompute import StepSeeds
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.stage_graph import model_inputs
from rpcbench.pipeline.step_log import Stamps
from rpcbench.pipeline.tasks import Metric, Report, Task
from rpcbench.pipeline.timeline import Timeline
from rpcbench.runtime.interrupts import uninterrupted


def grad_norm(crew: WorkerGroup, context: int, norm_type: float) -> float:
    """The norm of all gradients in the context, seen as one vector."""
    return total_norm(crew.on_row(_norm, context, norm_type), norm_type)


def clip(crew: WorkerGroup, context: int, max_norm: float, norm_type: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before. PipelineError for a bad bound."""
    if not max_norm > 0:
        raise PipelineError(f"max_norm must be a positive number, not {max_norm!r}")
    norm = grad_norm(crew, context, norm_type)
    factor = clip_factor(norm, max_norm)
    if not factor >= 1:  # not a number, too: all gradients become that, as with torch, and the norm says so
        crew.scale(context, factor)
    return norm


def _norm(own: StageWorker, context: int, norm_type: float) -> float:
    held = recorder().gradients(context)
    params = dict.fromkeys(param for module in own.modules.values() for param in module.parameters())
    return local_norm([held[p] for p in params if p in held and not own.copies.repeats(p)], norm_type)


_STEPS = itertools.count(1)  # steps of all pipelines share one count: rows of two pipelines never mix


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """One training step. `loss`: of the whole batch. `rows`: every operation with its times, in seconds; made when they
    are asked for, of what each worker `ran`.

    `idle`: share of the workers' time, between the first operation and the last, in which none ran; `idle_ideal`:
    what the schedule cannot avoid if all stages take equally long.
    """

    step: int
    loss: float
    ran: tuple[tuple[int, str, Stamps], ...]
    names: dict[int, str]
    samples: int

    def __repr__(self) -> str:
        return f"<step {self.step}: loss {self.loss:.6g} of {counted(self.samples, 'sample')}, idle {self.idle:.1%}>"

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for id_, plan, stamps in self.ran for row in stamps.rows(self.step, id_, ops_in(plan)))

    @property
    def timeline(self) -> Timeline:
        return Timeline.of(self.rows, self.step, names=self.names)

    @property
    def idle(self) -> float:
        return self.timeline.idle

    @property
    def idle_ideal(self) -> float | None:
        return self.timeline.idle_ideal


class BatchRunner:
    """The runs of one pipeline. `names`: worker id → name, in the order of the lists of operations.

    `inputs`: the names of the model's inputs, as `split` was told them.
    """

    def __init__(
        self,
        crew: WorkerGroup,
        book: ScheduleCache,
        names: dict[int, str],
        inputs: Sequence[str],
        reduction: str,
        has_loss: bool,
        seeds: StepSeeds,
    ) -> None:
        self.crew = crew
        self.reduction, self.has_loss = reduction, has_loss
        self.updates = book.whole.updates
        self._book, self._names, self._inputs = book, names, inputs
        self._seeds, self._others = seeds, StepSeeds(seeds.base + 1)
        self._windows: dict[tuple[int, bool], int] = {}  # by micro-batches, and whether it trains

    def train(self, x: Any, y: Any, whole: int | None = None) -> StepResult:
        """Forward and backward of a batch, as its share of `whole` samples, by default all there are."""
        samples = self._to_train(x, y)
        tasks = self._tasks(x, y, samples, whole=whole)
        return self._result(tasks, self.crew.steps.run(tasks), samples, whole)

    def step(self, x: Any, y: Any, keeps: bool, done: Callable[[StepResult, list[int]], object]) -> None:
        """As `train`, and a step of the optimizers; `done` hears what came of it, and who has let go of the context."""
        samples = self._to_train(x, y)
        tasks = self._tasks(x, y, samples, applies=True, keeps=keeps)
        self.crew.check_optimizer()
        self.crew.steps.step(tasks, lambda reports, over: done(self._result(tasks, reports, samples), over))

    def outputs(self, x: Any) -> Any:
        """Outputs of the last stage for a batch, in evaluation mode, in the order of the samples."""
        return microbatch.join(self._forwards(x, None, microbatch.samples(x)))

    def scores(self, x: Any, y: Any, metrics: Mapping[str, Metric]) -> list[tuple[int, dict[str, float]]]:
        """Of each micro-batch its samples, and what loss and metrics say of it, in evaluation mode."""
        samples = self._samples(x, y)
        found = self._forwards(x, y, samples, metrics)
        return list(zip(microbatch.sizes(samples, len(found)), found, strict=True))

    # -- inside
    def _to_train(self, x: Any, y: Any) -> int:
        """How many samples a batch to train on has."""
        if not self.has_loss:
            raise PipelineError("this pipeline has no loss_fn, so it cannot train; give Pipeline one")
        return self._samples(x, y)

    def _result(
        self, tasks: Mapping[int, Task], reports: Sequence[Report], samples: int, whole: int | None = None
    ) -> StepResult:
        step = next(iter(tasks.values())).step
        losses = {number: loss for report in reports for number, loss in report.losses.items()}
        loss = sum([losses[number] for number in sorted(losses)])
        if self.reduction == "mean" and whole is not None:
            loss *= whole / samples
        ran = [(id_, task.plan, report.stamps) for (id_, task), report in zip(tasks.items(), reports, strict=True)]
        return StepResult(step, loss, tuple(ran), self._names, samples)

    def _samples(self, x: Any, y: Any) -> int:
        samples, others = microbatch.samples(x), microbatch.samples(y)
        if samples != others:
            raise PipelineError(f"the batch has {counted(samples, 'sample')}, but its targets {others}")
        return samples

    def _forwards(self, x: Any, y: Any, samples: int, metrics: Mapping[str, Metric] | None = None) -> list[Any]:
        """What each micro-batch gives, in order."""
        reports = self.crew.steps.run(self._tasks(x, y, samples, train=False, metrics=metrics))
        outputs = {number: output for report in reports for number, output in report.outputs.items()}
        return [outputs[number] for number in sorted(outputs)]

    def _tasks(
        self,
        x: Any,
        y: Any,
        samples: int,
        *,
        train: bool = True,
        whole: int | None = None,
        applies: bool = False,
        keeps: bool = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> dict[int, Task]:
        """A step for each worker, by its id."""
        orders = self._book.fitting(samples)
        microbatch.sizes(samples, orders.microbatches)  # an error here, before anything is sent
        orders = orders if train else orders.forwards
        seeds = self._seeds if train else self._others  # what is looked at in between changes no training
        step, seed, inputs = next(_STEPS), seeds.draw(), model_inputs(x, self._inputs)
        tasks: dict[int, Task] = {}
        for place, id_ in enumerate(self._names):
            share = orders.microbatches, orders.replica(place), orders.replicas
            last = orders.has_last(place)
            tasks[id_] = Task(
                step=step,
                plan=orders.plans[place],
                train=train,
                samples=samples,
                microbatches=orders.microbatches,
                reduction=self.reduction,
                whole=whole,
                ideal=orders.ideal,
                seed=seed,
                window=self._window(orders, train),
                applies=applies,
                keeps=keeps,
                metrics=metrics if last else None,
                targets=microbatch.share(y, *share) if last and y is not None else None,
                inputs=tuple([microbatch.share(each, *share) for each in self.crew.inputs(id_, inputs)]),
            )
        return tasks

    def _window(self, orders: Orders, train: bool) -> int:
        """How many micro-batches a stage may be ahead of another; 0: of as many as it has."""
        key = orders.microbatches, train
        if key not in self._windows:
            each = -(-orders.microbatches // orders.replicas)
            ways = [(stage.index, way.stage) for stage in self.crew.row for way in stage.ports.gives]
            ahead = window(orders.ops, ways)
            self._windows[key] = ahead if each > ahead else 0
        return self._windows[key]


_BROKEN = "an add has failed, so these gradients are not whole"
_APPLIED = "these gradients have been applied"


class Batch:
    """Gradients in an autograd context, on the workers. Made by `Pipeline.batch` and `Pipeline.accumulate`."""

    def __init__(self, runs: BatchRunner, recorder: AutogradRecorder, context: int, keeps: bool) -> None:
        self.context = context
        self.results: list[StepResult] = []
        self.samples = 0
        self.applied = False
        self._runs, self._recorder = runs, recorder
        self._keeps = keeps
        self._whole = 0
        self._closed = ""
        self._clipped = False
        self._told: Sequence[int] = ()

    @property
    def result(self) -> StepResult:
        """Of the latest `add`."""
        self._check_added()
        return self.results[-1]

    @property
    def loss(self) -> float:
        """Of all that was added, as if it were one batch."""
        self._check_added()
        if self._runs.reduction == "sum":
            return sum(result.loss for result in self.results)
        return sum(result.loss * result.samples for result in self.results) / self.samples

    def add(self, x: Any, y: Any) -> StepResult:
        """Forward and backward of a batch; its gradients join those that are here.

        x, y: tensors (or tuples, dicts of them) with samples along dimension 0. The error of a worker's operation is
        raised as it was, and nothing of this step can be applied then. PipelineError after `clip` and `apply`.
        """
        self._check_open()
        if self._clipped:
            raise PipelineError("these gradients are clipped already: add all batches first, then clip")
        self._closed = _BROKEN
        with self._recorder.inside(self.context):
            result = self._runs.train(x, y, self._whole or None)
        self._closed = ""
        self._whole = self._whole or result.samples
        self.samples += result.samples
        self.results.append(result)
        return result

    def step(self, x: Any, y: Any) -> StepResult:
        """As `add` and then `apply`, of one batch alone: the workers agree by themselves that all have all gradients.

        Ctrl-C before that changes nothing; after it, it waits until all have stepped.
        """
        self._check_open()
        if self.results:
            raise PipelineError("something was added already: apply that, or begin another batch")
        self._recorder.recorded(self.context)  # raises where it is over, before anything is sent
        self._closed = _BROKEN
        with self._recorder.inside(self.context):
            self._runs.step(x, y, self._keeps, self._stepped)
        return self.result

    def _stepped(self, result: StepResult, over: Sequence[int]) -> None:
        self.results.append(result)
        self._whole = self.samples = result.samples
        self._closed, self._told, self.applied = _APPLIED, over, True

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of all parameters that have one, under the names of the un-split model."""
        self._settle()
        return self._runs.crew.gradients(self.context)

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """The norm of all gradients, over all stages. PipelineError where the schedule has applied them already."""
        self._check_there()
        self._settle()
        return grad_norm(self._runs.crew, self.context, norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients so that their norm, over all stages, is at most `max_norm`; returns the norm before.

        As torch.nn.utils.clip_grad_norm_ over the whole model. It comes after the last `add`.
        """
        self._check_added()
        self._check_there()
        self._settle()
        self._clipped = True
        return clip(self._runs.crew, self.context, max_norm, norm_type)

    def apply(self) -> None:
        """One step of every stage's optimizer. PipelineError where the pipeline has none, and the second time.

        Ctrl-C waits until all have stepped.
        """
        self._apply(last=False)

    def apply_last(self) -> None:
        """As `apply`, where nothing is asked of the batch afterwards: the workers let go of it at once."""
        self._apply(last=True)

    def release(self) -> None:
        """The gradients are wanted no more."""
        self._runs.crew.steps.after_applying(lambda: self._recorder.release(self.context, self._told))

    # -- inside
    def _apply(self, last: bool) -> None:
        self._check_open()
        self._check_added()
        self._runs.crew.check_optimizer()
        self._settle()
        self._recorder.recorded(self.context)  # raises where it is over, before anything is sent
        self._closed = _APPLIED
        with uninterrupted:  # all stages or none; if one hangs, a second Ctrl-C ends it all the same
            self._told = self._runs.crew.steps.apply(self.context, self._keeps, last)
            self.applied = True

    def _settle(self) -> None:
        """Divide by the number of all samples: so far the gradients were divided by that of the first `add`."""
        if self._closed == _BROKEN:
            self._check_open()
        if self._runs.reduction == "mean" and self._whole != self.samples:
            self._runs.crew.scale(self.context, self._whole / self.samples)
            self._whole = self.samples

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineError(f"{self._closed}; leave the block and begin another one")

    def _check_there(self) -> None:
        if self._runs.updates:
            raise PipelineError(
                "this schedule applies gradients within the step, micro-batch by micro-batch: none are left for a norm "
                "or to clip; choose another schedule"
            )

    def _check_added(self) -> None:
        if not self.results:
            raise PipelineError("nothing was added yet: call add(x, y) first")

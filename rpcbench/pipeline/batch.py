"""A training step in parts: gradients of one batch or several on the workers, inspection and clipping, then one apply.

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
from functools import partial
from typing import Any

import torch

from rpcbench.autograd import recorder
from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.base.ids import Row
from rpcbench.optim.distributed import limit_norm, local_norm, total_norm
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.mailboxes import compute_send_window
from rpcbench.pipeline.ops import parse_plan
from rpcbench.pipeline.plan import Orders, ScheduleCache
from rpcbench.pipeline.recompute import StepSeeds
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.stage_graph import model_inputs
from rpcbench.pipeline.step_log import Stamps
from rpcbench.pipeline.tasks import Metric, StepReport, Task
from rpcbench.pipeline.timeline import Timeline
from rpcbench.runtime.locked_node import uninterrupted


def _compute_norm(own: StageWorker, context: int, norm_type: float) -> float:
    held = recorder().named_gradients(context)
    params = dict.fromkeys(param for module in own.modules.values() for param in module.parameters())
    return local_norm([held[p] for p in params if p in held and not own.copies.is_repeated(p)], norm_type)


_STEPS = itertools.count(1)  # one count for all pipelines: rows of two pipelines never mix


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """The result of one training step, with the `loss` of the whole batch. `rows`: every operation with its times, in
    seconds; made on demand from `ran`, each worker's (id, schedule, stamps). `idle`: share of the workers' time between
    the first operation and the last in which none ran; `idle_ideal`: that of the schedule if all stages are equal."""

    step: int
    loss: float
    ran: tuple[tuple[int, str, Stamps], ...]
    names: dict[int, str]
    samples: int

    def __repr__(self) -> str:
        return f"<step {self.step}: loss {self.loss:.6g} of {count_noun(self.samples, 'sample')}, idle {self.idle:.1%}>"

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for id_, plan, stamps in self.ran for row in stamps.op_rows(self.step, id_, parse_plan(plan)))

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
    """Runs batches. `names`: worker id → name, in the order of the operation lists; `inputs`: those of the model."""

    def __init__(
        self,
        worker_group: WorkerGroup,
        schedule_cache: ScheduleCache,
        names: dict[int, str],
        inputs: Sequence[str],
        reduction: str,
        has_loss: bool,
        seeds: StepSeeds,
    ) -> None:
        self.worker_group = worker_group
        self.reduction, self.has_loss = reduction, has_loss
        self._schedule_cache, self._names, self._inputs = schedule_cache, names, inputs
        self._seeds = seeds
        self._windows: dict[tuple[int, bool], int] = {}  # (micro-batches, trains) → window

    def compute_gradients(self, x: Any, y: Any, whole: int | None = None) -> StepResult:
        """Run forward and backward of a batch, as its share of `whole` samples, by default its own number."""
        samples = self._to_train(x, y)
        tasks = self._make_tasks(x, y, samples, whole=whole)
        return self._make_result(tasks, self.worker_group.steps.run_step(tasks), samples, whole)

    def train_and_apply(self, x: Any, y: Any, keeps: bool, done: Callable[[StepResult, list[int]], object]) -> None:
        """As `compute_gradients`, then a step of the optimizers. `done` gets the result, and ids that have released
        the context."""
        samples = self._to_train(x, y)
        tasks = self._make_tasks(x, y, samples, applies=True, keeps=keeps)
        self.worker_group.check_optimizer()
        self.worker_group.steps.run_and_commit(
            tasks, lambda reports, over: done(self._make_result(tasks, reports, samples), over)
        )

    def compute_outputs(self, x: Any) -> Any:
        """Return the outputs of the last stage for a batch, in evaluation mode, in the order of the samples."""
        return microbatch.join_microbatches(self._run_forwards(x, None, microbatch.count_samples(x)))

    def compute_scores(self, x: Any, y: Any, metrics: Mapping[str, Metric]) -> list[tuple[int, dict[str, float]]]:
        """Return for each micro-batch its samples and the values of loss and metrics, in evaluation mode."""
        samples = self._count_samples(x, y)
        found = self._run_forwards(x, y, samples, metrics)
        return list(zip(microbatch.microbatch_sizes(samples, len(found)), found, strict=True))

    # -- inside
    def _to_train(self, x: Any, y: Any) -> int:
        """Return the number of samples of a batch to train on. Raises PipelineError if that is not possible."""
        if not self.has_loss:
            raise PipelineError("this pipeline has no loss_fn, so it cannot train; give Pipeline one")
        return self._count_samples(x, y)

    def _make_result(
        self, tasks: Mapping[int, Task], reports: Sequence[StepReport], samples: int, whole: int | None = None
    ) -> StepResult:
        step = next(iter(tasks.values())).step
        losses = {number: loss for report in reports for number, loss in report.losses.items()}
        loss = sum([losses[number] for number in sorted(losses)])
        if self.reduction == "mean" and whole is not None:
            loss *= whole / samples  # workers divided by `whole`; the result is this batch's own mean
        ran = [(id_, task.plan, report.stamps) for (id_, task), report in zip(tasks.items(), reports, strict=True)]
        return StepResult(step, loss, tuple(ran), self._names, samples)

    def _count_samples(self, x: Any, y: Any) -> int:
        samples, others = microbatch.count_samples(x), microbatch.count_samples(y)
        if samples != others:
            raise PipelineError(f"the batch has {count_noun(samples, 'sample')}, but its targets {others}")
        return samples

    def _run_forwards(self, x: Any, y: Any, samples: int, metrics: Mapping[str, Metric] | None = None) -> list[Any]:
        """Return the output or the scores of each micro-batch, in order."""
        reports = self.worker_group.steps.run_step(self._make_tasks(x, y, samples, train=False, metrics=metrics))
        outputs = {number: output for report in reports for number, output in report.outputs.items()}
        return [outputs[number] for number in sorted(outputs)]

    def _make_tasks(
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
        orders = self._schedule_cache.orders_for_batch(samples)
        microbatch.microbatch_sizes(samples, orders.microbatches)  # raises before anything is sent
        orders = orders if train else orders.forward_orders
        step, seed, inputs = next(_STEPS), self._seeds.next_seed(train), model_inputs(x, self._inputs)
        tasks: dict[int, Task] = {}
        for place, id_ in enumerate(self._names):
            share = orders.microbatches, orders.replica_of_worker(place), orders.replicas
            last = orders.has_last_stage(place)
            tasks[id_] = Task(
                step=step,
                plan=orders.plan_texts[place],
                train=train,
                samples=samples,
                microbatches=orders.microbatches,
                reduction=self.reduction,
                whole=whole,
                ideal=orders.ideal,
                seed=seed,
                window=self._send_window(orders, train),
                applies=applies,
                keeps=keeps,
                metrics=metrics if last else None,
                targets=microbatch.share_of_replica(y, *share) if last and y is not None else None,
                inputs=tuple(
                    [
                        microbatch.share_of_replica(each, *share)
                        for each in self.worker_group.inputs_of_worker(id_, inputs)
                    ]
                ),
            )
        return tasks

    def _send_window(self, orders: Orders, train: bool) -> int:
        """Return how many micro-batches a stage may be ahead of another; 0: no limit."""
        key = orders.microbatches, train
        if key not in self._windows:
            each = -(-orders.microbatches // orders.replicas)  # per replica, rounded up
            stage_pairs = [(stage.index, path.stage) for stage in self.worker_group.row for path in stage.ports.gives]
            ahead = compute_send_window(orders.ops, stage_pairs)
            self._windows[key] = ahead if each > ahead else 0  # a window that is never full is not counted
        return self._windows[key]


_BROKEN = "an add() has failed, so these gradients are incomplete"
_APPLIED = "these gradients have been applied"


class Batch:
    """Gradients in an autograd context, on the workers. Made by `Pipeline.batch` and `Pipeline.accumulate`."""

    def __init__(self, runs: BatchRunner, recorder: AutogradRecorder, context: int, keeps: bool) -> None:
        self.context = context
        self.results: list[StepResult] = []
        self.samples = 0
        self.applied = False
        self._runs, self._recorder = runs, recorder
        self._keeps = keeps  # the workers keep the gradients after the apply
        self._whole = 0  # number of samples that the gradients are divided by
        self._closed = ""  # the reason why nothing can be added or applied
        self._clipped = False
        self._released_ids: Sequence[int] = ()  # ids that have released the context

    @property
    def result(self) -> StepResult:
        """The result of the latest `add`."""
        self._check_added()
        return self.results[-1]

    @property
    def loss(self) -> float:
        """The loss of all that was added, as if it were one batch."""
        self._check_added()
        if self._runs.reduction == "sum":
            return sum(result.loss for result in self.results)
        return sum(result.loss * result.samples for result in self.results) / self.samples

    def add(self, x: Any, y: Any) -> StepResult:
        """Run forward and backward of a batch, and add its gradients to those here.

        Args:
            x: inputs: tensors, or tuples or dicts of them, with samples along dimension 0.
            y: targets, with as many samples along dimension 0.

        Returns:
            The loss and the times of this batch.

        Raises:
            PipelineError: after `clip` or `apply`, and after an `add` that failed.
            Exception: the error of a worker's operation, as it was; then nothing of this step can be applied.
        """
        self._check_open()
        if self._clipped:
            raise PipelineError("these gradients are clipped already: add all batches first, then clip")
        self._closed = _BROKEN  # until it has succeeded
        with self._recorder.enter_context(self.context):
            result = self._runs.compute_gradients(x, y, self._whole or None)
        self._closed = ""
        self._whole = self._whole or result.samples  # the first one sets the divisor
        self.samples += result.samples
        self.results.append(result)
        return result

    def step(self, x: Any, y: Any) -> StepResult:
        """Do `add` and `apply` for one batch alone; the workers commit among themselves.

        Args:
            x: inputs, as of `add`.
            y: targets, as of `add`.

        Returns:
            The loss and the times of the step.

        Raises:
            PipelineError: if something was added before, or there is no optimizer.
            KeyboardInterrupt: before the commit nothing has changed; after it, this is raised when all have stepped.
        """
        self._check_open()
        if self.results:
            raise PipelineError("something was added already: apply that, or begin another batch")
        self._recorder.find_record(self.context)  # raises if the context has ended, before anything is sent
        self._closed = _BROKEN
        with self._recorder.enter_context(self.context):
            self._runs.train_and_apply(x, y, self._keeps, self._step_ended)
        return self.result

    def _step_ended(self, result: StepResult, over: Sequence[int]) -> None:
        self.results.append(result)
        self._whole = self.samples = result.samples
        self._mark_applied(over)

    def _mark_applied(self, over: Sequence[int]) -> None:
        self._closed, self._released_ids, self.applied = _APPLIED, over, True

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of all parameters that have one, under the names of the un-split model."""
        self._rescale_gradients()
        return self._runs.worker_group.gather_gradients(self.context)

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """Return the norm of all gradients, over all stages."""
        self._rescale_gradients()
        return total_norm(self._runs.worker_group.call_on_row(_compute_norm, self.context, norm_type), norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients to a norm over all stages of at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

        Call it after the last `add`.

        Args:
            max_norm: a positive bound.
            norm_type: as of torch.linalg.vector_norm.

        Returns:
            The norm before.

        Raises:
            PipelineError: for a bad bound, before any `add`, and if the schedule has applied the gradients already.
        """
        self._check_added()
        if not max_norm > 0:
            raise PipelineError(f"max_norm must be a positive number, not {max_norm!r}")
        norm = self.grad_norm(norm_type)
        self._clipped = True  # set first: a clip that fails may have scaled some
        limit_norm(norm, max_norm, partial(self._runs.worker_group.scale_gradients, self.context))
        return norm

    def apply(self, *, last: bool = False) -> None:
        """Step every stage's optimizer once. Ctrl-C is raised when all have stepped. Raises PipelineError if the
        pipeline has no optimizer, and the second time. `last`: the workers release the batch, it is not used again."""
        self._check_open()
        self._check_added()
        self._runs.worker_group.check_optimizer()
        self._rescale_gradients()
        self._recorder.find_record(self.context)  # raises if the context has ended, before anything is sent
        self._closed = _APPLIED  # first: they are applied once or not at all
        with uninterrupted:  # all stages or none; a second Ctrl-C ends one that hangs
            self._runs.worker_group.steps.apply_gradients(self.context, self._keeps, last, self._mark_applied)

    def release(self) -> None:
        """Free the gradients on the workers."""
        self._runs.worker_group.steps.run_after_applying(
            lambda: self._recorder.release_context(self.context, self._released_ids)
        )

    # -- inside
    def _rescale_gradients(self) -> None:
        """Divide the gradients by the number of all samples; until now the divisor was that of the first `add`."""
        if self._closed == _BROKEN:
            self._check_open()
        if self._runs.reduction == "mean" and self._whole != self.samples:
            self._runs.worker_group.scale_gradients(self.context, self._whole / self.samples)
            self._whole = self.samples

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineError(f"{self._closed}; leave the block and begin another one")

    def _check_added(self) -> None:
        if not self.results:
            raise PipelineError("nothing was added yet: call add(x, y) first")

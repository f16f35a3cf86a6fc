"""The driver's side of a pipeline: it creates the stages on their workers, and runs training steps on them.

    pipe = Pipeline(stages, schedule="1f1b", microbatches=8, loss_fn=F.cross_entropy,
                    optimizer=(torch.optim.SGD, {"lr": 0.1}))
    result = pipe.step(x, y)

Guarantees
- The driver is not in the data path: in a step each worker gets one call with its list of operations, and a second one,
  to apply gradients, only if the program reads or changes the gradients before.
- Two-phase commit: parameters change only after all workers have all gradients. A step that fails on any worker changes
  nothing.
- After a step, however it ends, no worker has a slot, context or gradient of it left, except the gradients of the
  latest step with keep_gradients=True, which no context holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rpcbench import autograd
from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.pipeline import batchnorm, microbatch, weights_file
from rpcbench.pipeline.batch import Batch, BatchRunner, StepResult
from rpcbench.pipeline.checkpoint import Checkpoints, load_state
from rpcbench.pipeline.data_parallel import replicate_stages, warn_of_hosts
from rpcbench.pipeline.driver import OptimizerSpec, WorkerGroup
from rpcbench.pipeline.ops import Ops, Schedule
from rpcbench.pipeline.plan import ScheduleCache
from rpcbench.pipeline.recompute import Recompute, StepSeeds
from rpcbench.pipeline.schedules import chunks_for
from rpcbench.pipeline.split import Stage, Stages, check_patterns
from rpcbench.pipeline.stage import PrecisionConfig, warn_if_evaluating
from rpcbench.pipeline.tasks import LossFn, Metric
from rpcbench.pipeline.training import (
    Fit,
    History,
    Schedulers,
    SchedulerSpec,
    evaluate_metrics,
    learning_rate,
    predict_outputs,
)
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.jobs import JobLog


class Pipeline:
    """A model cut into stages, each on its worker, trained in micro-batches.

    A batch with fewer samples than `microbatches` is cut into as many micro-batches as it has samples. Each replica has
    `microbatches` of its own, and the gradients of all replicas are added up at the end of a step. Random numbers of a
    forward, as for dropout, depend on step, stage, micro-batch and `torch.manual_seed` here, before the pipeline is
    made.

    >>> from rpcbench.pipeline import Pipeline, split
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=4, loss_fn=torch.nn.functional.mse_loss,
    ...                 optimizer=(torch.optim.SGD, {"lr": 0.1}))
    >>> x = torch.randn(16, 4)
    >>> before, after = [pipe.step(x, x[:, :1]).loss for _ in range(20)][::19]
    >>> after < before
    True

    Args:
        stages: a model cut by `split`.
        schedule: "sequential", "gpipe", "1f1b", "interleaved", "bfs", "zb1p", "zbv", "dualpipev" or a function
            (workers, microbatches, chunks) -> ops.
        microbatches: into how many a batch is cut.
        loss_fn: `loss_fn(output, target)`, called where the last stage is, returns a scalar.
        optimizer: class and arguments, and optionally groups of parameters with other arguments: by patterns of names,
            as (torch.optim.AdamW, {"lr": 0.01}, {"*.bias": {"weight_decay": 0.0}}), or a function. It gets a list of
            names and parameters, those of one stage, and returns torch's groups of them, as many for each stage; some
            may be empty. Without groups the class gets a list of a stage's parameters, and may make its own groups.
            None: only compute gradients.
        loss_reduction: whether the loss is the "mean" or the "sum" over samples, so that micro-batches add up to the
            gradient of the whole batch.
        chunks: stages for each worker; by default as many as `split` was given, where the schedule takes any number,
            else as many as it is made for.
        recompute: activations that are computed again for the backward, not kept: "none", "all", "except_last"
            (micro-batch), or a function (stage, microbatch) -> bool.
        lr_scheduler: class and arguments, as (torch.optim.lr_scheduler.StepLR, {"step_size": 30}); it moves by
            `lr_scheduler.step()`, or in `fit`.
        batch_norm: when running statistics of batch norms move: with "microbatch" at each micro-batch; "warn": the same
            with a warning; with "deferred" once a step, by the whole batch. All other buffers of replicas are those of
            the first one, after each step that trains.
        autocast: torch.bfloat16 runs the stages' forwards under autocast; the loss stays in single precision.
        keep_gradients: the workers keep the gradients of a step until the next one, for `gradients`; as much memory as
            parameters.
        checkpoint: a folder that all workers reach, for checkpoints; `resume` continues from there.
        checkpoint_every: optimizer steps between two checkpoints; 0: write none.

    Raises:
        PipelineError: where split, schedule and workers do not fit.
        UnknownWorkerError: for a worker that is not in the world.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: str | Schedule = "1f1b",
        microbatches: int = 8,
        loss_fn: LossFn | None = None,
        optimizer: OptimizerSpec | None = None,
        loss_reduction: str = "mean",
        chunks: int | None = None,
        recompute: Recompute = "none",
        *,
        lr_scheduler: SchedulerSpec | None = None,
        batch_norm: str = "warn",
        autocast: torch.dtype | None = None,
        keep_gradients: bool = False,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        self._agent: Agent = current.current_agent()
        _check_arguments(stages, optimizer, lr_scheduler)
        _check_loss(loss_fn)
        names = {self._agent.member(worker).id: worker for worker in stages.workers}  # raises before a stage is created
        if chunks is None:
            chunks = chunks_for(schedule, stages.sizes, len(stages.row))
        schedule_cache = ScheduleCache(schedule, len(stages.row), microbatches, chunks, recompute, stages.replicas)
        microbatch.loss_weights([1], loss_reduction)  # raises for an unknown reduction
        numerics = PrecisionConfig(autocast, batch_norm)
        numerics.check_options()
        self.ops: Ops = schedule_cache.whole.ops  # for users, to print and simulate
        self.microbatches = microbatches
        row = stages.cut(schedule_cache.whole.placement)  # of one replica
        if optimizer is not None and len(optimizer) == 3:
            check_patterns(optimizer[2], row)
        self.stages: list[Stage] = replicate_stages(row, stages.workers, stages.replicas)
        if loss_fn is not None:
            warn_if_evaluating([link.module for link in stages.links] if stages.whole is None else [stages.whole])
        if batch_norm == batchnorm.WARN and loss_fn is not None:
            batchnorm.warn_of_microbatches(row, microbatches)
        self.worker_group = WorkerGroup(self._agent, self.stages, loss_fn, optimizer, numerics, stages.replicas)
        warn_of_hosts(self._agent, self.stages, self.worker_group.layout)
        self._schedulers = None if lr_scheduler is None else Schedulers(self.worker_group, lr_scheduler)
        self._keeps = keep_gradients
        self._name = stages.name
        seeds = StepSeeds(int(torch.randint(2**62, ())))  # by the user's generator, so manual_seed repeats it
        self._runs = BatchRunner(
            self.worker_group, schedule_cache, names, stages.inputs, loss_reduction, loss_fn is not None, seeds
        )
        # Checkpoints have the optimizer's class: its state fits no other class.
        name = f"{optimizer[0].__module__}.{optimizer[0].__qualname__}" if optimizer else ""
        self._checkpoints = Checkpoints(seeds, name, checkpoint, checkpoint_every)
        self.worker_group.steps.on_applied = partial(self._checkpoints.step_applied, self.worker_group)
        if self._schedulers is not None:
            self._schedulers.on_moved = partial(self._checkpoints.rates_changed, self.worker_group)

    # -- training
    def step(self, x: Any, y: Any) -> StepResult:
        """Run forward, backward and one optimizer step on a batch.

        Args:
            x: inputs: a tensor (or tuple, dict of them) with samples along dimension 0.
            y: targets, likewise.

        Returns:
            The loss of the batch, its idle share and timings.

        Raises:
            StageLostError: where a worker died; with its last operation, and the optimizer step that each stage holds.
            Exception: the error of a worker's operation, as it was raised. No parameter has changed, unless it was
                raised while the optimizers stepped, when all workers had their gradients.
        """
        with self.accumulate() as batch:
            return batch.step(x, y)

    @contextlib.contextmanager
    def batch(self, x: Any, y: Any) -> Iterator[Batch]:
        """Run forward and backward; in the block read or clip the gradients, and step by `batch.apply()`.

            with pipe.batch(x, y) as batch:
                norm = batch.clip(1.0)
                batch.apply()

        x, y: as for `step`. Without `apply` the gradients are dropped at the end of the block.
        """
        with self.accumulate() as batch:
            batch.add(x, y)
            yield batch

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[Batch]:
        """Make one optimizer step from several batches, of any sizes: `add` each of them, then `apply`.

            with pipe.accumulate() as batch:
                for x, y in four_batches:
                    batch.add(x, y)
                batch.apply()

        The gradients are those of all their samples as one batch. Without `apply` they are dropped at the end of the
        block.
        """
        recorder = autograd.recorder(self._agent)
        batch = Batch(self._runs, recorder, recorder.new_context(), self._keeps)
        try:
            yield batch
        finally:
            batch.release()  # on an error, too: no worker keeps gradients of a step that ends here

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int = 1,
        *,
        clip: float | None = None,
        lr_step: str = "epoch",
        validate: Iterable[Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        on_step: Callable[[StepResult], object] | None = None,
        on_epoch: Callable[[History], object] | None = None,
        progress: bool = True,
    ) -> History:
        """Run a step for each batch of a loader, `epochs` times.

        Ctrl-C ends it, and so does a callback that raises `EndFit`; the results so far are returned. The error of a
        step is raised; the steps before it stay done.

            def on_epoch(history):
                if history.validation[-1]["loss"] < 0.1:
                    raise EndFit

            history = pipe.fit(DataLoader(dataset, batch_size=64), epochs=30, validate=others, on_epoch=on_epoch)
            history.losses, history.epochs

        Args:
            loader: yields pairs of inputs and targets.
            epochs: passes over the loader.
            clip: largest norm of all gradients together; None: not clipped.
            lr_step: whether lr_scheduler, if there is one, moves after each "epoch" or each "step". One that needs a
                value, as ReduceLROnPlateau, gets the loss of that, or of the validation.
            validate: a loader, for `evaluate` after each epoch.
            metrics: as for `evaluate`.
            on_step: called with the StepResult of each step.
            on_epoch: called with the History, after each epoch and its validation.
            progress: show a bar with loss, idle share and samples a second.

        Returns:
            The losses of all steps and epochs, and the scores of the validations.

        Raises:
            PipelineError: for arguments that do not fit, or a loader that yields no pairs.
        """
        sums, rates = self._runs.reduction == "sum", self._schedulers
        own = self.accumulate, self.evaluate, sums, partial(self._agent.part(JobLog).begin_job, "fit", self._name)
        return Fit(
            *own, loader, epochs, progress, on_step, on_epoch, clip, rates, lr_step, validate, metrics
        ).run_epochs()

    @property
    def lr(self) -> float:
        """The current learning rate, read from the workers."""
        return learning_rate(self.worker_group)

    @property
    def lr_scheduler(self) -> Schedulers:
        """The schedulers of all stages, with `step()`. PipelineError if the pipeline has none."""
        if self._schedulers is None:
            raise PipelineError("give Pipeline lr_scheduler=(torch.optim.lr_scheduler.StepLR, {'step_size': 30})")
        return self._schedulers

    # -- evaluation
    def evaluate(self, x: Any, y: Any = None, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Return the loss and metrics of a batch with its targets, or of all pairs of a loader, in evaluation mode.

            pipe.evaluate(x, y)
            pipe.evaluate(loader, metrics={"accuracy": lambda output, y: (output.argmax(1) == y).double().mean()})

        Args:
            x: a batch, or a loader that yields pairs of inputs and targets.
            y: the targets of a batch; None for a loader.
            metrics: functions as loss_fn, by name. They run where the last stage is, on micro-batches, so each must be
                a mean over samples.

        Returns:
            {"loss": …} and, for each of `metrics`, its mean over samples.

        Raises:
            PipelineError: without a loss_fn and metrics, or for data that do not fit.
        """
        return evaluate_metrics(self._runs, x, y, metrics or {})

    def predict(self, x: Any) -> Any:
        """Return the outputs of the last stage in evaluation mode, in the order of the samples.
        x: a batch, or a loader of batches or of pairs, of which the targets are ignored."""
        return predict_outputs(self._runs, x)

    # -- parameters and gradients
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, under the names of the un-split model."""
        return self.worker_group.gather_state()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the latest step has applied, after clipping, under the names of the un-split model.
        The workers keep them; they are sent at this call. PipelineError without keep_gradients=True, and before the
        first step. `batch.gradients()` needs neither."""
        if not self._keeps:
            raise PipelineError(
                "the gradients of a step are dropped at its end: give Pipeline keep_gradients=True, or read them in "
                "`with pipe.batch(x, y) as batch: batch.gradients()`"
            )
        if not (found := self.worker_group.gather_kept_gradients()):
            raise PipelineError("there are no gradients: no step has been applied yet, or nothing is to be trained")
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the stages' parameters and buffers, named as in the un-split model. Optimizers keep their state.
        PipelineError where names or shapes do not fit; then nothing has changed."""
        load_state(self.worker_group, state)

    # -- checkpoints
    @property
    def optimizer_step(self) -> int | None:
        """Optimizer steps that all stages have made, also before a checkpoint; None if some have made more."""
        return self.worker_group.commit_state.common_step

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: each worker writes its own stages' parameters and optimizers.
        It replaces the one in `folder`, which all workers must reach under this path, once it is complete; if that
        fails, the old one stays. StageLostError, PipelineError; OSError that names the file and its worker.

        With the suffix .safetensors it is one file, which this process writes: the parameters and buffers under the
        un-split model's names, for other programs. It has no optimizer's state and no random state, so training cannot
        continue from it exactly."""
        if weights_file.is_weights_path(folder):
            weights_file.save_weights(self.worker_group, folder)
        else:
            self._checkpoints.save_checkpoint(self.worker_group, folder)

    def load(self, folder: str | Path) -> int:
        """Continue from a checkpoint of the model, made with any split and schedule; return its optimizer step.
        PipelineError where there is no complete one, or it does not fit; then nothing has changed.

        From a .safetensors file the stages get parameters and buffers. The optimizers keep their state, of which a
        warning tells where they have made steps, and the count of these is returned."""
        if weights_file.is_weights_path(folder):
            return weights_file.load_weights(self.worker_group, folder)
        return self._checkpoints.load_checkpoint(self.worker_group, folder)

    def resume(self) -> int:
        """Continue from the latest checkpoint in this pipeline's folder, as `load` does; return its optimizer step."""
        return self._checkpoints.resume_latest(self.worker_group)

    def __repr__(self) -> str:
        where = ", ".join(f"{stage.index} on {stage.worker}" for stage in self.stages)
        replicas = (
            f" in each of {self.worker_group.layout.replicas} replicas" if self.worker_group.layout.replicas > 1 else ""
        )
        count = f"{count_noun(self.worker_group.layout.stages, 'stage')}{replicas}"
        return f"<Pipeline of {count} ({where}), {count_noun(self.microbatches, 'micro-batch')}>"


def _check_loss(loss_fn: LossFn | None) -> None:
    """Raise PipelineError for a loss with parameters to train, which no optimizer of the pipeline would have."""
    own = loss_fn.named_parameters() if isinstance(loss_fn, torch.nn.Module) else ()
    if trained := [name for name, parameter in own if parameter.requires_grad]:
        raise PipelineError(
            f"loss_fn has parameters of its own ({', '.join(trained[:5])}), which no stage's optimizer trains: put the "
            "module that has them at the end of the model, or freeze them by loss_fn.requires_grad_(False)"
        )


def _check_arguments(stages: Stages, optimizer: OptimizerSpec | None, lr_scheduler: SchedulerSpec | None) -> None:
    """Raise PipelineError for arguments of other types."""
    if not isinstance(stages, Stages):
        raise PipelineError(f"stages must be the result of split(model, workers), not a {type(stages).__name__}")
    for name, given, most, example in (
        ("optimizer", optimizer, 3, "(torch.optim.SGD, {'lr': 0.1})"),
        ("lr_scheduler", lr_scheduler, 2, "(torch.optim.lr_scheduler.StepLR, {'step_size': 30})"),
    ):
        valid = (
            isinstance(given, tuple)
            and 2 <= len(given) <= most
            and callable(given[0])
            and isinstance(given[1], Mapping)
        )
        if given is not None and not valid:
            raise PipelineError(f"{name} must be a class and its arguments, as {example}, not {given!r:.80}")
    if optimizer is not None and not isinstance(optimizer[0], type):
        raise PipelineError(
            f"optimizer must begin with a class such as torch.optim.SGD, not {optimizer[0]!r:.80}: each stage makes an "
            "optimizer of that class. A function that makes groups of parameters is the third item"
        )
    groups = optimizer[2] if optimizer is not None and len(optimizer) == 3 else {}
    if not isinstance(groups, Mapping) and not callable(groups):
        raise PipelineError(
            "the third item of optimizer must be a dict of patterns of names, as {'*.bias': {'weight_decay': 0.0}}, "
            f"or a function of named parameters, not {groups!r:.80}"
        )

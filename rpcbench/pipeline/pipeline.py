"""The driver's side of a pipeline: builds the stages on their workers, and runs steps of two phases.

    pipe = Pipeline(stages, schedule="1f1b", microbatches=8, loss_fn=F.cross_entropy,
                    optimizer=(torch.optim.SGD, {"lr": 0.1}))
    result = pipe.step(x, y)

Guarantees
- The driver is not in the data path: for a step each worker gets one call with its list of operations, and one more to
  apply where somebody looks at the gradients before.
- Parameters change only after all workers have all gradients: a step that fails in any worker changes nothing.
- After a step, however it ends, no slot, context or gradient of it is left on any worker; but for the gradients of the
  latest one where they are to be kept, which no context holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rpcbench import autograd
from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline import batchnorm, microbatch
from rpcbench.pipeline.batch import Batch, BatchRunner, StepResult
from rpcbench.pipeline.checkpoint import Checkpoints, load_state
from rpcbench.pipeline.data_parallel import replicated, warn_of_hosts
from rpcbench.pipeline.driver import OptimizerSpec, WorkerGroup
from rpcbench.pipeline.ops import Ops, Schedule
from rpcbench.pipeline.plan import ScheduleCache
from rpcbench.pipeline.recompute import Recompute, StepSeeds
from rpcbench.pipeline.schedules import chunks_for
from rpcbench.pipeline.split import Stage, Stages, check_patterns
from rpcbench.pipeline.stage import PrecisionConfig, warn_of_rest
from rpcbench.pipeline.tasks import LossFn, Metric
from rpcbench.pipeline.training import Fit, History, Schedulers, SchedulerSpec, evaluated, predicted, rate
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent


class Pipeline:
    """A model cut into stages, each on its worker, trained in micro-batches.

    schedule: "sequential", "gpipe", "1f1b", "interleaved", "bfs", "zb1p", "zbv", "dualpipev" or a function (workers,
    microbatches, chunks) -> ops. "async" is an experiment, which trains to other weights: each stage steps its
    optimizer after each micro-batch, as if that were a batch of its own, and a step that fails has changed some.
    chunks: stages for each worker; by default as many as `split` was told, where the schedule takes any number, else as
    many as it is made for. A batch with fewer samples than
    `microbatches` is cut into as many as it has samples. Where `split` has made replicas, each has so many of them; the
    gradients of all replicas are added up at the end of a step.
    loss_fn(output, target) where the last stage is gives a scalar; loss_reduction says whether it is the "mean" or the
    "sum" over samples, so that micro-batches add up to the gradient of the whole batch.
    optimizer: class and arguments, and groups of parameters with other arguments, if there are any: by patterns of
    names, as (torch.optim.AdamW, {"lr": 0.01}, {"*.bias": {"weight_decay": 0.0}}), or a function. It gets a list of
    names and parameters, those of one stage, and gives torch's groups of them, as many for each stage; some may be
    empty. None to only compute gradients. lr_scheduler: class and arguments, as
    (torch.optim.lr_scheduler.StepLR, {"step_size": 30}); it moves by `lr_scheduler.step()`, or in `fit`.
    recompute: "none", "all", "except_last" (micro-batch), or a function (stage, microbatch) -> bool: which activations
    are computed anew for the backward, not kept. Random numbers of a forward, as for dropout, depend on step, stage,
    micro-batch and `torch.manual_seed` here, before the pipeline is made.
    batch_norm: what running statistics of batch norms do, which see micro-batches: with "microbatch" they move at each
    of these; "warn" is the same with a warning; with "deferred" they move once a step, by the whole batch. All other
    buffers of replicas are those of the first one, after each step that trains.
    autocast: torch.bfloat16 runs the stages' forwards under autocast; the loss stays in single precision.
    keep_gradients: the workers keep those of a step until the next one, for `gradients`; as much memory as parameters.
    checkpoint: a folder that all workers reach; checkpoint_every: after so many optimizer steps a checkpoint is written
    there, which `resume` goes on from; 0 for never.
    PipelineError where split, schedule and workers do not fit; UnknownWorkerError for a worker that is not there.

    >>> from rpcbench.pipeline import Pipeline, split
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=4, loss_fn=torch.nn.functional.mse_loss,
    ...                 optimizer=(torch.optim.SGD, {"lr": 0.1}))
    >>> x = torch.randn(16, 4)
    >>> before, after = [pipe.step(x, x[:, :1]).loss for _ in range(20)][::19]
    >>> after < before
    True
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
        self._agent: Agent = current.current()
        _check(stages, optimizer, lr_scheduler)
        names = {self._agent.member(worker).id: worker for worker in stages.workers}
        if chunks is None:
            chunks = chunks_for(schedule, stages.sizes, len(stages.row))
        book = ScheduleCache(schedule, len(stages.row), microbatches, chunks, recompute, stages.replicas)
        microbatch.weights([1], loss_reduction)
        numerics = PrecisionConfig(autocast, batch_norm)
        numerics.check()
        self.ops: Ops = book.whole.ops
        self.microbatches = microbatches
        row = stages.cut(book.whole.homes)
        if optimizer is not None and len(optimizer) == 3:
            check_patterns(optimizer[2], row)
        self.stages: list[Stage] = replicated(row, stages.workers, stages.replicas)
        if loss_fn is not None:
            warn_of_rest([link.module for link in stages.links] if stages.whole is None else [stages.whole])
        if batch_norm == batchnorm.WARN and loss_fn is not None:
            batchnorm.warn_of_microbatches(row, microbatches)
        self.crew = WorkerGroup(self._agent, self.stages, loss_fn, optimizer, numerics, stages.replicas)
        warn_of_hosts(self._agent, self.stages, self.crew.layout)
        if book.whole.updates:
            self.crew.check_may_update()
        self._schedulers = None if lr_scheduler is None else Schedulers(self.crew, lr_scheduler)
        self._keeps = keep_gradients
        seeds = StepSeeds(int(torch.randint(2**62, ())))
        self._runs = BatchRunner(self.crew, book, names, stages.inputs, loss_reduction, loss_fn is not None, seeds)
        name = f"{optimizer[0].__module__}.{optimizer[0].__qualname__}" if optimizer else ""
        self._checkpoints = Checkpoints(seeds, name, checkpoint, checkpoint_every)
        self.crew.steps.on_applied = partial(self._checkpoints.applied, self.crew)
        if self._schedulers is not None:
            self._schedulers.on_moved = partial(self._checkpoints.moved, self.crew)

    # -- training
    def step(self, x: Any, y: Any) -> StepResult:
        """Forward, backward and one optimizer step on a batch.

        x, y: tensors (or tuples, dicts of them) with samples along dimension 0. The error of a worker's operation is
        raised as it was, or StageLostError where a worker died, which says what it was at and which optimizer step each
        stage holds. No parameter has changed, unless that was in the last phase, where all have their gradients.
        """
        with self.accumulate() as batch:
            return batch.step(x, y)

    @contextlib.contextmanager
    def batch(self, x: Any, y: Any) -> Iterator[Batch]:
        """Forward and backward; gradients are there inside the block, and parameters change only by `batch.apply()`.

            with pipe.batch(x, y) as batch:
                norm = batch.clip(1.0)
                batch.apply()

        Without `apply` the gradients are dropped at the end of the block.
        """
        with self.accumulate() as batch:
            batch.add(x, y)
            yield batch

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[Batch]:
        """One optimizer step from several batches, of any sizes: `add` each of them, then `apply`.

        The gradients are those of all their samples as one batch. Without `apply` they are dropped at the end of the
        block.

            with pipe.accumulate() as batch:
                for x, y in four_batches:
                    batch.add(x, y)
                batch.apply()
        """
        recorder = autograd.recorder(self._agent)
        batch = Batch(self._runs, recorder, recorder.new_context(), self._keeps)
        try:
            yield batch
        finally:
            batch.release()

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
        """A step for each batch of a loader, which gives pairs of inputs and targets; `epochs` times.

        clip: largest norm of all gradients together. lr_step: whether lr_scheduler, if there is one, moves after each
        "epoch" or each "step"; one that needs a value, as ReduceLROnPlateau, gets the loss of that, or of the
        validation. validate, metrics: as for `evaluate`, after each epoch. on_step: called with each StepResult;
        on_epoch: with the History, after each epoch and its validation. progress: show a bar with loss, idle share and
        samples a second. Ctrl-C ends it, and so does a callback that raises `EndFit`; what has been done is returned
        as ever. The error of a step is raised, and those before it stay done.

            def on_epoch(history):
                if history.validation[-1]["loss"] < 0.1:
                    raise EndFit

            history = pipe.fit(DataLoader(dataset, batch_size=64), epochs=30, validate=others, on_epoch=on_epoch)
            history.losses, history.epochs
        """
        sums = self._runs.reduction == "sum"
        rates = self._schedulers
        calls = on_step, on_epoch
        return Fit(self, sums, loader, epochs, progress, *calls, clip, rates, lr_step, validate, metrics).run()

    @property
    def lr(self) -> float:
        """The learning rate as it is now, asked of the workers."""
        return rate(self.crew)

    @property
    def lr_scheduler(self) -> Schedulers:
        """The schedulers of all stages, with `step()`. PipelineError where the pipeline has none."""
        if self._schedulers is None:
            raise PipelineError("give Pipeline lr_scheduler=(torch.optim.lr_scheduler.StepLR, {'step_size': 30})")
        return self._schedulers

    # -- evaluation
    def evaluate(self, x: Any, y: Any = None, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """The loss over a batch `x` with targets `y`, or over all pairs that a loader `x` gives, in evaluation mode.

            pipe.evaluate(x, y)
            pipe.evaluate(loader, metrics={"accuracy": lambda output, y: (output.argmax(1) == y).double().mean()})

        Returns {"loss": …} and, for each of `metrics`, its mean over samples. Metrics are functions as loss_fn, and run
        where the last stage is; each gets micro-batches, so it must be a mean over samples.
        """
        return evaluated(self._runs, x, y, metrics or {})

    def predict(self, x: Any) -> Any:
        """Outputs of the last stage in evaluation mode, in the order of the samples.

        x: a batch, or a loader of batches or of pairs, whose targets are left out.
        """
        return predicted(self._runs, x)

    # -- what it holds
    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, under the names of the un-split model."""
        return self.crew.state()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those that the latest step has applied, under the names of the un-split model; as clipped, if they were.

        They stay on the workers and are brought here when asked for. PipelineError without keep_gradients=True, and
        before the first step. `batch.gradients()` needs neither.
        """
        if not self._keeps:
            raise PipelineError(
                "the gradients of a step go with it: give Pipeline keep_gradients=True, or look at them in "
                "`with pipe.batch(x, y) as batch: batch.gradients()`"
            )
        if not (found := self.crew.kept()):
            raise PipelineError("there are no gradients: no step has been applied yet, or nothing is to be trained")
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let the stages hold these parameters and buffers, named as in the un-split model. Optimizers go on as before.

        PipelineError where names or shapes do not fit; then nothing has changed.
        """
        load_state(self.crew, state)

    # -- checkpoints
    @property
    def optimizer_step(self) -> int | None:
        """Optimizer steps that all stages have had, also before a checkpoint; None where some have had more."""
        return self.crew.standing.number

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: each worker its own stages, parameters and optimizers. It replaces the one in `folder`,
        which all workers must reach under this path, as soon as it is whole; where that fails it stays.
        StageLostError, PipelineError; OSError that names the file and its worker.
        """
        self._checkpoints.save(self.crew, folder)

    def load(self, folder: str | Path) -> int:
        """Go on from a checkpoint, of whatever split and schedule of the model; its optimizer step.

        PipelineError where there is none that is whole, or where it does not fit; then nothing has changed.
        """
        return self._checkpoints.load(self.crew, folder)

    def resume(self) -> int:
        """As `load`, from the folder that this pipeline's checkpoints go to."""
        return self._checkpoints.resume(self.crew)

    def __repr__(self) -> str:
        where = ", ".join(f"{stage.index} on {stage.worker}" for stage in self.stages)
        replicas = f" in each of {self.crew.layout.replicas} replicas" if self.crew.layout.replicas > 1 else ""
        count = f"{counted(self.crew.layout.stages, 'stage')}{replicas}"
        return f"<Pipeline of {count} ({where}), {counted(self.microbatches, 'micro-batch')}>"


def _check(stages: Stages, optimizer: OptimizerSpec | None, lr_scheduler: SchedulerSpec | None) -> None:
    """PipelineError for what is none of these."""
    if not isinstance(stages, Stages):
        raise PipelineError(f"stages must be what split(model, workers) gives, not a {type(stages).__name__}")
    for name, given, most, example in (
        ("optimizer", optimizer, 3, "(torch.optim.SGD, {'lr': 0.1})"),
        ("lr_scheduler", lr_scheduler, 2, "(torch.optim.lr_scheduler.StepLR, {'step_size': 30})"),
    ):
        told = (
            isinstance(given, tuple)
            and 2 <= len(given) <= most
            and callable(given[0])
            and isinstance(given[1], Mapping)
        )
        if given is not None and not told:
            raise PipelineError(f"{name} must be a class and its arguments, as {example}, not {given!r:.80}")
    groups = optimizer[2] if optimizer is not None and len(optimizer) == 3 else {}
    if not isinstance(groups, Mapping) and not callable(groups):
        raise PipelineError(
            "the third item of optimizer must be a dict of patterns of names, as {'*.bias': {'weight_decay': 0.0}}, "
            f"or a function of named parameters, not {groups!r:.80}"
        )

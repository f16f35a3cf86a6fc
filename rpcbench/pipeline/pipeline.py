"""The driver's side of a pipeline: builds the stages on their workers, and runs steps of two phases.

    pipe = Pipeline(stages, schedule="1f1b", microbatches=8, loss_fn=F.cross_entropy,
                    optimizer=(torch.optim.SGD, {"lr": 0.1}))
    result = pipe.step(x, y)

Guarantees
- The driver is not in the data path: in a step each worker gets one call with its list of operations, and one to apply.
- Parameters change only after all workers have all gradients: a step that fails in any worker changes nothing.
- After a step, however it ends, no slot, context or gradient of it is left on any worker.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpcbench import autograd
from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.chance import StepSeeds
from rpcbench.pipeline.checkpoint import Checkpoints, load_state
from rpcbench.pipeline.crew import Crew, OptimizerSpec
from rpcbench.pipeline.ops import Kind, Ops, Schedule
from rpcbench.pipeline.ports import model_inputs
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.split import Stage, Stages
from rpcbench.pipeline.stage import LossFn, Report, Task
from rpcbench.pipeline.timeline import Timeline
from rpcbench.pipeline.validate import placement, validate
from rpcbench.words.errors import PipelineError
from rpcbench.words.events import Row

_STEPS = itertools.count(1)  # steps of all pipelines share one count: rows of two pipelines never mix


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step. `loss`: of the whole batch. `rows`: every operation with its times, in seconds.

    `idle`: share of the workers' time, between the first operation and the last, in which none ran; `idle_ideal`:
    what the schedule cannot avoid if all stages take equally long.
    """

    step: int
    loss: float
    rows: tuple[Row, ...]
    names: dict[int, str]

    @property
    def timeline(self) -> Timeline:
        return Timeline.of(self.rows, self.step, names=self.names)

    @property
    def idle(self) -> float:
        return self.timeline.idle

    @property
    def idle_ideal(self) -> float | None:
        return self.timeline.idle_ideal


class Pipeline:
    """A model cut into stages, each on its worker, trained in micro-batches.

    schedule: "sequential", "gpipe", "1f1b", "interleaved", "bfs", "zb1p", "zbv", "dualpipev" or a function (workers,
    microbatches, chunks) -> ops. "async" is an experiment, which trains to other weights: each stage steps its
    optimizer after each micro-batch, as if that were a batch of its own, and a step that fails has changed some.
    chunks: stages for each worker; by default as many as the schedule is made for.
    loss_fn(output, target) where the last stage is gives a scalar; loss_reduction says whether it is the "mean" or the
    "sum" over samples, so that micro-batches add up to the gradient of the whole batch. optimizer: class and arguments;
    None to only compute gradients. recompute: "none", "all", "except_last" (micro-batch), or a function (stage,
    microbatch) -> bool: which activations are computed anew for the backward, not kept. Random numbers of a forward, as
    for dropout, depend on step, stage, micro-batch and `torch.manual_seed` here, before the pipeline is made.
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
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        self._agent: Agent = current.current()
        make_ops = named(schedule) if isinstance(schedule, str) else schedule
        self._names = {self._agent.member(worker).id: worker for worker in stages.workers}
        self._ids = list(self._names)
        ops = make_ops(len(self._ids), microbatches, **({} if chunks is None else {"chunks": chunks}))
        self.ops: Ops = with_recompute(ops, recompute, microbatches)
        self._seeds = StepSeeds(int(torch.randint(2**62, ())))
        stage_count = 1 + max((op.stage for own in self.ops for op in own), default=-1)
        validate(self.ops, stage_count, microbatches)
        self._ideal = simulate(self.ops).idle
        microbatch.weights([1], loss_reduction)
        self.microbatches, self._reduction, self._trains = microbatches, loss_reduction, loss_fn is not None
        if len(self.ops) != len(self._ids):
            raise PipelineError(f"the schedule has lists for {len(self.ops)} workers, the split names {len(self._ids)}")
        homes = placement(self.ops)
        self._inputs = stages.inputs
        self.stages: list[Stage] = stages.cut([homes[stage] for stage in range(stage_count)])
        self.crew = Crew(self._agent, self.stages, loss_fn, optimizer)
        if any(op.kind is Kind.UPDATE for own in self.ops for op in own):
            self.crew.update_within_steps()
        name = f"{optimizer[0].__module__}.{optimizer[0].__qualname__}" if optimizer else ""
        self._checkpoints = Checkpoints(self._seeds, name, checkpoint, checkpoint_every)
        self.crew.on_applied = self._checkpoints.applied

    # -- training
    def step(self, x: Any, y: Any) -> StepResult:
        """Forward, backward and one optimizer step on a batch.

        x, y: tensors (or tuples, dicts of them) with samples along dimension 0. The error of a worker's operation is
        raised as it was, or StageLostError where a worker died, which says what it was at and which optimizer step each
        stage holds. No parameter has changed, unless that was in the last phase, where all have their gradients.
        """
        with self.batch(x, y) as batch:
            batch.apply()
        return batch.result

    @contextlib.contextmanager
    def batch(self, x: Any, y: Any) -> Iterator[Batch]:
        """Forward and backward; gradients are there inside the block, and parameters change only by `batch.apply()`."""
        if not self._trains:
            raise PipelineError("this pipeline has no loss_fn, so it cannot train; give Pipeline one")
        inputs = microbatch.cut(x, self.microbatches)
        targets = microbatch.cut(y, self.microbatches)
        sizes = [microbatch.samples(part) for part in inputs]
        if sizes != [microbatch.samples(part) for part in targets]:
            raise PipelineError(f"the batch has {sum(sizes)} samples, but its targets {microbatch.samples(y)}")
        weights = microbatch.weights(sizes, self._reduction)
        recorder = autograd.recorder(self._agent)
        context = recorder.new_context()
        try:
            with recorder.inside(context):
                step, reports = self._run(self.ops, inputs, targets, weights, True, self._ideal)
            losses = {number: loss for report in reports for number, loss in report.losses.items()}
            rows = tuple(row for report in reports for row in report.rows)
            yield Batch(self, context, StepResult(step, sum(losses[i] for i in sorted(losses)), rows, self._names))
        finally:
            recorder.release(context)

    def predict(self, x: Any) -> Any:
        """Outputs of the last stage for a batch, in evaluation mode, in the order of the samples."""
        inputs = microbatch.cut(x, min(self.microbatches, microbatch.samples(x)))
        ops = [[op for op in own if op.kind is Kind.FORWARD and op.microbatch < len(inputs)] for own in self.ops]
        _, reports = self._run(ops, inputs, None, [], False, None)
        outputs = {number: output for report in reports for number, output in report.outputs.items()}
        return microbatch.join([outputs[number] for number in sorted(outputs)])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, under the names of the un-split model."""
        return self.crew.state()

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
        which all workers must reach under this path, as soon as it is whole. StageLostError, PipelineError, OSError.
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

    # -- inside
    def _run(
        self,
        ops: Ops,
        inputs: list[Any],
        targets: list[Any] | None,
        weights: list[float],
        train: bool,
        ideal: float | None,
    ) -> tuple[int, list[Report]]:
        step, seed = next(_STEPS), self._seeds.draw()
        last = self.crew.homes[len(self.stages) - 1]
        batches = [model_inputs(part, self._inputs) for part in inputs]
        tasks = {
            id_: Task(
                step,
                tuple(own),
                self.crew.inputs(id_, batches),
                targets if id_ == last else None,
                weights,
                train,
                self._ids,
                ideal,
                seed,
            )
            for id_, own in zip(self._ids, ops, strict=True)
        }
        return step, self.crew.run(step, tasks)

    def __repr__(self) -> str:
        where = ", ".join(f"{stage.index} on {stage.worker}" for stage in self.stages)
        return f"<Pipeline of {len(self.stages)} stages ({where}), {self.microbatches} micro-batches>"


class Batch:
    """A batch whose gradients are in its context, on the workers."""

    def __init__(self, pipe: Pipeline, context: int, result: StepResult) -> None:
        self._pipe = pipe
        self.context = context
        self.result = result

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of all parameters that have one, under the names of the un-split model."""
        return self._pipe.crew.gradients(self.context)

    def apply(self) -> None:
        """One step of every stage's optimizer. PipelineError where the pipeline has none."""
        if not self._pipe.crew.optimizers:
            raise PipelineError("this pipeline has no optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")
        self._pipe.crew.apply(self.context)

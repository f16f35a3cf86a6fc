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
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rpcbench import autograd
from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.ops import Kind, Ops, Schedule
from rpcbench.pipeline.recompute import Recompute, with_recompute
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.simulate import placement, simulate, validate
from rpcbench.pipeline.split import Stage, Stages
from rpcbench.pipeline.stage import LossFn, Report, StageWorker, Task
from rpcbench.pipeline.timeline import Timeline
from rpcbench.rpc import RRef
from rpcbench.words.errors import PipelineError, WorkerLostError
from rpcbench.words.events import Row
from rpcbench.words.futures import Future, settle_all, wait_all

OptimizerSpec = tuple[type[torch.optim.Optimizer], dict[str, Any]]
_NUMBERS = itertools.count()
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
    microbatches, chunks) -> ops. chunks: stages for each worker; by default as many as the schedule is made for.
    loss_fn(output, target) where the last stage is gives a scalar; loss_reduction says whether it is the "mean" or the
    "sum" over samples, so that micro-batches add up to the gradient of the whole batch. optimizer: class and arguments;
    None to only compute gradients. recompute: "none", "all", "except_last" (micro-batch), or a function (stage,
    microbatch) -> bool: which activations are computed anew for the backward, not kept. Random numbers of a forward, as
    for dropout, depend on step, stage, micro-batch and `torch.manual_seed` here, before the pipeline is made.
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
    ) -> None:
        self._agent: Agent = current.current()
        make_ops = named(schedule) if isinstance(schedule, str) else schedule
        self._names = {self._agent.member(worker).id: worker for worker in stages.workers}
        self._ids = list(self._names)
        ops = make_ops(len(self._ids), microbatches, **({} if chunks is None else {"chunks": chunks}))
        self.ops: Ops = with_recompute(ops, recompute, microbatches)
        self._seeds = random.Random(int(torch.randint(2**62, ())))
        stage_count = 1 + max((op.stage for own in self.ops for op in own), default=-1)
        validate(self.ops, stage_count, microbatches)
        self._ideal = simulate(self.ops).idle
        microbatch.weights([1], loss_reduction)
        self.microbatches, self._reduction, self._trains = microbatches, loss_reduction, loss_fn is not None
        if len(self.ops) != len(self._ids):
            raise PipelineError(f"the schedule has lists for {len(self.ops)} workers, the split names {len(self._ids)}")
        homes = placement(self.ops)
        self.stages: list[Stage] = stages.cut([homes[stage] for stage in range(stage_count)])
        self._homes = {stage.index: self._agent.member(stage.worker).id for stage in self.stages}
        self._build(loss_fn, optimizer)

    def _build(self, loss_fn: LossFn | None, optimizer: OptimizerSpec | None) -> None:
        """Modules, optimizers and loops of the workers: RRefs, held here."""
        create = self._agent.create
        key = f"{self._agent.id}.{next(_NUMBERS)}"
        self.modules: dict[int, Any] = {s.index: create(s.worker, _here, (s.module,), timeout=0) for s in self.stages}
        self.workers: dict[int, Any] = {}
        for id_ in self._ids:
            modules = {s: rref for s, rref in self.modules.items() if self._homes[s] == id_}
            self.workers[id_] = create(id_, StageWorker, (key, modules, self._homes, loss_fn), timeout=0)
        self.optimizers: dict[int, Any] = {}
        if optimizer is not None:
            for stage, module in self.modules.items():
                self.optimizers[stage] = create(self._homes[stage], _make_optimizer, (module, *optimizer), timeout=0)
        made = [*self.workers.values(), *self.optimizers.values()]
        wait_all([self._agent.call(rref._owner, _made, (rref,), timeout=0) for rref in made])

    # -- training
    def step(self, x: Any, y: Any) -> StepResult:
        """Forward, backward and one optimizer step on a batch.

        x, y: tensors (or tuples, dicts of them) with samples along dimension 0. The error of a worker's operation is
        raised as it was; WorkerLostError where a worker died; either way no parameter has changed.
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
        return self._gather(_state)

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
        step, seed = next(_STEPS), self._seeds.getrandbits(62)
        last = len(self.stages) - 1
        running: dict[int, Future[Any]] = {}
        for id_, own in zip(self._ids, ops, strict=True):
            first_here, last_here = self._homes[0] == id_, self._homes[last] == id_
            task = Task(
                step,
                tuple(own),
                inputs if first_here else None,
                targets if last_here else None,
                weights,
                train,
                self._ids,
                ideal,
                seed,
            )
            running[id_] = self.workers[id_].rpc_async(timeout=0).run(task)
        try:
            return step, wait_all(running.values())  # the first failure at once, whichever worker it comes from
        except BaseException as error:
            self._abort(step, f"{type(error).__name__}: {error}", running)
            raise

    def _abort(self, step: int, reason: str, running: dict[int, Future[Any]]) -> None:
        """Wake the workers that still wait for each other; none of them is waited for, so the error is told at once."""
        for id_, future in running.items():
            if not future.done():
                with contextlib.suppress(WorkerLostError):
                    self.workers[id_].rpc_async().abort(step, reason)

    def _apply(self, context: int) -> None:
        owners = [(self._homes[stage], rref) for stage, rref in self.optimizers.items()]
        grouped = {id_: [rref for owner, rref in owners if owner == id_] for id_ in self._ids}
        settle_all([self._agent.call(i, _apply, (rrefs, context), timeout=0) for i, rrefs in grouped.items() if rrefs])

    def _gather(self, function: Callable[..., dict[str, torch.Tensor]], *args: Any) -> dict[str, torch.Tensor]:
        """Named tensors of all stages, renamed as in the un-split model."""
        calls = {
            stage.index: self._agent.call(stage.worker, function, (self.modules[stage.index], *args), timeout=0)
            for stage in self.stages
        }
        return {stage.key(own): t for stage in self.stages for own, t in calls[stage.index].wait().items()}

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
        return self._pipe._gather(_gradients, self.context)

    def apply(self) -> None:
        """One step of every stage's optimizer. PipelineError where the pipeline has none."""
        if not self._pipe.optimizers:
            raise PipelineError("this pipeline has no optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")
        self._pipe._apply(self.context)


# -- what runs on the workers
def _here(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _make_optimizer(
    module: RRef[Any], optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> LocalOptimizer | None:
    params = [p for p in module.local_value().parameters() if p.requires_grad]
    return LocalOptimizer(optimizer_class, params, **kwargs) if params else None


def _made(rref: RRef[Any]) -> None:
    rref.local_value()


def _apply(optimizers: list[RRef[Any]], context: int) -> None:
    for rref in optimizers:
        optimizer = rref.local_value()
        if optimizer is not None:
            optimizer.step(context)


def _state(module: RRef[Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in module.local_value().state_dict().items()}


def _gradients(module: RRef[Any], context: int) -> dict[str, torch.Tensor]:
    held = autograd.recorder().gradients(context)
    return {name: held[param] for name, param in module.local_value().named_parameters() if param in held}

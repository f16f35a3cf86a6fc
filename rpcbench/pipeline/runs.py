"""Batches sent through the stages of a pipeline: cut to fit their schedule, run, and what came of it put together.

A run is one call to each worker. It changes no parameter; a run that trains leaves gradients in the autograd context
that it is made in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcbench.base.errors import PipelineError, counted
from rpcbench.base.events import Row
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.chance import StepSeeds
from rpcbench.pipeline.credits import window
from rpcbench.pipeline.crew import Crew
from rpcbench.pipeline.oplog import Stamps
from rpcbench.pipeline.ops import ops_in
from rpcbench.pipeline.orders import OrderBook, Orders
from rpcbench.pipeline.ports import model_inputs
from rpcbench.pipeline.tasks import Metric, Report, Task
from rpcbench.pipeline.timeline import Timeline

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


class Runs:
    """The runs of one pipeline. `names`: worker id → name, in the order of the lists of operations.

    `inputs`: the names of the model's inputs, as `split` was told them.
    """

    def __init__(
        self,
        crew: Crew,
        book: OrderBook,
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

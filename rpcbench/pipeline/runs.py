"""Batches sent through the stages of a pipeline: cut to fit their schedule, run, and what came of it put together.

A run is one call to each worker. It changes no parameter; a run that trains leaves gradients in the autograd context
that it is made in.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcbench.pipeline import microbatch
from rpcbench.pipeline.chance import StepSeeds
from rpcbench.pipeline.credits import window
from rpcbench.pipeline.crew import Crew
from rpcbench.pipeline.orders import OrderBook, Orders
from rpcbench.pipeline.ports import model_inputs
from rpcbench.pipeline.tasks import Metric, Report, Task
from rpcbench.pipeline.timeline import Timeline
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
    samples: int

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
        self._seeds = seeds
        self._windows: dict[tuple[int, bool], int] = {}  # by micro-batches, and whether it trains

    def train(self, x: Any, y: Any, whole: int | None = None) -> StepResult:
        """Forward and backward of a batch, as its share of `whole` samples, by default all there are."""
        if not self.has_loss:
            raise PipelineError("this pipeline has no loss_fn, so it cannot train; give Pipeline one")
        inputs, targets, orders = self._cut(x, y)
        sizes = [microbatch.samples(part) for part in inputs]
        samples = sum(sizes)
        weights = microbatch.weights(sizes, self.reduction, whole)
        step, reports = self._run(orders, inputs, targets, weights)
        losses = {number: loss for report in reports for number, loss in report.losses.items()}
        loss = sum(losses[i] for i in sorted(losses))
        if self.reduction == "mean" and whole is not None:
            loss *= whole / samples
        rows = tuple(row for report in reports for row in report.rows)
        return StepResult(step, loss, rows, self._names, samples)

    def outputs(self, x: Any) -> Any:
        """Outputs of the last stage for a batch, in evaluation mode, in the order of the samples."""
        orders = self._book.fitting(microbatch.samples(x)).forwards()
        return microbatch.join(self._forwards(orders, microbatch.cut(x, orders.microbatches)))

    def scores(self, x: Any, y: Any, metrics: Mapping[str, Metric]) -> list[tuple[int, dict[str, float]]]:
        """Of each micro-batch its samples, and what loss and metrics say of it, in evaluation mode."""
        inputs, targets, orders = self._cut(x, y)
        found = self._forwards(orders.forwards(), inputs, targets, metrics)
        return [(microbatch.samples(part), each) for part, each in zip(inputs, found, strict=True)]

    # -- inside
    def _cut(self, x: Any, y: Any) -> tuple[list[Any], list[Any], Orders]:
        samples, others = microbatch.samples(x), microbatch.samples(y)
        if samples != others:
            raise PipelineError(f"the batch has {samples} samples, but its targets {others}")
        orders = self._book.fitting(samples)
        return microbatch.cut(x, orders.microbatches), microbatch.cut(y, orders.microbatches), orders

    def _forwards(
        self,
        orders: Orders,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> list[Any]:
        """What each micro-batch gives, in order."""
        _, reports = self._run(orders, inputs, targets, [], train=False, metrics=metrics)
        outputs = {number: output for report in reports for number, output in report.outputs.items()}
        return [outputs[number] for number in sorted(outputs)]

    def _run(
        self,
        orders: Orders,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None,
        weights: Sequence[float],
        train: bool = True,
        metrics: Mapping[str, Metric] | None = None,
    ) -> tuple[int, list[Report]]:
        step, seed, ids = next(_STEPS), self._seeds.draw(), list(self._names)
        batches = [model_inputs(part, self._inputs) for part in inputs]
        ahead = self._window(orders, train)
        tasks = {
            id_: Task(
                step=step,
                ops=tuple(orders.ops[place]),
                inputs=self.crew.inputs(id_, {number: batches[number] for number in orders.numbers(place)}),
                targets=orders.judged(place, targets),
                weights=weights,
                train=train,
                workers=ids,
                ideal=orders.ideal,
                seed=seed,
                metrics=metrics if orders.has_last(place) else None,
                window=ahead,
            )
            for place, id_ in enumerate(ids)
        }
        return step, self.crew.run(step, tasks)

    def _window(self, orders: Orders, train: bool) -> int:
        """How many micro-batches a stage may be ahead of another; 0: of as many as it has."""
        key = orders.microbatches, train
        if key not in self._windows:
            ways = [(stage.index, way.stage) for stage in self.crew.row for way in stage.ports.gives]
            ahead = window(orders.ops, ways)
            self._windows[key] = ahead if len(orders.numbers(0)) > ahead else 0
        return self._windows[key]

"""Training over the batches of a loader: the loop around `Pipeline.step`, with learning rates, validation and progress.

Guarantees
- Every batch is one step, the same as `step` makes. The loss of an epoch is over all its samples, for any sizes of
  batches.
- Ctrl-C ends the loop, and the results so far are returned. A step that it interrupts changes nothing, and one whose
  gradients are being applied is completed and counted. `EndFit` in a callback ends the loop, too.
- A loader is any iterable that is not a batch: a `DataLoader`, a generator, a list of pairs. A tensor, tuple, dict or
  other list is a batch. A score is a mean over samples, for any sizes of batches and micro-batches; a loss that is a
  sum stays a sum.
- Each stage's optimizer has a learning-rate scheduler on its worker. All of them take the same steps, so all stages
  have one learning rate. When a call that changes it returns, it is changed on all workers.
- The progress bar is tqdm's: a widget in a notebook, a line on stderr in a script. A hidden one costs nothing. A `fit`
  is a job (`runtime.jobs`) with a bar or without.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.batch import Batch, BatchRunner, StepResult
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.tasks import Metric
from rpcbench.runtime.jobs import DONE, INTERRUPTED, STOPPED, JobCounts, count_items, end_state, make_bar

BeginJob = Callable[[int | None, str], JobCounts]
"""(number of steps or None, name of one) -> the job of a `fit`."""

EVERY = 0.1
"""Seconds between two updates of the bar's text: idle shares are computed for these only."""


class Progress:
    """One bar for all epochs over a loader; `with` shows and closes it."""

    def __init__(self, loader: Iterable[Any], epochs: int, shown: bool, begin_job: BeginJob) -> None:
        self._epochs, self._shown = epochs, shown
        steps = count_items(loader)
        self._total = None if steps is None else steps * epochs
        self._begin_job = begin_job
        self._job: JobCounts | None = None
        self._bar: Any = None
        self._epoch, self._loss = 0, math.nan
        self._steps = self._number = 0  # steps of this run; the number of the last one among those of all pipelines
        self._runs = False  # a step that is not counted yet
        self.ended = DONE
        self._samples = 0  # of all steps, for samples per second
        self._began = self._looked = 0.0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._job = self._begin_job(self._total, "step")
        self._job.describe = self._describe
        if self._shown:
            self._bar = make_bar(self._total, "step")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._job is not None:
            self._job.end(*((self.ended, "") if error is None else end_state(error)))

    def _describe(self) -> str:
        loss = "" if math.isnan(self._loss) else f", loss {self._loss:.4g}"
        among = f", step {self._number:,} of all pipelines" if self._number != self._steps else ""
        return f"epoch {self._epoch + 1} of {self._epochs}{loss}{among}"

    def show_epoch(self, number: int) -> None:
        self._epoch = number
        if self._bar is not None:
            self._bar.set_description(f"epoch {number + 1}/{self._epochs}")

    def begin_step(self) -> None:
        self._runs = True
        if self._job is not None:
            self._job.begin_item()

    def fail_step(self) -> None:
        """Count a step that has failed, unless it has changed the model: then it is counted already."""
        if self._job is not None and self._runs:
            self._job.end_item(failed=True)

    def show_step(self, result: StepResult) -> None:
        """Count a step, and show its loss, idle share and the samples per second."""
        self._runs = False
        self._samples += result.samples
        self._loss = result.loss
        self._steps, self._number = self._steps + 1, result.step
        if self._job is not None:
            self._job.end_item()
        if self._bar is None:
            return
        now = time.monotonic()
        last = self._bar.total is not None and self._bar.n + 1 == self._bar.total
        # The text of the last step stays on the screen, so it must be up to date.
        if last or now - self._looked >= EVERY:
            self._looked = now
            rate = self._samples / max(now - self._began, 1e-9)
            shown = {"loss": f"{result.loss:.4g}", "idle": f"{result.idle:.0%}", "samples/s": f"{rate:.0f}"}
            self._bar.set_postfix(shown, refresh=False)  # `update` refreshes it, at tqdm's own rate
        self._bar.update()


SchedulerSpec = tuple[Any, dict[str, Any]]
"""A class of torch.optim.lr_scheduler and its arguments, without the optimizer."""


class Schedulers:
    """The learning-rate schedulers of all stages. PipelineError if there are no optimizers."""

    def __init__(self, worker_group: WorkerGroup, spec: SchedulerSpec) -> None:
        if not worker_group.optimizers:
            raise PipelineError("lr_scheduler needs an optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")
        self._worker_group = worker_group
        self.on_moved: Callable[[], object] = lambda: None  # called after each step; a checkpoint may be due
        scheduler, kwargs = spec
        self.needs_value = needs_value(scheduler)
        worker_group.call_on_workers(_on_optimizers, "schedule", scheduler, (), kwargs)

    def step(self, *args: Any) -> None:
        """Step all schedulers, after the optimizers, once an epoch or a batch; `args` as for the scheduler's `step`."""
        self._worker_group.call_on_workers(_on_optimizers, "advance", args)
        self.on_moved()


def needs_value(scheduler: Any) -> bool:
    """Return whether the scheduler steps by a measured value, as ReduceLROnPlateau."""
    # Its `step` has a parameter without a default then.
    _self, *others = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind in positional for each in others)


def learning_rate(worker_group: WorkerGroup) -> float:
    """Return the learning rate, read from the workers. PipelineError where nothing is optimized."""
    rates = [each for found in worker_group.call_on_workers(_on_optimizers, "rates") for each in found]
    if not rates:
        raise PipelineError("this pipeline has no learning rate: it has no optimizer, or all its stages are frozen")
    return float(rates[0][0])  # the same for all stages


def _on_optimizers(worker: StageWorker, method: str, *args: Any) -> list[Any]:
    """Call a method of a worker's optimizers; a stage without trainable parameters has none."""
    return [getattr(optimizer, method)(*args) for optimizer in worker.optimizers.values() if optimizer is not None]


_EMPTY = "the loader gives no batch; an exhausted one, as a generator, must be created again"


def is_batch(data: Any) -> bool:
    """Return whether this is one batch, not a loader. A list of pairs, also an empty one, is a loader."""
    pairs = isinstance(data, list) and all(isinstance(item, tuple | list) and len(item) == 2 for item in data)
    return isinstance(data, torch.Tensor | tuple | list | dict) and not pairs


def iterate_pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and targets of each batch of a loader. PipelineError if it yields anything else, or nothing."""
    number = -1
    for number, item in enumerate(loader):
        if not isinstance(item, tuple | list) or len(item) != 2:
            found = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
            raise PipelineError(f"batch {number} of the loader is {found}, not a pair of inputs and targets")
        yield item[0], item[1]
    if number < 0:
        raise PipelineError(_EMPTY)


def predict_outputs(runs: BatchRunner, data: Any) -> Any:
    """Return the outputs for a batch or a loader. Targets, the second items of a loader's pairs, are ignored."""
    if is_batch(data):
        return runs.compute_outputs(data)
    outputs = [runs.compute_outputs(item[0] if isinstance(item, tuple | list) else item) for item in data]
    if not outputs:
        raise PipelineError(_EMPTY)
    return microbatch.join_microbatches(outputs)


def evaluate_metrics(runs: BatchRunner, data: Any, targets: Any, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return loss and metrics of a batch with its targets, or of all pairs of a loader."""
    if targets is None and is_batch(data):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader of such pairs")
    if targets is not None and not isinstance(data, torch.Tensor | tuple | list | dict):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader, which has both")
    if "loss" in metrics or not (metrics or runs.has_loss):
        raise PipelineError("evaluate needs a loss_fn of the pipeline or metrics, and no metric can be called 'loss'")
    totals: dict[str, float] = {}
    samples = 0
    for x, y in iterate_pairs(data) if targets is None else [(data, targets)]:
        for size, scores in runs.compute_scores(x, y, metrics):
            samples += size
            for name, score in scores.items():
                totals[name] = totals.get(name, 0.0) + score * (1 if _is_sum(name, runs) else size)
    return {name: total if _is_sum(name, runs) else total / samples for name, total in totals.items()}


def _is_sum(name: str, runs: BatchRunner) -> bool:
    """Return whether a score is a sum over samples instead of a mean."""
    return name == "loss" and runs.reduction == "sum"


class EndFit(Exception):
    """Raised by a callback of `fit` to end it: `fit` then returns its history."""


@dataclass(slots=True)
class History:
    """The results of a `fit`."""

    losses: list[float] = field(default_factory=list)  # of each step
    epochs: list[float] = field(default_factory=list)  # losses of each completed epoch, over all its samples
    validation: list[dict[str, float]] = field(default_factory=list)  # after each epoch, if there is a validation
    interrupted: bool = False  # by Ctrl-C
    ended_early: bool = False  # by a callback

    def __repr__(self) -> str:
        """Return a line short enough for the end of a cell, after any number of steps."""
        last = f", loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else ""
        scores = "".join(f", {name} {score:.4g}" for name, score in (self.validation or [{}])[-1].items())
        validated = f"; validation{scores.replace(',', '', 1)}" if scores else ""
        ended = ", interrupted" if self.interrupted else ", ended early" if self.ended_early else ""
        steps, epochs = count_noun(len(self.losses), "step"), count_noun(len(self.epochs), "epoch")
        return f"<History of {steps}, {epochs}{last}{validated}{ended}>"


@dataclass(frozen=True, slots=True)
class Fit:
    """One call of `Pipeline.fit`, which documents the arguments. `accumulate` and `evaluate`: methods of the pipeline;
    `sums`: losses are sums, not means, over samples."""

    accumulate: Callable[[], AbstractContextManager[Batch]]
    evaluate: Callable[..., dict[str, float]]
    sums: bool
    begin_job: BeginJob
    loader: Iterable[Any]
    epochs: int
    progress: bool
    on_step: Callable[[StepResult], object] | None
    on_epoch: Callable[[History], object] | None
    clip: float | None
    rates: Schedulers | None
    lr_step: str
    validate: Iterable[Any] | None
    metrics: Mapping[str, Metric] | None
    history: History = field(default_factory=History)

    def run_epochs(self) -> History:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise PipelineError(f"epochs must be a whole number of at least 1, not {self.epochs!r}")
        if self.epochs > 1 and iter(self.loader) is self.loader:  # an iterator is its own iter()
            raise PipelineError(f"the loader can be iterated only once, not {self.epochs} times: give a DataLoader")
        if self.lr_step not in ("epoch", "step"):
            raise PipelineError(f"lr_step must be 'epoch' or 'step', not {self.lr_step!r}")
        if self.metrics and self.validate is None:
            raise PipelineError("metrics are computed in a validation: give fit validate=, a loader of pairs, too")
        with Progress(self.loader, self.epochs, self.progress, self.begin_job) as progress:
            try:
                for epoch in range(self.epochs):
                    self._run_epoch(epoch, progress)
            except KeyboardInterrupt:
                self.history.interrupted, progress.ended = True, INTERRUPTED
            except EndFit:
                self.history.ended_early, progress.ended = True, STOPPED
        return self.history

    def _run_epoch(self, epoch: int, progress: Progress) -> None:
        progress.show_epoch(epoch)
        total, samples = 0.0, 0
        for x, y in iterate_pairs(self.loader):
            progress.begin_step()
            try:
                result = self._train_batch(x, y, progress)
            except Exception:
                progress.fail_step()
                raise
            total += result.loss * (1 if self.sums else result.samples)
            samples += result.samples
            self._step_schedulers("step", result.loss)
            if self.on_step is not None:
                self.on_step(result)
        self.history.epochs.append(total if self.sums else total / samples)
        judged = self.rates is not None and self.rates.needs_value
        if not judged:  # before a validation, which Ctrl-C may end: the epoch counts
            self._step_schedulers("epoch")
        if self.validate is not None:
            self.history.validation.append(self.evaluate(self.validate, metrics=self.metrics))
        if judged:
            # Without a validation loss, the scheduler gets the epoch's own loss.
            validated = self.history.validation[-1] if self.validate is not None else {}
            self._step_schedulers("epoch", validated.get("loss", self.history.epochs[-1]))
        if self.on_epoch is not None:
            self.on_epoch(self.history)

    def _step_schedulers(self, ended: str, value: float | None = None) -> None:
        if self.rates is not None and self.lr_step == ended:
            self.rates.step(*([value] if self.rates.needs_value else []))

    def _train_batch(self, x: Any, y: Any, progress: Progress) -> StepResult:
        with self.accumulate() as batch:
            try:
                if self.clip is None:
                    batch.step(x, y)
                else:
                    batch.add(x, y)
                    batch.clip(self.clip)
                    batch.apply(last=True)
            finally:
                if batch.applied:  # also if Ctrl-C has come since: the step counts
                    self.history.losses.append(batch.result.loss)
                    progress.show_step(batch.result)
        return batch.result

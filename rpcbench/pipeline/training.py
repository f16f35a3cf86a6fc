"""Training over the batches of a loader: the loop that is otherwise written around `step`.

Guarantees
- Every batch is one step, the same as `step` makes; losses of epochs are those of all samples, whatever their batches.
- Ctrl-C ends the loop, and what has been done until then is returned; a step that it finds halfway
  changes nothing, and one whose gradients are being applied is done whole and counted. So does `EndFit` of a callback.
- A loader is what is iterated and is no batch: a `DataLoader`, a generator, a list of pairs. A tensor, tuple, dict or
  other list is a batch. A score is a mean over samples, whatever the sizes of batches and micro-batches; a loss that is
  a sum stays a sum.
- A learning-rate scheduler stands beside each stage's optimizer, on its worker. All of them take the same steps, so all
  stages have one learning rate; what a call changes is changed on all workers when it returns.
- The progress bar is tqdm's: a widget in a notebook, a line on stderr in a script. A hidden one costs nothing.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import length_hint
from types import TracebackType
from typing import Any, Protocol

import torch

from rpcbench.base.errors import PipelineError, counted
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.batch import Batch, BatchRunner, StepResult
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.tasks import Metric

EVERY = 0.1
"""Seconds between two looks: idle shares are computed for these only."""


class Progress:
    """One bar for all epochs over a loader; `with` shows and closes it."""

    def __init__(self, loader: Iterable[Any], epochs: int, shown: bool) -> None:
        self._loader, self._epochs, self._shown = loader, epochs, shown
        self._bar: Any = None
        self._samples = 0
        self._began = self._looked = 0.0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._shown:
            from tqdm.auto import tqdm  # here: it asks whether this is a notebook when it is first loaded

            steps = length_hint(self._loader) * self._epochs  # 0: not known
            self._bar = tqdm(total=steps or None, unit="step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def epoch(self, number: int) -> None:
        """An epoch begins, counted from 0."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {number + 1}/{self._epochs}")

    def step(self, result: StepResult) -> None:
        """A step is done."""
        self._samples += result.samples
        if self._bar is None:
            return
        now = time.monotonic()
        last = self._bar.total is not None and self._bar.n + 1 == self._bar.total
        if last or now - self._looked >= EVERY:
            self._looked = now
            rate = self._samples / max(now - self._began, 1e-9)
            shown = {"loss": f"{result.loss:.4g}", "idle": f"{result.idle:.0%}", "samples/s": f"{rate:.0f}"}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()


SchedulerSpec = tuple[Any, dict[str, Any]]
"""A class of torch.optim.lr_scheduler and its arguments, without the optimizer."""


class Schedulers:
    """The schedulers of all stages. PipelineError where there are no optimizers to schedule."""

    def __init__(self, crew: WorkerGroup, spec: SchedulerSpec) -> None:
        if not crew.optimizers:
            raise PipelineError("lr_scheduler needs an optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")
        self._crew = crew
        self.on_moved: Callable[[], object] = lambda: None
        scheduler, kwargs = spec
        self.needs_value = needs_value(scheduler)
        crew.on_workers(_schedule, scheduler, kwargs)

    def step(self, *args: Any) -> None:
        """After the optimizer's step, once an epoch or a batch, as the scheduler is meant; `args` as its own `step`."""
        self._crew.on_workers(_advance, args)
        self.on_moved()


def needs_value(scheduler: Any) -> bool:
    """Whether it can only step with something that was measured, as ReduceLROnPlateau."""
    _self, *others = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind in positional for each in others)


def rate(crew: WorkerGroup) -> float:
    """The learning rate, asked of the workers. PipelineError where nothing is optimized."""
    rates = [each for found in crew.on_workers(_rates) for each in found]
    if not rates:
        raise PipelineError("this pipeline has no learning rate: it has no optimizer, or all its stages are frozen")
    return rates[0]


# -- on the workers; a stage without parameters to train has no optimizer
def _optimizers(worker: StageWorker) -> list[LocalOptimizer]:
    return [optimizer for optimizer in worker.optimizers.values() if optimizer is not None]


def _schedule(worker: StageWorker, scheduler: Any, kwargs: dict[str, Any]) -> None:
    for optimizer in _optimizers(worker):
        optimizer.schedule(scheduler, (), kwargs)


def _advance(worker: StageWorker, args: tuple[Any, ...]) -> None:
    for optimizer in _optimizers(worker):
        optimizer.advance(args)


def _rates(worker: StageWorker) -> list[float]:
    return [optimizer.rates()[0] for optimizer in _optimizers(worker)]


_EMPTY = "the loader gives no batch; one that is used up, as a generator, must be made anew"


def is_batch(data: Any) -> bool:
    """Whether it is one batch, and no loader."""
    return isinstance(data, torch.Tensor | tuple | list | dict) and not is_list_of_pairs(data)


def is_list_of_pairs(data: Any) -> bool:
    """Whether it is what `list(loader)` gives; so is an empty list."""
    return isinstance(data, list) and all(isinstance(item, tuple | list) and len(item) == 2 for item in data)


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of each batch of a loader. PipelineError where it gives anything else, or nothing."""
    number = -1
    for number, item in enumerate(loader):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise PipelineError(f"batch {number} of the loader is {_kind(item)}, not a pair of inputs and targets")
        yield item[0], item[1]
    if number < 0:
        raise PipelineError(_EMPTY)


def predicted(runs: BatchRunner, data: Any) -> Any:
    """Outputs for a batch or a loader. Where the loader gives pairs, inputs come first, and targets are left out."""
    if is_batch(data):
        return runs.outputs(data)
    outputs = [runs.outputs(item[0] if isinstance(item, tuple | list) else item) for item in data]
    if not outputs:
        raise PipelineError(_EMPTY)
    return microbatch.join(outputs)


def evaluated(runs: BatchRunner, data: Any, targets: Any, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Loss and metrics of a batch with its targets, or of all pairs of a loader."""
    if targets is None and is_batch(data):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader of such pairs")
    if targets is not None and not isinstance(data, torch.Tensor | tuple | list | dict):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader, which has both")
    if "loss" in metrics or not (metrics or runs.has_loss):
        raise PipelineError("evaluate needs a loss_fn of the pipeline or metrics, and no metric can be called 'loss'")
    totals: dict[str, float] = {}
    samples = 0
    for x, y in pairs(data) if targets is None else [(data, targets)]:
        for size, scores in runs.scores(x, y, metrics):
            samples += size
            for name, score in scores.items():
                totals[name] = totals.get(name, 0.0) + score * (1 if _is_sum(name, runs) else size)
    return {name: total if _is_sum(name, runs) else total / samples for name, total in totals.items()}


def _is_sum(name: str, runs: BatchRunner) -> bool:
    return name == "loss" and runs.reduction == "sum"


def _kind(item: Any) -> str:
    return f"a {type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else f"a {type(item).__name__}"


class EndFit(Exception):
    """Raise it in a callback of `fit`, which ends then and returns its history."""


@dataclass(slots=True)
class History:
    """What a `fit` has done. `losses`: of each step; `epochs`: of each epoch that was ended, over all its samples.

    `validation`: scores after each epoch, where there was something to validate on. `interrupted`: Ctrl-C has ended it;
    `ended_early`: a callback has.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False
    ended_early: bool = False

    def __repr__(self) -> str:
        """Short enough for the end of a cell, however many steps there were."""
        last = f", loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else ""
        scores = "".join(f", {name} {score:.4g}" for name, score in (self.validation or [{}])[-1].items())
        validated = f"; validation{scores.replace(',', '', 1)}" if scores else ""
        ended = ", interrupted" if self.interrupted else ", ended early" if self.ended_early else ""
        steps, epochs = counted(len(self.losses), "step"), counted(len(self.epochs), "epoch")
        return f"<History of {steps}, {epochs}{last}{validated}{ended}>"


class Trained(Protocol):
    """What a loop needs of a pipeline."""

    def accumulate(self) -> AbstractContextManager[Batch]: ...

    def evaluate(self, x: Any, y: Any = None, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]: ...


class Rates(Protocol):
    """The learning rates; `needs_value`: they move by a loss."""

    needs_value: bool

    def step(self, *args: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Fit:
    """One call of `Pipeline.fit`, which says what its arguments are. `sums`: losses are sums, not means, of samples."""

    pipe: Trained
    sums: bool
    loader: Iterable[Any]
    epochs: int
    progress: bool
    on_step: Callable[[StepResult], object] | None
    on_epoch: Callable[[History], object] | None
    clip: float | None
    rates: Rates | None
    lr_step: str
    validate: Iterable[Any] | None
    metrics: Mapping[str, Metric] | None
    history: History = field(default_factory=History)

    def run(self) -> History:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise PipelineError(f"epochs must be a whole number of at least 1, not {self.epochs!r}")
        if self.epochs > 1 and iter(self.loader) is self.loader:
            raise PipelineError(f"the loader can be gone through once only, not {self.epochs} times: give a DataLoader")
        if self.lr_step not in ("epoch", "step"):
            raise PipelineError(f"lr_step must be 'epoch' or 'step', not {self.lr_step!r}")
        if self.metrics and self.validate is None:
            raise PipelineError("metrics are of a validation: give fit validate=, a loader of pairs, as well")
        with Progress(self.loader, self.epochs, self.progress) as progress:
            try:
                for epoch in range(self.epochs):
                    self._epoch(epoch, progress)
            except KeyboardInterrupt:
                self.history.interrupted = True
            except EndFit:
                self.history.ended_early = True
        return self.history

    def _epoch(self, epoch: int, progress: Progress) -> None:
        progress.epoch(epoch)
        total, samples = 0.0, 0
        for x, y in pairs(self.loader):
            result = self._step(x, y)
            total += result.loss * (1 if self.sums else result.samples)
            samples += result.samples
            self._move("step", result.loss)
            progress.step(result)
            if self.on_step is not None:
                self.on_step(result)
        self.history.epochs.append(total if self.sums else total / samples)
        judged = self.rates is not None and self.rates.needs_value
        if not judged:  # before a validation, which may be cut short
            self._move("epoch")
        if self.validate is not None:
            self.history.validation.append(self.pipe.evaluate(self.validate, metrics=self.metrics))
        if judged:
            validated = self.history.validation[-1] if self.validate is not None else {}
            self._move("epoch", validated.get("loss", self.history.epochs[-1]))
        if self.on_epoch is not None:
            self.on_epoch(self.history)

    def _move(self, ended: str, value: float | None = None) -> None:
        if self.rates is not None and self.lr_step == ended:
            self.rates.step(*([value] if self.rates.needs_value else []))

    def _step(self, x: Any, y: Any) -> StepResult:
        with self.pipe.accumulate() as batch:
            try:
                if self.clip is None:
                    batch.step(x, y)
                else:
                    batch.add(x, y)
                    batch.clip(self.clip)
                    batch.apply_last()
            finally:
                if batch.applied:  # Ctrl-C may have come meanwhile
                    self.history.losses.append(batch.result.loss)
        return batch.result

"""Training over the batches of a loader: the loop that is otherwise written around `step`.

Guarantees
- Every batch is one step, the same as `step` makes; losses of epochs are those of all samples, whatever their batches.
- Ctrl-C ends the loop, and what has been done until then is returned; a step that it finds halfway
  changes nothing, and one whose gradients are being applied is done whole and counted. So does `EndFit` of a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rpcbench.base.errors import PipelineError, counted
from rpcbench.pipeline.batch import Batch
from rpcbench.pipeline.loaders import pairs
from rpcbench.pipeline.progress import Progress
from rpcbench.pipeline.runs import StepResult
from rpcbench.pipeline.tasks import Metric


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

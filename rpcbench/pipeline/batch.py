"""A step in the open: gradients of one batch, or of several, on the workers; then a look at them, and one apply.

Guarantees
- The gradients are those of all samples added so far, as if they were one batch, however many each `add` brought.
- They are applied once or not at all: after an `add` that failed nothing can be applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import norms
from rpcbench.pipeline.runs import Runs, StepResult
from rpcbench.runtime.interrupts import uninterrupted

_BROKEN = "an add has failed, so these gradients are not whole"
_APPLIED = "these gradients have been applied"


class Batch:
    """Gradients in an autograd context, on the workers. Made by `Pipeline.batch` and `Pipeline.accumulate`."""

    def __init__(self, runs: Runs, recorder: AutogradRecorder, context: int, keeps: bool) -> None:
        self.context = context
        self.results: list[StepResult] = []
        self.samples = 0
        self.applied = False
        self._runs, self._recorder = runs, recorder
        self._keeps = keeps
        self._whole = 0
        self._closed = ""
        self._clipped = False
        self._told: Sequence[int] = ()

    @property
    def result(self) -> StepResult:
        """Of the latest `add`."""
        self._check_added()
        return self.results[-1]

    @property
    def loss(self) -> float:
        """Of all that was added, as if it were one batch."""
        self._check_added()
        if self._runs.reduction == "sum":
            return sum(result.loss for result in self.results)
        return sum(result.loss * result.samples for result in self.results) / self.samples

    def add(self, x: Any, y: Any) -> StepResult:
        """Forward and backward of a batch; its gradients join those that are here.

        x, y: tensors (or tuples, dicts of them) with samples along dimension 0. The error of a worker's operation is
        raised as it was, and nothing of this step can be applied then. PipelineError after `clip` and `apply`.
        """
        self._check_open()
        if self._clipped:
            raise PipelineError("these gradients are clipped already: add all batches first, then clip")
        self._closed = _BROKEN
        with self._recorder.inside(self.context):
            result = self._runs.train(x, y, self._whole or None)
        self._closed = ""
        self._whole = self._whole or result.samples
        self.samples += result.samples
        self.results.append(result)
        return result

    def step(self, x: Any, y: Any) -> StepResult:
        """As `add` and then `apply`, of one batch alone: the workers agree by themselves that all have all gradients.

        Ctrl-C before that changes nothing; after it, it waits until all have stepped.
        """
        self._check_open()
        if self.results:
            raise PipelineError("something was added already: apply that, or begin another batch")
        self._recorder.recorded(self.context)  # raises where it is over, before anything is sent
        self._closed = _BROKEN
        with self._recorder.inside(self.context):
            self._runs.step(x, y, self._keeps, self._stepped)
        return self.result

    def _stepped(self, result: StepResult, over: Sequence[int]) -> None:
        self.results.append(result)
        self._whole = self.samples = result.samples
        self._closed, self._told, self.applied = _APPLIED, over, True

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of all parameters that have one, under the names of the un-split model."""
        self._settle()
        return self._runs.crew.gradients(self.context)

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """The norm of all gradients, over all stages. PipelineError where the schedule has applied them already."""
        self._check_there()
        self._settle()
        return norms.grad_norm(self._runs.crew, self.context, norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients so that their norm, over all stages, is at most `max_norm`; returns the norm before.

        As torch.nn.utils.clip_grad_norm_ over the whole model. It comes after the last `add`.
        """
        self._check_added()
        self._check_there()
        self._settle()
        self._clipped = True
        return norms.clip(self._runs.crew, self.context, max_norm, norm_type)

    def apply(self) -> None:
        """One step of every stage's optimizer. PipelineError where the pipeline has none, and the second time.

        Ctrl-C waits until all have stepped.
        """
        self._apply(last=False)

    def apply_last(self) -> None:
        """As `apply`, where nothing is asked of the batch afterwards: the workers let go of it at once."""
        self._apply(last=True)

    def release(self) -> None:
        """The gradients are wanted no more."""
        self._runs.crew.steps.after_applying(lambda: self._recorder.release(self.context, self._told))

    # -- inside
    def _apply(self, last: bool) -> None:
        self._check_open()
        self._check_added()
        self._runs.crew.check_optimizer()
        self._settle()
        self._recorder.recorded(self.context)  # raises where it is over, before anything is sent
        self._closed = _APPLIED
        with uninterrupted:  # all stages or none; if one hangs, a second Ctrl-C ends it all the same
            self._told = self._runs.crew.steps.apply(self.context, self._keeps, last)
            self.applied = True

    def _settle(self) -> None:
        """Divide by the number of all samples: so far the gradients were divided by that of the first `add`."""
        if self._closed == _BROKEN:
            self._check_open()
        if self._runs.reduction == "mean" and self._whole != self.samples:
            self._runs.crew.scale(self.context, self._whole / self.samples)
            self._whole = self.samples

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineError(f"{self._closed}; leave the block and begin another one")

    def _check_there(self) -> None:
        if self._runs.updates:
            raise PipelineError(
                "this schedule applies gradients within the step, micro-batch by micro-batch: none are left for a norm "
                "or to clip; choose another schedule"
            )

    def _check_added(self) -> None:
        if not self.results:
            raise PipelineError("nothing was added yet: call add(x, y) first")

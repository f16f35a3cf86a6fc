"""Learning rates of a pipeline: a scheduler beside each stage's optimizer, on its worker, advanced together.

Guarantees: all of them take the same steps, so all stages have one learning rate; what a call changes is changed on all
workers when it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rpcbench.base.errors import PipelineError
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.crew import Crew
from rpcbench.pipeline.stage import StageWorker

SchedulerSpec = tuple[Any, dict[str, Any]]
"""A class of torch.optim.lr_scheduler and its arguments, without the optimizer."""


class Schedulers:
    """The schedulers of all stages. PipelineError where there are no optimizers to schedule."""

    def __init__(self, crew: Crew, spec: SchedulerSpec) -> None:
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


def rate(crew: Crew) -> float:
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

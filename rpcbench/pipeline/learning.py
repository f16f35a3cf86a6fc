"""Learning rates of a pipeline: a scheduler beside each stage's optimizer, on its worker, advanced together.

Guarantees: all of them take the same steps, so all stages have one learning rate; what a call changes is changed on all
workers when it returns.
"""

from __future__ import annotations

from typing import Any

from rpcbench.pipeline.crew import Crew
from rpcbench.rpc import RRef
from rpcbench.words.errors import PipelineError

SchedulerSpec = tuple[Any, dict[str, Any]]
"""A class of torch.optim.lr_scheduler and its arguments, without the optimizer."""


class Schedulers:
    """The schedulers of all stages. PipelineError where there are no optimizers to schedule."""

    def __init__(self, crew: Crew, spec: SchedulerSpec) -> None:
        if not crew.optimizers:
            raise PipelineError("lr_scheduler needs an optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")
        self._crew = crew
        scheduler, kwargs = spec
        crew.on_optimizers(_schedule, scheduler, kwargs)

    def step(self, *args: Any) -> None:
        """After the optimizer's step, once an epoch or a batch, as the scheduler is meant; `args` as its own `step`."""
        self._crew.on_optimizers(_advance, args)


def rate(crew: Crew) -> float:
    """The learning rate, asked of the workers. PipelineError where nothing is optimized."""
    rates = [each for found in crew.on_optimizers(_rates) for each in found]
    if not rates:
        raise PipelineError("this pipeline has no learning rate: it has no optimizer, or all its stages are frozen")
    return rates[0]


# -- on the workers; a stage without parameters to train has no optimizer
def _optimizers(rrefs: list[RRef[Any]]) -> list[Any]:
    return [optimizer for rref in rrefs if (optimizer := rref.local_value()) is not None]


def _schedule(rrefs: list[RRef[Any]], scheduler: Any, kwargs: dict[str, Any]) -> None:
    for optimizer in _optimizers(rrefs):
        optimizer.schedule(scheduler, (), kwargs)


def _advance(rrefs: list[RRef[Any]], args: tuple[Any, ...]) -> None:
    for optimizer in _optimizers(rrefs):
        optimizer.advance(args)


def _rates(rrefs: list[RRef[Any]]) -> list[float]:
    return [optimizer.rates()[0] for optimizer in _optimizers(rrefs)]

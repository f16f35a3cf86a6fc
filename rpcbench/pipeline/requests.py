"""What a driver asks of the workers of its pipeline: each function runs there, in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rpcbench.autograd import recorder
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.execution import Execution
from rpcbench.pipeline.parameter_groups import Groups, grouped
from rpcbench.pipeline.record import Doing
from rpcbench.pipeline.stage import StageWorker, here
from rpcbench.pipeline.tasks import Apply, Task
from rpcbench.rpc import RRef

T = TypeVar("T")


# -- when the pipeline is made
def make_optimizer(
    module: RRef[Any],
    name: Callable[[str], str],
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    groups: Groups | None = None,
) -> LocalOptimizer | None:
    """A stage's; None for one without parameters to train. `name`: what the un-split model calls one of them."""
    named = [(name(own), p) for own, p in module.local_value().named_parameters() if p.requires_grad]
    if not named:
        return None
    optimizer = LocalOptimizer(optimizer_class, grouped(groups, named), **kwargs)
    numbers = {parameter: number for number, (_, parameter) in enumerate(named)}
    optimizer.numbers = [numbers[parameter] for parameter in optimizer.params]
    return optimizer


def made(rref: RRef[Any]) -> None:
    """Wait until there is a value; its error."""
    rref.local_value()


def learn(key: str, optimizers: dict[int, RRef[Any]]) -> None:
    """The worker is told of its stages' optimizers."""
    here(key).learn(optimizers)


# -- in a step
def run(key: str, *told: Any) -> tuple[Any, ...]:
    """All operations of this worker in one step; a `Task` and its `Report`, as they travel."""
    worker, task, context = here(key), Task.heard(told), recorder().current()
    with worker.turn:
        report = Execution(worker, task).run()
        if task.applies:
            assert context is not None, "gradients are those of a context"
            report = report._replace(over=_apply(worker, Apply(task.step, context, task.keeps, last=True)))
        return report.told


def stop(key: str, step: int, reason: str) -> bool:
    """A step is not to go on. False where all have agreed on it: then it does."""
    return here(key).slots.abort(step, reason)


def apply(key: str, *told: Any) -> bool:
    """One step of the optimizers here, as an `Apply` says; whether this worker has let go of the context."""
    return _apply(here(key), Apply(*told))


def _apply(worker: StageWorker, what: Apply) -> bool:
    note = worker.record.note
    if what.keeps:
        worker.keep(what.context)
    for stage, optimizer in worker.optimizers.items():
        if optimizer is not None:
            note(what.step, Doing.APPLIES, stage)
            optimizer.step(what.context)
    note(what.step, Doing.APPLIED)
    return what.last and _let_go(worker, what)


def _let_go(worker: StageWorker, what: Apply) -> bool:
    """Unless somebody else has part in the context, who would pass the word on to workers that still apply; or the
    driver is here, whose word all wait for that have failed."""
    known = worker.recorder.known_workers(what.context)
    if worker.recorder.agent.id == worker.driver or not known <= {worker.driver, *worker.workers}:
        return False
    worker.recorder.release(what.context, told=known)
    return True


# -- between steps
def served(key: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """A function of what the worker has of the pipeline."""
    return function(here(key), *args)


def scale(_worker: StageWorker, context: int, factor: float) -> None:
    held = recorder().gradients(context)
    recorder().scale(context, list(held), factor)


def kept(worker: StageWorker) -> dict[int, dict[str, torch.Tensor]]:
    return worker.kept()


def state(module: RRef[Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in module.local_value().state_dict().items()}


def gradients(module: RRef[Any], context: int) -> dict[str, torch.Tensor]:
    held = recorder().gradients(context)
    return {name: held[param] for name, param in module.local_value().named_parameters() if param in held}

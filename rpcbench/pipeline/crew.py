"""The workers of one pipeline, as its driver holds them: modules, loops and optimizers of all stages, by RRefs.

Guarantees
- A step is one call to each worker; the first failure of any is raised at once, and the others are woken.
- What a stage holds comes back under the names of the un-split model.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from rpcbench import autograd
from rpcbench.agent.core import Agent
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.exchange import Inputs
from rpcbench.pipeline.lazy import built
from rpcbench.pipeline.numerics import Numerics
from rpcbench.pipeline.split import Stage
from rpcbench.pipeline.stage import LossFn, Report, StageWorker, Task
from rpcbench.pipeline.ties import ties
from rpcbench.rpc import RRef
from rpcbench.words.errors import PipelineError, WorkerLostError
from rpcbench.words.futures import Future, settle_all, wait_all

OptimizerSpec = tuple[type[torch.optim.Optimizer], dict[str, Any]]
_NUMBERS = itertools.count()
T = TypeVar("T")


class Crew:
    """`homes`: stage → id of its worker; `modules` and `optimizers`: stage → RRef; `workers`: id → RRef of its loop."""

    def __init__(
        self,
        agent: Agent,
        stages: Sequence[Stage],
        loss_fn: LossFn | None,
        optimizer: OptimizerSpec | None,
        numerics: Numerics,
    ) -> None:
        self._agent = agent
        self.stages = stages
        self.homes = {stage.index: agent.member(stage.worker).id for stage in stages}
        key = f"{agent.id}.{next(_NUMBERS)}"
        self.modules = {stage.index: self._create(stage.index, built, stage.module) for stage in stages}
        self.workers: dict[int, Any] = {}
        self.ties = ties(stages)
        for id_ in dict.fromkeys(self.homes.values()):
            modules = {stage: rref for stage, rref in self.modules.items() if self.homes[stage] == id_}
            ports = {stage.index: stage.ports for stage in stages if stage.index in modules}
            made = (key, modules, self.homes, loss_fn, ports, self.ties, numerics)
            self.workers[id_] = agent.create(id_, StageWorker, made, timeout=0)
        self.optimizers: dict[int, Any] = {}
        if optimizer is not None:
            self.optimizers = {s: self._create(s, _make_optimizer, m, *optimizer) for s, m in self.modules.items()}
        rrefs = [*self.workers.values(), *self.optimizers.values()]
        wait_all([agent.call(rref._owner, _made, (rref,), timeout=0) for rref in rrefs])

    def _create(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._agent.create(self.homes[stage], function, args, timeout=0)

    def update_within_steps(self) -> None:
        """The workers are to step the optimizers by themselves, as operations of a schedule."""
        if self.ties or not self.optimizers:
            why = "takes no tied weights" if self.ties else "needs an optimizer"
            raise PipelineError(f"a schedule that updates within a step {why}")
        for id_, worker in self.workers.items():
            own = {stage: rref for stage, rref in self.optimizers.items() if self.homes[stage] == id_}
            worker.rpc_sync(timeout=0).learn(own)

    def inputs(self, id_: int, batches: Sequence[tuple[Any, ...]]) -> Inputs:
        """Of the model's inputs, a micro-batch each, those that this worker's stages take."""
        own = [stage for stage in self.stages if self.homes[stage.index] == id_ and stage.ports.inputs]
        return {s.index: [tuple(batch[place] for place in s.ports.inputs) for batch in batches] for s in own}

    def run(self, step: int, tasks: dict[int, Task]) -> list[Report]:
        """One step: worker id → what it does. The error of a worker's operation as it was; WorkerLostError."""
        running = {id_: self.workers[id_].rpc_async(timeout=0).run(task) for id_, task in tasks.items()}
        try:
            return wait_all(running.values())  # the first failure at once, whichever worker it comes from
        except BaseException as error:
            self._abort(step, f"{type(error).__name__}: {error}", running)
            raise

    def _abort(self, step: int, reason: str, running: dict[int, Future[Any]]) -> None:
        """Wake the workers that still wait for each other; none of them is waited for, so the error is told at once."""
        for id_, future in running.items():
            if not future.done():
                with contextlib.suppress(WorkerLostError):
                    self.workers[id_].rpc_async().abort(step, reason)

    def apply(self, context: int) -> None:
        """One step of every stage's optimizer, with the gradients in this context."""
        self.on_each(self.optimizers, _apply, context)

    def on_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function(loop, *args)` on each worker, with its RRef of the worker's loop."""
        calls = [self._agent.call(id_, function, (rref, *args), timeout=0) for id_, rref in self.workers.items()]
        return settle_all(calls)

    def on_each(self, rrefs: dict[int, Any], function: Callable[..., T], *args: Any) -> list[T]:
        """On each worker `function(what it has of rrefs, *args)`; `rrefs`: by stage, as `modules` or `optimizers`."""
        grouped: dict[int, list[Any]] = {}
        for stage, rref in rrefs.items():
            grouped.setdefault(self.homes[stage], []).append(rref)
        return settle_all([self._agent.call(id_, function, (own, *args), timeout=0) for id_, own in grouped.items()])

    def scale(self, context: int, factor: float) -> None:
        """Multiply all gradients in this context."""
        self.on_workers(_scale, context, factor)

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers."""
        return self._gather(_state)

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Those of all parameters that have one in this context; of a tied one under its first name."""
        return self._without_copies(self._gather(_gradients, context))

    def keep(self, context: int) -> None:
        """Let the workers keep the gradients of this context when it is over, in place of those kept before."""
        self.on_workers(_keep, context)

    def kept(self) -> dict[str, torch.Tensor]:
        """The gradients that were kept last; of a tied one under its first name."""
        own = {stage: gradients for each in self.on_workers(_kept) for stage, gradients in each.items()}
        named = {stage.key(name): gradient for stage in self.stages for name, gradient in own[stage.index].items()}
        return self._without_copies(named)

    def _without_copies(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {self.stages[stage].key(name) for tie in self.ties for stage, name in sorted(tie.items())[1:]}
        return {name: tensor for name, tensor in named.items() if name not in copies}

    def _gather(self, function: Callable[..., dict[str, torch.Tensor]], *args: Any) -> dict[str, torch.Tensor]:
        calls = {
            stage.index: self._agent.call(stage.worker, function, (self.modules[stage.index], *args), timeout=0)
            for stage in self.stages
        }
        return {stage.key(own): t for stage in self.stages for own, t in calls[stage.index].wait().items()}


# -- what runs on the workers
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


def _scale(_worker: RRef[Any], context: int, factor: float) -> None:
    held = autograd.recorder().gradients(context)
    autograd.recorder().scale(context, list(held), factor)


def _keep(worker: RRef[Any], context: int) -> None:
    worker.local_value().keep(context)


def _kept(worker: RRef[Any]) -> dict[int, dict[str, torch.Tensor]]:
    kept: dict[int, dict[str, torch.Tensor]] = worker.local_value().kept()
    return kept


def _state(module: RRef[Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in module.local_value().state_dict().items()}


def _gradients(module: RRef[Any], context: int) -> dict[str, torch.Tensor]:
    held = autograd.recorder().gradients(context)
    return {name: held[param] for name, param in module.local_value().named_parameters() if param in held}

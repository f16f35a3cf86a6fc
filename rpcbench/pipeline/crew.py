"""The workers of one pipeline, as its driver holds them: modules, loops and optimizers of all stages, by RRefs.

Guarantees
- Where a worker is lost, whatever the stages are asked for says so.
- What a stage holds comes back under the names of the un-split model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from rpcbench.base.errors import PipelineError, WorkerLostError
from rpcbench.base.futures import Future, settle_all, wait_all
from rpcbench.pipeline import requests
from rpcbench.pipeline.layout import Layout
from rpcbench.pipeline.lazy import built
from rpcbench.pipeline.losses import Losses
from rpcbench.pipeline.mail import end
from rpcbench.pipeline.numerics import Numerics
from rpcbench.pipeline.parameter_groups import Groups
from rpcbench.pipeline.phases import Standing
from rpcbench.pipeline.ports import inputs_of
from rpcbench.pipeline.split import Stage, whole_name
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.steps import Steps
from rpcbench.pipeline.tasks import LossFn
from rpcbench.pipeline.ties import ties
from rpcbench.pipeline.watch import Watch
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import label_of

OptimizerSpec = (
    tuple[type[torch.optim.Optimizer], dict[str, Any]] | tuple[type[torch.optim.Optimizer], dict[str, Any], Groups]
)
_NUMBERS = itertools.count()
T = TypeVar("T")


class Crew:
    """`homes`: stage → id of its worker; `modules` and `optimizers`: stage → RRef; `workers`: id → RRef of its loop.

    Stages are known here by their numbers in the `layout`: `row` has those of the first replica, whose parameters and
    gradients all others have, too.

    `standing`: which optimizer step each stage holds; `steps` moves them on.
    """

    def __init__(
        self,
        agent: Agent,
        stages: Sequence[Stage],
        loss_fn: LossFn | None,
        optimizer: OptimizerSpec | None,
        numerics: Numerics,
        replicas: int = 1,
    ) -> None:
        self._agent = agent
        self.stages = stages
        self.layout = Layout(len(stages) // replicas, replicas)
        self.row = stages[: self.layout.stages]
        self.homes = {stage.index: agent.member(stage.worker).id for stage in stages}
        self.standing = Standing(self.homes, self.layout)
        self._key = f"pipeline {agent.id}.{agent.incarnation}.{next(_NUMBERS)}"
        self.modules = {stage.index: self._create(stage.index, built, stage.module, stage.tied) for stage in stages}
        self.workers: dict[int, Any] = {}
        self._taken: dict[int, list[int]] = {}
        self.ties = ties(self.row)
        ids = list(dict.fromkeys(self.homes.values()))
        watch = Watch(agent, ids)
        self._losses = Losses(watch, self.homes, self.standing)
        self.steps = Steps(self._ask, self._end, ids, self.homes, self._losses, self.standing)
        with watch.opening() as records:
            for id_ in ids:
                modules = self._own(id_, self.modules)
                ports = {stage: self.row[stage].ports for stage in modules}
                homes = self.layout.homes(id_, self.homes)
                made = (self._key, modules, homes, loss_fn, ports, self.ties, records.get(id_, ""), numerics, ids)
                self.workers[id_] = agent.create(id_, StageWorker, made, timeout=0)
                self._taken[id_] = inputs_of(ports.values())
            self._await_made(self.workers.values())
        self.optimizers: dict[int, Any] = {}
        if optimizer is not None:
            make, names = requests.make_optimizer, self._names()
            self.optimizers = {
                s: self._create(s, make, m, names[self.layout.stage(s)], *optimizer) for s, m in self.modules.items()
            }
            self._await_made(self.optimizers.values())
            wait_all([self._ask(id_, requests.learn, self._own(id_, self.optimizers)) for id_ in self.workers])

    def _names(self) -> dict[int, Callable[[str], str]]:
        """Stage → what the un-split model calls its parameters; a copy of a tied weight has the name of the first."""
        first: dict[int, dict[str, str]] = {stage.index: {} for stage in self.row}
        for tie in self.ties:
            name = self.row[min(tie)].key(tie[min(tie)])
            for stage, own in tie.items():
                first[stage][own] = name
        return {stage.index: partial(whole_name, stage.prefixes, first[stage.index]) for stage in self.row}

    def _create(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._agent.create(self.homes[stage], function, args, timeout=0)

    def _await_made(self, rrefs: Any) -> None:
        wait_all([self._agent.call(rref._owner, requests.made, (rref,), timeout=0) for rref in rrefs])

    def _own(self, id_: int, each: Mapping[int, T]) -> dict[int, T]:
        """Of what is known by number, that of a worker's stages, as they are called there."""
        return {self.layout.stage(number): own for number, own in each.items() if self.homes[number] == id_}

    def _ask(self, id_: int, function: Callable[..., T], *args: Any) -> Future[T]:
        """`function(key, *args)` on a worker, which finds its part of this pipeline by the key."""
        return self._agent.call(id_, function, (self._key, *args), timeout=0)

    def _end(self, id_: int, step: int, reason: str) -> None:
        end(self._agent, id_, self._key, step, reason)

    def check_optimizer(self) -> None:
        """PipelineError where there is none."""
        if not self.optimizers:
            raise PipelineError("this pipeline has no optimizer; give Pipeline one, as (torch.optim.SGD, {'lr': 0.1})")

    def check_may_update(self) -> None:
        """PipelineError where no schedule may step the optimizers within a step."""
        faults = {
            "takes no tied weights": bool(self.ties),
            "takes no replicas": self.layout.replicas > 1,
            "needs an optimizer": not self.optimizers,
        }
        for why, there in faults.items():
            if there:
                raise PipelineError(f"a schedule that updates within a step {why}")

    def inputs(self, id_: int, given: Sequence[Any]) -> tuple[Any, ...]:
        """Of the model's inputs those that this worker's stages take."""
        return tuple([given[number] for number in self._taken[id_]])

    # -- what stages hold
    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers."""
        return self._gather(requests.state)

    def gradients(self, context: int) -> dict[str, torch.Tensor]:
        """Those of all parameters that have one in this context; of a tied one under its first name."""
        return self._without_copies(self._gather(requests.gradients, context))

    def kept(self) -> dict[str, torch.Tensor]:
        """The gradients that were kept last; of a tied one under its first name."""
        own = {stage: gradients for each in self.on_row(requests.kept) for stage, gradients in each.items()}
        named = {stage.key(name): gradient for stage in self.row for name, gradient in own[stage.index].items()}
        return self._without_copies(named)

    def _without_copies(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A module that runs in two stages of a traced model has one name in both."""
        names = [[self.stages[stage].key(name) for stage, name in sorted(tie.items())] for tie in self.ties]
        copies = {copy for first, *others in names for copy in others if copy != first}
        return {name: tensor for name, tensor in named.items() if name not in copies}

    def _gather(self, function: Callable[..., dict[str, torch.Tensor]], *args: Any) -> dict[str, torch.Tensor]:
        found = self.on_stages(function, {stage.index: (self.modules[stage.index], *args) for stage in self.row})
        return {stage.key(own): t for stage in self.row for own, t in found[stage.index].items()}

    def stage(self, stage: int) -> tuple[Any, Any, Any]:
        """What a stage is there: RRefs of its worker's loop, of its module and of its optimizer, if it has one."""
        return self.workers[self.homes[stage]], self.modules[stage], self.optimizers.get(stage)

    def on_stages(self, function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """`function(*args[stage])` on each stage's worker, all at once: stage → what came of it. StageLostError."""
        there = partial(self._agent.call, function=function, timeout=0)
        found = self._all(lambda: [there(self.homes[stage], args=own) for stage, own in args.items()])
        return dict(zip(args, found, strict=True))

    def on_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function(its StageWorker, *args)` on each worker. StageLostError."""
        return self._on(self.workers, function, args)

    def on_row(self, function: Callable[..., T], *args: Any) -> list[T]:
        """As `on_workers`, on those of the first replica."""
        return self._on(dict.fromkeys(self.homes[stage.index] for stage in self.row), function, args)

    def _on(self, ids: Iterable[int], function: Callable[..., T], args: tuple[Any, ...]) -> list[T]:
        served = partial(self._agent.call, function=requests.served, timeout=0, label=label_of(function))
        return self._all(lambda: [served(id_, args=(self._key, function, args)) for id_ in ids])

    def scale(self, context: int, factor: float) -> None:
        """Multiply all gradients in this context."""
        self.on_workers(requests.scale, context, factor)

    def _all(self, calls: Callable[[], list[Future[T]]]) -> list[T]:
        """Calls of workers, all at once; what came of each."""
        self.steps.check_there(changed=True)
        try:
            return settle_all(calls())
        except WorkerLostError as error:
            self._losses.tell_of(error, "between two steps", changed=True)
            raise

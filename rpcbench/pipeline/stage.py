"""What one worker has of a pipeline: modules, optimizers and slots of its stages, for as long as its driver wants them.

Activations and gradients come as parcels, straight from the workers of other stages, and wait in slots; see `execution`
for what becomes of them.

How stages compute, where it is not as torch does by itself:
- A stage's forward runs under autocast as the whole model would in one process; the loss gets outputs of single
  precision at least, and no autocast. What is recomputed is computed the same way.
- What came in evaluation mode, as a batch norm that is frozen, stays so while the stage trains.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from rpcbench.autograd import recorder
from rpcbench.base.errors import PipelineError
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline import batchnorm, microbatch
from rpcbench.pipeline.data_parallel import ReplicaGroup
from rpcbench.pipeline.gradient_sums import Copies, Tie, summable
from rpcbench.pipeline.mailboxes import CREDITS, ENDS, Channel, CommitProtocol, Mailbox
from rpcbench.pipeline.placement import StagePlacement
from rpcbench.pipeline.stage_graph import Segment, StageIO, inputs_of, sendable
from rpcbench.pipeline.stage_ring import LOOK, OPENED
from rpcbench.pipeline.step_log import CrashRecord, OpLog
from rpcbench.pipeline.tasks import LossFn
from rpcbench.pipeline.tracing import Recipe
from rpcbench.rpc import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.server import caller

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """What `Pipeline` was told of it. autocast: the low precision, or None; batch_norm: see `batchnorm`."""

    autocast: torch.dtype | None = None
    batch_norm: str = batchnorm.WARN

    def check(self) -> None:
        """PipelineError for what is unknown."""
        batchnorm.check(self.batch_norm)
        if self.autocast not in (None, torch.bfloat16):
            raise PipelineError(
                f"autocast must be torch.bfloat16, not {self.autocast!r}: in torch.float16 small gradients vanish, "
                "unless the loss is scaled up, which a pipeline does not do"
            )


class ForwardContext:
    """A worker's side: around its steps, its forwards, and before its losses."""

    def __init__(self, numerics: PrecisionConfig, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._autocast = numerics.autocast
        self.norms = batchnorm.Deferred(modules if numerics.batch_norm == batchnorm.DEFERRED else [])
        self._plain = self._autocast is None and not self.norms
        self._devices = {module: _device(module) for module in modules}

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self.norms.step()

    def forward(self, module: nn.Module, first: bool = True) -> contextlib.AbstractContextManager[object]:
        """Around the forward of a stage; `first`: it is no recomputed one."""
        return _NOTHING if self._plain else self._around(module, first)

    @contextlib.contextmanager
    def _around(self, module: nn.Module, first: bool) -> Iterator[None]:
        with self.norms.counting(first), self._casting(module):
            yield

    def _casting(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING if self._autocast is None else torch.autocast(self._devices[module], self._autocast)

    def judged(self, output: Any) -> Any:
        """What loss and metrics get for an output of the last stage."""
        if self._autocast is None:
            return output
        return microbatch.mapped(output, lambda tensor: tensor.float() if tensor.dtype == self._autocast else tensor)


def _device(module: nn.Module) -> str:
    """The kind of device that the module is on."""
    return next((tensor.device.type for tensor in module.parameters()), "cpu")


_training = attrgetter("training")
_RESTS = (
    "the model is in evaluation mode, and its stages train so: dropout drops nothing, and batch norms use the "
    "statistics they have. Call model.train() before split() if that is not what you want"
)


class TrainModes:
    """The layers of one worker's stages."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        layers = [layer for module in self._modules for layer in module.modules()]
        self._trained, self._resting = [*filter(_training, layers)], [*filterfalse(_training, layers)]

    def set(self, training: bool) -> None:
        """All layers are in training mode, but for those that came in evaluation mode; or all in evaluation mode."""
        if {*map(_training, self._trained)} - {training}:
            for module in self._modules:
                module.train(training)
            for layer in self._resting:
                layer.training = False


def warn_of_rest(modules: Iterable[nn.Module]) -> None:
    """UserWarning, at the line that makes the pipeline, where none of the model's modules is in training mode."""
    if not any(layer.training for module in modules for layer in module.modules()):
        warnings.warn(_RESTS, UserWarning, stacklevel=3)


def changes_in_place(module: nn.Module) -> bool:
    """Whether it may change what it is given, as a ReLU(inplace=True) does; not all that may can be told."""
    return any(
        getattr(layer, "inplace", False) is True or (isinstance(layer, Recipe) and layer.changes_in_place)
        for layer in module.modules()
    )


class _Directory:
    """The pipelines that have stages on this worker, for as long as their drivers hold them."""

    def __init__(self, agent: Agent) -> None:
        self.workers: weakref.WeakValueDictionary[str, StageWorker] = weakref.WeakValueDictionary()
        agent.on_member(self._member)
        agent.on_notice(ENDS, self._ends)
        agent.on_notice(CREDITS, self._taken)
        agent.on_notice(OPENED, partial(self._opened, agent))
        agent.on_notice(LOOK, self._look)

    def _member(self, kind: str, who: WorkerInfo, reason: str) -> None:
        """No step goes on without its driver, who would end it, nor without a worker that it waits for."""
        if kind in GONE:
            for worker in list(self.workers.values()):
                if who.id == worker.driver or who.id in worker.workers:
                    worker.slots.close(f"{who.name} has gone: {reason}")

    def _ends(self, _source: int, told: tuple[str, int, str]) -> None:
        key, step, reason = told
        if (worker := self.workers.get(key)) is not None:
            worker.slots.abort(step, reason)

    def _taken(self, _source: int, told: tuple[str, int, int, int, int, int]) -> None:
        key, step, count, kind, stage, source = told
        if (worker := self.workers.get(key)) is not None:
            worker.mail.heard(step, count, Channel(kind, stage, source))

    def _opened(self, agent: Agent, source: int, told: tuple[str, int, int]) -> None:
        key, place, name = told
        connection = agent.connection(source)
        if connection is None:
            return
        lane = connection.store.lane_from(place, name)  # also for a pipeline that is gone: then it goes back at once
        if lane is not None and (worker := self.workers.get(key)) is not None:
            worker.mail.offered(source, lane)

    def _look(self, _source: int, key: str) -> None:
        if (worker := self.workers.get(key)) is not None:
            worker.slots.stir()


def here(key: str) -> StageWorker:
    """What this worker has of a pipeline. PipelineError where its driver has let go of that."""
    worker = current.current().part(_Directory).workers.get(key)
    if worker is None:
        raise PipelineError("this pipeline is gone: its driver holds it no more")
    return worker


class StageWorker:
    """The stages of one pipeline, `key`, on one worker. `modules`: stage → module; `homes`: where the others are.

    `record`: the file behind what the driver reads if this process dies, empty where there is none. `workers`: all that
    the pipeline has.
    """

    def __init__(
        self,
        key: str,
        modules: dict[int, RRef[Any]],
        homes: StagePlacement,
        loss_fn: LossFn | None,
        ports: dict[int, StageIO],
        ties: Sequence[Tie],
        record: str,
        numerics: PrecisionConfig,
        workers: Sequence[int],
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        self.loss_fn = loss_fn
        self.ports, self.inputs = ports, inputs_of(ports.values())
        self.params = {stage: [p for p in m.parameters() if p.requires_grad] for stage, m in self.modules.items()}
        self.modes = TrainModes(self.modules.values())
        self.changing = {stage for stage, module in self.modules.items() if changes_in_place(module)}
        """Stages that may change what they take."""
        self.copies = Copies(ties, self.modules, self.params)
        self.record = CrashRecord.at(record)
        self.computing = ForwardContext(numerics, self.modules.values())
        self.optimizers: dict[int, LocalOptimizer | None] = {}
        self.driver, self.workers = caller(), workers
        self.last_stage = len(homes.stages) - 1
        self.share = homes.replica, len(homes.column)
        """Which of how many replicas this is."""
        self.replica = homes.replica if len(homes.column) > 1 else None
        untied = {stage: own for stage, own in self.params.items() if not self.copies.places[stage]}
        self.summable = summable(untied) if self.replica is None else {}
        """Those of `params` whose gradients torch's engine may add up."""
        self.turn = threading.Lock()
        """Held while a step runs here, even the rest of one that was aborted."""
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        agent: Agent = current.current()
        self.log, self.recorder = agent.part(OpLog), recorder(agent)
        self.mail = mail = Mailbox(agent, key, homes)
        self.slots = mail.slots
        self.accord = CommitProtocol(agent.id, workers, mail)
        self.column = ReplicaGroup(agent, key, homes, mail.slots, mail.send) if len(homes.column) > 1 else None
        agent.part(_Directory).workers[key] = self
        agent.parcels.listen(key, mail)
        weakref.finalize(self, agent.parcels.deaf, key, mail)

    def learn(self, optimizers: dict[int, RRef[Any]]) -> None:
        """Take the stages' optimizers."""
        self.optimizers = {stage: rref.local_value() for stage, rref in optimizers.items()}

    # -- gradients
    def keep(self, context: int) -> None:
        """Keep the gradients of a context when that is over, until those of the next one are kept."""
        self._gradients = self.recorder.gradients(context)

    def kept(self) -> dict[int, dict[str, torch.Tensor]]:
        """What was kept: stage → its own names → gradients."""
        return {
            stage: {name: self._gradients[p] for name, p in module.named_parameters() if p in self._gradients}
            for stage, module in self.modules.items()
        }

    # -- what steps need
    def between_steps(self) -> AbstractContextManager[object]:
        """No step runs here inside."""
        return self.turn

    def values(self, stage: int, made: Any) -> tuple[Any, ...]:
        """What the stage's module has returned, as the values that go to other stages."""
        return sendable(made if isinstance(self.modules[stage], Segment) else (made,), stage)

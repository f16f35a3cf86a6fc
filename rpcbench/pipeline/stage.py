"""What one worker has of a pipeline: modules, optimizers and slots of its stages, for as long as its driver wants them.

Activations and gradients come as parcels, straight from the workers of other stages, and wait in slots; see `execution`
for what becomes of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from rpcbench.autograd import recorder
from rpcbench.base.errors import PipelineError
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.accord import Accord
from rpcbench.pipeline.credits import Channel
from rpcbench.pipeline.engine_sums import summable
from rpcbench.pipeline.lanes import LOOK, OPENED
from rpcbench.pipeline.layout import Homes
from rpcbench.pipeline.mail import CREDITS, ENDS, Mail
from rpcbench.pipeline.modes import Modes, changes_in_place
from rpcbench.pipeline.numerics import Computing, Numerics
from rpcbench.pipeline.oplog import OpLog
from rpcbench.pipeline.ports import Ports, Segment, inputs_of, sendable
from rpcbench.pipeline.record import Record
from rpcbench.pipeline.shared import Column
from rpcbench.pipeline.tasks import LossFn
from rpcbench.pipeline.ties import Copies, Tie
from rpcbench.rpc import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.server import caller


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
        homes: Homes,
        loss_fn: LossFn | None,
        ports: dict[int, Ports],
        ties: Sequence[Tie],
        record: str,
        numerics: Numerics,
        workers: Sequence[int],
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        self.loss_fn = loss_fn
        self.ports, self.inputs = ports, inputs_of(ports.values())
        self.params = {stage: [p for p in m.parameters() if p.requires_grad] for stage, m in self.modules.items()}
        self.modes = Modes(self.modules.values())
        self.changing = {stage for stage, module in self.modules.items() if changes_in_place(module)}
        """Stages that may change what they take."""
        self.copies = Copies(ties, self.modules, self.params)
        self.record = Record.at(record)
        self.computing = Computing(numerics, self.modules.values())
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
        self.mail = mail = Mail(agent, key, homes)
        self.slots = mail.slots
        self.accord = Accord(agent.id, workers, mail)
        self.column = Column(agent, key, homes, mail.slots, mail.send) if len(homes.column) > 1 else None
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

"""What one worker has of a pipeline: modules, optimizers and slots of its stages, for as long as its driver wants them.

Activations and gradients come as parcels, straight from the workers of other stages, and wait in slots; see `execution`
for what becomes of them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.agent.roster import GONE, WorkerInfo
from rpcbench.agent.serve import caller
from rpcbench.autograd import recorder
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.exchange import cut_off
from rpcbench.pipeline.layout import Homes
from rpcbench.pipeline.numerics import Computing, Numerics
from rpcbench.pipeline.ports import Ports, Segment, sendable
from rpcbench.pipeline.record import Record
from rpcbench.pipeline.shared import Column
from rpcbench.pipeline.slots import Slot, Slots
from rpcbench.pipeline.tasks import LossFn
from rpcbench.pipeline.ties import Copies, Tie
from rpcbench.rpc import RRef
from rpcbench.words.errors import PipelineError, WorkerLostError
from rpcbench.words.futures import Waits


class _Directory:
    """The pipelines that have stages on this worker, for as long as their drivers hold them."""

    def __init__(self, agent: Agent) -> None:
        self.workers: weakref.WeakValueDictionary[str, StageWorker] = weakref.WeakValueDictionary()
        agent.on_member(self._member)

    def _member(self, kind: str, who: WorkerInfo, reason: str) -> None:
        """No step goes on whose driver has gone: nobody would end it."""
        if kind in GONE:
            for worker in list(self.workers.values()):
                if worker.driver == who.id:
                    worker.slots.close(f"its driver, {who.name}, has gone: {reason}")


def here(key: str) -> StageWorker:
    """What this worker has of a pipeline. PipelineError where its driver has let go of that."""
    worker = current.current().part(_Directory).workers.get(key)
    if worker is None:
        raise PipelineError("this pipeline is gone: its driver holds it no more")
    return worker


class StageWorker:
    """The stages of one pipeline, `key`, on one worker. `modules`: stage → module; `homes`: where the others are.

    `record`: the file behind what the driver reads if this process dies, empty where there is none.
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
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        self.loss_fn = loss_fn
        self.ports = ports
        self.copies = Copies(ties, self.modules)
        self.record = Record.at(record)
        self.computing = Computing(numerics, self.modules.values())
        self.optimizers: dict[int, LocalOptimizer | None] = {}
        self.driver = caller()
        self.last_stage = len(homes.stages) - 1
        self.turn = threading.Lock()
        """Held while a step runs here, even the rest of one that was aborted."""
        self._params = {stage: [p for p in m.parameters() if p.requires_grad] for stage, m in self.modules.items()}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._agent: Agent = current.current()
        self._homes = homes
        self.slots = Slots(self._help_along)
        self.column = Column(self._agent, homes, self.slots, self.send) if len(homes.column) > 1 else None
        self._agent.part(_Directory).workers[key] = self
        self._agent.parcels.listen(key, _Mailbox(self._agent, key, homes, self.slots))
        weakref.finalize(self, self._agent.parcels.deaf, key)

    def learn(self, optimizers: dict[int, RRef[Any]]) -> None:
        """Take the stages' optimizers."""
        self.optimizers = {stage: rref.local_value() for stage, rref in optimizers.items()}

    # -- gradients
    def keep(self, context: int) -> None:
        """Keep the gradients of a context when that is over, until those of the next one are kept."""
        self._gradients = recorder().gradients(context)

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

    def parameters(self, stage: int) -> list[nn.Parameter]:
        return self._params[stage]

    def values(self, stage: int, made: Any) -> tuple[Any, ...]:
        """What the stage's module has returned, as the values that go to other stages."""
        return sendable(made if isinstance(self.modules[stage], Segment) else (made,), stage)

    def send(self, slot: Slot, values: tuple[Any, ...]) -> None:
        """Values for another stage, or another replica of one, wherever that is."""
        to = self._homes.taker(slot)
        if to == self._agent.id:
            self.slots.put(slot, partial(cut_off, values))
        else:
            self._agent.parcels.post(to, self.key, slot.place, str(slot), values[0] if len(values) == 1 else values)

    def _help_along(self, reached: Waits, slot: Slot) -> None:
        giver = self._homes.giver(slot)
        if giver is not None:
            self._agent.read_while(lambda: not reached(), giver, free=True)


class _Mailbox:
    """What comes for one pipeline; it does not hold that."""

    def __init__(self, agent: Agent, key: str, homes: Homes, slots: Slots) -> None:
        self._agent, self._key, self._homes, self._slots = agent, key, homes, slots

    def came(self, place: tuple[int, ...], values: Callable[[], Any]) -> None:
        self._slots.put(Slot.at(place), partial(_opened, values))

    def undelivered(self, place: tuple[int, ...], error: Exception) -> None:
        """The step is to end here and where the values are waited for; the driver hears of it from whoever fails."""
        slot, reason = Slot.at(place), f"{type(error).__name__}: {error}"
        self._slots.abort(slot.step, reason)
        if self._agent.running and not isinstance(error, WorkerLostError):  # else nobody waits there
            self._agent.submit(lambda: self._end_there(slot, reason))

    def _end_there(self, slot: Slot, reason: str) -> None:
        with contextlib.suppress(WorkerLostError):  # it has gone since
            self._agent.call(self._homes.taker(slot), abort, (self._key, slot.step, reason))


def _opened(values: Callable[[], Any]) -> tuple[Any, ...]:
    """One value travels alone: none is a tuple by itself."""
    found = values()
    return found if type(found) is tuple else (found,)


def abort(key: str, step: int, reason: str) -> None:
    """On a worker: whoever runs this step there waits for nothing any more."""
    here(key).slots.abort(step, reason)

"""The part of a pipeline on one worker: modules, optimizers and slots of its stages, while the driver holds it.

Activations and gradients arrive as parcels, straight from the workers of other stages, and wait in slots for
`execution`.

Rules for computing where a stage differs from plain torch
- A stage's forward runs under autocast as the whole model would in one process; the loss gets outputs of single
  precision at least, and no autocast. A recomputed forward is computed in the same way.
- A layer that came in evaluation mode, as a frozen batch norm, keeps that mode while the stage trains.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from rpcbench.pipeline.gradient_sums import Copies, Tie, has_write_hooks, summable_stages
from rpcbench.pipeline.mailboxes import CREDITS, Channel, CommitProtocol, Mailbox
from rpcbench.pipeline.placement import StagePlacement
from rpcbench.pipeline.stage_graph import Segment, StageIO, check_sendable, inputs_of_stages
from rpcbench.pipeline.step_log import CrashRecord, OpLog
from rpcbench.pipeline.tasks import ENDS, LossFn
from rpcbench.pipeline.tracing import Recipe
from rpcbench.rpc import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.server import caller_id

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The numeric options of a `Pipeline`."""

    autocast: torch.dtype | None = None  # the low precision; None: no autocast
    batch_norm: str = batchnorm.WARN  # a mode of `batchnorm`

    def check_options(self) -> None:
        """Raise PipelineError for a value that is not supported."""
        batchnorm.check_mode(self.batch_norm)
        if self.autocast not in (None, torch.bfloat16):
            raise PipelineError(
                f"autocast must be torch.bfloat16, not {self.autocast!r}: in torch.float16 small gradients vanish, "
                "unless the loss is scaled up, which a pipeline does not do"
            )


class ForwardContext:
    """Context managers around the steps and forwards of a worker, and the precision of its outputs."""

    def __init__(self, numerics: PrecisionConfig, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._autocast = numerics.autocast
        self.norms = batchnorm.Deferred(modules if numerics.batch_norm == batchnorm.DEFERRED else [])
        self._plain = self._autocast is None and not self.norms  # nothing to do, the usual case
        self._devices = {module: next((p.device.type for p in module.parameters()), "cpu") for module in modules}

    def forward_scope(self, module: nn.Module, first: bool = True) -> contextlib.AbstractContextManager[object]:
        """Return the context for a stage's forward. `first`: it is not a recomputed one."""
        return _NOTHING if self._plain else self._enter_forward(module, first)

    @contextlib.contextmanager
    def _enter_forward(self, module: nn.Module, first: bool) -> Iterator[None]:
        casting: Any = _NOTHING if self._autocast is None else torch.autocast(self._devices[module], self._autocast)
        with self.norms.forward_scope(first), casting:  # a recomputed forward counts no statistics twice
            yield

    def output_for_loss(self, output: Any) -> Any:
        """Return an output of the last stage as the loss and the metrics get it: in single precision at least."""
        if self._autocast is None:
            return output
        return microbatch.map_tensors(
            output, lambda tensor: tensor.float() if tensor.dtype == self._autocast else tensor
        )


_training = attrgetter("training")
_IN_EVALUATION_MODE = (
    "the model is in evaluation mode, and its stages train so: dropout drops nothing, and batch norms use the "
    "statistics they have. Call model.train() before split() if that is not what you want"
)


class TrainModes:
    """The training modes of the layers in one worker's stages."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        layers = [layer for module in self._modules for layer in module.modules()]
        self._trained, self._resting = [*filter(_training, layers)], [*filterfalse(_training, layers)]

    def set_training(self, training: bool) -> None:
        """Put all layers into evaluation mode, or all but those that came in evaluation mode into training mode."""
        if {*map(_training, self._trained)} - {training}:  # else all have the mode already
            for module in self._modules:
                module.train(training)
            for layer in self._resting:
                layer.training = False


def warn_if_evaluating(modules: Iterable[nn.Module]) -> None:
    """Warn the user if none of the model's modules is in training mode."""
    if not any(layer.training for module in modules for layer in module.modules()):
        warnings.warn(_IN_EVALUATION_MODE, UserWarning, stacklevel=3)  # at the line that makes the pipeline


def changes_in_place(module: nn.Module) -> bool:
    """Return whether a layer is known to change its input in place, as ReLU(inplace=True). Others may, unseen."""
    return any(
        getattr(layer, "inplace", False) is True or (isinstance(layer, Recipe) and layer.may_change_inputs())
        for layer in module.modules()
    )


def _refuse_hooks_of_writing(modules: Mapping[int, nn.Module]) -> None:
    """Raise PipelineError for a parameter with a hook that belongs to the writing of `.grad`, as a step writes none."""
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and has_write_hooks(parameter):
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} has a hook that belongs to the writing of .grad, by "
                    "register_post_accumulate_grad_hook or on its AccumulateGrad node, and a pipeline's step writes "
                    "none: use parameter.register_hook, which runs once for each micro-batch"
                )


class _Directory:
    """The pipelines that have stages on this worker. It keeps none alive: a driver's RRef does."""

    def __init__(self, agent: Agent) -> None:
        self.workers: weakref.WeakValueDictionary[str, StageWorker] = weakref.WeakValueDictionary()
        self._member_table = agent.links.members
        agent.on_member(self._member_changed)
        agent.on_notice(ENDS, self._abort_received)
        agent.on_notice(CREDITS, self._credit_received)

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        """Close the slots of each pipeline whose driver or worker has left. Only a step in doubt may still end well."""
        if kind in GONE:
            for worker in list(self.workers.values()):
                # A pipeline that was made since may have another process with this id.
                if who.id in self._member_table.departed_members(worker.processes):
                    decides = who.id in (worker.driver, worker.workers[0])  # the latter is the coordinator
                    worker.slots.close(f"{who.name} has gone: {reason}", in_doubt=decides)

    def _abort_received(self, _source: int, notice: tuple[str, int, str]) -> None:
        key, step, reason = notice
        if (worker := self.workers.get(key)) is not None:
            worker.slots.abort_step(step, reason)

    def _credit_received(self, _source: int, notice: tuple[str, int, int, int, int, int]) -> None:
        key, step, count, kind, stage, source = notice
        if (worker := self.workers.get(key)) is not None:
            worker.mail.credit_received(step, count, Channel(kind, stage, source))


def worker_for(key: str) -> StageWorker:
    """Return this worker's part of a pipeline. PipelineError if its driver has released the pipeline."""
    worker = current.current_agent().part(_Directory).workers.get(key)
    if worker is None:
        raise PipelineError("this pipeline has ended: its driver has released it")
    return worker


class StageWorker:
    """The stages of one pipeline on one worker. The driver's RRef keeps it alive; its calls find it by
    `worker_for(key)`."""

    def __init__(
        self,
        key: str,  # of the pipeline
        modules: dict[int, RRef[Any]],  # by stage
        placement: StagePlacement,  # where the other stages are
        loss_fn: LossFn | None,  # None: no loss is computed
        ports: dict[int, StageIO],
        ties: Sequence[Tie],
        record: str,  # path of the crash record; empty: no process reads it
        numerics: PrecisionConfig,
        workers: Sequence[int],  # ids of all workers of the pipeline
        processes: Mapping[int, int],  # id → incarnation: those of the workers and of the driver
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        _refuse_hooks_of_writing(self.modules)
        self.loss_fn = loss_fn
        self.ports, self.inputs = ports, inputs_of_stages(ports.values())
        self.params = {stage: [p for p in m.parameters() if p.requires_grad] for stage, m in self.modules.items()}
        self.modes = TrainModes(self.modules.values())  # before any step changes modes
        self.changes_inputs = {stage for stage, module in self.modules.items() if changes_in_place(module)}
        """Stages that may change their input in place."""
        self.copies = Copies(ties, self.modules, self.params)
        self.record = CrashRecord.open_file(record)
        self.forward_context = ForwardContext(numerics, self.modules.values())
        self.optimizers: dict[int, LocalOptimizer | None] = {}
        self.driver, self.workers = caller_id(), workers  # the driver makes this object by a call
        self.processes = processes
        self.last_stage = len(placement.stages) - 1
        self.share = placement.replica, len(placement.replica_workers)
        """The index of this replica, and the number of replicas."""
        self.replica = placement.replica if len(placement.replica_workers) > 1 else None  # None: only one replica
        # A copy of a tied parameter, or a replica, must first exchange its gradients.
        untied = {stage: own for stage, own in self.params.items() if not self.copies.places[stage]}
        self.summable = summable_stages(untied) if self.replica is None else {}
        """Those of `params` whose gradients torch's engine may sum."""
        self.step_lock = threading.Lock()
        """Held while a step runs here, also by the rest of a step that was aborted."""
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # by parameter, of the last step that kept them
        agent: Agent = current.current_agent()
        self.log, self.recorder = agent.part(OpLog), recorder(agent)
        self.mail = mail = Mailbox(agent, key, placement)
        self.slots = mail.slots
        self.commit_protocol = CommitProtocol(agent.id, workers, mail)
        self.replica_group = (
            ReplicaGroup(agent, key, placement, mail.slots, mail.send_values)
            if len(placement.replica_workers) > 1
            else None
        )
        agent.part(_Directory).workers[key] = self
        agent.calls.parcels.add_listener(key, mail)
        weakref.finalize(self, agent.calls.parcels.remove_listener, key, mail)

    # -- gradients
    def keep_gradients(self, context: int) -> None:
        """Keep the gradients of a context after it has ended, until those of the next one are kept."""
        self._gradients = self.recorder.named_gradients(context)

    def kept_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the kept gradients: stage → the module's own names → gradients."""
        return {
            stage: {name: self._gradients[p] for name, p in module.named_parameters() if p in self._gradients}
            for stage, module in self.modules.items()
        }

    def output_values(self, stage: int, made: Any) -> tuple[Any, ...]:
        """Return the output of the stage's module as the values that are sent to other stages."""
        return check_sendable(made if isinstance(self.modules[stage], Segment) else (made,), stage)

"""The worker's side of a pipeline: its stages, and the loop that runs its list of operations.

One call brings a worker its inputs or targets for a step; then activations and gradients go from worker to worker,
into slots, and one answer goes back. All of it happens in the step's autograd context: an activation that is sent is a
recorded send, and a recv where it arrives, as with any call; gradients of parameters add up in the context.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.autograd import recorder
from rpcbench.pipeline.chance import seed, seeded
from rpcbench.pipeline.halves import Halves
from rpcbench.pipeline.numerics import Computing, Numerics
from rpcbench.pipeline.oplog import DONE, FAILED, OpLog
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.slots import Slot, Slots
from rpcbench.rpc import RRef
from rpcbench.words.events import Row
from rpcbench.words.futures import Future

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker does in one step. `inputs` are for stage 0, `targets` for the last, a micro-batch each.

    `weights` scale the micro-batches' losses. Where it is not to `train`, the last stage's outputs are sent back, or
    with targets what the loss and `metrics` say of them. For those who look on: all `workers` that take part, and the
    `ideal` idle share. `seed` is the step's, for random numbers.
    """

    step: int
    ops: tuple[Op, ...]
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    weights: Sequence[float]
    train: bool
    workers: Sequence[int]
    ideal: float | None
    seed: int
    metrics: Mapping[str, Metric] | None = None


@dataclass(slots=True)
class Report:
    """What came of it: operations with their times, and on the last stage's worker losses, outputs or scores."""

    rows: list[Row] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


class _Directory:
    """The pipelines that have stages on this worker, for as long as their drivers hold them."""

    def __init__(self, agent: Agent) -> None:
        self.workers: weakref.WeakValueDictionary[str, StageWorker] = weakref.WeakValueDictionary()


def _deliver(key: str, slot: Slot, value: Any) -> None:
    """On a worker, from a neighbour: an activation or a gradient. Dropped where the pipeline is gone."""
    worker = current.current().part(_Directory).workers.get(key)
    if worker is not None:
        worker.slots.put(slot, value)


class StageWorker:
    """The stages of one pipeline, `key`, on one worker. `modules`: stage → module; `homes`: stage → worker id."""

    def __init__(
        self,
        key: str,
        modules: dict[int, RRef[Any]],
        homes: dict[int, int],
        loss_fn: LossFn | None,
        numerics: Numerics,
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        self.homes = homes
        self.loss_fn = loss_fn
        self.computing = Computing(numerics, self.modules.values())
        self.slots = Slots()
        self._params = {stage: [p for p in m.parameters() if p.requires_grad] for stage, m in self.modules.items()}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._turn = threading.Lock()
        current.current().part(_Directory).workers[key] = self

    def run(self, task: Task) -> Report:
        """One step; returns when all of this worker's operations are done."""
        with self._turn:
            running = _Step(self, task)
            try:
                return running.run()
            finally:
                self.slots.finish(task.step)

    def abort(self, step: int, reason: str) -> None:
        self.slots.abort(step, reason)

    def keep(self, context: int) -> None:
        """Keep the gradients of a context when that is over, until those of the next one are kept."""
        self._gradients = recorder().gradients(context)

    def kept(self) -> dict[int, dict[str, torch.Tensor]]:
        """What was kept: stage → its own names → gradients."""
        return {
            stage: {name: self._gradients[p] for name, p in module.named_parameters() if p in self._gradients}
            for stage, module in self.modules.items()
        }

    def parameters(self, stage: int) -> list[nn.Parameter]:
        return self._params[stage]

    @property
    def last_stage(self) -> int:
        return len(self.homes) - 1


class _Step:
    """One step on one worker: what its operations hand to each other."""

    def __init__(self, worker: StageWorker, task: Task) -> None:
        self._worker = worker
        self._task = task
        self._agent: Agent = current.current()
        self._log = self._agent.part(OpLog)
        self._recorder = recorder()
        self._context = self._recorder.current()
        self._kept: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}  # (stage, micro-batch) → input, output
        self._held: dict[int, int] = {}  # stage → bytes of what is kept
        self._halves: dict[tuple[int, int], Halves] = {}
        self._ways: dict[Kind, tuple[Callable[[Op], Any], Callable[[Op, Any], Any]]] = {
            Kind.FORWARD: (self._input, self._forward),
            Kind.BACKWARD: (self._gradient, self._backward),
            Kind.INPUT: (self._gradient, self._input_half),
            Kind.WEIGHT: (lambda op: None, self._weight_half),
            Kind.RECOMPUTE: (lambda op: None, self._recompute),
        }
        self._later = {(op.stage, op.microbatch) for op in task.ops if op.kind is Kind.RECOMPUTE}
        self._sent: list[Future[Any]] = []
        self._report = Report()

    def run(self) -> Report:
        task = self._task
        row = self._log.open(task.step, task.ops, task.workers, task.ideal)
        state = FAILED
        try:
            report = self._run()
            state = DONE
            return report
        finally:
            self._log.close(row, state)

    def _run(self) -> Report:
        for module in self._worker.modules.values():
            module.train(self._task.train)
        with torch.set_grad_enabled(self._task.train), self._worker.computing.step():
            for index, op in enumerate(self._task.ops):
                self._operate(index, op)
        for future in self._sent:
            future.wait()
        return self._report

    def _operate(self, index: int, op: Op) -> None:
        """Wait for what the operation needs, run it, send what it makes."""
        needs, runs = self._ways[op.kind]
        needed = needs(op)
        key, row = self._log.begin(self._task.step, index, op)
        try:
            made = runs(op, needed)
        except BaseException:
            self._log.end(key, row, sent=0, held=self._held.get(op.stage, 0), failed=True)
            raise
        self._report.rows.append(self._log.end(key, row, sent=_bytes(made), held=self._held.get(op.stage, 0)))
        if made is not None:
            self._send(op, made)

    # -- forward
    def _input(self, op: Op) -> Any:
        if op.stage == 0:
            assert self._task.inputs is not None
            return self._task.inputs[op.microbatch]
        return self._worker.slots.take(Slot(self._task.step, "F", op.stage, op.microbatch))

    def _forward(self, op: Op, value: Any) -> Any:
        last = op.stage == self._worker.last_stage
        if not self._task.train:
            output = self._module(op, value)
            if last:
                self._report.outputs[op.microbatch] = self._shown(op, output)
            return None if last else output
        output = self._once(op, value) if (op.stage, op.microbatch) in self._later else self._compute(op, value)
        if last:
            self._report.losses[op.microbatch] = output.item()
        self._keep(op, value, output)
        return None if last else output

    def _shown(self, op: Op, output: Any) -> Any:
        """What the driver gets of an output in evaluation: itself, or its scores where there are targets."""
        if self._task.targets is None:
            return output
        loss = {} if self._worker.loss_fn is None else {"loss": self._worker.loss_fn}
        judges: dict[str, Metric] = {**loss, **(self._task.metrics or {})}
        output = self._worker.computing.judged(output)
        return {name: float(judge(output, self._task.targets[op.microbatch])) for name, judge in judges.items()}

    def _module(self, op: Op, value: Any) -> Any:
        """The stage's own forward."""
        module = self._worker.modules[op.stage]
        with self._worker.computing.forward(module, first=op.kind is Kind.FORWARD):
            return module(value)

    def _compute(self, op: Op, value: Any) -> torch.Tensor:
        """The stage's output; at the last stage the loss."""
        with seeded(seed(self._task.seed, op)):
            output: torch.Tensor = self._module(op, value)
            if op.stage < self._worker.last_stage:
                return output
            assert self._worker.loss_fn is not None and self._task.targets is not None
            loss = self._worker.loss_fn(self._worker.computing.judged(output), self._task.targets[op.microbatch])
            return loss * self._task.weights[op.microbatch]

    def _once(self, op: Op, value: Any) -> torch.Tensor:
        """As `_compute`, and nothing is kept for a backward."""
        wants = bool(self._worker.parameters(op.stage)) or (isinstance(value, torch.Tensor) and value.requires_grad)
        with torch.no_grad():
            output = self._compute(op, value)
        return output.detach().requires_grad_(wants and output.is_floating_point())

    def _recompute(self, op: Op, _: None) -> None:
        value, _output = self._let_go(op)
        self._keep(op, value, self._compute(op, value))

    def _keep(self, op: Op, value: Any, output: torch.Tensor) -> None:
        """Input and output of a stage, for the backward. What the stage saves in between counts for nobody."""
        self._kept[op.stage, op.microbatch] = (value, output)
        self._held[op.stage] = self._held.get(op.stage, 0) + _bytes(value) + _bytes(output)

    def _let_go(self, op: Op) -> tuple[Any, torch.Tensor]:
        value, output = self._kept.pop((op.stage, op.microbatch))
        self._held[op.stage] -= _bytes(value) + _bytes(output)
        return value, output

    # -- backward
    def _gradient(self, op: Op) -> torch.Tensor | None:
        if op.stage == self._worker.last_stage:
            return None
        gradient: torch.Tensor = self._worker.slots.take(Slot(self._task.step, "B", op.stage, op.microbatch))
        return gradient

    def _backward(self, op: Op, gradient: torch.Tensor | None) -> torch.Tensor | None:
        value, output = self._let_go(op)
        params = self._worker.parameters(op.stage)
        wants_input = isinstance(value, torch.Tensor) and value.requires_grad
        inputs = [value, *params] if wants_input else params
        if not output.requires_grad or not inputs:
            return None
        found = torch.autograd.grad([output], inputs, None if gradient is None else [gradient], allow_unused=True)
        self._add_up([(p, g) for p, g in zip(params, found[wants_input:], strict=True) if g is not None])
        return found[0] if wants_input else None

    def _input_half(self, op: Op, gradient: torch.Tensor | None) -> torch.Tensor | None:
        value, output = self._kept[op.stage, op.microbatch]
        wants_input = isinstance(value, torch.Tensor) and value.requires_grad
        params = self._worker.parameters(op.stage)
        if not output.requires_grad or not (params or wants_input):
            return None
        halves = self._halves[op.stage, op.microbatch] = Halves(output, value if wants_input else None, params)
        return halves.input(gradient)

    def _weight_half(self, op: Op, _: None) -> None:
        self._let_go(op)
        halves = self._halves.pop((op.stage, op.microbatch), None)
        if halves is not None:
            self._add_up(halves.weights())

    def _add_up(self, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients of parameters add up in the step's context."""
        if self._context is not None:
            self._recorder.accumulate_leaves(self._context, leaves)

    # -- to the neighbour
    def _send(self, op: Op, value: Any) -> None:
        slot = (
            Slot(self._task.step, "F", op.stage + 1, op.microbatch)
            if op.kind is Kind.FORWARD
            else Slot(self._task.step, "B", op.stage - 1, op.microbatch)
        )
        to = self._worker.homes[slot.stage]
        if to == self._agent.id:
            self._worker.slots.put(slot, value.detach().requires_grad_(value.requires_grad))
            return
        self._sent = [future for future in self._sent if not _succeeded(future)]
        self._sent.append(self._agent.call(to, _deliver, (self._worker.key, slot, value), timeout=0))


def _succeeded(future: Future[Any]) -> bool:
    """Done without an error; an error is kept, to be raised at the end of the step."""
    if not future.done():
        return False
    future.value()
    return True


def _bytes(value: Any) -> int:
    """Of the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return 0
    return sum(map(_bytes, value))

"""The worker's side of a pipeline: its stages, and the loop that runs its list of operations.

One call brings a worker its inputs or targets for a step; then activations and gradients go from worker to worker,
into slots, and one answer goes back. All of it happens in the step's autograd context: what is sent to the stage of
another worker is a recorded send, and a recv where it arrives, as with any call; gradients of parameters add up in the
context. What a stage takes and gives is a tuple of values here; a stage of a plain chain has one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.autograd import recorder
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.chance import seed, seeded
from rpcbench.pipeline.exchange import Exchange, Gradients, Inputs, Messages, cut_off, nbytes, requires_grad
from rpcbench.pipeline.halves import Halves
from rpcbench.pipeline.numerics import Computing, Numerics
from rpcbench.pipeline.oplog import DONE, FAILED, OpLog
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.ports import Ports, Segment, sendable
from rpcbench.pipeline.record import Doing, Record
from rpcbench.pipeline.slots import Slot, Slots
from rpcbench.pipeline.stash import Stash
from rpcbench.pipeline.ties import Copies, Tie, TiedGradients
from rpcbench.rpc import RRef
from rpcbench.words.events import Row
from rpcbench.words.futures import Future

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], torch.Tensor | float]
_Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker does in one step. `inputs`: for stages that take some of the model's; `targets`: for the last.

    `weights` scale the micro-batches' losses. Where it is not to `train`, the last stage's outputs are sent back, or
    with targets what the loss and `metrics` say of them. For those who look on: all `workers` that take part, and the
    `ideal` idle share. `seed` is the step's, for random numbers.
    """

    step: int
    ops: tuple[Op, ...]
    inputs: Inputs
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


def _deliver(key: str, slot: Slot, message: tuple[Any, ...]) -> None:
    """On a worker, from another stage: activations or gradients. Dropped where the pipeline is gone."""
    worker = current.current().part(_Directory).workers.get(key)
    if worker is not None:
        worker.slots.put(slot, message)


class StageWorker:
    """The stages of one pipeline, `key`, on one worker. `modules`: stage → module; `homes`: stage → worker id.

    `record`: the file behind what the driver reads if this process dies, empty where there is none.
    """

    def __init__(
        self,
        key: str,
        modules: dict[int, RRef[Any]],
        homes: dict[int, int],
        loss_fn: LossFn | None,
        ports: dict[int, Ports],
        ties: Sequence[Tie],
        record: str,
        numerics: Numerics,
    ) -> None:
        self.key = key
        self.modules: dict[int, nn.Module] = {stage: rref.local_value() for stage, rref in modules.items()}
        self.homes = homes
        self.loss_fn = loss_fn
        self.ports = ports
        self.copies = Copies(ties, self.modules)
        self.record = Record.at(record)
        self.computing = Computing(numerics, self.modules.values())
        self.slots = Slots()
        self.optimizers: dict[int, LocalOptimizer | None] = {}
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

    def learn(self, optimizers: dict[int, RRef[Any]]) -> None:
        """Take the stages' optimizers, for schedules that update within a step."""
        self.optimizers = {stage: rref.local_value() for stage, rref in optimizers.items()}

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

    def between_steps(self) -> AbstractContextManager[object]:
        """No step runs here inside, not even the rest of one that was aborted."""
        return self._turn

    def parameters(self, stage: int) -> list[nn.Parameter]:
        return self._params[stage]

    def values(self, stage: int, made: Any) -> tuple[Any, ...]:
        """What the stage's module has returned, as the values that go to other stages."""
        return sendable(made if isinstance(self.modules[stage], Segment) else (made,), stage)

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
        self._tied = TiedGradients(task.step, worker.copies)
        self._stash = Stash(task.ops, worker.modules, worker.optimizers, task.weights)
        self._exchange = Exchange(task.step, worker.ports, worker.slots, task.inputs)
        self._kept: dict[tuple[int, int], tuple[_Values, _Values]] = {}  # (stage, micro-batch) → taken, given
        self._held: dict[int, int] = {}  # stage → bytes of what is kept
        self._halves: dict[tuple[int, int], Halves] = {}
        self._ways: dict[Kind, tuple[Callable[[Op], Any], Callable[[Op, Any], Messages]]] = {
            Kind.FORWARD: (self._exchange.taken, self._forward),
            Kind.BACKWARD: (self._gradients, self._backward),
            Kind.INPUT: (self._gradients, self._input_half),
            Kind.WEIGHT: (lambda op: None, self._weight_half),
            Kind.RECOMPUTE: (lambda op: None, self._recompute),
            Kind.UPDATE: (lambda op: None, self._update),
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
        self._worker.record.note(self._task.step, Doing.READY)
        if self._task.train:
            self._add_up_tied()
        for future in self._sent:
            future.wait()
        return self._report

    def _operate(self, index: int, op: Op) -> None:
        """Wait for what the operation needs, run it, send what it makes."""
        step, note = self._task.step, self._worker.record.note
        needs, runs = self._ways[op.kind]
        note(step, Doing.WAITS, index)
        needed = needs(op)
        note(step, Doing.RUNS, index)
        key, row = self._log.begin(step, index, op)
        try:
            made = runs(op, needed)
        except BaseException:
            self._log.end(key, row, sent=0, held=self._held.get(op.stage, 0), failed=True)
            raise
        sent = sum(nbytes(message) for _, message in made)
        self._report.rows.append(self._log.end(key, row, sent=sent, held=self._held.get(op.stage, 0)))
        if made:
            note(step, Doing.SENDS, index)
        for slot, message in made:
            self._send(slot, message)

    # -- forward
    def _forward(self, op: Op, values: _Values) -> Messages:
        last = op.stage == self._worker.last_stage
        if not self._task.train:
            made = self._module(op, values)
            if last:
                self._report.outputs[op.microbatch] = self._shown(op, made)
            return [] if last else self._exchange.given(op, self._worker.values(op.stage, made))
        given = self._once(op, values) if (op.stage, op.microbatch) in self._later else self._compute(op, values)
        if last:
            self._report.losses[op.microbatch] = given[0].item()
        self._keep(op, values, given)
        return self._exchange.given(op, given)

    def _shown(self, op: Op, output: Any) -> Any:
        """What the driver gets of an output in evaluation: itself, or its scores where there are targets."""
        if self._task.targets is None:
            return output
        loss = {} if self._worker.loss_fn is None else {"loss": self._worker.loss_fn}
        judges: dict[str, Metric] = {**loss, **(self._task.metrics or {})}
        output = self._worker.computing.judged(output)
        return {name: float(judge(output, self._task.targets[op.microbatch])) for name, judge in judges.items()}

    def _module(self, op: Op, values: _Values) -> Any:
        """The stage's own forward."""
        module = self._worker.modules[op.stage]
        with self._worker.computing.forward(module, first=op.kind is Kind.FORWARD):
            return self._stash.forward(op, values)

    def _compute(self, op: Op, values: _Values) -> _Values:
        """What the stage gives; at the last stage the loss."""
        with seeded(seed(self._task.seed, op)):
            made = self._module(op, values)
            if op.stage < self._worker.last_stage:
                return self._worker.values(op.stage, made)
            assert self._worker.loss_fn is not None and self._task.targets is not None
            loss = self._worker.loss_fn(self._worker.computing.judged(made), self._task.targets[op.microbatch])
            return (loss * self._task.weights[op.microbatch],)

    def _once(self, op: Op, values: _Values) -> _Values:
        """As `_compute`, and nothing is kept for a backward."""
        wants = bool(self._worker.parameters(op.stage)) or any(map(requires_grad, values))
        with torch.no_grad():
            given = self._compute(op, values)
        return tuple(
            value.detach().requires_grad_(wants and (value.is_floating_point() or value.is_complex()))
            if isinstance(value, torch.Tensor)
            else value
            for value in given
        )

    def _recompute(self, op: Op, _: None) -> Messages:
        values, _given = self._let_go(op)
        self._keep(op, values, self._compute(op, values))
        return []

    def _keep(self, op: Op, values: _Values, given: _Values) -> None:
        """What a stage took and gave, for the backward. What it saves in between counts for nobody."""
        self._kept[op.stage, op.microbatch] = (values, given)
        self._held[op.stage] = self._held.get(op.stage, 0) + nbytes(values) + nbytes(given)

    def _let_go(self, op: Op) -> tuple[_Values, _Values]:
        values, given = self._kept.pop((op.stage, op.microbatch))
        self._held[op.stage] -= nbytes(values) + nbytes(given)
        return values, given

    # -- backward
    def _gradients(self, op: Op) -> Gradients:
        """Those of what the stage gave; none at the last stage."""
        _values, given = self._kept[op.stage, op.microbatch]
        return self._exchange.gradients(op, len(given))

    def _roots(self, op: Op, gradients: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Where the stage's backward begins: what it gave, as far as gradients came for it, or the loss."""
        _values, given = self._kept[op.stage, op.microbatch]
        if op.stage == self._worker.last_stage:
            return [loss for loss in given if requires_grad(loss)], None
        came = [(g, grad) for g, grad in zip(given, gradients, strict=True) if grad is not None and requires_grad(g)]
        return [root for root, _ in came], [gradient for _, gradient in came]

    def _backward(self, op: Op, gradients: Gradients) -> Messages:
        roots, given = self._roots(op, gradients)
        values, _ = self._let_go(op)
        params = self._stash.parameters(op, self._worker.parameters(op.stage))
        inputs = [*self._exchange.wanted(op, values), *params]
        found: Sequence[Any] = [None] * len(inputs)
        if roots and inputs:
            found = torch.autograd.grad(roots, inputs, given, allow_unused=True)
        pairs = list(zip(inputs, found, strict=True))
        first = len(inputs) - len(params)
        self._add_up(op, [(param, grad) for param, grad in pairs[first:] if grad is not None])
        return self._exchange.returned(op, values, pairs[:first])

    def _input_half(self, op: Op, gradients: Gradients) -> Messages:
        values, _ = self._kept[op.stage, op.microbatch]
        roots, given = self._roots(op, gradients)
        wanted = self._exchange.wanted(op, values)
        params = self._stash.parameters(op, self._worker.parameters(op.stage))
        found: list[torch.Tensor | None] = [None] * len(wanted)
        if roots and (wanted or params):
            halves = self._halves[op.stage, op.microbatch] = Halves(roots, given, wanted, params)
            found = halves.inputs()
        return self._exchange.returned(op, values, list(zip(wanted, found, strict=True)))

    def _weight_half(self, op: Op, _: None) -> Messages:
        self._let_go(op)
        halves = self._halves.pop((op.stage, op.microbatch), None)
        if halves is not None:
            self._add_up(op, halves.weights())
        return []

    def _add_up(self, op: Op, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients of parameters add up in the step's context; those of tied ones are kept until the end."""
        left = self._stash.keep(op, leaves)
        if self._context is not None and left:
            self._recorder.accumulate_leaves(self._context, self._tied.keep(left))

    def _update(self, op: Op, _: None) -> Messages:
        self._stash.update(op)
        return []

    def _add_up_tied(self) -> None:
        for slot, message in self._tied.messages():
            self._send(slot, message)
        if self._context is not None:
            self._recorder.accumulate_leaves(self._context, self._tied.totals(self._worker.slots.take))

    # -- to another stage
    def _send(self, slot: Slot, message: tuple[Any, ...]) -> None:
        to = self._worker.homes[slot.stage]
        if to == self._agent.id:
            self._worker.slots.put(slot, cut_off(message))
            return
        self._sent = [future for future in self._sent if not _succeeded(future)]
        self._sent.append(self._agent.call(to, _deliver, (self._worker.key, slot, message), timeout=0))


def _succeeded(future: Future[Any]) -> bool:
    """Done without an error; an error is kept, to be raised at the end of the step."""
    if not future.done():
        return False
    future.value()
    return True

"""One step on one worker: the loop that runs its list of operations, and what these hand to each other.

All of it happens in the step's autograd context: what is sent to the stage of another worker is a recorded send, and a
recv where it is taken, as with any call; gradients of parameters add up in the context. What a stage takes and gives is
a tuple of values here; a stage of a plain chain has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcbench.agent import current
from rpcbench.autograd import recorder
from rpcbench.pipeline.chance import seed, seeded
from rpcbench.pipeline.exchange import Exchange, Gradients, Messages, nbytes, requires_grad
from rpcbench.pipeline.halves import Halves
from rpcbench.pipeline.oplog import DONE, FAILED, OpLog
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.record import Doing
from rpcbench.pipeline.shared import Shared
from rpcbench.pipeline.stage import StageWorker
from rpcbench.pipeline.stash import Leaves, Stash
from rpcbench.pipeline.sums import Sums
from rpcbench.pipeline.tasks import Metric, Report, Task
from rpcbench.pipeline.ties import TiedGradients

_Values = tuple[Any, ...]


class Execution:
    """Made for one step; `run` it once."""

    def __init__(self, worker: StageWorker, task: Task) -> None:
        self._worker = worker
        self._task = task
        self._log = current.current().part(OpLog)
        self._recorder = recorder()
        self._context = self._recorder.current()
        self._tied = TiedGradients(task.step, worker.copies)
        self._sums = Sums({} if self._context is None else self._recorder.gradients(self._context))
        self._stash = Stash(task.ops, worker.modules, worker.optimizers, task.weights)
        self._shared = Shared(task.step, worker.column, worker.computing.norms)
        self._exchange = Exchange(task.step, worker.ports, worker.mail.take, task.inputs)
        self._kept: dict[tuple[int, int], tuple[_Values, _Values]] = {}  # (stage, micro-batch) → taken, given
        self._held: dict[int, int] = {}  # stage → bytes of what is kept
        self._halves: dict[tuple[int, int], Halves] = {}
        self._leaves: Leaves = []  # parameters with their gradients, from the latest operation
        self._ways: dict[Kind, tuple[Callable[[Op], Any], Callable[[Op, Any], Messages]]] = {
            Kind.FORWARD: (self._exchange.taken, self._forward),
            Kind.BACKWARD: (self._gradients, self._backward),
            Kind.INPUT: (self._gradients, self._input_half),
            Kind.WEIGHT: (lambda op: None, self._weight_half),
            Kind.RECOMPUTE: (lambda op: None, self._recompute),
            Kind.UPDATE: (lambda op: None, self._update),
            Kind.ALL_REDUCE: (lambda op: self._shared.ready(op.stage), self._all_reduce),
        }
        self._later = {(op.stage, op.microbatch) for op in task.ops if op.kind is Kind.RECOMPUTE}
        self._reduced = 0  # bytes of the latest all-reduce
        self._report = Report()

    def run(self) -> Report:
        """Returns when all operations of this worker are done."""
        self._worker.mail.begin(self._task.step, self._task.window)
        try:
            return self._logged()
        finally:
            self._worker.slots.finish(self._task.step)

    def _logged(self) -> Report:
        task = self._task
        column = self._worker.column
        replica = None if column is None else column.rank
        row = self._log.open(task.step, task.ops, task.workers, task.ideal, replica)
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
        if self._context is not None and self._task.train:
            self._add_up_tied()
            self._recorder.replace_leaves(self._context, self._sums.leaves())
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
            failed = not self._worker.slots.aborted(step)  # else another one has, and this lacks what went with it
            self._log.end(key, row, sent=0, held=self._held.get(op.stage, 0), failed=failed)
            raise
        sent = self._reduced if op.kind is Kind.ALL_REDUCE else sum(nbytes(message) for _, message in made)
        self._report.rows.append(self._log.end(key, row, sent=sent, held=self._held.get(op.stage, 0)))
        if made:
            note(step, Doing.SENDS, index)
        for slot, message in made:
            self._worker.mail.send(slot, message)
        self._add_up(op)

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
        self._leaves = self._stash.keep(op, [(param, grad) for param, grad in pairs[first:] if grad is not None])
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
            self._leaves = self._stash.keep(op, halves.weights())
        return []

    def _add_up(self, op: Op) -> None:
        """After what others wait for has been sent. Gradients of tied parameters are kept until the end."""
        leaves, self._leaves = self._leaves, []
        if op.kind is not Kind.ALL_REDUCE:
            leaves = self._shared.add(op.stage, self._worker.parameters(op.stage), leaves)
        self._sums.add(self._tied.keep(leaves))

    def _all_reduce(self, op: Op, agreed: int) -> Messages:
        module, params = self._worker.modules[op.stage], self._worker.parameters(op.stage)
        self._leaves, self._reduced = self._shared.total(op.stage, module, params, agreed)
        return []

    def _update(self, op: Op, _: None) -> Messages:
        self._stash.update(op)
        return []

    def _add_up_tied(self) -> None:
        for slot, message in self._tied.messages():
            self._worker.mail.send(slot, message)
        self._sums.add(self._tied.totals(self._worker.slots.take))

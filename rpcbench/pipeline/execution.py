"""One step on one worker: the loop that runs its operations, what these hand to each other, and what a driver asks.

All of it happens in the step's autograd context: what is sent to the stage of another worker is a recorded send, and a
recv where it is taken, as with any call; gradients of parameters add up here, and are the context's at the end. What a
stage takes and gives is a tuple of values here; a stage of a plain chain has one.

What goes wrong in a user's stage or loss is told in words: which operation it was, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from rpcbench.autograd import recorder
from rpcbench.base.errors import PipelineError
from rpcbench.base.rebuild import add_note
from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.data_parallel import GradientAllReduce
from rpcbench.pipeline.exchange import Exchange, Gradients, Messages, nbytes, requires_grad
from rpcbench.pipeline.gradient_sums import EngineSums, SplitBackward, Sums, TiedGradients
from rpcbench.pipeline.ops import Kind, Op, places_in
from rpcbench.pipeline.recompute import begin_rng, resume_rng, seed
from rpcbench.pipeline.split import Groups, grouped
from rpcbench.pipeline.stage import StageWorker, here
from rpcbench.pipeline.step_log import DONE, FAILED, PLACES, WorkerPhase, noted
from rpcbench.pipeline.tasks import Apply, Metric, Report, Task
from rpcbench.pipeline.weight_stash import WeightStash
from rpcbench.rpc import RRef
from rpcbench.runtime.handles import layout_of

IN_PLACE = (
    "a stage changes in place what it takes, which the stage before and the backward need as it was: let its first "
    "module do that out of place, or cut the model elsewhere (balance=, at=)"
)
DETACHED = (
    "the loss needs no gradient although there are parameters to train: loss_fn or the last stage has detached it, so "
    "nothing could learn"
)
_NAMES = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.INPUT: "the gradient of the input",
    Kind.WEIGHT: "the gradients of the weights",
    Kind.RECOMPUTE: "the forward for its backward",
    Kind.UPDATE: "the optimizer's step",
    Kind.ALL_REDUCE: "the sum over replicas",
}


def explain(error: BaseException, op: Op, step: int) -> None:
    """Say on an error what it came of."""
    what = _NAMES[op.kind] + ("" if op.kind is Kind.ALL_REDUCE else f" of micro-batch {op.microbatch}")
    add_note(error, f"in {op.label} of stage {op.stage}, {what}, in step {step}")
    if isinstance(error, RuntimeError) and "used in an in-place operation" in str(error):
        add_note(error, IN_PLACE)


def scalar(loss: Any) -> Tensor:
    """What a loss function has returned. PipelineError where that is not one number in a tensor."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = layout_of(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise PipelineError(f"loss_fn must give one number, in a tensor, for each micro-batch; it has given {found}")


def versions(values: Sequence[Any]) -> list[int]:
    """They grow where a tensor among these is changed in place."""
    return [value._version for value in values if isinstance(value, Tensor)]


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
        report = StepExecution(worker, task).run()
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
            note(what.step, WorkerPhase.APPLIES, stage)
            optimizer.step(what.context)
    note(what.step, WorkerPhase.APPLIED)
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


_Values = tuple[Any, ...]
_PLAIN = frozenset((Tensor, nn.Parameter))


class StepExecution:
    """Made for one step; `run` it once."""

    def __init__(self, worker: StageWorker, task: Task) -> None:
        self._worker, self._task = worker, task
        self._step = task.step
        self._context = worker.recorder.current()
        self._tied = TiedGradients(task.step, worker.copies)
        before = {} if self._context is None else worker.recorder.gradients(self._context)
        self._sums = Sums(worker.params, before)
        usual = task.train and not before and not places_in(task.plan, Kind.WEIGHT) | places_in(task.plan, Kind.UPDATE)
        self._engine_sums = EngineSums(worker.summable if usual else {})
        self._bounds = microbatch.bounds(task.samples, task.microbatches, *worker.share)
        self._weights = microbatch.factors(task.samples, task.microbatches, task.reduction, task.whole)
        self._stash = WeightStash(task.plan, worker.modules, worker.optimizers, self._weights)
        self._shared = GradientAllReduce(task.step, worker.column, worker.computing.norms)
        self._exchange = Exchange(task.step, worker.ports, worker.mail.take, self._inputs)
        self._kept: dict[tuple[int, int], tuple[_Values, _Values, int]] = {}  # see `_keep`
        self._held: dict[int, int] = dict.fromkeys(worker.modules, 0)  # stage → bytes of what is kept
        self._halves: dict[tuple[int, int], SplitBackward] = {}
        self._made: Gradients | None = None  # by the latest operation, for its stage's parameters
        self._ways: dict[Kind, tuple[Callable[[Op], Any], Callable[[Op, Any], Messages]]] = {
            Kind.FORWARD: (self._exchange.taken, self._forward),
            Kind.BACKWARD: (self._gradients, self._backward),
            Kind.INPUT: (self._gradients, self._input_half),
            Kind.WEIGHT: (lambda op: None, self._weight_half),
            Kind.RECOMPUTE: (lambda op: None, self._recompute),
            Kind.UPDATE: (lambda op: None, self._update),
            Kind.ALL_REDUCE: (lambda op: self._shared.ready(op.stage), self._all_reduce),
        }
        self._later = places_in(task.plan, Kind.RECOMPUTE)
        self._given = dict(zip(worker.inputs, task.inputs, strict=True))
        self._reduced = 0  # bytes of the latest all-reduce
        self._losses: dict[int, float] = {}
        self._outputs: dict[int, Any] = {}

    def run(self) -> Report:
        """Returns when all operations of this worker are done, and those of all, if the step is to be applied."""
        self._worker.mail.begin(self._step, self._task.window)
        try:
            report = self._logged()
            if self._task.applies:
                self._worker.accord.reach(self._step)
            return report
        finally:
            self._worker.slots.finish(self._step)

    def _logged(self) -> Report:
        task, worker = self._task, self._worker
        self._log = worker.log.open(task.step, task.plan, worker.workers, task.ideal, worker.replica)
        state = FAILED
        try:
            self._run()
            state = DONE
        finally:
            self._log.close(state)
        return Report(self._log.stamps, self._losses, self._outputs)

    def _run(self) -> None:
        train, worker = self._task.train, self._worker
        worker.modes.set(train)
        with torch.set_grad_enabled(train), worker.computing.step():
            self._operate()
        worker.mail.settle()
        worker.record.note(self._step, WorkerPhase.READY)
        if self._context is not None and train:
            self._add_up_tied()
            leaves = [*self._sums.leaves(), *self._engine_sums.leaves()]
            worker.recorder.replace_leaves(self._context, leaves)

    def _operate(self) -> None:
        """For each operation: wait for what it needs, run it, send what it makes."""
        log, send, word = self._log, self._worker.mail.send, self._worker.record.word
        waits, runs, sends = [
            noted(self._step, doing) for doing in (WorkerPhase.WAITS, WorkerPhase.RUNS, WorkerPhase.SENDS)
        ]
        for index, op in enumerate(self._task.ops):
            where, (needs, does) = index % PLACES, self._ways[op.kind]
            word[0] = waits + where
            needed = needs(op)
            word[0] = runs + where
            log.begin()
            try:
                made = does(op, needed)
            except BaseException as error:
                failed = self._failed()
                log.end(0, self._held[op.stage], failed)
                if failed:
                    explain(error, op, self._step)
                raise
            sent, self._reduced = self._reduced, 0
            for _, message in made:
                sent += nbytes(message)
            log.end(sent, self._held[op.stage])
            if made:
                word[0] = sends + where
                for slot, message in made:
                    send(slot, message)
            if self._made is not None:  # after what others wait for has been sent
                self._add_up(op, self._made)

    def _failed(self) -> bool:
        """Whether an error is of this operation; else another one has failed, and this lacks what went with it."""
        return not self._worker.slots.aborted(self._step)

    # -- forward
    def _inputs(self, op: Op) -> _Values:
        begin_, end = self._bounds[op.microbatch]
        inputs = self._worker.ports[op.stage].inputs
        return tuple([microbatch.part(self._given[number], begin_, end) for number in inputs])

    def _targets(self, op: Op) -> Any:
        return microbatch.part(self._task.targets, *self._bounds[op.microbatch])

    def _forward(self, op: Op, values: _Values) -> Messages:
        last = op.stage == self._worker.last_stage
        if not self._task.train:
            made = self._module(op, values)
            if last:
                self._outputs[op.microbatch] = self._shown(op, made)
            return [] if last else self._exchange.given(op, self._worker.values(op.stage, made))
        given = self._once(op, values) if (op.stage, op.microbatch) in self._later else self._compute(op, values)
        if last:
            self._losses[op.microbatch] = given[0].item() * self._weights[op.microbatch]
        self._keep(op, values, given)
        return self._exchange.given(op, given)

    def _shown(self, op: Op, output: Any) -> Any:
        """What the driver gets of an output in evaluation: itself, or its scores where there are targets."""
        if self._task.targets is None:
            return output
        loss = {} if self._worker.loss_fn is None else {"loss": self._worker.loss_fn}
        judges: dict[str, Metric] = {**loss, **(self._task.metrics or {})}
        output, targets = self._worker.computing.judged(output), self._targets(op)
        return {name: float(judge(output, targets)) for name, judge in judges.items()}

    def _module(self, op: Op, values: _Values) -> Any:
        """The stage's own forward."""
        if op.stage in self._worker.changing:
            values = tuple([value.clone() if isinstance(value, Tensor) else value for value in values])
        with self._worker.computing.forward(self._worker.modules[op.stage], op.kind is Kind.FORWARD):
            return self._stash.forward(op, values)

    def _compute(self, op: Op, values: _Values) -> _Values:
        """What the stage gives; at the last stage the loss."""
        worker, before = self._worker, begin_rng(seed(self._task.seed, op))
        try:
            made = self._module(op, values)
            if op.stage < worker.last_stage:
                return worker.values(op.stage, made)
            assert worker.loss_fn is not None
            loss = scalar(worker.loss_fn(worker.computing.judged(made), self._targets(op)))
            if not loss.requires_grad and torch.is_grad_enabled() and self._trains(op, values):
                raise PipelineError(DETACHED)
            return (loss,)
        finally:
            resume_rng(before)

    def _trains(self, op: Op, values: _Values) -> bool:
        """Whether a stage, or one before it, has something to train."""
        return bool(self._worker.params[op.stage]) or any(map(requires_grad, values))

    def _once(self, op: Op, values: _Values) -> _Values:
        """As `_compute`, and nothing is kept for a backward."""
        wants = self._trains(op, values)
        before = versions(values)
        with torch.no_grad():
            given = self._compute(op, values)
        if versions(values) != before:
            raise PipelineError(IN_PLACE)
        return tuple(
            value.detach().requires_grad_(wants and (value.is_floating_point() or value.is_complex()))
            if isinstance(value, Tensor)
            else value
            for value in given
        )

    def _recompute(self, op: Op, _: None) -> Messages:
        values, _given = self._let_go(op)
        self._keep(op, values, self._compute(op, values))
        return []

    def _keep(self, op: Op, values: _Values, given: _Values) -> None:
        """What a stage took and gave, for the backward, with its bytes. What it saves in between counts for nobody."""
        size = nbytes(values) + nbytes(given)
        self._kept[op.stage, op.microbatch] = (values, given, size)
        self._held[op.stage] += size

    def _let_go(self, op: Op) -> tuple[_Values, _Values]:
        values, given, size = self._kept.pop((op.stage, op.microbatch))
        self._held[op.stage] -= size
        return values, given

    # -- backward
    def _gradients(self, op: Op) -> Gradients:
        """Those of what the stage gave; none at the last stage."""
        return self._exchange.gradients(op, len(self._kept[op.stage, op.microbatch][1]))

    def _roots(self, op: Op, given: _Values, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Where the stage's backward begins: what it gave, as far as gradients came for it, or the loss, by its weight
        in the batch; to multiply that itself would be two more operations of torch."""
        if op.stage == self._worker.last_stage:
            losses = [loss for loss in given if requires_grad(loss)]
            return losses, [torch.full_like(loss, self._weights[op.microbatch]) for loss in losses]
        roots, came = [], []
        for value, gradient in zip(given, gradients, strict=True):
            if gradient is not None and requires_grad(value):
                roots.append(value)
                came.append(gradient)
        return roots, came

    def _backward(self, op: Op, gradients: Gradients) -> Messages:
        values, given = self._let_go(op)
        roots, came = self._roots(op, given, gradients)
        wanted = self._exchange.wanted(op, values)
        if op.stage in self._engine_sums:
            return self._exchange.returned(op, values, wanted, self._engine_sums.add(op.stage, roots, came, wanted))
        inputs = [*wanted, *self._stash.parameters(op, self._worker.params[op.stage])]
        found = _grad(roots, inputs, came) if roots and inputs else [None] * len(inputs)
        self._made = found[len(wanted) :]
        return self._exchange.returned(op, values, wanted, found[: len(wanted)])

    def _input_half(self, op: Op, gradients: Gradients) -> Messages:
        values, given, _ = self._kept[op.stage, op.microbatch]
        roots, came = self._roots(op, given, gradients)
        wanted = self._exchange.wanted(op, values)
        params = self._stash.parameters(op, self._worker.params[op.stage])
        found: Gradients = [None] * len(wanted)
        if roots and (wanted or params):
            halves = self._halves[op.stage, op.microbatch] = SplitBackward(roots, came, wanted, params)
            found = halves.inputs()
        return self._exchange.returned(op, values, wanted, found)

    def _weight_half(self, op: Op, _: None) -> Messages:
        self._let_go(op)
        halves = self._halves.pop((op.stage, op.microbatch), None)
        if halves is not None:
            params = self._stash.parameters(op, self._worker.params[op.stage])
            found = dict(halves.weights())
            self._made = [found.get(param) for param in params]
        return []

    # -- gradients of parameters
    def _add_up(self, op: Op, made: Gradients) -> None:
        """Unless they are for a step of the stage's own optimizer; those of replicas and tied parameters at the end."""
        self._made, params = None, self._worker.params[op.stage]
        if op.kind is Kind.ALL_REDUCE or not (self._stash.keep(op, made) or self._shared.add(op.stage, params, made)):
            self._sums.add(op.stage, self._tied.keep(op.stage, made))

    def _all_reduce(self, op: Op, agreed: int) -> Messages:
        module, params = self._worker.modules[op.stage], self._worker.params[op.stage]
        self._made, self._reduced = self._shared.total(op.stage, module, params, agreed)
        return []

    def _update(self, op: Op, _: None) -> Messages:
        self._stash.update(op)
        return []

    def _add_up_tied(self) -> None:
        for slot, message in self._tied.messages():
            self._worker.mail.send(slot, message)
        for stage, gradients in self._tied.totals(self._worker.slots.take).items():
            self._sums.add(stage, gradients)


def _grad(roots: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Gradients:
    """`torch.autograd.grad`, without its checks: what comes back for a value was made from one of its shape.

    They cost more than a small backward. Tensors of other classes, and what has no usual gradient, get them.
    """
    if not _PLAIN.issuperset(map(type, (*roots, *inputs))) or not all(map(Tensor.is_floating_point, roots)):
        return torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
    return _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )

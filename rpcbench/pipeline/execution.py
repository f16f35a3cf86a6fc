"""The worker's side of one pipeline step: the operation loop, and the functions that the driver calls on a worker.

Guarantees
- Every operation runs in the step's autograd context. A value for a stage on another worker is a recorded send there
  and a recorded recv where it is taken, as with any call.
- Gradients of parameters are summed on the worker. The context receives the sums at the end of the step.
- An error in a user's stage or loss function has a note that names the operation and, where known, the remedy.

Here a stage receives and returns a tuple of values; a stage of a plain chain has one.
"""

# Theory of operation
#
# The driver calls `run_step` with a `Task` on every worker. `StepExecution` runs the worker's list of operations in
# order; this list is the schedule. For each operation:
#
#     wait ─────────────► run ───────────────► send ──────────────► add up
#     for its input, in   its handler, from    its messages, by     gradients of parameters, after the
#     a slot (`Slots`)    `_op_handlers`       `Mailbox.send_values`       messages that other workers wait for
#
#     kind         waits for                   runs                                  sends
#     FORWARD      activations                 module; at the last stage also loss   activations
#     BACKWARD     gradients of its outputs    backward pass of the stage            gradients of its inputs
#     INPUT        gradients of its outputs    first half of a split backward pass   gradients of its inputs
#     WEIGHT       -                           second half: gradients of weights     -
#     RECOMPUTE    -                           forward again, now with a graph       -
#     ALL_REDUCE   all replicas of the stage   sum of its gradients over replicas    -
#
# After the last operation the copies of tied weights exchange gradients, and the sums become the leaves of the context.
# A task with `applies` then waits for the two-phase commit (`mailboxes`), and `_apply_gradients` steps the optimizers.
# The crash record has the phase:  WAITS ─► RUNS ─► SENDS ─► ... ─► READY ─► commit ─► APPLIES ─► APPLIED
#
# A step ends early when its slots are aborted: by `abort_step`, by a notice of another worker, or by the loss of a
# worker unless this one has voted. The next wait raises. `run_step` holds `worker.step_lock`, so a step begins only
# after the rest of an aborted one has returned.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
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
from rpcbench.pipeline.exchange import Exchange, Gradients, Messages, count_bytes, requires_grad
from rpcbench.pipeline.gradient_sums import EngineSums, SplitBackward, Sums, TiedGradients
from rpcbench.pipeline.ops import Kind, Op, places_of_kind
from rpcbench.pipeline.recompute import forward_seed, resume_rng, seed_generator, seeded_rng
from rpcbench.pipeline.split import Groups, parameter_groups
from rpcbench.pipeline.stage import StageWorker, worker_for
from rpcbench.pipeline.step_log import DONE, FAILED, INTERRUPTED, PLACES, WorkerPhase, phase_word
from rpcbench.pipeline.tasks import Apply, Metric, StepReport, Task
from rpcbench.rpc import RRef
from rpcbench.runtime.handles import layout_of

IN_PLACE = (
    "a stage modifies its input in place, but the stage before it and the backward pass need the original value: let "
    "its first module work out of place, or cut the model elsewhere (balance=, at=)"
)
DETACHED = (
    "the loss needs no gradient although there are parameters to train: loss_fn or the last stage has detached it, so "
    "nothing could learn"
)
_NAMES = {  # for the notes on errors
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.INPUT: "the gradient of the input",
    Kind.WEIGHT: "the gradients of the weights",
    Kind.RECOMPUTE: "the recomputed forward",
    Kind.ALL_REDUCE: "the sum over replicas",
}


def explain(error: BaseException, op: Op, step: int) -> None:
    """Add a note to an error that names its operation and step."""
    what = _NAMES[op.kind] + ("" if op.kind is Kind.ALL_REDUCE else f" of micro-batch {op.microbatch}")
    add_note(error, f"in {op.label} of stage {op.stage}, {what}, in step {step}")
    if isinstance(error, RuntimeError) and "used in an in-place operation" in str(error):  # of a leaf: the input
        add_note(error, IN_PLACE)


def scalar_loss(loss: Any) -> Tensor:
    """Return the result of a loss function. Raises PipelineError if it is not a tensor with one element."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = layout_of(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise PipelineError(f"loss_fn must return one number, in a tensor, for each micro-batch; it returned {found}")


def version_counters(values: Sequence[Any]) -> list[int]:
    """Return the version counters of the tensors; torch increments one at each change in place."""
    return [value._version for value in values if isinstance(value, Tensor)]


T = TypeVar("T")

running_op: ContextVar[Op | None] = ContextVar("rpcbench_op", default=None)
"""The operation whose stage runs forward on this thread; for hooks of the stage's modules."""


# -- when the pipeline is made
def make_optimizer(
    module: RRef[Any],
    name: Callable[[str], str],
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    groups: Groups | None = None,
) -> LocalOptimizer | None:
    """Make a stage's optimizer; None without trainable parameters. `name`: own name → un-split model's name."""
    named = [(name(own), p) for own, p in module.local_value().named_parameters() if p.requires_grad]
    if not named:
        return None
    # the plain parameters where no groups are given: a class of the user may make its own groups of them
    params = [parameter for _, parameter in named] if groups is None else parameter_groups(groups, named)
    optimizer = LocalOptimizer(optimizer_class, params, **kwargs)
    # groups may reorder parameters: state dicts count them in the module's order
    numbers = {parameter: number for number, (_, parameter) in enumerate(named)}
    optimizer.numbers = [numbers[parameter] for parameter in optimizer.params]
    return optimizer


def wait_until_created(rref: RRef[Any]) -> None:
    """Wait until the value exists. Raises the error of its creation."""
    rref.local_value()


def set_optimizers(key: str, optimizers: dict[int, RRef[Any]]) -> None:
    """Give the worker its stages' optimizers, which the driver creates after its `StageWorker`."""
    worker_for(key).optimizers = {stage: rref.local_value() for stage, rref in optimizers.items()}


# -- in a step
def run_step(key: str, task: Task) -> StepReport:
    """Run all operations of this worker in one step."""
    worker, context = worker_for(key), recorder().current_context()
    with worker.step_lock:  # the rest of an aborted step may still run on another thread
        report = StepExecution(worker, task).run_step()
        if task.applies:
            assert context is not None, "gradients are those of a context"  # and the commit is reached
            report = report._replace(over=_apply_gradients(worker, Apply(task.step, context, task.keeps, last=True)))
        return report


def abort_step(key: str, step: int, reason: str) -> bool:
    """Abort a step. Returns False where all workers have committed it: then it is applied."""
    return worker_for(key).slots.abort_step(step, reason)


def step_optimizers(key: str, *told: Any) -> bool:
    """Step the optimizers here, as an `Apply` says. Returns whether this worker has released the context."""
    return _apply_gradients(worker_for(key), Apply(*told))


def _apply_gradients(worker: StageWorker, what: Apply) -> bool:
    note = worker.record.store_phase
    if what.keeps:
        worker.keep_gradients(what.context)
    for stage, optimizer in worker.optimizers.items():
        if optimizer is not None:
            note(what.step, WorkerPhase.APPLIES, stage)  # after a death here, this stage may hold either step
            optimizer.step(what.context)
    note(what.step, WorkerPhase.APPLIED)
    return what.last and _let_go(worker, what)


def _let_go(worker: StageWorker, what: Apply) -> bool:
    """Release the context, if the workers of the pipeline and its driver are its only members."""
    # other members would forward the release to workers that still apply; workers that failed wait for the driver's
    known = worker.recorder.known_workers(what.context)
    if worker.recorder.agent.id == worker.driver or not known <= {worker.driver, *worker.workers}:
        return False
    worker.recorder.release_context(what.context, notified=known)
    return True


# -- between steps
def call_with_worker(key: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call a function with this worker's part of the pipeline."""
    return function(worker_for(key), *args)


def scale_gradients(_worker: StageWorker, context: int, factor: float) -> None:
    held = recorder().named_gradients(context)
    recorder().scale_gradients(context, list(held), factor)


def stage_state(worker: StageWorker, stage: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in worker.modules[stage].state_dict().items()}


def stage_gradients(worker: StageWorker, stage: int, context: int) -> dict[str, torch.Tensor]:
    held = recorder().named_gradients(context)
    return {name: held[param] for name, param in worker.modules[stage].named_parameters() if param in held}


_Values = tuple[Any, ...]
_PLAIN = frozenset((Tensor, nn.Parameter))


class StepExecution:
    """The execution of one step on one worker. Call `run_step` once."""

    def __init__(self, worker: StageWorker, task: Task) -> None:
        self._worker, self._task = worker, task
        self._step = task.step
        self._context = worker.recorder.current_context()  # None in evaluation outside a context
        self._tied = TiedGradients(task.step, worker.copies)
        before = {} if self._context is None else worker.recorder.named_gradients(self._context)  # of earlier `add`s
        self._sums = Sums(worker.params, before)
        # torch's engine can sum gradients only where each backward pass is one call and the sum starts empty
        usual = task.train and not before and not places_of_kind(task.plan, Kind.WEIGHT)
        self._engine_sums = EngineSums(worker.summable if usual else {})
        # the samples of each
        self._bounds = microbatch.microbatch_bounds(task.samples, task.microbatches, *worker.share)
        self._weights = microbatch.batch_loss_weights(task.samples, task.microbatches, task.reduction, task.whole)
        self._shared = GradientAllReduce(task.step, worker.replica_group, worker.forward_context.norms)
        self._exchange = Exchange(task.step, worker.ports, worker.mail.receive_values, self._inputs_of_op)
        self._kept: dict[tuple[int, int], tuple[_Values, _Values, int]] = {}  # (stage, micro-batch) → in, out, bytes
        self._held: dict[int, int] = dict.fromkeys(worker.modules, 0)  # stage → bytes in `_kept`
        self._halves: dict[tuple[int, int], SplitBackward] = {}  # between INPUT and WEIGHT
        self._made: Gradients | None = None  # of the latest operation, for its stage's parameters; not summed yet
        # kind → a function that waits for the input, and the handler that returns the messages to send
        self._op_handlers: dict[Kind, tuple[Callable[[Op], Any], Callable[[Op, Any], Messages]]] = {
            Kind.FORWARD: (self._exchange.receive_inputs, self._run_forward),
            Kind.BACKWARD: (self._receive_gradients, self._run_backward),
            Kind.INPUT: (self._receive_gradients, self._input_half),
            Kind.WEIGHT: (lambda op: None, self._weight_half),
            Kind.RECOMPUTE: (lambda op: None, self._run_recompute),
            Kind.ALL_REDUCE: (lambda op: self._shared.wait_for_replicas(op.stage), self._all_reduce),
        }
        self._later = places_of_kind(task.plan, Kind.RECOMPUTE)  # (stage, micro-batch) of forwards that run again
        self._given = dict(zip(worker.inputs, task.inputs, strict=True))  # number of a model input → samples
        self._reduced = 0  # bytes of the latest all-reduce
        self._losses: dict[int, float] = {}  # micro-batch → weighted loss
        self._outputs: dict[int, Any] = {}  # micro-batch → output or scores, in evaluation

    def run_step(self) -> StepReport:
        """Run the step. Returns after all operations here and, if the step is to be applied, after the commit."""
        self._worker.mail.begin_step(self._step, self._task.window)
        try:
            report = self._run_logged()
            if self._task.applies:
                self._worker.commit_protocol.wait_for_commit(self._step)
            return report
        finally:
            self._worker.slots.finish_step(self._step)  # also after an error: late messages of the step are dropped

    def _run_logged(self) -> StepReport:
        task, worker = self._task, self._worker
        self._log = worker.log.open_step(
            "", task.step, task.plan, worker.workers, task.ideal, task.samples, worker.replica
        )
        state = DONE
        try:
            self._run_and_commit()
        except BaseException:
            state = INTERRUPTED if worker.slots.is_interrupted(self._step) else FAILED
            raise
        finally:
            self._log.end_step(state, **self._loss_fields())  # an aborted step has a row, too
        return StepReport(self._log.stamps, self._losses, self._outputs)

    def _loss_fields(self) -> dict[str, float | None]:
        """Return this worker's part of the batch's loss for its row; none without the last stage."""
        task, loss = self._task, sum(self._losses.values())
        if task.reduction == "mean" and task.whole is not None:
            loss *= task.whole / task.samples  # the workers divided by `whole`
        # None for a number that a record or JSON cannot hold, as NaN
        return {"loss": loss if abs(loss) < 2**63 else None} if self._losses else {}

    def _run_and_commit(self) -> None:
        train, worker = self._task.train, self._worker
        worker.recorder.graph_events.step_began(self._context, self._step, worker.modules)
        worker.modes.set_training(train)
        with torch.set_grad_enabled(train), worker.forward_context.norms.step_scope():
            self._run_operations()
        worker.record.store_phase(self._step, WorkerPhase.READY)
        if self._context is not None and train:
            for slot, message in self._tied.gradient_messages():
                worker.mail.send_values(slot, message)
            for stage, gradients in self._tied.receive_totals(worker.slots.take_values).items():
                self._sums.add_gradients(stage, gradients)
            leaves = [*self._sums.summed_leaves(), *self._engine_sums.summed_leaves()]
            worker.recorder.passes.replace_gradients(self._context, leaves)

    def _run_operations(self) -> None:
        """Run the operations: for each, wait for its input, run it, send its messages, add up its gradients."""
        log, send, word = self._log, self._worker.mail.send_values, self._worker.record.word
        # prepared words: to note a phase in the crash record is then one store of eight bytes
        waits, runs, sends = [
            phase_word(self._step, doing) for doing in (WorkerPhase.WAITS, WorkerPhase.RUNS, WorkerPhase.SENDS)
        ]
        for index, op in enumerate(self._task.ops):
            where, (needs, does) = index % PLACES, self._op_handlers[op.kind]
            word[0] = waits + where
            needed = needs(op)
            word[0] = runs + where
            log.begin_op()  # after the wait: the stamps have the time of the operation alone
            try:
                made = does(op, needed)
            except BaseException as error:  # Ctrl-C, too, ends the log entry
                # if not of this operation, the step was aborted, and this is a consequence
                failed = not self._worker.slots.is_aborted(self._step)
                log.end_op(0, self._held[op.stage], failed)
                if failed:
                    explain(error, op, self._step)
                raise
            sent, self._reduced = self._reduced, 0
            for _, message in made:
                sent += count_bytes(message)
            log.end_op(sent, self._held[op.stage])
            if made:
                word[0] = sends + where
                for slot, message in made:
                    send(slot, message)
            if self._made is not None:  # after the send, which other workers wait for
                self._add_up(op, self._made)

    # -- forward
    def _inputs_of_op(self, op: Op) -> _Values:
        begin_, end = self._bounds[op.microbatch]
        inputs = self._worker.ports[op.stage].inputs
        return tuple([microbatch.part(self._given[number], begin_, end) for number in inputs])

    def _targets_of_op(self, op: Op) -> Any:
        return microbatch.part(self._task.targets, *self._bounds[op.microbatch])

    def _run_forward(self, op: Op, values: _Values) -> Messages:
        if not self._task.train:
            return self._run_evaluation(op, values)
        given = (
            self._compute_without_graph(op, values)
            if (op.stage, op.microbatch) in self._later
            else self._compute_outputs(op, values)
        )
        if op.stage == self._worker.last_stage:
            self._losses[op.microbatch] = given[0].item() * self._weights[op.microbatch]
        self._store_values(op, values, given)
        return self._exchange.output_messages(op, given)

    def _run_evaluation(self, op: Op, values: _Values) -> Messages:
        # dropout as a function, for example, draws in evaluation, too
        with seeded_rng(forward_seed(self._task.seed, op)):
            made = self._call_module(op, values)
            if op.stage == self._worker.last_stage:
                self._outputs[op.microbatch] = self._output_or_scores(op, made)
                return []
        return self._exchange.output_messages(op, self._worker.output_values(op.stage, made))

    def _output_or_scores(self, op: Op, output: Any) -> Any:
        """Return the output for the driver in evaluation, or its scores where there are targets."""
        if self._task.targets is None:
            return output
        loss = {} if self._worker.loss_fn is None else {"loss": self._worker.loss_fn}
        judges: dict[str, Metric] = {**loss, **(self._task.metrics or {})}
        output, targets = self._worker.forward_context.output_for_loss(output), self._targets_of_op(op)
        return {name: float(judge(output, targets)) for name, judge in judges.items()}

    def _call_module(self, op: Op, values: _Values) -> Any:
        if op.stage in self._worker.changes_inputs:  # the input is kept, perhaps in the memory of another stage
            values = tuple([value.clone() if isinstance(value, Tensor) else value for value in values])
        module = self._worker.modules[op.stage]
        before = running_op.set(op)
        try:
            with self._worker.forward_context.forward_scope(module, op.kind is Kind.FORWARD):
                return module(*values)
        finally:
            running_op.reset(before)

    def _compute_outputs(self, op: Op, values: _Values) -> _Values:
        """Return the stage's outputs; at the last stage its loss."""
        worker, before = self._worker, seed_generator(forward_seed(self._task.seed, op))
        try:
            made = self._call_module(op, values)
            if op.stage < worker.last_stage:
                return worker.output_values(op.stage, made)
            assert worker.loss_fn is not None
            loss = scalar_loss(worker.loss_fn(worker.forward_context.output_for_loss(made), self._targets_of_op(op)))
            if not loss.requires_grad and torch.is_grad_enabled() and self._has_trained_params(op, values):
                raise PipelineError(DETACHED)
            return (loss,)
        finally:
            resume_rng(before)  # a stage draws from the step's seed, so that a recomputed forward draws the same

    def _has_trained_params(self, op: Op, values: _Values) -> bool:
        """Return whether this stage, or one before it, has parameters to train."""
        return bool(self._worker.params[op.stage]) or any(map(requires_grad, values))

    def _compute_without_graph(self, op: Op, values: _Values) -> _Values:
        """Run the forward of a stage that is recomputed later: as `_compute_outputs`, without a graph."""
        wants = self._has_trained_params(op, values)
        before = version_counters(values)
        with torch.no_grad():
            given = self._compute_outputs(op, values)
        if version_counters(values) != before:  # the recomputed forward would start from another input
            raise PipelineError(IN_PLACE)
        return tuple(
            value.detach().requires_grad_(wants and (value.is_floating_point() or value.is_complex()))
            if isinstance(value, Tensor)
            else value
            for value in given
        )

    def _run_recompute(self, op: Op, _: None) -> Messages:
        values, _given = self._let_go(op)
        self._store_values(op, values, self._compute_outputs(op, values))
        return []

    def _store_values(self, op: Op, values: _Values, given: _Values) -> None:
        """Store inputs and outputs for the backward, with their bytes, without those that autograd saves."""
        size = count_bytes(values) + count_bytes(given)
        self._kept[op.stage, op.microbatch] = (values, given, size)
        self._held[op.stage] += size

    def _let_go(self, op: Op) -> tuple[_Values, _Values]:
        values, given, size = self._kept.pop((op.stage, op.microbatch))
        self._held[op.stage] -= size
        return values, given

    # -- backward
    def _receive_gradients(self, op: Op) -> Gradients:
        """Wait for the gradients of the stage's outputs; at the last stage there are none."""
        return self._exchange.receive_output_gradients(op, len(self._kept[op.stage, op.microbatch][1]))

    def _backward_roots(self, op: Op, given: _Values, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        if op.stage == self._worker.last_stage:
            # the weight is the loss's gradient: to multiply by it instead would be two more operations of torch
            losses = [loss for loss in given if requires_grad(loss)]
            return losses, [torch.full_like(loss, self._weights[op.microbatch]) for loss in losses]
        roots, root_gradients = [], []
        for value, gradient in zip(given, gradients, strict=True):
            if gradient is not None and requires_grad(value):  # a later stage may not use each output
                roots.append(value)
                root_gradients.append(gradient)
        return roots, root_gradients

    def _run_backward(self, op: Op, gradients: Gradients) -> Messages:
        values, given = self._let_go(op)
        roots, root_gradients = self._backward_roots(op, given, gradients)
        wanted = self._exchange.inputs_that_need_grad(op, values)
        if op.stage in self._engine_sums:
            return self._exchange.input_gradient_messages(
                op, values, wanted, self._engine_sums.add_microbatch(op.stage, roots, root_gradients, wanted)
            )
        inputs = [*wanted, *self._worker.params[op.stage]]
        found = _compute_gradients(roots, inputs, root_gradients) if roots and inputs else [None] * len(inputs)
        self._made = found[len(wanted) :]
        return self._exchange.input_gradient_messages(op, values, wanted, found[: len(wanted)])

    def _input_half(self, op: Op, gradients: Gradients) -> Messages:
        values, given, _ = self._kept[op.stage, op.microbatch]  # kept until WEIGHT
        roots, root_gradients = self._backward_roots(op, given, gradients)
        wanted = self._exchange.inputs_that_need_grad(op, values)
        params = self._worker.params[op.stage]
        found: Gradients = [None] * len(wanted)
        if roots and (wanted or params):
            halves = self._halves[op.stage, op.microbatch] = SplitBackward(roots, root_gradients, wanted, params)
            found = halves.compute_input_gradients()
        return self._exchange.input_gradient_messages(op, values, wanted, found)

    def _weight_half(self, op: Op, _: None) -> Messages:
        self._let_go(op)
        halves = self._halves.pop((op.stage, op.microbatch), None)
        if halves is not None:
            params = self._worker.params[op.stage]
            found = dict(halves.compute_weight_gradients())
            self._made = [found.get(param) for param in params]
        return []

    # -- gradients of parameters
    def _add_up(self, op: Op, made: Gradients) -> None:
        """Add the latest operation's gradients to the stage's sums."""
        self._made, params = None, self._worker.params[op.stage]
        # the all-reduce and tied weights keep their gradients themselves: only the rest is summed here
        if op.kind is Kind.ALL_REDUCE or not self._shared.add_to_buckets(op.stage, params, made):
            self._sums.add_gradients(op.stage, self._tied.keep_tied_gradients(op.stage, made))

    def _all_reduce(self, op: Op, agreed: int) -> Messages:
        module, params = self._worker.modules[op.stage], self._worker.params[op.stage]
        self._made, self._reduced = self._shared.all_reduce_stage(op.stage, module, params, agreed)
        return []


def _compute_gradients(roots: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Gradients:
    """As `torch.autograd.grad`, without its checks, which cost more than a small backward pass."""
    # a gradient comes from a value of its shape; other classes and dtypes get the checks
    if not _PLAIN.issuperset(map(type, (*roots, *inputs))) or not all(map(Tensor.is_floating_point, roots)):
        return torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
    return _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )

"""Messages between stages in one step, and the slots in which they wait for the operation that needs them.

Guarantees
- A message goes straight from the worker of one stage to the worker of the other; in a context it is a recorded send.
- A stage waits for gradients exactly where it has sent a value that requires one, even if that is not used there. So a
  frozen stage waits for none.
- Gradients of a value that several stages take are summed in the order of the stages.
- An aborted step wakes all threads that wait for it. Later values for it, or for a step that is over, are dropped. So
  nothing is left after a step, however it ends.
- The thread that takes a value from another worker unpickles it.
"""

# Theory of operation
#
#     stage 0 ──h, enc──► stage 1 ──h──► stage 3     one message from a stage to each that takes some of its values,
#        └───────────enc────────────────────┘          and one back, with a gradient or None for each value
#
# A slot has the name (step, kind, stage, micro-batch, source). It is filled once, by its source, and emptied once.
#
#     kind                               micro-batch               source
#     F activations, B gradients         micro-batch               stage that sends
#     T gradient of a tied weight        number of the weight      stage that sends
#     A replica is ready, G an address   replica that takes        replica that sends
#     D work of the group is done        number of the tensor      own replica: filled on this worker
#     R worker is ready, O all are       id of the taker           id of the sender, see `mailboxes`
#
# The states of a step are in a table, `StepLife.transitions`; docs/internals/journey-of-a-step.md draws it.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import PipelineError, WorkerLostError
from rpcbench.base.futures import Waits, release_slot
from rpcbench.base.state_machine import StateMachine
from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.stage_graph import OUTSIDE, StageIO, ValuePath

Opened = Callable[[], Any]
"""Returns the content of a slot: values in a tuple, or one value that is no tuple."""
FORWARD, BACKWARD, TIED, READY, GROUP, DONE, VOTE, DECISION = map(ord, "FBTAGDRO")
"""Kinds are numbers, so that a slot has the same form on the wire."""
REPLICA_KINDS = READY, GROUP  # between workers of one replica group
COMMIT_KINDS = VOTE, DECISION  # of the two-phase commit


new_tuple = tuple.__new__
"""Makes a `Slot` or the like without the call of the class's own __new__."""


class Slot(NamedTuple):
    """The name of one message in a step."""

    step: int
    kind: int
    stage: int
    microbatch: int  # or the taker, see above
    source: int

    def __str__(self) -> str:
        """Return the name as in pictures: "F3 for stage 1"."""
        return _slot_text(self.kind, self.stage, self.microbatch)


@lru_cache(maxsize=1024)  # the same in each step
def _slot_text(kind: int, stage: int, microbatch: int) -> str:
    if kind in REPLICA_KINDS:
        return f"{kind:c} for replica {microbatch} of stage {stage}"
    if kind in COMMIT_KINDS:
        return f"{kind:c} for worker {microbatch}"
    return f"{kind:c}{microbatch} for stage {stage}"


Help = Callable[[Waits, Slot], object]
"""Run by a thread that waits for a slot: receives messages until the condition holds."""


# VOTED: not as the coordinator. COMMITTED: it can no longer be aborted. APPLYING: its operations have ended after that.
# OVER: they have ended without a commit. LOST: a process that every step needs has left.
StepState = StrEnum("StepState", "RUNNING VOTED COMMITTED APPLYING ABORTED LOST OVER")
RUNNING, VOTED, COMMITTED, APPLYING, ABORTED, LOST, OVER = StepState
StepEvent = StrEnum("StepEvent", "VOTES DECIDED STOPPED LOSS DECIDER_LOSS ENDED")
VOTES, DECIDED, STOPPED, LOSS, DECIDER_LOSS, ENDED = StepEvent


@dataclass(slots=True)
class StepLife(StateMachine[StepState, StepEvent]):
    """One step on one worker."""

    transitions = {
        RUNNING: {VOTES: VOTED, DECIDED: COMMITTED, STOPPED: ABORTED, LOSS: LOST, DECIDER_LOSS: LOST, ENDED: OVER},
        VOTED: {DECIDED: COMMITTED, STOPPED: ABORTED, LOSS: VOTED, DECIDER_LOSS: LOST, ENDED: OVER},
        COMMITTED: {STOPPED: COMMITTED, LOSS: COMMITTED, DECIDER_LOSS: COMMITTED, ENDED: APPLYING},
        APPLYING: {STOPPED: APPLYING, LOSS: APPLYING, DECIDER_LOSS: APPLYING},
        ABORTED: {STOPPED: ABORTED, LOSS: LOST, DECIDER_LOSS: LOST, ENDED: OVER},
        LOST: {STOPPED: LOST, LOSS: LOST, DECIDER_LOSS: LOST, ENDED: OVER},
        OVER: {STOPPED: OVER, LOSS: OVER, DECIDER_LOSS: OVER, ENDED: OVER},
    }  # fmt: skip
    reason: str = "it has ended on this worker"  # why it was aborted


class Slots:
    """The slots of one worker in one pipeline. Steps are numbered upward."""

    def __init__(self, help_along: Help = lambda *_: None) -> None:
        self._help_along = help_along
        self._lock = threading.Lock()
        self._changes = Condition()
        self._filled: dict[tuple[int, ...], Opened] = {}
        self._steps: dict[int, StepLife] = {}  # from their first event until a later one ends
        self._ended_through = -1  # this step and all before it are over
        self._closed = ""  # the reason why no further step can begin

    def put(self, slot: tuple[int, ...], values: Opened) -> None:
        with self._lock:  # else a value that comes while a step ends would stay
            if not self.is_aborted(slot[0]):
                self._filled[slot] = values
        self.wake_waiters()

    def take_values(self, slot: Slot) -> tuple[Any, ...]:
        """Wait for the values of a slot. Raises PipelineError if the step is aborted, WorkerLostError if all are."""
        while (values := self._filled.pop(slot, None)) is None:  # one operation under the GIL: no lock
            self.check_step(slot.step)
            self.wait_until(slot.step, lambda: slot in self._filled, lambda reached: self._help_along(reached, slot))
        found = values()  # unpickles, on this thread
        return found if type(found) is tuple else (found,)

    def wait_until(
        self, step: int, reached: Waits, help_along: Callable[[Waits], object] = lambda reached: None
    ) -> None:
        """Wait until `reached()` or the end of the step. The thread that changes either calls `wake_waiters`."""

        def is_decided() -> bool:
            return reached() or self.is_aborted(step)

        if not is_decided():
            with release_slot():  # the pool may start another thread
                help_along(is_decided)  # receives here, which saves a thread switch
                if not is_decided():
                    self._changes.wait_for(is_decided)

    def wake_waiters(self) -> None:
        """Wake the threads that wait, to check their conditions again."""
        self._changes.notify_all()

    def check_step(self, step: int) -> None:
        """Raise as `take_values` if the step cannot go on; WorkerLostError also if another worker has reported the
        loss."""
        state = self._state_of(step)
        if state is LOST:
            raise WorkerLostError(f"step {step} was aborted: {self._closed}")
        if state in (ABORTED, APPLYING, OVER):
            reason = self._steps.get(step, StepLife(OVER)).reason
            died = reason.startswith(WorkerLostError.__name__)  # reasons travel as text
            raise (WorkerLostError if died else PipelineError)(f"step {step} was aborted: {reason}")

    def is_aborted(self, step: int) -> bool:
        """Return whether a step is aborted or over."""
        return self._state_of(step) in (ABORTED, LOST, APPLYING, OVER)

    def begin_step(self, step: int) -> None:
        """Begin a step on this worker. It may be aborted, or over, already."""
        with self._lock:
            self._life_of(step)

    def is_interrupted(self, step: int) -> bool:
        """Return whether a Ctrl-C in the notebook has aborted the step."""
        with self._lock:
            life = self._steps.get(step)
            return life is not None and life.reason.startswith(KeyboardInterrupt.__name__)  # reasons travel as text

    def abort_step(self, step: int, reason: str) -> bool:
        """Abort a step, which wakes all threads that wait for it. Returns False if it was committed."""
        with self._lock:
            life = self._life_of(step)
            state = life.apply_event(STOPPED, step)
            if state is ABORTED:
                life.reason = reason
            dropped = self._drop_values()
        self.wake_waiters()
        del dropped
        return state not in (COMMITTED, APPLYING)

    def advance_step(self, step: int, event: StepEvent) -> None:
        """Record this worker's vote for the commit of a step, or the decision. Raises as `check_step` if it was aborted
        before."""
        with self._lock:
            if not self.is_aborted(step):
                self._life_of(step).apply_event(event, step)
                return
        self.check_step(step)

    def close(self, reason: str, in_doubt: bool = True) -> None:
        """Abort all steps: a process that every step needs has left. `in_doubt`: abort also a step that this worker has
        voted for. Otherwise that step still waits for its decision or an abort, and is the last one."""
        with self._lock:
            self._closed = reason
            for step, life in self._steps.items():
                life.apply_event(DECIDER_LOSS if in_doubt else LOSS, step)
            dropped = self._drop_values()
        self.wake_waiters()
        del dropped

    def finish_step(self, step: int) -> None:
        """End a step on this worker, and drop its values."""
        with self._lock:
            self._life_of(step).apply_event(ENDED, step)
            self._ended_through = max(self._ended_through, step)
            self._steps = {n: life for n, life in self._steps.items() if n >= step and life.state is not OVER}
            dropped = self._drop_values()
        del dropped

    def _state_of(self, step: int) -> StepState:
        if (life := self._steps.get(step)) is not None:
            return life.state
        return LOST if self._closed else OVER if step <= self._ended_through else RUNNING

    def _life_of(self, step: int) -> StepLife:
        return self._steps.setdefault(step, StepLife(self._state_of(step)))

    def _drop_values(self) -> list[Any]:
        # returned, so that tensors are freed after the lock is released
        return [self._filled.pop(slot, None) for slot in list(self._filled) if self.is_aborted(slot[0])]

    def __len__(self) -> int:
        return len(self._filled)


Messages = list[tuple[Slot, tuple[Any, ...]]]
Gradients = Sequence[Tensor | None]


class Exchange:
    """One worker's messages in one step. `ports`: stage → its values; `inputs`: an op's inputs of the whole model."""

    def __init__(
        self,
        step: int,
        ports: dict[int, StageIO],
        take: Callable[[Slot], tuple[Any, ...]],
        inputs: Callable[[Op], tuple[Any, ...]],
    ) -> None:
        self._step, self._ports, self._take, self._inputs = step, ports, take, inputs
        self._awaited: dict[tuple[int, int], list[ValuePath]] = {}  # (stage, micro-batch) → where gradients come from

    # -- forward
    def receive_inputs(self, op: Op) -> tuple[Any, ...]:
        """Wait for the arguments of the stage's module, and return them in its order."""
        ports = self._ports[op.stage]
        received: list[Any] = []
        for source, _ in ports.takes:
            if source == OUTSIDE:
                received += self._inputs(op)
            else:
                received += self._take(new_tuple(Slot, (self._step, FORWARD, op.stage, op.microbatch, source)))
        return tuple([received[number] for number in ports.argument_order])

    def output_messages(self, op: Op, values: Sequence[Any]) -> Messages:
        """Return the messages with the stage's outputs, and note where gradients will come from."""
        messages = []
        for path in self._ports[op.stage].gives:
            message = tuple([values[place] for place in path.places])
            messages.append((new_tuple(Slot, (self._step, FORWARD, path.stage, op.microbatch, op.stage)), message))
            if any(map(requires_grad, message)):
                self._awaited.setdefault((op.stage, op.microbatch), []).append(path)
        return messages

    # -- backward
    def receive_output_gradients(self, op: Op, count: int) -> Gradients:
        """Wait for the gradients of the `count` outputs of a stage; each is the sum over all stages that took it."""
        total: list[Tensor | None] = [None] * count
        for source, places in self._awaited.pop((op.stage, op.microbatch), ()):
            message = self._take(new_tuple(Slot, (self._step, BACKWARD, op.stage, op.microbatch, source)))
            for place, gradient in zip(places, message, strict=True):
                total[place] = sum_optional_gradients(total[place], gradient)
        return total

    def inputs_that_need_grad(self, op: Op, values: Sequence[Any]) -> list[Tensor]:
        """Return the inputs that a gradient goes back for, each once."""
        there = [values[place] for path in self._ports[op.stage].gradient_paths for place in path.places]
        return list({id(value): value for value in there if requires_grad(value)}.values())

    def input_gradient_messages(
        self, op: Op, values: Sequence[Any], wanted: Sequence[Tensor], found: Gradients
    ) -> Messages:
        """Return the messages with the gradients found for the `inputs_that_need_grad` inputs."""
        grads = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
        messages = []
        for path in self._ports[op.stage].gradient_paths:
            own = [values[place] for place in path.places]
            if any(map(requires_grad, own)):
                message = tuple([grads.pop(id(value), None) for value in own])  # a value taken twice: only once
                messages.append((new_tuple(Slot, (self._step, BACKWARD, path.stage, op.microbatch, op.stage)), message))
        return messages


def sum_optional_gradients(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients; None is no gradient."""
    return second if first is None else first if second is None else first + second


def requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def detach_values(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values for another stage on this worker: the same memory, in a graph of its own."""
    return tuple(v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values)


def count_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors among the values, nested ones included."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            total += count_bytes(value.values())
        elif isinstance(value, tuple | list):
            total += count_bytes(value)
    return total

"""What goes between stages in one step, and the slots where it waits for the operation that needs it.

    stage 0 ──h, enc──► stage 1 ──h──► stage 3        one message from a stage to each that takes something of it,
       └───────────enc────────────────────┘           and one back, with a gradient or None for each value

Guarantees
- A message goes straight from the worker of one stage to that of the other; in a context it is a recorded send.
- A stage waits for gradients exactly where it gave something that requires one, whatever becomes of it there. So a
  frozen stage waits for none.
- Gradients of a value that several stages take are added up in the order of the stages.

A slot is named by step, kind (F: for a forward, B: gradients for a backward, T: gradient of a tied weight), stage,
micro-batch and the stage that it comes from; it is filled once, by that stage, and emptied once. Between replicas (A:
has the gradients of a stage, G: where it is found) it is named by the replica that takes it, in place of the
micro-batch, and the one that it comes from; and D is filled here, when an all-reduce is done. Those of a commit (R: a
worker is ready, O: all are) are named by worker ids in the same places. A step that was aborted wakes all threads that
wait; what still comes for it, or for a step that is over, is dropped. So nothing is left after a step, however it ends.
What comes from another worker is opened by the thread that takes it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import PipelineError, WorkerLostError
from rpcbench.base.futures import Waits, blocked
from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.stage_graph import OUTSIDE, StageIO, ValuePath

Opened = Callable[[], Any]
"""Gives what is in a slot: some values in a tuple, or one that is none."""
FORWARD, BACKWARD, TIED, READY, GROUP, DONE, MINE, ALL = map(ord, "FBTAGDRO")
"""Kinds are numbers, so that a slot is as it is on the wire."""
AMONG_REPLICAS = READY, GROUP
IN_ACCORD = MINE, ALL


class Slot(NamedTuple):
    step: int
    kind: int
    stage: int
    microbatch: int
    source: int

    def __str__(self) -> str:
        """As in pictures: "F3 for stage 1"."""
        return _told(self.kind, self.stage, self.microbatch)


@lru_cache(maxsize=1024)  # the same in each step
def _told(kind: int, stage: int, microbatch: int) -> str:
    if kind in AMONG_REPLICAS:
        return f"{kind:c} for replica {microbatch} of stage {stage}"
    if kind in IN_ACCORD:
        return f"{kind:c} for worker {microbatch}"
    return f"{kind:c}{microbatch} for stage {stage}"


Help = Callable[[Waits, Slot], object]
"""Of a thread that waits until something is reached: takes part in what brings it into this slot."""
Look = Callable[["Slots", Slot], object]
"""Of a thread that needs this slot: brings what lies ready for it, of which nobody is told."""


def _nothing(*_: object) -> None:
    """There is nothing to help along, or to look at."""


class Slots:
    """The slots of one worker in one pipeline. Steps are numbered upward. `changed` is called after each change that
    ends a wait."""

    def __init__(
        self, help_along: Help = _nothing, look: Look = _nothing, changed: Callable[[], object] = _nothing
    ) -> None:
        self._help_along, self._look, self._changed = help_along, look, changed
        self._lock = threading.Lock()
        self._changes = Changes()
        self._filled: dict[tuple[int, ...], Opened] = {}
        self._over: float = -1  # this step and all before are over
        self._agreed = -1  # the latest step of an accord, which nobody ends any more
        self._aborted: dict[int, str] = {}
        self._closed = ""  # why no step goes on any more

    def put(self, slot: tuple[int, ...], values: Opened) -> None:
        with self._lock:  # else what is put while a step ends would stay
            if slot[0] > self._over and slot[0] not in self._aborted:
                self._filled[slot] = values
        self.stir()

    def take(self, slot: Slot) -> tuple[Any, ...]:
        """What was put there, waited for. PipelineError where the step is aborted, WorkerLostError where all are."""
        self._look(self, slot)
        while (values := self._filled.pop(slot, None)) is None:
            self._await(slot)
        found = values()
        return found if type(found) is tuple else (found,)

    def _await(self, slot: Slot) -> None:
        self.check(slot.step)
        self.wait_for(slot.step, lambda: self._found(slot), lambda reached: self._help_along(reached, slot))

    def _found(self, slot: Slot) -> bool:
        self._look(self, slot)
        return slot in self._filled

    def has(self, slot: Slot) -> bool:
        """Whether it is filled now."""
        return slot in self._filled

    def wait_for(self, step: int, reached: Waits, help_along: Callable[[Waits], object] = lambda reached: None) -> None:
        """Wait until something of a step is reached, or that does not go on; who makes it so calls `stir`."""

        def decided() -> bool:
            return reached() or self.aborted(step)

        if not decided():
            with blocked():
                help_along(decided)
                if not decided():
                    self._changes.wait_for(decided)

    def stir(self) -> None:
        """Let those who wait look again."""
        self._changes.tell()
        self._changed()

    def check(self, step: int) -> None:
        """As `take`, where a step does not go on; WorkerLostError also where another worker has noticed the loss."""
        if self._closed:
            raise WorkerLostError(f"step {step} was aborted: {self._closed}")
        if self.aborted(step):
            reason = self._aborted.get(step, "it is over here")
            died = reason.startswith(WorkerLostError.__name__)
            raise (WorkerLostError if died else PipelineError)(f"step {step} was aborted: {reason}")

    def aborted(self, step: int) -> bool:
        """Whether this step is not to go on."""
        return step <= self._over or step in self._aborted

    def abort(self, step: int, reason: str) -> bool:
        """Nobody shall wait for this step any more. False where there was an accord on it."""
        with self._lock:
            if step == self._agreed:
                return False
            if step > self._over:
                self._aborted[step] = reason
            dropped = self._drop(step)
        self.stir()
        del dropped
        return True

    def agree(self, step: int) -> None:
        """From now on nobody ends this step. As `check`, where somebody has."""
        with self._lock:
            if not self.aborted(step):
                self._agreed = step
                return
        self.check(step)

    def close(self, reason: str) -> None:
        """Somebody has gone without whom no step can go on."""
        with self._lock:
            self._closed, self._over = reason, math.inf
            dropped = self._drop(self._over)
        self.stir()
        del dropped

    def finish(self, step: int) -> None:
        """The step is over on this worker."""
        with self._lock:
            self._over = max(self._over, step)
            self._aborted = {later: reason for later, reason in self._aborted.items() if later > step}
            dropped = self._drop(step)
        del dropped

    def _drop(self, last: float) -> list[Any]:
        """Returned, so that tensors are freed after the lock."""
        return [self._filled.pop(slot, None) for slot in list(self._filled) if slot[0] <= last]

    def __len__(self) -> int:
        return len(self._filled)


_new = tuple.__new__  # a step less than the class itself takes
Messages = list[tuple[Slot, tuple[Any, ...]]]
Gradients = Sequence[Tensor | None]


class Exchange:
    """One worker's side. `ports`: those of its stages; `take`: gives what is in a slot, waited for; `inputs`: gives
    those of the model's inputs that a stage takes, of an op's micro-batch."""

    def __init__(
        self,
        step: int,
        ports: dict[int, StageIO],
        take: Callable[[Slot], tuple[Any, ...]],
        inputs: Callable[[Op], tuple[Any, ...]],
    ) -> None:
        self._step, self._ports, self._take, self._inputs = step, ports, take, inputs
        self._awaited: dict[tuple[int, int], list[ValuePath]] = {}

    # -- forward
    def taken(self, op: Op) -> tuple[Any, ...]:
        """What the stage's module is to be called with, waited for."""
        ports = self._ports[op.stage]
        came: list[Any] = []
        for source, _ in ports.takes:
            if source == OUTSIDE:
                came += self._inputs(op)
            else:
                came += self._take(_new(Slot, (self._step, FORWARD, op.stage, op.microbatch, source)))
        return tuple([came[number] for number in ports.order])

    def given(self, op: Op, values: Sequence[Any]) -> Messages:
        """The messages for what the stage gives; gradients will be waited for where one is required."""
        messages = []
        for way in self._ports[op.stage].gives:
            message = tuple([values[place] for place in way.places])
            messages.append((_new(Slot, (self._step, FORWARD, way.stage, op.microbatch, op.stage)), message))
            if any(map(requires_grad, message)):
                self._awaited.setdefault((op.stage, op.microbatch), []).append(way)
        return messages

    # -- backward
    def gradients(self, op: Op, count: int) -> Gradients:
        """For each of the `count` values that the stage gave, the sum of the gradients from those who took it."""
        total: list[Tensor | None] = [None] * count
        for source, places in self._awaited.pop((op.stage, op.microbatch), ()):
            message = self._take(_new(Slot, (self._step, BACKWARD, op.stage, op.microbatch, source)))
            for place, gradient in zip(places, message, strict=True):
                before = total[place]
                total[place] = gradient if before is None else before if gradient is None else before + gradient
        return total

    def wanted(self, op: Op, values: Sequence[Any]) -> list[Tensor]:
        """Those of the values taken that a gradient goes back for, each once."""
        there = [values[place] for way in self._ports[op.stage].back for place in way.places]
        return list({id(value): value for value in there if requires_grad(value)}.values())

    def returned(self, op: Op, values: Sequence[Any], wanted: Sequence[Tensor], found: Gradients) -> Messages:
        """The messages with the gradients found for those wanted; for a value taken in two places, in the first."""
        if len(values) == 1:  # it has come one way
            ways = self._ports[op.stage].back if wanted else ()
            return [
                (_new(Slot, (self._step, BACKWARD, stage, op.microbatch, op.stage)), (found[0],)) for stage, _ in ways
            ]
        grads = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
        messages = []
        for way in self._ports[op.stage].back:
            own = [values[place] for place in way.places]
            if any(map(requires_grad, own)):
                message = tuple([grads.pop(id(value), None) for value in own])
                messages.append((_new(Slot, (self._step, BACKWARD, way.stage, op.microbatch, op.stage)), message))
        return messages


def requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def cut_off(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values as the other stage would get them, for one on this worker: same memory, another graph."""
    return tuple(v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values)


def nbytes(values: Iterable[Any]) -> int:
    """Of the tensors among them, or in those."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            total += nbytes(value.values())
        elif isinstance(value, tuple | list):
            total += nbytes(value)
    return total

"""Small tensors between stages of a pipeline lie in shared memory until they are taken, see `transport.shared_ring`.

Guarantees
- In an autograd context each value that goes this way is a recorded send and recv, as a parcel is: at once where
  somebody looks at tables, else before this worker waits, and at the end of its operations. Nobody waits for that.
- All else goes as a parcel: large values, several at once, tensors that are not plain, values for another host or with
  a device map, for one who waits for messages, or where somebody wants to see each message.
- What lies in a lane is found also when the connection that it came with has ended; what is of a later step stays
  there.
"""

from __future__ import annotations

import math
import queue
import secrets
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rpcbench.base.errors import ProtocolError
from rpcbench.pipeline.exchange import Slot, Slots
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.interceptors import InterceptedMessage
from rpcbench.transport.shared_ring import AWAY, LISTENS, NUMBERS, ROOM, WORKS, Consumer, EventReceiver, Producer
from rpcbench.transport.stream import StreamConnection

OPENED = "pipeline lanes"
"""The channel of notices (key, place, name): the sender gives values there, in the memory that it shares."""
LOOK = "pipeline values"
"""The channel of notices (key): one has come while its taker went away."""
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_DIMENSIONS = 6
_UNRECORDED = -1, -1
_MOST_VIEWS = 256
_SOON = 0.01
"""Seconds that are no long wait: a bell is all that a thread listens for, and it counts as one that runs."""
_new = tuple.__new__  # a step less than the class itself takes


class _Views:
    """Tensors that stand in the places of a ring. Each is made once: the same shapes come again and again."""

    def __init__(self, ring: Producer | Consumer) -> None:
        self._ring = ring
        self._made: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}

    def at(self, place: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
        """What is in a place, or is to be. ProtocolError for what does not fit there."""
        found = self._made.get((place, dtype, shape))
        return self._make(place, dtype, shape) if found is None else found

    def _make(self, place: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if not 0 <= dtype < len(_DTYPES) or min(shape, default=1) < 1 or count * _DTYPES[dtype].itemsize > ROOM:
            raise ProtocolError(f"a peer has given a value that cannot be: number {dtype} of {shape}")
        if len(self._made) >= _MOST_VIEWS:
            self._made.clear()
        with torch.inference_mode(False):  # else it could not be written to outside of that
            flat = torch.frombuffer(self._ring.places[place], dtype=_DTYPES[dtype], count=count)
            made = self._made[place, dtype, shape] = flat.view(shape)
        return made


def _fits(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and value.dtype in _NUMBER
        and value.is_contiguous()
        and 0 < value.nbytes <= ROOM
        and value.dim() <= _DIMENSIONS
    )


class _Giving:
    def __init__(self, ring: Producer, connection: StreamConnection) -> None:
        self.ring, self.connection = ring, connection
        self.views = _Views(ring)


class _Taking:
    def __init__(self, ring: Consumer) -> None:
        self.ring = ring
        self.views = _Views(ring)

    def next(self, last: int) -> tuple[Slot, Tensor, tuple[int, int]] | None:
        """What lies there next, for its slot, with its context and number there; nothing of steps after `last`."""
        ring = self.ring
        if (found := ring.next()) is None:
            return None
        place, (step, kind, stage, microbatch, source, context, message, wanted, number, dims, *sizes) = found
        if step > last:
            return None
        value = self.views.at(place, number, tuple(sizes[: max(0, dims)])).clone()
        ring.done(value.nbytes)
        if wanted:
            value.requires_grad_()
        return _new(Slot, (step, kind, stage, microbatch, source)), value, (context, message)


class StageRing:
    """One worker's, in the pipeline `key`. All but `offer` and `wake` is for the thread that runs the step."""

    def __init__(self, agent: Agent, key: str) -> None:
        self._agent, self._key = agent, key
        self._giving: dict[int, _Giving] = {}
        self._refused: set[int] = set()  # who can have no lane in this step
        self._offers: queue.SimpleQueue[tuple[int, Consumer]] = queue.SimpleQueue()
        self._taking: dict[int, list[_Taking]] = {}  # by who gives; the latest last, and those before it not empty yet
        self._brought: set[Slot] = set()  # of this step, in the slots, and not taken yet
        self._crossed: list[InterceptedMessage] = []  # not recorded yet
        self._ear: EventReceiver | None = None  # where the thread that runs the step waits

    def begin(self) -> None:
        """A step begins."""
        self._refused.clear()
        self._brought.clear()
        self._crossed.clear()  # of a step that has failed, and its context with it
        for giver in self._taking:
            self.be(giver, WORKS)

    # -- giving
    def give(self, to: int, slot: Slot, values: tuple[Any, ...], opens: bool = True) -> bool:
        """Whether the values lie where their taker finds them. `opens`: a lane, where there is none yet; else they say
        nothing but that they have come, and are not recorded."""
        if len(values) != 1 or self._watched() or not _fits(value := values[0]):
            return False
        lane, connection = self._giving.get(to), self._agent.connection(to)
        if lane is None or lane.connection is not connection or lane.ring.over:
            lane = self._open(to, connection) if opens else None
        if lane is None or not self._lay(lane, to, slot, value, opens):
            return False
        lane.ring.tell(partial(self._agent.notify, to, LOOK, self._key))
        return True

    def _watched(self) -> bool:
        """Whether each message is to be seen, so that nothing may go beside them."""
        return self._agent.bus.telling or not self._agent.links.plain

    def _lay(self, lane: _Giving, to: int, slot: Slot, value: Tensor, recorded: bool) -> bool:
        ring, recorder, shape = lane.ring, self._agent.values.recorder, tuple(value.shape)
        with ring.lock:
            place = ring.room()
            if place is None:
                return False
            named = (recorder.crossing() if recorded and recorder is not None else None) or _UNRECORDED
            number = _NUMBER[value.dtype]
            lane.views.at(place, number, shape).copy_(value.detach() if value.requires_grad else value)
            head = *slot, *named, value.requires_grad, number, len(shape), *shape
            ring.give(head + (0,) * (NUMBERS - len(head)), value.nbytes)
        self._note(named, to, slot, value.requires_grad)
        return True

    def _open(self, to: int, connection: StreamConnection | None) -> _Giving | None:
        """A lane to a worker, which hears of it; None where they have none in common."""
        if connection is None or to in self._refused:
            return None
        mapped = bool(self._agent.values.routes.to(to, False).targets)
        made = None if mapped else connection.store.open_lane(name := secrets.randbits(62))
        if made is None:
            self._refused.add(to)
            return None
        place, ring = made
        lane = self._giving[to] = _Giving(ring, connection)
        self._agent.notify(to, OPENED, (self._key, place, name))
        return lane

    # -- taking
    def offer(self, giver: int, ring: Consumer) -> None:
        """A lane that a worker has opened, to be looked at from the next look on."""
        self._offers.put((giver, ring))

    def take(self, slots: Slots, slot: Slot, giver: int) -> tuple[Tensor] | None:
        """What is to go into this slot, if it lies there next: straight to who takes it. Else None, and what does lie
        there next is in its own slot."""
        lanes = self._taking.get(giver)
        if not lanes or slots.has(slot) or slots.aborted(slot.step) or self._watched():
            return None
        if (found := lanes[0].next(slot.step)) is None:
            return None
        came, value, named = found
        if came != slot:
            self._bring(slots, giver, came, value, named)
            return None
        self._note(named, giver, None, value.requires_grad)
        return (value,)

    def listen(self, slots: Slots, slot: Slot, giver: int) -> bool:
        """Wait for a moment, for what is to go into this slot: whether something lies in the lane now."""
        lanes = self._taking.get(giver)
        if not lanes or len(lanes) > 1 or (ear := self.be(giver, LISTENS)) is None:
            return False
        ring, self._ear = lanes[0].ring, ear
        try:  # it looks at the slots after that, and who changes them looks for the ear
            ear.wait_while(lambda: not (ring.lies() or slots.has(slot) or slots.aborted(slot.step)), _SOON)
            return ring.lies()
        finally:
            self._ear = None
            ring.be(WORKS)

    def wake(self) -> None:
        """Something has changed that a thread may wait for, which listens; by any thread."""
        if (ear := self._ear) is not None:
            ear.ring()

    def look(self, slots: Slots, slot: Slot, giver: int) -> None:
        """Bring what lies there into the slots, up to this one."""
        while not self._offers.empty():
            source, ring = self._offers.get()
            self._taking.setdefault(source, []).append(_Taking(ring))
        lanes = self._taking.get(giver, ())
        while lanes and not slots.has(slot):
            if (found := lanes[0].next(slot.step)) is not None:
                self._bring(slots, giver, *found)
            elif len(lanes) > 1 and lanes[0].ring.next() is None:
                del lanes[0]  # nothing is given there since the next one was opened
            else:
                break

    def _bring(self, slots: Slots, giver: int, slot: Slot, value: Tensor, named: tuple[int, int]) -> None:
        if slots.aborted(slot.step):  # nor is its context there any more
            return
        self._note(named, giver, None, value.requires_grad)
        self._brought.add(slot)
        slots.put(slot, lambda: value)

    def brought(self, slot: Slot) -> bool:
        """Whether what has just been taken had come by a lane."""
        if slot in self._brought:
            self._brought.remove(slot)
            return True
        return False

    # -- both
    def _note(self, named: tuple[int, int], other: int, label: Slot | None, requires_grad: bool) -> None:
        if named != _UNRECORDED:
            self._crossed.append(_new(InterceptedMessage, (*named, other, label, requires_grad)))
            if self._agent.bus.listening:
                self.settle()

    def settle(self) -> None:
        """Record what has gone out and come in until now."""
        if self._crossed and (recorder := self._agent.values.recorder) is not None:
            crossed, self._crossed = self._crossed, []
            recorder.crossed(crossed)

    def be(self, giver: int, at: int) -> EventReceiver | None:
        """What this worker is at, for one who gives; always away where messages are watched here. The ear to listen at,
        if it does and there is one."""
        lanes = self._taking.get(giver)
        return lanes[-1].ring.be(AWAY if self._watched() else at) if lanes else None

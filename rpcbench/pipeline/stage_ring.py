"""Ring buffers in shared memory for small tensors between stages, see `transport.shared_ring`.

Guarantees
- In an autograd context each value sent through a ring is recorded as a send and a recv, as a parcel is: at once if a
  reader follows the tables, else before this worker waits, and at the end of its operations. No thread waits for the
  record.
- All other values are parcels: large ones, several at once, tensors that are not plain, values for another host or with
  a device map, for a receiver that waits for messages, and while each message must be visible.
- Values in a ring are found also after the connection with which it was opened has ended. Values of a later step stay
  in it.
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
from rpcbench.pipeline.exchange import Slot, Slots, new_tuple
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.interceptors import InterceptedMessage
from rpcbench.transport.shared_ring import (
    AWAY,
    NUMBERS,
    POLLING,
    SLOT_BYTES,
    WAITING,
    Consumer,
    EventReceiver,
    Producer,
)
from rpcbench.transport.stream import StreamConnection

RING_OPENED = "pipeline rings"
"""The channel of notices (key, place, name): the sender has opened a ring there, in the memory that it shares."""
VALUE_IN_RING = "pipeline values"
"""The channel of notices (key): a value has come while its receiver was waiting for messages."""
# Heads of values are integers: a dtype is its index here, the same in all processes of one version.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_DIMENSIONS = 6  # with these a head still fits its NUMBERS integers
_UNRECORDED = -1, -1  # context and number of a value outside of an autograd context
_MOST_VIEWS = 256  # a pipeline has few shapes; a faulty peer must not fill the memory
_MAX_WAIT = 0.01
"""Seconds of the longest wait on a ring: meanwhile the thread listens to nothing else, and its pool slot is taken."""


class _Views:
    """Tensors over the slots of a ring. Each is created once, because the same shapes are sent again and again."""

    def __init__(self, ring: Producer | Consumer) -> None:
        self._ring = ring
        self._made: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}

    def at(self, place: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor over a slot. ProtocolError for a dtype or shape that does not fit there."""
        found = self._made.get((place, dtype, shape))
        return self._make_view(place, dtype, shape) if found is None else found

    def _make_view(self, place: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if not 0 <= dtype < len(_DTYPES) or min(shape, default=1) < 1 or count * _DTYPES[dtype].itemsize > SLOT_BYTES:
            raise ProtocolError(f"a peer has sent an impossible value: dtype number {dtype}, shape {shape}")
        if len(self._made) >= _MOST_VIEWS:
            self._made.clear()
        with torch.inference_mode(False):  # an inference tensor could not be written to in training
            flat = torch.frombuffer(self._ring.places[place], dtype=_DTYPES[dtype], count=count)
            made = self._made[place, dtype, shape] = flat.view(shape)
        return made


def _may_carry(value: Any) -> bool:
    """Return whether a ring can carry this value: a plain, contiguous CPU tensor of at most ROOM bytes."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and value.dtype in _NUMBER
        and value.is_contiguous()
        and 0 < value.nbytes <= SLOT_BYTES
        and value.dim() <= _DIMENSIONS
    )


class _ProducerEnd:
    """The producer's end of a ring, with the connection whose memory it is in."""

    def __init__(self, ring: Producer, connection: StreamConnection) -> None:
        self.ring, self.connection = ring, connection
        self.views = _Views(ring)


class _ConsumerEnd:
    """The consumer's end of a ring."""

    def __init__(self, ring: Consumer) -> None:
        self.ring = ring
        self.views = _Views(ring)

    def next(self, last: int) -> tuple[Slot, Tensor, tuple[int, int]] | None:
        """Return the next value, with its slot, context and number; None if it is of a step after `last`."""
        ring = self.ring
        if (found := ring.next()) is None:
            return None
        place, (step, kind, stage, microbatch, source, context, message, wanted, number, dims, *sizes) = found
        if step > last:
            return None
        value = self.views.at(place, number, tuple(sizes[: max(0, dims)])).clone()
        ring.done(value.nbytes)  # the clone is complete, so the place is free again
        if wanted:
            value.requires_grad_()
        return new_tuple(Slot, (step, kind, stage, microbatch, source)), value, (context, message)


class StageRing:
    """All rings of one worker in the pipeline `key`. The thread that runs the step calls all but `offer` and `wake`."""

    def __init__(self, agent: Agent, key: str) -> None:
        self._agent, self._key = agent, key
        self._producers: dict[int, _ProducerEnd] = {}
        self._refused: set[int] = set()  # workers for which `_open_ring` has failed in this step
        self._new_rings: queue.SimpleQueue[tuple[int, Consumer]] = queue.SimpleQueue()
        self._consumers: dict[int, list[_ConsumerEnd]] = {}  # by sender; the latest last, older ones until empty
        self._from_ring: set[Slot] = set()  # filled from a ring in this step, and not taken yet
        self._crossed: list[InterceptedMessage] = []  # sends and recvs to be recorded
        self._event_receiver: EventReceiver | None = None  # set while the step's thread waits on a ring

    def begin(self) -> None:
        """Begin a step."""
        self._refused.clear()
        self._from_ring.clear()
        self._crossed.clear()  # of a step that has failed: its context has ended
        for giver in self._consumers:
            self.be(giver, POLLING)

    # -- giving
    def give(self, to: int, slot: Slot, values: tuple[Any, ...], opens: bool = True) -> bool:
        """Put a value into the receiver's ring; return whether that was possible. `opens`: open a ring if there is
        none, and record the value, unlike messages of the commit."""
        if len(values) != 1 or self._is_watched() or not _may_carry(value := values[0]):
            return False
        lane, connection = self._producers.get(to), self._agent.connection(to)
        if lane is None or lane.connection is not connection or lane.ring.over:  # the ring ends with its connection
            lane = self._open_ring(to, connection) if opens else None
        if lane is None or not self._write_value(lane, to, slot, value, opens):
            return False
        lane.ring.tell(partial(self._agent.notify, to, VALUE_IN_RING, self._key))
        return True

    def _is_watched(self) -> bool:
        """Return whether each message must be visible, so that none may bypass the connection."""
        return self._agent.bus.telling or not self._agent.links.plain

    def _write_value(self, lane: _ProducerEnd, to: int, slot: Slot, value: Tensor, recorded: bool) -> bool:
        ring, recorder, shape = lane.ring, self._agent.values.recorder, tuple(value.shape)
        with ring.lock:  # the value, its record and its head together, in the order of the ring
            place = ring.room()
            if place is None:  # full: the value is sent as a parcel
                return False
            named = (recorder.crossing() if recorded and recorder is not None else None) or _UNRECORDED
            number = _NUMBER[value.dtype]
            lane.views.at(place, number, shape).copy_(value.detach() if value.requires_grad else value)
            head = *slot, *named, value.requires_grad, number, len(shape), *shape
            ring.give(head + (0,) * (NUMBERS - len(head)), value.nbytes)
        self._note_crossing(named, to, slot, value.requires_grad)
        return True

    def _open_ring(self, to: int, connection: StreamConnection | None) -> _ProducerEnd | None:
        """Open a ring to a worker, and notify it; None if the two share no memory."""
        if connection is None or to in self._refused:
            return None
        mapped = bool(self._agent.values.routes.to(to, False).targets)  # a device map moves values to another device
        made = None if mapped else connection.store.create_ring(name := secrets.randbits(62))
        if made is None:
            self._refused.add(to)
            return None
        place, ring = made
        lane = self._producers[to] = _ProducerEnd(ring, connection)
        self._agent.notify(to, RING_OPENED, (self._key, place, name))
        return lane

    # -- taking
    def offer(self, giver: int, ring: Consumer) -> None:
        """Store a ring that a worker has opened; `look` adds it."""
        self._new_rings.put((giver, ring))

    def take(self, slots: Slots, slot: Slot, giver: int) -> tuple[Tensor] | None:
        """Return the value for this slot if it is next in the ring; else None, and put the next into its own slot."""
        lanes = self._consumers.get(giver)
        if not lanes or slots.has(slot) or slots.aborted(slot.step) or self._is_watched():
            return None
        if (found := lanes[0].next(slot.step)) is None:
            return None
        came, value, named = found
        if came != slot:
            self._store_value(slots, giver, came, value, named)
            return None
        self._note_crossing(named, giver, None, value.requires_grad)
        return (value,)

    def listen(self, slots: Slots, slot: Slot, giver: int) -> bool:
        """Wait at most `_MAX_WAIT` for the value of this slot; return whether a value is in the ring now."""
        lanes = self._consumers.get(giver)
        if not lanes or len(lanes) > 1 or (event_receiver := self.be(giver, WAITING)) is None:
            return False
        ring, self._event_receiver = lanes[0].ring, event_receiver
        # Slots are checked after `_event_receiver` is set; a thread that changes them reads it later: none is missed.
        try:
            event_receiver.wait_while(
                lambda: not (ring.lies() or slots.has(slot) or slots.aborted(slot.step)), _MAX_WAIT
            )
            return ring.lies()
        finally:
            self._event_receiver = None
            ring.be(POLLING)

    def wake(self) -> None:
        """Wake the step's thread if it waits on a ring, because slots have changed. Any thread may call it."""
        if (event_receiver := self._event_receiver) is not None:
            event_receiver.ring()

    def look(self, slots: Slots, slot: Slot, giver: int) -> None:
        """Move values from the ring into the slots, up to this slot."""
        while not self._new_rings.empty():
            source, ring = self._new_rings.get()
            self._consumers.setdefault(source, []).append(_ConsumerEnd(ring))
        lanes = self._consumers.get(giver, ())
        while lanes and not slots.has(slot):
            if (found := lanes[0].next(slot.step)) is not None:
                self._store_value(slots, giver, *found)
            elif len(lanes) > 1 and lanes[0].ring.next() is None:
                del lanes[0]  # empty, and nothing is sent there since the next one was opened
            else:
                break

    def _store_value(self, slots: Slots, giver: int, slot: Slot, value: Tensor, named: tuple[int, int]) -> None:
        if slots.aborted(slot.step):  # its context has ended
            return
        self._note_crossing(named, giver, None, value.requires_grad)
        self._from_ring.add(slot)
        slots.put(slot, lambda: value)

    def came_by_ring(self, slot: Slot) -> bool:
        """Return whether the value just taken from this slot had come through a ring."""
        if slot in self._from_ring:
            self._from_ring.remove(slot)
            return True
        return False

    # -- both
    def _note_crossing(self, named: tuple[int, int], other: int, label: Slot | None, requires_grad: bool) -> None:
        if named != _UNRECORDED:
            self._crossed.append(new_tuple(InterceptedMessage, (*named, other, label, requires_grad)))
            if self._agent.bus.listening:  # a reader follows the tables
                self.settle()

    def settle(self) -> None:
        """Record all sends and recvs until now, in one call."""
        if self._crossed and (recorder := self._agent.values.recorder) is not None:
            crossed, self._crossed = self._crossed, []
            recorder.crossed(crossed)

    def be(self, giver: int, at: int) -> EventReceiver | None:
        """Publish this worker's state, AWAY while messages are watched; return the event receiver if the state is
        WAITING."""
        lanes = self._consumers.get(giver)
        return lanes[-1].ring.be(AWAY if self._is_watched() else at) if lanes else None

"""What the workers of one pipeline send each other: values, into slots, and that a step is not to go on.

Guarantees
- A value goes straight to the worker that needs it, by a lane or as a parcel; on that worker itself it stays where it
  is.
- Where one does not arrive, its step ends on both sides. That a step ends is told again until it is heard.
- A stage is not further ahead of those that take of it than `credits` allows, and a lane has places.
- Nothing here holds the stages, so a pipeline is gone as soon as its driver lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rpcbench.base.futures import Waits
from rpcbench.pipeline.credits import COUNTED, Channel, Credits, channel
from rpcbench.pipeline.exchange import cut_off
from rpcbench.pipeline.lanes import Lanes
from rpcbench.pipeline.layout import Homes
from rpcbench.pipeline.slots import IN_ACCORD, Slot, Slots
from rpcbench.runtime.agent import Agent
from rpcbench.transport.shared_ring import AWAY, WORKS, Consumer

_BY_LANE = (*COUNTED, *IN_ACCORD)
_QUIET_SECONDS = 0.02
"""A worker that waits for a value receives itself, until nothing has come for so long."""
ENDS = "pipeline ends"
"""The channel of notices (key, step, reason)."""
CREDITS = "pipeline credits"
"""The channel of notices (key, step, how many were taken there, and what of: see `credits.Channel`)."""


class Mail:
    """One worker's, of the pipeline `key`. It listens for parcels under that name."""

    def __init__(self, agent: Agent, key: str, homes: Homes) -> None:
        self._agent, self._key, self._homes = agent, key, homes
        self._lanes = lanes = Lanes(agent, key)
        self.slots = Slots(partial(_receive, agent, homes, lanes), partial(_look, homes, lanes), lanes.wake)
        self._credits: Credits | None = None

    def begin(self, step: int, window: int) -> None:
        """A step begins, in which stages may be so many micro-batches ahead of each other; 0: as many as there are."""
        self._credits = Credits(step, window) if window else None
        self._lanes.begin()

    def take(self, slot: Slot) -> tuple[Any, ...]:
        """As `Slots.take`, of a kind that goes by lanes, too: who fills it hears from time to time that it has room
        here, if that is counted."""
        giver = self._homes.giver(slot)
        if giver is None or giver == self._agent.id:
            return self.slots.take(slot)
        lanes = self._lanes
        if (lying := lanes.take(self.slots, slot, giver)) is not None:
            return lying
        lanes.settle()
        if lanes.listen(self.slots, slot, giver) and (lying := lanes.take(self.slots, slot, giver)) is not None:
            return lying
        values = self.slots.take(slot)
        lanes.be(giver, WORKS)
        if not lanes.brought(slot) and self._credits is not None:
            self._took(self._credits, slot, giver)
        return values

    def _took(self, credits_: Credits, slot: Slot, giver: int) -> None:
        of = channel(slot)
        if count := credits_.took(of):
            self._agent.notify(giver, CREDITS, (self._key, slot.step, count, *of))

    def heard(self, step: int, count: int, of: Channel) -> None:
        """Of what was given here, so many have been taken."""
        if self._credits is not None and self._credits.step == step:
            self._credits.heard(of, count)
            self.slots.stir()

    def send(self, slot: Slot, values: tuple[Any, ...]) -> None:
        """Values for another stage, or another replica of one, wherever that is. Waits where that is far behind."""
        to = self._homes.taker(slot)
        if to == self._agent.id:
            self.slots.put(slot, partial(cut_off, values))
        else:
            counted = slot.kind in COUNTED
            if (counted or slot.kind in IN_ACCORD) and self._lanes.give(to, slot, values, opens=counted):
                return
            if counted and self._credits is not None:
                self._await_credit(self._credits, slot)
            self._agent.parcels.post(to, self._key, slot, str(slot), values[0] if len(values) == 1 else values)

    def _await_credit(self, credits_: Credits, slot: Slot) -> None:
        of = channel(slot)
        if not credits_.may_give(of):
            self.slots.wait_for(slot.step, lambda: credits_.may_give(of))  # which a thread of the pool hears
        self.slots.check(slot.step)
        credits_.gave(of)

    def offered(self, giver: int, lane: Consumer) -> None:
        """A worker has opened a lane to this one, and gives nothing there before this one looks."""
        self._lanes.offer(giver, lane)

    def settle(self) -> None:
        """Record in the step's context what has gone and come until now."""
        self._lanes.settle()

    def came(self, place: tuple[int, ...], values: Callable[[], Any]) -> None:
        self.slots.put(place, values)

    def undelivered(self, place: tuple[int, ...], error: Exception) -> None:
        """The driver hears of it from whoever fails."""
        slot, reason = Slot(*place), f"{type(error).__name__}: {error}"
        self.slots.abort(slot.step, reason)
        self.end(self._homes.taker(slot), slot.step, reason)

    def end(self, to: int, step: int, reason: str) -> None:
        """Tell another worker that a step is not to go on."""
        end(self._agent, to, self._key, step, reason)


def end(agent: Agent, to: int, key: str, step: int, reason: str) -> None:
    """Tell a worker that a step of a pipeline is not to go on."""
    agent.notify(to, ENDS, (key, step, reason))


def _look(homes: Homes, lanes: Lanes, slots: Slots, slot: Slot) -> None:
    if slot.kind in _BY_LANE and (giver := homes.giver(slot)) is not None:
        lanes.look(slots, slot, giver)


def _receive(agent: Agent, homes: Homes, lanes: Lanes, reached: Waits, slot: Slot) -> None:
    """On a thread that waits for what is to go into a slot. A worker that waits long is told by messages alone."""
    giver = homes.giver(slot)
    if giver is None:
        return
    if slot.kind in _BY_LANE:
        lanes.be(giver, AWAY)
    agent.requests.receive_until(giver, lambda: not reached(), _QUIET_SECONDS)

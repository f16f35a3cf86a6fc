"""What the workers of one pipeline send each other: values, flow control, and whether a step is applied.

Values go straight to the worker that needs them, through shared memory or as a parcel; on that worker itself they stay
where they are. Where one does not arrive, its step ends on both sides. That a step ends is told again until it is
heard. Nothing here holds the stages, so a pipeline is gone as soon as its driver lets go of it.

Flow control: how far a stage may be ahead of another that takes what it gives.

    stage 0 ──F5──F6──F7──► stage 1      `window` micro-batches at most are on their way or wait there; then stage 0
                                         waits, until it is told that half as many have been taken

- No window stops a schedule that can run to its end. Played through with equal stages the schedule has at most half of
  it there at once; and where one order of events keeps to such bounds, all do in the end, as each worker has one list.
- Where a step has no more micro-batches than the window nothing is counted. Nor is what goes through shared memory:
  that has places for 16 more.

Two-phase commit: whether a step is applied, agreed among the workers, so that none waits for their driver.

    first worker    R R R      all have their gradients ── O O O ──► its optimizers step
    another one     ── R ──►                               ── O ──►  its optimizers step

- No optimizer steps before all workers have all gradients: the first worker decides.
- A step that was ended before the first worker had decided is applied nowhere. So a driver that wants to end one asks
  that worker, and as long as it lives its answer is that of all. If it has gone, each of the others can be ended until
  it has heard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rpcbench.base.futures import Waits
from rpcbench.pipeline.exchange import ALL, BACKWARD, FORWARD, IN_ACCORD, MINE, Slot, Slots, cut_off
from rpcbench.pipeline.ops import Kind, Op, Ops, gives
from rpcbench.pipeline.placement import StagePlacement
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.stage_ring import StageRing
from rpcbench.runtime.agent import Agent
from rpcbench.transport.shared_ring import AWAY, WORKS, Consumer

_new = tuple.__new__  # a step less than the class itself takes
LEAST = 8
COUNTED = (FORWARD, BACKWARD)
"""The kinds of slots that there may be many of."""


class Channel(NamedTuple):
    """What goes from one stage to another: `kind` of slot, the stage that takes and the one that gives."""

    kind: int
    stage: int
    source: int


def window(ops: Ops, ways: Iterable[tuple[int, int]]) -> int:
    """How many micro-batches a stage may be ahead. `ways`: stages, each with one that takes some of what it gives."""
    begins: dict[Op, float] = {}
    ends: dict[Op, float] = {}
    for span in simulate(ops).spans:
        begins[gives(span.op)], ends[gives(span.op)] = span.begin, span.end
    most = 0
    for source, taker in ways:
        for kind, giving, taking in ((Kind.FORWARD, source, taker), (Kind.INPUT, taker, source)):
            given = sorted(end for op, end in ends.items() if (op.kind, op.stage) == (kind, giving))
            taken = sorted(begin for op, begin in begins.items() if (op.kind, op.stage) == (kind, taking))
            most = max([most, *(count - bisect_left(taken, end) for count, end in enumerate(given, 1))])
    return max(LEAST, 2 * most)


class FlowControl:
    """One worker's, in one step."""

    def __init__(self, step: int, window: int) -> None:
        self.step = step
        self._window = window
        self._given: Counter[Channel] = Counter()
        self._gone: Counter[Channel] = Counter()  # of those, taken as far as is known
        self._taken: Counter[Channel] = Counter()

    def may_give(self, channel: Channel) -> bool:
        return self._given[channel] - self._gone[channel] < self._window

    def gave(self, channel: Channel) -> None:
        self._given[channel] += 1

    def took(self, channel: Channel) -> int:
        """One more was taken here; how many there are now, if who gives is to hear that, else 0."""
        count = self._taken[channel] = self._taken[channel] + 1
        return 0 if count % (self._window // 2) else count

    def heard(self, channel: Channel, count: int) -> None:
        """So many have been taken there."""
        self._gone[channel] = max(self._gone[channel], count)


def channel(slot: Slot) -> Channel:
    return _new(Channel, (slot.kind, slot.stage, slot.source))


_WORD = torch.zeros(1, dtype=torch.uint8)
"""Nothing needs to be said; as a tensor it goes by the lanes that there are."""


class CommitProtocol:
    """One worker's part. `workers`: ids of all, `own` among them."""

    def __init__(self, own: int, workers: Sequence[int], mail: Mailbox) -> None:
        self._own, self._first, self._others = own, workers[0], workers[1:]
        self._mail = mail

    def reach(self, step: int) -> None:
        """Wait until all have come so far. From then on the step is to be applied here. As `Slots.take`."""
        if self._own == self._first:
            for other in self._others:
                self._mail.take(Slot(step, MINE, 0, self._own, other))
            self._mail.slots.agree(step)
            self._tell_all(step)
        else:
            self._mail.send(Slot(step, MINE, 0, self._first, self._own), (_WORD,))
            self._mail.take(Slot(step, ALL, 0, self._own, self._first))
            self._mail.slots.agree(step)

    def _tell_all(self, step: int) -> None:
        """All others hear that it goes on; who cannot be told that waits no longer, and the error is raised."""
        failed: Exception | None = None
        for other in self._others:
            try:
                self._mail.send(Slot(step, ALL, 0, other, self._own), (_WORD,))
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = failed or error
                self._mail.end(other, step, f"{type(error).__name__}: {error}")
        if failed is not None:
            raise failed


_BY_LANE = (*COUNTED, *IN_ACCORD)
_QUIET_SECONDS = 0.02
"""A worker that waits for a value receives itself, until nothing has come for so long."""
ENDS = "pipeline ends"
"""The channel of notices (key, step, reason)."""
CREDITS = "pipeline credits"
"""The channel of notices (key, step, how many were taken there, and what of: see `credits.Channel`)."""


class Mailbox:
    """One worker's, of the pipeline `key`. It listens for parcels under that name."""

    def __init__(self, agent: Agent, key: str, homes: StagePlacement) -> None:
        self._agent, self._key, self._homes = agent, key, homes
        self._lanes = lanes = StageRing(agent, key)
        self.slots = Slots(partial(_receive, agent, homes, lanes), partial(_look, homes, lanes), lanes.wake)
        self._credits: FlowControl | None = None

    def begin(self, step: int, window: int) -> None:
        """A step begins, in which stages may be so many micro-batches ahead of each other; 0: as many as there are."""
        self._credits = FlowControl(step, window) if window else None
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

    def _took(self, credits_: FlowControl, slot: Slot, giver: int) -> None:
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

    def _await_credit(self, credits_: FlowControl, slot: Slot) -> None:
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


def _look(homes: StagePlacement, lanes: StageRing, slots: Slots, slot: Slot) -> None:
    if slot.kind in _BY_LANE and (giver := homes.giver(slot)) is not None:
        lanes.look(slots, slot, giver)


def _receive(agent: Agent, homes: StagePlacement, lanes: StageRing, reached: Waits, slot: Slot) -> None:
    """On a thread that waits for what is to go into a slot. A worker that waits long is told by messages alone."""
    giver = homes.giver(slot)
    if giver is None:
        return
    if slot.kind in _BY_LANE:
        lanes.be(giver, AWAY)
    agent.requests.receive_until(giver, lambda: not reached(), _QUIET_SECONDS)

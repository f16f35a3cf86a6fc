"""Messages between the workers of one pipeline: values, flow control, and the two-phase commit of a step.

Guarantees
- A value goes straight to the worker that needs it, as a parcel. For a stage on the same worker it stays in place.
- A value that cannot be delivered ends its step on both sides. The notice that ends a step is retransmitted until it is
  acknowledged.
- Flow control never blocks a schedule that can run to its end.
- No optimizer steps before all workers have all gradients, and no worker waits for the driver to learn that.
- Nothing here refers to the stages, so a pipeline is freed as soon as its driver drops it.
"""

# Theory of operation
#
#     stage 0 ──F5──F6──F7──► stage 1     at most `compute_send_window` micro-batches are under way or wait; then stage
# 0 blocks,
#             ◄── 4 taken ───             until a notice says that half a window has been taken
#
# Flow control: `compute_send_window` is twice the largest backlog of a simulated run with equal stages. If one order of
# events stays within such bounds, then all orders end, as each worker has one list of operations. A step with no more
# micro-batches than the window is not counted.
#
# Two-phase commit, among the workers alone; the first one is the coordinator:
#
#     coordinator     R R R     all have their gradients ── O O O ──►   its optimizers step
#     another worker  ── R ──►                              ── O ──►    its optimizers step
#
# A step that is aborted before the coordinator decides is applied nowhere. So a driver that aborts a step asks the
# coordinator, and its answer is that of all. If the coordinator is lost, the driver asks each of the others: a worker
# can be aborted until it has received its O. If a third worker is lost after a worker's R, that worker still waits for
# its O: the coordinator may have decided before it noticed the loss. If it has not, the driver ends that wait.

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rpcbench.base.futures import Waits
from rpcbench.pipeline.exchange import BACKWARD, DECIDED, DECISION, FORWARD, VOTE, VOTES, Slot, Slots, detach_values
from rpcbench.pipeline.ops import Kind, Op, Ops, result_of_op
from rpcbench.pipeline.placement import StagePlacement
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.tasks import ENDS, error_text
from rpcbench.runtime.agent import Agent

MIN_WINDOW = 8  # micro-batches: the smallest window
COUNTED = (FORWARD, BACKWARD)
"""Kinds of slots that flow control counts: a step may have many of them."""


class Channel(NamedTuple):
    """The values of one `kind` of slot from the stage `source` to the stage `stage`."""

    kind: int
    stage: int
    source: int


def compute_send_window(ops: Ops, stage_pairs: Iterable[tuple[int, int]]) -> int:
    """Return how many micro-batches a stage may be ahead. `stage_pairs`: pairs of a stage and one that takes its
    values."""
    begins: dict[Op, float] = {}
    ends: dict[Op, float] = {}
    for span in simulate(ops).spans:
        begins[result_of_op(span.op)], ends[result_of_op(span.op)] = span.begin, span.end
    most = 0  # the largest backlog so far
    for source, taker in stage_pairs:
        for kind, giving, taking in ((Kind.FORWARD, source, taker), (Kind.INPUT, taker, source)):
            given = sorted(end for op, end in ends.items() if (op.kind, op.stage) == (kind, giving))
            taken = sorted(begin for op, begin in begins.items() if (op.kind, op.stage) == (kind, taking))
            # when the count-th value was made, those that a taker had begun with are no longer in its backlog
            most = max([most, *(count - bisect_left(taken, end) for count, end in enumerate(given, 1))])
    return max(MIN_WINDOW, 2 * most)


class FlowControl:
    """The send windows of one worker in one step."""

    def __init__(self, step: int, window: int) -> None:
        self.step = step
        self._window = window
        self._given: Counter[Channel] = Counter()  # sent
        self._gone: Counter[Channel] = Counter()  # of those, acknowledged as taken
        self._taken: Counter[Channel] = Counter()  # taken here

    def may_send(self, channel: Channel) -> bool:
        return self._given[channel] - self._gone[channel] < self._window

    def record_sent(self, channel: Channel) -> None:
        self._given[channel] += 1

    def record_taken(self, channel: Channel) -> int:
        """Count one value that was taken here. Returns the total if the source is to be notified now, else 0."""
        count = self._taken[channel] = self._taken[channel] + 1
        return 0 if count % (self._window // 2) else count

    def record_acknowledgement(self, channel: Channel, count: int) -> None:
        """Record that the other side has taken `count` values."""
        self._gone[channel] = max(self._gone[channel], count)  # notices may arrive in any order


def channel_of(slot: Slot) -> Channel:
    return Channel(slot.kind, slot.stage, slot.source)


class CommitProtocol:
    """One worker's part of the two-phase commit. `workers`: ids of all; the first is the coordinator."""

    def __init__(self, own: int, workers: Sequence[int], mail: Mailbox) -> None:
        self._own, self._first, self._others = own, workers[0], workers[1:]
        self._mail = mail

    def wait_for_commit(self, step: int) -> None:
        """Wait until all workers are ready. From then on the step is applied here. Raises as `Slots.take_values`."""
        if self._own == self._first:
            for other in self._others:
                self._mail.receive_values(Slot(step, VOTE, 0, self._own, other))
            self._mail.slots.advance_step(step, DECIDED)  # the decision: the driver can no longer abort the step
            self._send_decision(step)
        else:
            self._mail.slots.advance_step(step, VOTES)
            self._mail.send_values(Slot(step, VOTE, 0, self._first, self._own), ())
            self._mail.receive_values(Slot(step, DECISION, 0, self._own, self._first))
            self._mail.slots.advance_step(step, DECIDED)

    def _send_decision(self, step: int) -> None:
        """Send the decision to all others. Ends the step on a worker that cannot be reached, and raises the error."""
        failed: Exception | None = None
        for other in self._others:
            try:
                self._mail.send_values(Slot(step, DECISION, 0, other, self._own), ())
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = failed or error
                self._mail.notify_abort(other, step, error_text(error))  # else it would wait for its O
        if failed is not None:
            raise failed


_QUIET_SECONDS = 0.02
"""A worker that waits for a value receives on its own thread until no message has come for this time."""
CREDITS = "pipeline credits"
"""The channel of notices (key, step, number of values taken, then the fields of the `Channel`)."""


class Mailbox:
    """One worker's messages of the pipeline `key`. It receives parcels under that name."""

    def __init__(self, agent: Agent, key: str, placement: StagePlacement) -> None:
        self._agent, self._key, self._placement = agent, key, placement
        self.slots = Slots(partial(_receive_for_slot, agent, placement))
        self._credits: FlowControl | None = None  # None: the step is not counted

    def begin_step(self, step: int, window: int) -> None:
        """Begin a step. `compute_send_window`: micro-batches that a stage may be ahead of another; 0: no limit."""
        self.slots.begin_step(step)
        self._credits = FlowControl(step, window) if window else None

    def receive_values(self, slot: Slot) -> tuple[Any, ...]:
        """Wait for the values of a slot, as `Slots.take_values`. Sends credits to the source."""
        values = self.slots.take_values(slot)
        if slot.kind in COUNTED and self._credits is not None:
            self._return_credit(self._credits, slot)
        return values

    def _return_credit(self, credits_: FlowControl, slot: Slot) -> None:
        sender, of = self._placement.sender_of(slot), channel_of(slot)
        if sender is not None and sender != self._agent.id and (count := credits_.record_taken(of)):
            self._agent.notify(sender, CREDITS, (self._key, slot.step, count, *of))

    def credit_received(self, step: int, count: int, of: Channel) -> None:
        """Record that the other side has taken `count` of the values sent from here."""
        if self._credits is not None and self._credits.step == step:  # a late notice of an earlier step is void
            self._credits.record_acknowledgement(of, count)
            self.slots.wake_waiters()

    def send_values(self, slot: Slot, values: tuple[Any, ...]) -> None:
        """Send values to another stage or replica, wherever it is. Blocks while that one is too far behind."""
        to = self._placement.receiver_of(slot)
        if to == self._agent.id:
            self.slots.put(slot, partial(detach_values, values))  # same worker: no copy
        else:
            if slot.kind in COUNTED and self._credits is not None:
                self._await_credit(self._credits, slot)
            packed = values[0] if len(values) == 1 else values
            self._agent.calls.parcels.send_parcel(to, self._key, slot, str(slot), packed)

    def _await_credit(self, credits_: FlowControl, slot: Slot) -> None:
        of = channel_of(slot)
        if not credits_.may_send(of):
            self.slots.wait_until(slot.step, lambda: credits_.may_send(of))  # a pool thread receives the notice
        self.slots.check_step(slot.step)  # the wait also ends when the step is aborted
        credits_.record_sent(of)

    def parcel_received(self, place: tuple[int, ...], values: Callable[[], Any]) -> None:
        self.slots.put(place, values)

    def delivery_failed(self, place: tuple[int, ...], error: Exception) -> None:
        """Abort the step of a value that cannot be delivered, on both sides. The driver gets the error that follows."""
        slot, reason = Slot(*place), error_text(error)
        self.slots.abort_step(slot.step, reason)
        self.notify_abort(self._placement.receiver_of(slot), slot.step, reason)

    def notify_abort(self, to: int, step: int, reason: str) -> None:
        """Notify another worker that a step is aborted."""
        self._agent.notify(to, ENDS, (self._key, step, reason))


def _receive_for_slot(agent: Agent, placement: StagePlacement, reached: Waits, slot: Slot) -> None:
    if (sender := placement.sender_of(slot)) is not None:
        agent.calls.receive_until(sender, lambda: not reached(), _QUIET_SECONDS)

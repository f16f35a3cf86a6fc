"""How far a stage may be ahead of another that takes what it gives, so that no worker is filled with what it has not
asked for.

    stage 0 ──F5──F6──F7──► stage 1      `window` micro-batches at most are on their way or wait there; then stage 0
                                         waits, until it is told that half as many have been taken

Guarantees
- No window stops a schedule that can run to its end. Played through with equal stages the schedule has at most half of
  it there at once; and where one order of events keeps to such bounds, all do in the end, as each worker has one list.
- Where a step has no more micro-batches than the window nothing is counted, and nobody is told anything. Nor is what
  goes by a lane: that has places for 16 more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rpcbench.pipeline.ops import Kind, Op, Ops
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.slots import BACKWARD, FORWARD, Slot
from rpcbench.pipeline.validate import gives

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


class Credits:
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

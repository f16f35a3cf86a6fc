"""The number of all messages that members have reported, though only the latest rows are kept.

A message counts once: whichever of its two ends reports it first, though both drop its row later, and though one of
them is restarted meanwhile. A message of which one end has reported too late, or neither could report, does not count:
the total is never too high, and it never falls.
"""
# Each pair of processes numbers its messages, and a sender reports them in that order, so the range of the numbers that
# it has reported says of any message whether it has counted. A receiver may be ahead of the sender's report, or the
# sender may have ended without one: such numbers are kept until the range has them.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpcbench.base.ids import OWN
from rpcbench.protocol.delivery import SEQUENCE_COUNT_BITS
from rpcbench.runtime.events import MessageRow

ANSWERS = frozenset(("Result", "Failure"))
CELL = "this cell"
"""The label of the calls that run cells: of the calls of this package, panels show these alone."""
# Messages by which members hold together or which panels cause: no program's, so they are not kept.
BENCH_KINDS = frozenset(("Join", "Refused", "View", "Ready", "Report", "Seen"))
_BENCH_CHANNELS = frozenset(
    ("look", "leave", "stop", "torchrun ends", "kill", "step.held", "waits.ask", "waits.told", "waits.break")
)


def parse_reports(member: int, reports: Iterable[Sequence[Any]]) -> Iterable[tuple[MessageRow, int, int]]:
    """Yield the reports of a member on messages of the program, each with its sender and its receiver."""
    for one in reports:
        half = MessageRow(*one)
        if half.kind not in BENCH_KINDS and not (half.kind == "Notice" and half.label in _BENCH_CHANNELS):
            yield (half, half.peer, member) if half.what == "received" else (half, member, half.peer)


@dataclass(slots=True)
class _Reported:
    """The reports on messages from one process to another."""

    first: int | None = None  # the range of the numbers that the sender has reported; None before its first report
    last: int = -1
    beyond: set[int] = field(default_factory=set)  # numbers outside it, which have counted

    def add(self, number: int, by_sender: bool) -> bool:
        """Add a report; return whether it is the first one of this message."""
        if self.first is not None and self.first <= number <= self.last:
            return False
        is_new = number not in self.beyond
        if by_sender and number > self.last:
            self.first = number if self.first is None else self.first
            self.last = number
            self.beyond.discard(number)
        elif is_new:
            self.beyond.add(number)
        return is_new


class MessageCount:
    """The count of the messages of one world."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int, int], _Reported] = {}  # by sender, receiver and their incarnations
        self._cells: set[tuple[int, int]] = set()  # calls that run cells: caller, number

    def count_new(self, member: int, reports: Iterable[Sequence[Any]]) -> int:
        """Return how many messages a member reports that nobody has reported before, of those that panels show."""
        return sum(
            self._find_pair(source, to, half.seq).add(half.seq, half.what == "sent")
            for half, source, to in parse_reports(member, reports)
            if self._is_shown(half, source, to)
        )

    def _find_pair(self, source: int, to: int, seq: int) -> _Reported:
        return self._reported.setdefault((source, to, seq >> SEQUENCE_COUNT_BITS), _Reported())

    def _is_shown(self, half: MessageRow, source: int, to: int) -> bool:
        if half.call is None or not half.call & OWN:
            return True
        call = to if half.kind in ANSWERS else source, half.call
        if half.label == CELL:
            self._cells.add(call)
        return call in self._cells

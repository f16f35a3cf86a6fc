"""What one worker knows of an autograd context: messages sent and received, and passes that go back over them.

A message says which sends lie behind it as long as these are few, so that a pass need not ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rpcbench.base.ids import Id, worker_of
from rpcbench.wire.messages import Awaited, Settled

ROOT = -1
"""Stands for the send number of the roots, on the worker that began a walk."""
MOST_BEHIND = 16
"""Beyond so many, messages no longer say what lies behind them; the backward pass has to ask."""


class Sent(NamedTuple):
    """A message of the context that went out: to whom, and what it was part of."""

    to: int
    label: str


class Received(NamedTuple):
    """A message that came in: from whom, and the sends that lie behind it, its own among them; None: too many."""

    source: int
    behind: tuple[int, ...] | None


@dataclass(slots=True)
class Question:
    """One question of the discovery that is not answered yet: who asked, and which of ours it waits for."""

    asker: int
    open: set[int]


class Tally:
    """What the root has heard. `open`: gradients that were sent and have not run, or the other way round."""

    __slots__ = ("awaited", "open", "settled")

    def __init__(self, open_: set[int]) -> None:
        self.open = open_
        self.settled: set[int] = set()
        self.awaited: dict[int, Awaited] = {}

    def add(self, report: Settled) -> None:
        self.open ^= {report.message, *report.fired}
        self.settled.add(report.message)
        for one in report.awaited:
            self.awaited[one.message] = one

    def owes(self, worker: int) -> bool:
        """Whether gradients that were sent to this worker are not known to have run."""
        return any(worker_of(number) == worker for number in self.open)

    def unused(self) -> list[Awaited]:
        """Sends that were awaited in vain, once the pass has come to rest."""
        return [one for number, one in sorted(self.awaited.items()) if number not in self.settled]


class Walk:
    """This worker's part of one backward pass; `plan` are all sends that take part, where the messages told."""

    __slots__ = ("arrived", "asked", "fast", "needed", "plan", "questions", "ran", "retain", "running", "tally")

    def __init__(
        self,
        retain: bool = False,
        fast: bool = False,
        plan: tuple[int, ...] = (),
        needed: set[int] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.retain = retain
        self.fast = fast
        self.plan = plan
        self.needed = set() if needed is None else needed
        self.asked: dict[int, int] = {}  # recv -> the send (or ROOT) from which it was reached first
        self.questions: dict[int, Question] = {}
        self.arrived: set[int] = set()
        self.ran = 0
        self.running = False
        self.tally = tally  # on the root


class Context:
    """What one worker knows of one context."""

    __slots__ = ("failed", "gradients", "known", "ran", "recvs", "sends", "walks")

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.sends: dict[int, Sent] = {}
        self.recvs: dict[int, Received] = {}
        self.walks: dict[Id, Walk] = {}
        self.ran: dict[Id, set[int]] = {}  # walks whose part here is over, with its neighbours
        self.failed: set[Id] = set()  # walks that must not begin again here
        self.gradients = 0

    def behind(self, recvs: Iterable[int], *more: int) -> tuple[int, ...] | None:
        """The sends behind all of these, where that is known and they are few; None also for recvs of elsewhere."""
        return union([one.behind if (one := self.recvs.get(recv)) else None for recv in recvs], *more)


def union(parts: Iterable[tuple[int, ...] | None], *more: int) -> tuple[int, ...] | None:
    """All sends of these, or None where they are too many or unknown."""
    found = dict.fromkeys(more)
    for part in parts:
        if part is None or len(found) > MOST_BEHIND:
            return None
        found |= dict.fromkeys(part)
    return tuple(found) if len(found) <= MOST_BEHIND else None

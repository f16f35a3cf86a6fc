"""What one worker knows of an autograd context: messages sent and received, and passes that go back over them.

A message says which sends lie behind it as long as these are few, so that a pass need not ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcbench.wire.messages import Awaited, Settled
from rpcbench.words.ids import Id, worker_of

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


@dataclass(slots=True)
class Tally:
    """What the root has heard. `open`: gradients that were sent and have not run, or the other way round."""

    open: set[int]
    settled: set[int] = field(default_factory=set)
    awaited: dict[int, Awaited] = field(default_factory=dict)

    def add(self, report: Settled) -> None:
        self.open ^= {report.message, *report.fired}
        self.settled.add(report.message)
        self.awaited.update((one.message, one) for one in report.awaited)

    def owes(self, worker: int) -> bool:
        """Whether gradients that were sent to this worker are not known to have run."""
        return any(worker_of(number) == worker for number in self.open)

    def unused(self) -> list[Awaited]:
        """Sends that were awaited in vain, once the pass has come to rest."""
        return [one for number, one in sorted(self.awaited.items()) if number not in self.settled]


@dataclass(slots=True)
class Walk:
    """This worker's part of one backward pass; `plan` are all sends that take part, where the messages told."""

    retain: bool = False
    fast: bool = False
    plan: tuple[int, ...] = ()
    needed: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)  # recv -> the send (or ROOT) from which it was reached first
    questions: dict[int, Question] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    ran: int = 0
    running: bool = False
    tally: Tally | None = None  # on the root


@dataclass(slots=True)
class Context:
    """What one worker knows of one context."""

    known: set[int] = field(default_factory=set)
    sends: dict[int, Sent] = field(default_factory=dict)
    recvs: dict[int, Received] = field(default_factory=dict)
    walks: dict[Id, Walk] = field(default_factory=dict)
    ran: dict[Id, set[int]] = field(default_factory=dict)  # walks whose part here is over, with its neighbours
    failed: set[Id] = field(default_factory=set)  # walks that must not begin again here
    gradients: int = 0

    def behind(self, recvs: Iterable[int], *more: int) -> tuple[int, ...] | None:
        """The sends behind all of these, where that is known and they are few; None also for recvs of elsewhere."""
        found = [self.recvs.get(recv) for recv in recvs]
        return union((one.behind if one else None for one in found), *more)


def union(parts: Iterable[tuple[int, ...] | None], *more: int) -> tuple[int, ...] | None:
    """All sends of these, or None where they are too many or unknown."""
    found = dict.fromkeys(more)
    for part in parts:
        if part is None or len(found) > MOST_BEHIND:
            return None
        found.update(dict.fromkeys(part))
    return tuple(found) if len(found) <= MOST_BEHIND else None

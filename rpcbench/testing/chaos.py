"""Faults on all members of a world at once, for drills: what a program says is lost, late or said twice; cells, output
and panels are not.

    drill = Drill.on(drop=0.1, delay=0.05, seed=7)
    ...
    drill.off()

The same seed gives the same fate to the n-th message of a program from one member to another, however long it runs and
whatever a bench says meanwhile. Members that come later are disturbed, too.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import NamedTuple

from rpcbench.base.errors import RpcError
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.testing.faults import Faults
from rpcbench.testing.program import of_program
from rpcbench.transport.base import Link
from rpcbench.wire.messages import Message


class Settings(NamedTuple):
    """Shares of all messages that are lost and that come twice, 0 to 1; the longest delay in seconds; the seed."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    seed: int = 0


class Chaos(Faults):
    """The faults of one member, of the messages of programs only."""

    def __init__(self, me: int, settings: Settings) -> None:
        super().__init__(settings.seed, settings.drop, settings.duplicate, settings.delay)
        self._me = me
        self._numbers: dict[tuple[int, int], int] = {}
        self._sent: Counter[int] = Counter()

    def outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        if of_program(message) and to != self._me:
            super().outgoing(to, seq, message, may_wait)
        else:
            Link.outgoing(self, to, seq, message, may_wait)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        Link.incoming(self, source, seq, message)

    def counts(self) -> dict[str, int]:
        """How many messages were sent, lost, late and said twice."""
        ends = [line.rpartition(": ")[2] for line in self.history]
        return {"sent": len(ends)} | {what: sum(what in end for end in ends) for what in ("lost", "late", "twice")}

    def _dice(self, to: int, seq: int, turn: int) -> random.Random:
        if (to, seq) not in self._numbers:
            self._numbers[to, seq] = self._sent[to]
            self._sent[to] += 1
        return random.Random(f"{self._seed} {self._me} {to} {self._numbers[to, seq]} {turn}")


class Disturbed:
    """What a drill has at each member."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._link: Chaos | None = None

    def begin(self, settings: Settings) -> None:
        self.end()
        self._link = Chaos(self._agent.id, settings)
        self._agent.links.add(self._link)

    def end(self) -> dict[str, int]:
        """From now on all passes, and what is late goes its way; the counts."""
        link, self._link = self._link, None
        if link is None:
            return {}
        self._agent.links.remove(link)
        return link.counts()


class Drill:
    """What is on in the world of one agent: `settings`, None where nothing is. Made by `on`."""

    def __init__(self, agent: Agent) -> None:
        self.settings: Settings | None = None
        self._agent = agent
        agent.on_member(self._changed)

    @classmethod
    def of(cls, agent: Agent | None = None) -> Drill:
        """That of the world of this agent, or of the current one."""
        return (agent or current.current()).part(cls)

    @classmethod
    def on(
        cls, *, drop: float = 0.0, duplicate: float = 0.0, delay: float = 0.0, seed: int = 0, agent: Agent | None = None
    ) -> Drill:
        """Disturb all members from now on, instead of what was on."""
        drill = cls.of(agent)
        drill.settings = Settings(drop, duplicate, delay, seed)
        for member in drill._agent.members():
            drill._begin(member.id)
        return drill

    def off(self) -> dict[str, int]:
        """All messages pass again; how many were sent, lost, late and said twice, over all members."""
        self.settings = None
        total: Counter[str] = Counter()
        asked = [self._agent.call(member.id, end, timeout=0, own=True) for member in self._agent.members()]
        for future in asked:
            with contextlib.suppress(RpcError):  # it has gone meanwhile
                total.update(future.wait())
        return dict(total)

    def _begin(self, member: int) -> None:
        self._agent.call(member, begin, (self.settings,), timeout=0, own=True).wait()

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "joined" and self.settings is not None:
            with contextlib.suppress(RpcError):  # it has gone again
                self._begin(who.id)


def begin(settings: Settings) -> None:
    """Called on a member."""
    current.current().part(Disturbed).begin(settings)


def end() -> dict[str, int]:
    """Called on a member."""
    return current.current().part(Disturbed).end()

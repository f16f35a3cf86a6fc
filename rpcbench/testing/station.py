"""What a stepper has at each member of the world: the messages held there, the clock, and the hands that obey it.

It is told what to do by calls and tells by notices what it holds. Both are the bench's own words, so nothing holds
them up. When the stepper's member goes, all that is held goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.testing.holding import Clock, Holding, Waiting
from rpcbench.testing.program import ids, of_program
from rpcbench.wire import messages as m

HELD = "step.held"
Report = dict[str, Any]
"""{stepper, turn, rows}: of two the one with the higher turn is later; see `Station.report`. No rows: it is over."""


@dataclass(frozen=True, slots=True)
class Order:
    """Hold messages of these kinds, to and from these members (empty: all), for the stepper of this name."""

    stepper: str
    kinds: frozenset[str]
    members: frozenset[int]


class Station:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # around changes of what is held by whom; not around deliveries
        self._order: Order | None = None
        self._desk = -1
        self._link: Holding | None = None
        self._clock: Clock | None = None
        self._patience = 0.0
        self._turn = 0
        self._telling = False
        agent.on_member(self._changed)

    # -- what the stepper asks for
    def hold(self, desk: int, order: Order) -> Report:
        """Begin; what another stepper held goes on, and it is told."""
        before, over = self._desk, self._order
        self.end()
        if over is not None:
            self._agent.notify(before, HELD, {"stepper": over.stepper, "turn": self._turn, "rows": None})
        with self._lock:
            self._desk, self._order = desk, order
            self._link = Holding(self._means, self._tell_soon)
            if self._clock is None:
                self._clock = Clock(self._agent.links.clock)
            self._clock.stop()
            self._patience = self._swap_patience(0.0)  # who waits for a person is not told of
            self._agent.links.run_by(self._clock)
            self._agent.links.add(self._link)
        return self.report()

    def deliver(self, key: int) -> Report:
        if self._link is not None:
            self._link.deliver(key)
        return self.report()

    def drop(self, key: int) -> Report:
        if self._link is not None:
            self._link.drop(key)
        return self.report()

    def put_on(self, seconds: float) -> Report:
        """Let so much time pass at once."""
        with self._lock:
            if self._clock is not None and self._link is not None:
                self._clock.put_on(seconds)
                self._agent.links.run_by(self._clock)
        return self.report()

    def end(self, stepper: str | None = None) -> None:
        """All goes on, and time as well. Harmless where this stepper (None: any) holds nothing."""
        with self._lock:
            if self._link is None or self._clock is None or stepper not in (None, self._order and self._order.stepper):
                return
            link, self._link, self._order = self._link, None, None
            self._clock.go()
            self._swap_patience(self._patience)
            self._agent.links.run_by(self._clock)
        link.let_go()
        self._agent.links.remove(link)

    def _swap_patience(self, seconds: float) -> float:
        """Of the one who tells of long waits in the log: what it was before."""
        watchdog = self._agent.part(Watchdog)
        before, watchdog.patience = watchdog.patience, seconds
        return before

    # -- what it is told
    def report(self) -> Report:
        """What is held: rows of key, sender, kind, label, ids, and since when (monotonic seconds)."""
        with self._lock:
            self._turn += 1
            link, stepper = self._link, self._order.stepper if self._order else ""
            held = link.held if link is not None else {}
            turn = self._turn
        return {"stepper": stepper, "turn": turn, "rows": [self._row(key, one) for key, one in held.items()]}

    def _row(self, key: int, one: Waiting) -> list[Any]:
        message = one.message
        return [key, one.source, type(message).__name__, self._label(one), ids(message), one.since]

    def _label(self, one: Waiting) -> str:
        """The name of the function that it is about."""
        message = one.message
        if isinstance(message, m.Result | m.Failure):
            asked = self._agent.machine.ask(lambda node: node.calls.outgoing.get(message.call))
            return asked.label if asked else ""
        return getattr(message, "label", "to_here" if isinstance(message, m.Fetch) else "")

    def _means(self, source: int, message: m.Message) -> bool:
        order = self._order
        if order is None or source == self._agent.id or type(message).__name__ not in order.kinds:
            return False
        return of_program(message) and (not order.members or not order.members.isdisjoint((source, self._agent.id)))

    def _tell_soon(self) -> None:
        """Several that come together are told of together."""
        with self._lock:
            telling, self._telling = self._telling, True
        if not telling:
            self._agent.submit(self._tell)

    def _tell(self) -> None:
        with self._lock:
            self._telling = False
            desk = self._desk
        self._agent.notify(desk, HELD, self.report())

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind not in GONE:
            return
        if who.id == self._desk:
            self.end()
        elif (link := self._link) is not None:
            link.let_go(who.id)  # last words; whoever was told of its end does not hear them
            self._tell_soon()


def at(deed: Callable[..., Any], *args: Any) -> Any:
    """Called on a member: do that at its station."""
    return deed(current.current().part(Station), *args)

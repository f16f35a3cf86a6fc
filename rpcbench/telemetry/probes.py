"""Questions to members that are answered once everything they had to tell before is on its way: so an answer says both
that all of it is here, and what their clock shows.
"""

from __future__ import annotations

import threading
import time

from rpcbench.base.conditions import Changes
from rpcbench.base.ids import Counter
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.publisher import WATCH
from rpcbench.telemetry.clocks import Clock, estimate

MEASURE_SECONDS = 5.0


class Probes:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._changes = Changes()
        self._numbers = Counter()
        self._open: dict[int, tuple[int, float]] = {}  # number: member, when it was asked
        self._latest: dict[int, float] = {}

    def near(self, member: int) -> bool:
        """Whether it is on this host, and so has this clock."""

        def same(node: Node) -> bool:
            other = node.members.members.get(member)
            return other is None or other.host == node.members.me.host

        return self._agent.machine.ask(same)

    def ask(self, member: int) -> int:
        """Ask; the number of the question."""
        number, now = self._numbers.next(), time.monotonic()
        with self._lock:
            self._open[number] = member, now
            self._latest[member] = now
        self._agent.notify(member, WATCH, {"probe": number})
        return number

    def refresh(self, member: int) -> None:
        """Measure the clock of a member on another host, unless that was done lately."""
        with self._lock:
            lately = time.monotonic() - self._latest.get(member, -MEASURE_SECONDS) < MEASURE_SECONDS
        if not lately and not self.near(member):
            self.ask(member)

    def answered(self, source: int, heard: float, said: float, number: int) -> Clock | None:
        """An answer has come: what it says of that member's clock, None where it has ours."""
        told = time.monotonic()
        with self._lock:
            _, asked = self._open.pop(number, (source, None))
        self._changes.tell()
        return None if asked is None or self.near(source) else estimate(asked, heard, said, told)

    def forget(self, member: int) -> None:
        """It is gone, and will not answer."""
        with self._lock:
            self._latest.pop(member, None)
            self._open = {number: one for number, one in self._open.items() if one[0] != member}
        self._changes.tell()

    def wait(self, number: int, timeout: float) -> bool:
        """Until that one is answered, or never will be; whether it is so in time."""
        return self._changes.wait_for(lambda: number not in self._open, max(0.0, timeout))

"""What this worker does together with others: rows of the table "collectives", its own part of each of them.

All members give the same key to the same collective. So whoever has the rows of all knows who has entered, who is
missing, and who came last. Guarantees
- What is under way is in the table whether anybody looks or not, as who comes to look wants to know what hangs; of what
  has ended the latest `KEPT` are.
- Each part ends once: by itself, or with the world that it is in.
- Where nobody looks a part costs two stamps and two entries, and no words are made.
"""

from __future__ import annotations

import collections
import threading
import time
from types import TracebackType

from rpcbench.base.events import Row, Table
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import EventLog

KEPT = 1000
_TOLD = ("group", "number", "op", "members", "shape", "bytes", "begin", "end", "failed")


class Part:
    """This worker's part of a collective. `members`: names of all who are to come; `size`: bytes of its own tensors.

    `scope` is what the numbers count in, the same on all members: a group, or two ranks of one. Under way from
    `Told.enter` until `leave`, or the end of a `with`; what ends by an error has failed.
    """

    __slots__ = ("begin", "bytes", "end", "failed", "group", "members", "number", "op", "scope", "shape", "told")

    def __init__(
        self, scope: str, number: int, group: str, op: str, members: tuple[str, ...], shape: str = "", size: int = 0
    ) -> None:
        self.scope, self.number, self.group, self.op = scope, number, group, op
        self.members, self.shape, self.bytes = members, shape, size
        self.begin, self.failed = 0.0, False
        self.end: float | None = None
        self.told = _NOWHERE

    @property
    def key(self) -> str:
        return f"{self.scope}.{self.number}"

    def row(self) -> Row:
        return {name: getattr(self, name) for name in _TOLD}

    def becomes(self, known: Part) -> None:
        """Now it is known with whom it is done: it is that part, under way since it has been."""
        self.told.rename(self, known)

    def leave(self, failed: bool = False) -> None:
        """It is over here. Harmless where it is already."""
        self.told.leave(self, failed)

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.told.leave(self, kind is not None)


class CollectiveEvents:
    """One for each agent: `agent.part(Told)`. Without an agent nobody can look."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._bus = EventLog() if agent is None else agent.bus
        self._lock = threading.Lock()
        self._open: dict[Part, None] = {}
        self._ended: collections.deque[Part] = collections.deque()
        self._bus.register("collectives", self.table)

    def enter(self, part: Part) -> Part:
        """It is under way from now on."""
        part.told, part.begin = self, time.monotonic()
        self._open[part] = None
        if self._bus.listening:
            self._bus.note("CollectiveEntered", "collectives", part.key, part.row)
        return part

    def leave(self, part: Part, failed: bool) -> None:
        with self._lock:
            if part not in self._open:
                return
            part.end, part.failed = time.monotonic(), failed
            self._ended.append(part)
            del self._open[part]
            oldest = self._ended.popleft() if len(self._ended) > KEPT else None
        if self._bus.listening:
            self._bus.note("CollectiveLeft", "collectives", part.key, part.row)
            if oldest is not None:
                self._bus.note("CollectiveForgotten", "collectives", oldest.key, _nothing)

    def rename(self, part: Part, known: Part) -> None:
        with self._lock:
            if part not in self._open:
                return
            before = part.key
            part.scope, part.number, part.op, part.members = known.scope, known.number, known.op, known.members
        self._bus.note("CollectiveForgotten", "collectives", before, _nothing)
        self._bus.note("CollectiveEntered", "collectives", part.key, part.row)

    def abandon(self, world: str) -> None:
        """What was under way in a world, the first word of its scopes, has ended with it."""
        for part in list(self._open):
            if part.scope.startswith(f"{world}."):
                self.leave(part, failed=True)

    def table(self) -> Table:
        with self._lock:
            parts = [*self._ended, *list(self._open)]
        return {part.key: part.row() for part in parts}


def _nothing() -> None:
    """Of what is forgotten there is no row."""


_NOWHERE = CollectiveEvents()

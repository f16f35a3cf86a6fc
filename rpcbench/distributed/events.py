"""The table "collectives": this worker's part of each collective and transfer, for panels and traces.

All members give the same key to the same collective. So the rows of all members show which have entered, which are
missing, and which came last. Guarantees
- Running parts are in the table even without an observer, since a hang is observed only after it has begun. Of ended
  parts the latest `KEPT` are in it.
- Each part ends once: by itself, or with its world.
- Without an observer a part costs two time stamps and two dictionary entries, and no text.
"""

from __future__ import annotations

import collections
import threading
import time
from types import TracebackType

from rpcbench.base.ids import Row, Table
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import EventLog

KEPT = 1000  # ended parts in the table
_TOLD = ("group", "number", "op", "members", "shape", "bytes", "begin", "end", "failed")  # the columns


class CollectivePart:
    """This worker's part of a collective, from `CollectiveEvents.enter` until `leave` or the end of a `with` block.

    `scope` is the space of the numbers, the same on all members: a group, or a direction between two of its ranks.
    """

    __slots__ = ("begin", "bytes", "end", "failed", "group", "members", "number", "op", "scope", "shape", "told")

    def __init__(
        self, scope: str, number: int, group: str, op: str, members: tuple[str, ...], shape: str = "", size: int = 0
    ) -> None:
        self.scope, self.number, self.group, self.op = scope, number, group, op
        self.members, self.shape, self.bytes = members, shape, size  # names of all participants; of its own tensors
        self.begin, self.failed = 0.0, False  # monotonic seconds; whether it ended by an error
        self.end: float | None = None  # None while it runs
        self.told = _NOWHERE  # the table that has it

    @property
    def key(self) -> str:
        return f"{self.scope}.{self.number}"

    def row(self) -> Row:
        return {name: getattr(self, name) for name in _TOLD}

    def becomes(self, known: CollectivePart) -> None:
        """Take the identity of `known`, now that the sender is known, and keep the time of the beginning."""
        self.told.rename(self, known)

    def leave(self, failed: bool = False) -> None:
        """Record the end of the part; without effect if it has ended already."""
        self.told.leave(self, failed)

    def __enter__(self) -> CollectivePart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.told.leave(self, kind is not None)


class CollectiveEvents:
    """The table of one agent: `agent.part(CollectiveEvents)`."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._bus = EventLog() if agent is None else agent.bus  # without an agent the table cannot be observed
        self._lock = threading.Lock()  # a thread that waits and one that breaks the world may end the same part
        self._open: dict[CollectivePart, None] = {}  # running, in order of entry
        self._ended: collections.deque[CollectivePart] = collections.deque()  # oldest first
        self._bus.register("collectives", self.table)

    def enter(self, part: CollectivePart) -> CollectivePart:
        """Record a part as running from now on."""
        part.told, part.begin = self, time.monotonic()
        self._open[part] = None  # one atomic step, so without the lock
        if self._bus.listening:
            self._bus.note("CollectiveEntered", "collectives", part.key, part.row)
        return part

    def leave(self, part: CollectivePart, failed: bool) -> None:
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

    def rename(self, part: CollectivePart, known: CollectivePart) -> None:
        with self._lock:
            if part not in self._open:
                return
            before = part.key
            part.scope, part.number, part.op, part.members = known.scope, known.number, known.op, known.members
        self._bus.note("CollectiveForgotten", "collectives", before, _nothing)
        self._bus.note("CollectiveEntered", "collectives", part.key, part.row)

    def abandon(self, world: str) -> None:
        """Record the running parts of a world, whose token begins their scopes, as failed."""
        for part in list(self._open):
            if part.scope.startswith(f"{world}."):
                self.leave(part, failed=True)

    def table(self) -> Table:
        with self._lock:
            parts = [*self._ended, *list(self._open)]
        return {part.key: part.row() for part in parts}


def _nothing() -> None:
    """Return no row: the event removes it."""


_NOWHERE = CollectiveEvents()  # of parts that have not been entered yet

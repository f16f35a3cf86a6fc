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
import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import ProcessGroup

from rpcbench.base.ids import Row, Table
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import PARTS_KEPT, EventLog

KEPT = PARTS_KEPT  # ended parts in the table
_TOLD = (  # the columns
    "group", "number", "op", "members", "shape", "bytes", "begin", "end", "failed", "site", "end_known",
)  # fmt: skip


class CollectivePart:
    """This worker's part of a collective, from `CollectiveEvents.record_entry` until `record_end` or the end of a
    `with` block.

    `scope` is the space of the numbers, the same on all members: a group, or a direction between two of its ranks.
    """

    __slots__ = (
        "begin",
        "bytes",
        "end",
        "end_known",
        "event_table",
        "failed",
        "group",
        "members",
        "number",
        "op",
        "scope",
        "shape",
        "site",
    )  # fmt: skip

    def __init__(
        self, scope: str, number: int, group: str, op: object, members: tuple[str, ...], shape: object = "",
        size: int = 0, site: object = "",
    ) -> None:  # fmt: skip
        self.scope, self.number, self.group, self.op = scope, number, group, op
        self.members, self.shape, self.bytes = members, shape, size  # names of all participants; of its own tensors
        # the module or line that asked for it, where that is known; as of `op` and `shape`, its text is made for rows
        self.site = site
        self.begin, self.failed = 0.0, False  # monotonic seconds; whether it ended by an error
        self.end: float | None = None  # None while it runs
        self.end_known = True  # False: it has ended, and `end` is no more than a bound
        self.event_table = _NOWHERE  # the table that has it

    @property
    def key(self) -> str:
        return f"{self.scope}.{self.number}"

    def collective_row(self) -> Row:
        texts = {"op": str(self.op), "shape": str(self.shape), "site": str(self.site)}
        return {**{name: getattr(self, name) for name in _TOLD}, **texts}

    def adopt_identity(self, known: CollectivePart) -> None:
        """Take the identity of `known`, now that the sender is known, and keep the time of the beginning."""
        self.event_table.change_identity(self, known)

    def record_end(self, failed: bool = False) -> None:
        """Record the end of the part; without effect if it has ended already."""
        self.event_table.record_end(self, failed)

    def __enter__(self) -> CollectivePart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.event_table.record_end(self, kind is not None)


class CollectiveEvents:
    """The table of one agent: `agent.part(CollectiveEvents)`."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._bus = EventLog() if agent is None else agent.links.bus  # without an agent the table cannot be observed
        self._lock = threading.Lock()  # a thread that waits and one that breaks the world may end the same part
        self._open: dict[CollectivePart, None] = {}  # running, in order of entry
        self._ended: collections.deque[CollectivePart] = collections.deque()  # oldest first
        self._bus.register_table("collectives", self.collectives_table)

    def record_entry(self, part: CollectivePart, begin: float | None = None) -> CollectivePart:
        """Record a part as running from now on, or since an earlier time (monotonic seconds)."""
        part.event_table, part.begin = self, time.monotonic() if begin is None else begin
        self._open[part] = None  # one atomic step, so without the lock
        if self._bus.listening:
            self._bus.record_change("CollectiveEntered", "collectives", part.key, part.collective_row)
        return part

    def record_end(self, part: CollectivePart, failed: bool, end: float | None = None) -> None:
        """Record the end of a part, now or at an `end` that is no more than a bound."""
        with self._lock:
            if part not in self._open:
                return
            part.end, part.failed = time.monotonic() if end is None else end, failed
            part.end_known = end is None
            self._ended.append(part)
            del self._open[part]
            oldest = self._ended.popleft() if len(self._ended) > KEPT else None
        if self._bus.listening:
            self._bus.record_change("CollectiveLeft", "collectives", part.key, part.collective_row)
            if oldest is not None:
                self._bus.record_change("CollectiveForgotten", "collectives", oldest.key, _no_row)

    def change_identity(self, part: CollectivePart, known: CollectivePart) -> None:
        with self._lock:
            if part not in self._open:
                return
            before = part.key
            part.scope, part.number, part.op, part.members = known.scope, known.number, known.op, known.members
        self._bus.record_change("CollectiveForgotten", "collectives", before, _no_row)
        self._bus.record_change("CollectiveEntered", "collectives", part.key, part.collective_row)

    def fail_running_parts(self, world: str) -> None:
        """Record the running parts of a world, whose token begins their scopes, as failed."""
        for part in list(self._open):
            if part.scope.startswith(f"{world}."):
                self.record_end(part, failed=True)

    def drop_ended_parts(self, scope: str) -> None:
        with self._lock:
            dropped = [part for part in self._ended if part.scope == scope]
            for part in dropped:
                self._ended.remove(part)
        for part in dropped:
            self._bus.record_change("CollectiveForgotten", "collectives", part.key, _no_row)

    def collectives_table(self) -> Table:
        with self._lock:
            parts = [*self._ended, *list(self._open)]
        return {part.key: part.collective_row() for part in parts}


def count_operations(group: Any) -> int:
    """Return how many operations of a group, or of one of its backends, this rank has begun; gloo counts transfers."""
    return int(group._get_sequence_number_for_group())


class OwnCalls:
    """The calls of torch's collectives by this package itself: their rows exist already, or none is wanted."""

    def __init__(self) -> None:
        self._here = threading.local()
        # (group, first, last): torch's numbers of such calls, for those who read torch's own record later
        self.numbers: collections.deque[tuple[str, int, int]] = collections.deque(maxlen=KEPT)
        self._running: dict[object, tuple[ProcessGroup, int]] = {}  # (group, first) of the blocks that have not ended

    @property
    def is_active(self) -> bool:
        """Whether this thread is in such a call."""
        return getattr(self._here, "depth", 0) > 0

    def __enter__(self) -> None:
        self._here.depth = getattr(self._here, "depth", 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.depth -= 1

    @contextlib.contextmanager
    def mark_group(self, group: ProcessGroup) -> Iterator[None]:
        """Mark all collectives of a group in this block; no other thread may use the group meanwhile."""
        first, block = count_operations(group) + 1, object()
        self._running[block] = group, first
        try:
            with self:
                yield
        finally:
            self.numbers.append((group.group_name, first, count_operations(group)))
            del self._running[block]

    def call_ranges(self) -> list[tuple[str, int, int]]:
        """Return (group, first, last) of all such calls so far, those that run included."""
        running = [(group.group_name, first, count_operations(group)) for group, first in list(self._running.values())]
        return [*running, *self.numbers]


OWN_CALLS = OwnCalls()


def _no_row() -> None:
    """Return no row: the event removes it."""


_NOWHERE = CollectiveEvents()  # of parts that have not been entered yet

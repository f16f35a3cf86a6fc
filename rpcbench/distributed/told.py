"""What this worker does together with others: rows of the table "collectives", its own part of each of them.

All members give the same key to the same collective. So whoever has the rows of all knows who has entered, who is
missing, and who came last. Guarantees
- What is under way is in the table whether anybody looks or not, as who comes to look wants to know what hangs; of what
  has ended the latest `KEPT` are.
- Each part ends once: by itself, or with the world that it is in.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rpcbench.agent.core import Agent
from rpcbench.words.events import Row, Table

KEPT = 1000
_TOLD = ("group", "number", "op", "members", "shape", "bytes", "begin", "end", "failed")


class Part:
    """This worker's part of a collective. `members`: names of all who are to come; `size`: bytes of its own tensors.

    `scope` is what the numbers count in, the same on all members: a group, or two ranks of one.
    """

    __slots__ = ("begin", "bytes", "end", "failed", "group", "key", "members", "number", "op", "shape")

    def __init__(
        self, scope: str, number: int, group: str, op: str, members: tuple[str, ...], shape: str = "", size: int = 0
    ) -> None:
        self.key, self.number, self.group, self.op = f"{scope}.{number}", number, group, op
        self.members, self.shape, self.bytes = members, shape, size
        self.begin, self.failed = 0.0, False
        self.end: float | None = None

    def row(self) -> Row:
        return {name: getattr(self, name) for name in _TOLD}


class Entered:
    """A part that is under way, until the end of a `with`; one that ends by an error has failed."""

    __slots__ = ("_part", "_told")

    def __init__(self, told: Told, part: Part) -> None:
        self._told, self._part = told, part

    def becomes(self, known: Part) -> None:
        """Now it is known with whom it is done: it is that part, under way since this one is."""
        if self._told.replace(self._part, known):
            self._part = known

    def leave(self, failed: bool = False) -> None:
        self._told.leave(self._part, failed)

    def __enter__(self) -> Entered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(kind is not None)


class Told:
    """One for each agent: `agent.part(Told)`. Without an agent nobody can look."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._note: Callable[..., None] = _nothing if agent is None else agent.bus.note
        self._lock = threading.Lock()
        self._open: dict[str, Part] = {}
        self._ended: collections.deque[Part] = collections.deque()
        if agent is not None:
            agent.bus.register("collectives", self.table)

    def enter(self, part: Part) -> Entered:
        """It is under way from now on."""
        part.begin = time.monotonic()
        self._open[part.key] = part
        self._note("CollectiveEntered", "collectives", part.key, part.row)
        return Entered(self, part)

    def leave(self, part: Part, failed: bool) -> None:
        """It is over here. Harmless where it is already."""
        with self._lock:
            if self._open.pop(part.key, None) is None:
                return
            part.end, part.failed = time.monotonic(), failed
            self._ended.append(part)
            oldest = self._ended.popleft() if len(self._ended) > KEPT else None
        self._note("CollectiveLeft", "collectives", part.key, part.row)
        if oldest is not None:
            self._note("CollectiveForgotten", "collectives", oldest.key, _nothing)

    def replace(self, part: Part, known: Part) -> bool:
        """Whether it was under way, and is the other one now."""
        with self._lock:
            if self._open.pop(part.key, None) is None:
                return False
            known.begin = part.begin
            self._open[known.key] = known
        self._note("CollectiveForgotten", "collectives", part.key, _nothing)
        self._note("CollectiveEntered", "collectives", known.key, known.row)
        return True

    def abandon(self, world: str) -> None:
        """What was under way in a world, the first word of its scopes, has ended with it."""
        with self._lock:
            parts = [part for key, part in list(self._open.items()) if key.startswith(f"{world}.")]
        for part in parts:
            self.leave(part, failed=True)

    def table(self) -> Table:
        with self._lock:
            parts = [*self._ended, *list(self._open.values())]
        return {part.key: part.row() for part in parts}


def _nothing(*_: object) -> None:
    """Of what is forgotten there is no row; and nobody is told where nobody listens."""

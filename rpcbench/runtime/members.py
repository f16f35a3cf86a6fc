"""Who is in the world and who has gone from it, in users' words: names, ids, reasons; and whoever wants to be told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import RpcError, UnknownWorkerError, WorkerLostError, counted, never_ran
from rpcbench.base.ids import check_name
from rpcbench.protocol.effects import Gone
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.pool import Job
from rpcbench.wire.messages import Member, Report


class _Fields(NamedTuple):
    name: str
    id: int


class WorkerInfo(_Fields):
    """Name and id of one worker. RuntimeError for a name that no worker can have."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> WorkerInfo:
        return super().__new__(cls, check_name(name), id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"  # as torch's, which programs match


To = int | str | WorkerInfo
"""Which member: its id, its name, or both."""
MemberHandler = Callable[[str, WorkerInfo, str], object]
"""("joined" | "left" | "lost" | "suspect" | "recovered", who, reason)"""
GONE = ("left", "lost")
"""Those after which a member does not come back."""
Explain = Callable[[str, str], str]
"""(name, reason) -> a better reason why that member went; may have to wait a moment for it."""


class Members:
    def __init__(self, me: str, machine: LockedNode, spawn: Callable[[Job], None]) -> None:
        self.explain: Explain = lambda name, reason: reason
        self.expected: Callable[[], list[str]] = self._free_ranks  # who else is known to come
        self._me = me
        self._machine = machine
        self._spawn = spawn
        self._found: dict[str | int, WorkerInfo] = {}  # until somebody comes or goes
        self._watchers: list[MemberHandler] = []
        self._changes = Changes()

    def all(self) -> list[WorkerInfo]:
        members = self._machine.ask(lambda node: list(node.members.members.values()))
        return [WorkerInfo._make((member.name, member.id)) for member in sorted(members)]

    def name(self, worker: int) -> str:
        """The name of a member, also of one that is gone."""
        return self._machine.ask(lambda node: node.name(worker))

    def find(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """A member by name, id or WorkerInfo. UnknownWorkerError, WorkerLostError, ValueError."""
        known = self._found.get(to) if type(to) is str or type(to) is int else None
        if known is not None:
            return known
        key = to if isinstance(to, str) else getattr(to, "id", to)
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise ValueError(f"Cannot get WorkerInfo from name {to!r}: give a worker's name, id or WorkerInfo")
        kept = self._found  # that of before the look: a change makes another one
        found = self._machine.ask(lambda node: node.members.find(key) or node.gone.find(key))
        if not isinstance(found, Member):
            raise self._unfound(key, found)
        info = kept[key] = WorkerInfo._make((found.name, found.id))
        return info

    def _unfound(self, key: int | str, gone: Gone | None) -> RpcError:
        if gone is not None:
            return never_ran(WorkerLostError(gone.words))
        return UnknownWorkerError.of(key, [info.name for info in self.all()])

    def unreachable(self, worker: int, reason: str) -> WorkerLostError:
        """What to say of a member that a message could not be sent to."""
        gone = self._machine.ask(lambda node: node.gone.find(worker))
        return never_ran(WorkerLostError(gone.words if gone else f"{self.name(worker)} cannot be reached: {reason}"))

    def explained(self, report: Report) -> Report:
        """What another member has noticed, with the reason as far as it is known here."""
        member = self._machine.ask(lambda node: node.members.members.get(report.id))
        return report._replace(reason=self.explain(member.name, report.reason)) if member else report

    # -- waiting
    def wait_for(self, count: int, timeout: float) -> None:
        """Wait until the world has `count` members, this one among them.

        RpcError after `timeout` seconds, or where the world has ended; it names who came and, as far as it is known,
        who is missing.
        """
        self._changes.wait_for(lambda: len(self.all()) >= count or self._is_over(), timeout)
        if len(self.all()) < count:
            raise RpcError(f"{self._me} waited {timeout:g} s for {counted(count, 'member')}, but {self.census()}")

    def wait_until(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait until members have come or gone so that `reached()`, `timeout` seconds at most; whether it is so."""
        return self._changes.wait_for(reached, timeout)

    def _is_over(self) -> bool:
        return self._machine.ask(lambda node: node.members.ended or node.members.closing)

    def census(self) -> str:
        """Who came, and who is missing as far as that is known."""
        here = [info.name for info in self.all()]
        missing = [name for name in self.expected() if name not in here]
        came = f"only {len(here)} came: {', '.join(here)}" if here else "only 0 came: not even member 0 answered"
        return f"{came}; missing: {', '.join(missing)}" if missing and here else came

    def _free_ranks(self) -> list[str]:
        """In a closed world the missing ones have numbers, and no names yet."""
        size = self._machine.ask(lambda node: node.members.world_size) or 0
        taken = {info.id for info in self.all()}
        return [f"rank {rank}" for rank in range(size) if rank not in taken]

    # -- changes
    def watch(self, handler: MemberHandler) -> None:
        self._watchers.append(handler)

    def came(self, member: Member) -> None:
        self._tell("joined", member, "")

    def went(self, gone: Gone) -> None:
        self._tell("lost" if gone.lost else "left", gone.member, gone.reason)

    def doubted(self, kind: str, member: int, reason: str) -> None:
        """A member has not been heard for a while ("suspect"), or is heard again ("recovered")."""
        found = self._machine.ask(lambda node: node.members.find(member))
        if found is not None:
            self._tell(kind, found, reason)

    def _tell(self, kind: str, member: Member, reason: str) -> None:
        self._found = {}
        info = WorkerInfo._make((member.name, member.id))
        self._changes.tell()
        for watcher in self._watchers:
            self._spawn(partial(watcher, kind, info, reason))

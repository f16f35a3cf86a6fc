"""The members of the world and those that have left it, by name, id and reason; and the callbacks for changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import RpcError, UnknownWorkerError, WorkerLostError, count_noun, mark_never_ran
from rpcbench.base.ids import check_name
from rpcbench.protocol.effects import MemberJoined, MemberLeft
from rpcbench.runtime.locked_node import EffectTable, LockedNode
from rpcbench.runtime.pool import Job
from rpcbench.wire.messages import Member, Report


class _Fields(NamedTuple):
    name: str
    id: int


class WorkerInfo(_Fields):
    """Name and id of one worker. RuntimeError for a name that no worker can have.

    Args:
        name: The name of the worker.
        id: Its id in the world, its rank.
    """

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> WorkerInfo:
        return super().__new__(cls, check_name(name), id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"  # the same text as torch's, which programs match


To = int | str | WorkerInfo
"""Which member: its id, its name, or both."""
MemberHandler = Callable[[str, WorkerInfo, str], object]
"""("joined" | "left" | "lost" | "suspect" | "recovered", member, reason)"""
GONE = ("left", "lost")
"""The events after which a member does not return."""


class _OrderedHandler:
    """A handler of changes. It gets them in their order, one at a time, each on a pool thread."""

    def __init__(self, handler: MemberHandler, spawn: Callable[[Job], None]) -> None:
        self._handler, self._spawn = handler, spawn
        self._lock = threading.Lock()
        self._ahead: deque[tuple[str, WorkerInfo, str]] = deque()
        self._busy = False  # a thread handles a change, or will

    def queue_event(self, kind: str, member: WorkerInfo, reason: str) -> None:
        with self._lock:
            self._ahead.append((kind, member, reason))
            if self._busy:
                return
            self._busy = True
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._spawn(self._handle_next)
        except RuntimeError:  # the system allows no thread now: the next change brings this one
            self._busy = False
            raise

    def _handle_next(self) -> None:
        change = self._ahead.popleft()
        try:
            self._handler(*change)
        finally:  # an error is reported by the pool, and the next change is handled all the same
            with self._lock:
                more = self._busy = bool(self._ahead)
            if more:  # not `_busy`, which another thread may have set since to go on by itself
                self._go_on()


class LaunchRecords(NamedTuple):
    """The knowledge about members of the program that launches them."""

    # (name, reason of a loss) → a better reason, say with an exit status; may block a moment for it.
    explain: Callable[[str, str], str] = lambda name, reason: reason
    expected: Callable[[], list[str]] | None = None  # names of members to come


NO_RECORDS = LaunchRecords()


class Members:
    def __init__(
        self,
        me: str,
        machine: LockedNode,
        effects: EffectTable,
        spawn: Callable[[Job], None],
        records: LaunchRecords,
    ) -> None:
        self.explain = records.explain
        self._expected = records.expected or self._free_ranks
        self._me = me
        self._machine = machine
        self._spawn = spawn
        self._found: dict[str | int, WorkerInfo] = {}  # cache; replaced at each change
        self._watchers: list[_OrderedHandler] = []
        self._changes = Condition()
        effects.register(MemberJoined, lambda effect: self._notify_watchers("joined", effect.member, ""))

    def all_members(self) -> list[WorkerInfo]:
        """Return name and id of all members, by id."""
        members = self._machine.read_node(lambda node: list(node.members.members.values()))
        return [WorkerInfo._make((member.name, member.id)) for member in sorted(members)]

    def departed_members(self, processes: Mapping[int, int]) -> list[int]:
        """Return the ids of those of these processes, id → incarnation, that are known to have left the world."""
        return self._machine.read_node(
            lambda node: [i for i, incarnation in processes.items() if node.is_alive(i, incarnation) is False]
        )

    def member_name(self, worker: int) -> str:
        """Return the name of a member, also of one that has left."""
        return self._machine.read_node(lambda node: node.member_name(worker))

    def find_member(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """Return a member by name, id or WorkerInfo. UnknownWorkerError, WorkerLostError, ValueError."""
        known = self._found.get(to) if type(to) is str or type(to) is int else None
        if known is not None:
            return known
        key = to if isinstance(to, str) else getattr(to, "id", to)
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise ValueError(f"Cannot get WorkerInfo from name {to!r}: give a worker's name, id or WorkerInfo")
        kept = self._found  # taken before the lookup: a change replaces it, so no stale entry stays
        found = self._machine.read_node(lambda node: node.members.find_member(key) or node.gone.find_departed(key))
        if not isinstance(found, Member):
            if found is not None:
                raise mark_never_ran(WorkerLostError(found.error_text))
            raise UnknownWorkerError.of(key, [info.name for info in self.all_members()])
        info = kept[key] = WorkerInfo._make((found.name, found.id))
        return info

    def unreachable_error(self, worker: int, reason: str) -> WorkerLostError:
        """Make the error for a member to which a message could not be sent."""
        gone = self._machine.read_node(lambda node: node.gone.find_departed(worker))
        return mark_never_ran(
            WorkerLostError(gone.error_text if gone else f"{self.member_name(worker)} cannot be reached: {reason}")
        )

    def explain_report(self, report: Report) -> Report:
        """Return another member's report of a loss, with the best reason known here."""
        member = self._machine.read_node(lambda node: node.members.members.get(report.id))
        return report._replace(reason=self.explain(member.name, report.reason)) if member else report

    # -- waiting
    def wait_for_members(self, count: int, timeout: float) -> None:
        """Wait for `count` members, this one included. RpcError lists them after `timeout` s, or if the world ends."""

        def is_reached_or_over() -> bool:
            over = self._machine.read_node(lambda node: node.members.ended or node.members.closing)
            return over or len(self.all_members()) >= count

        self._changes.wait_for(is_reached_or_over, timeout)
        if len(self.all_members()) < count:
            raise RpcError(
                f"{self._me} waited {timeout:g} s for {count_noun(count, 'member')}, but {self.describe_members()}"
            )

    def wait_until_reached(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait for changes until `reached()`, at most `timeout` seconds; return whether it is reached."""
        return self._changes.wait_for(reached, timeout)

    def describe_members(self) -> str:
        """List the members that came, and those that are missing as far as that is known."""
        here = [info.name for info in self.all_members()]
        missing = [name for name in self._expected() if name not in here]
        present = f"only {len(here)} came: {', '.join(here)}" if here else "only 0 came: not even member 0 answered"
        return f"{present}; missing: {', '.join(missing)}" if missing and here else present

    def _free_ranks(self) -> list[str]:
        """List the ranks without a member: in a closed world missing members have numbers, but no names yet."""
        size = self._machine.read_node(lambda node: node.members.world_size) or 0
        taken = {info.id for info in self.all_members()}
        return [f"rank {rank}" for rank in range(size) if rank not in taken]

    # -- changes
    def add_watcher(self, handler: MemberHandler) -> None:
        """Call `handler` (on a pool thread, in order) when members join, leave or are lost.

        The call may come late, when another process has taken the id already: see `departed_members`.
        """
        self._watchers.append(_OrderedHandler(handler, self._spawn))

    def member_left(self, gone: MemberLeft) -> None:
        self._notify_watchers("lost" if gone.lost else "left", gone.member, gone.reason)

    def suspicion_changed(self, kind: str, member: int, reason: str) -> None:
        """Report a member that has been silent for a while ("suspect"), or responds again ("recovered")."""
        found = self._machine.read_node(lambda node: node.members.find_member(member))
        if found is not None:
            self._notify_watchers(kind, found, reason)

    def _notify_watchers(self, kind: str, member: Member, reason: str) -> None:
        self._found = {}
        info = WorkerInfo._make((member.name, member.id))
        self._changes.notify_all()
        for watcher in self._watchers:
            watcher.queue_event(kind, info, reason)

"""The world that this process has a rank in, and its groups: founded, waited in, broken, ended.

torch does the work, on lanes; who waits for it here is freed by what ends it: a deadline, Ctrl-C on any rank, a rank
that is gone, a cluster that has changed. A world in which this has happened is broken: no rank knows what others have
done of the collective, so it refuses all more, and `init_process_group` founds the next one.

Guarantees
- The first reason is told to all ranks, through the store, and every rank raises it.
- Nobody's end is guessed: it is known from membership, from the system on one host, or not named.

How processes become the ranks of one world at a store: each founding is a round with a number. A round gets one
verdict, by one atomic step of the store: all have come, or one gave up; so either all its ranks go on, or none does.
- Ranks that nobody names are handed out in the order of arrival.
- A process that was late for a round that failed comes into the next one, as the others do that try again; so does one
  that meets only what a killed process of this host has left there.
- Groups of different names at one store never see each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import CollectiveError, RpcError, RpcTimeoutError, WorkerLostError, counted
from rpcbench.distributed.events import CollectiveEvents
from rpcbench.distributed.executor import BlockingExecutor, Pending
from rpcbench.distributed.stores import Place, polled, store_at
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import creation_site
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.hosts import host_id


class RankWatch:
    """One to an agent: it looks after the latest world."""

    def __init__(self, agent: Agent) -> None:
        self._world: weakref.ref[World] | None = None
        agent.on_member(self._changed)

    @staticmethod
    def over(world: World) -> None:
        """Look after a world, where this process has an agent."""
        if (agent := current.find()) is not None:
            agent.part(RankWatch)._world = weakref.ref(world)

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        world = self._world() if self._world is not None else None
        rank = world.rank_of(who.name) if world is not None and kind == "lost" else None
        if world is not None and rank is not None:
            world.ends(world.lost([rank], reason))


_COMPLETE, _STALE = b"complete", b"stale"


@dataclass(frozen=True, slots=True)
class Who:
    """The process behind a rank."""

    name: str
    host: str
    pid: int

    @staticmethod
    def here() -> Who:
        agent = current.find()
        return Who(agent.name if agent else f"{socket.gethostname()}:{os.getpid()}", host_id(), os.getpid())

    def is_gone(self) -> bool:
        """Whether it has certainly ended; False of one on another host."""
        if self.host != host_id():
            return False
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, slots=True)
class Met:
    """A founding that came about: the store of this round, and who has which rank."""

    store: Store
    rank: int
    ranks: tuple[Who, ...]


def meet(place: Place, group_name: str, seconds: float) -> Met:
    """Wait until all ranks have come. RpcTimeoutError after `seconds`: who has not, and who gave up."""
    shared = PrefixStore(f"rpcbench/{group_name}", store_at(place, seconds))
    while True:
        number, rank = _arrive(shared, place)
        store = PrefixStore(f"{number}", shared)
        if not store.check(["verdict"]) and (met := _wait(store, rank, place, seconds)):
            return met


def _arrive(shared: Store, place: Place) -> tuple[int, int]:
    """The round and rank of this process."""
    if place.rank >= 0:
        return shared.add(f"{place.world_size}/tries/{place.rank}", 1), place.rank
    number, rank = divmod(shared.add(f"{place.world_size}/tries", 1) - 1, place.world_size)
    return number + 1, rank


def _wait(store: Store, rank: int, place: Place, seconds: float) -> Met | None:
    """The world, once all are there; None where one that had come is dead."""
    size = place.world_size
    store.set(f"here/{rank}", json.dumps(asdict(Who.here())))
    if store.add("came", 1) == size:
        dead = any(who.is_gone() for who in _who(store, size))
        store.compare_set("verdict", "", (_STALE if dead else _COMPLETE).decode())
    try:
        polled(lambda: store.check(["verdict"]), seconds)
    finally:
        verdict = store.compare_set("verdict", "", _reason(store, rank, size, seconds))
    if verdict == _STALE:
        return None
    if verdict != _COMPLETE:
        raise RpcTimeoutError(verdict.decode())
    return Met(store, rank, _who(store, size))


def _who(store: Store, size: int) -> tuple[Who, ...]:
    return tuple(Who(**json.loads(store.get(f"here/{each}"))) for each in range(size))


def _reason(store: Store, rank: int, size: int, seconds: float) -> str:
    missing = [str(each) for each in range(size) if not store.check([f"here/{each}"])]
    return (
        f"the process group was not founded: rank {rank} gave up after at most {seconds:g} s. Of "
        f"{counted(size, 'rank')} {size - len(missing)} had come; missing: {', '.join(missing) or 'none'}. "
        "Each rank must call init_process_group, with the same world_size and group_name"
    )


T = TypeVar("T")

_GLANCE = 0.5
"""After so many seconds a wait is told of in the store, and looks there for what others tell."""
_NEWS_SECONDS = 2.0
"""How long after a broken connection word of a lost rank may take."""
_UNUSED_TAG = 0x7E57
_KINDS = {kind.__name__: kind for kind in (CollectiveError, RpcTimeoutError, WorkerLostError)}
AGAIN = "Call init_process_group again, on all ranks"


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits in: `number` counts what its group does; `members` are those it waits for."""

    what: str
    group: str
    number: int
    members: tuple[int, ...]


class World:
    """One founding of the default group, as this rank sees it."""

    def __init__(self, met: Met, backend: str, seconds: float) -> None:
        self.store, self.rank, self.ranks = met.store, met.rank, met.ranks
        self.backend, self.seconds = backend, seconds
        self._changes = Changes()
        self._broken: RpcError | None = None
        self.outdated = False  # ranks are others now
        self._lanes: dict[object, BlockingExecutor] = {}
        self.made = 0  # groups, counted alike on all ranks
        self.kept: Store | None = None  # what torch waits in: it does not keep a store of Python's itself
        self.token = met.store.compare_set("token", "", secrets.token_hex(8)).decode()
        agent = current.find()
        self.told = CollectiveEvents() if agent is None else agent.part(CollectiveEvents)

    # -- naming
    def named(self, rank: int) -> str:
        """As `rank 1 (worker2)`."""
        return f"rank {rank} ({self.ranks[rank].name})"

    def rank_of(self, name: str) -> int | None:
        """The rank of a worker of our cluster."""
        return next((rank for rank, who in enumerate(self.ranks) if who.name == name), None)

    # -- work
    def lane(self, key: object) -> BlockingExecutor:
        """The lane of this key, the same for all threads; it has no thread of its own before its first job."""
        return self._lanes.setdefault(key, BlockingExecutor(f"rpcbench-group-{key}", self._changes.tell))

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return any(lane.busy for lane in list(self._lanes.values()))

    def check(self) -> None:
        """Raises why this world is broken, if it is."""
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def finish(self, pending: Pending[T], wait: Wait) -> T:
        """The result of a job, as soon as it is there; what breaks the world meanwhile is raised instead."""
        try:
            self._await(pending, wait)
        except KeyboardInterrupt:
            self.breaks(CollectiveError(f"{self.named(self.rank)} was interrupted in {wait.what}. {AGAIN}"))
            raise
        if not self.broken and _is_of_torch(pending.error):
            self._blame(str(pending.error), wait)
        if not pending.done or _is_of_torch(pending.error):
            self.check()
        return pending.result()

    def _await(self, pending: Pending[T], wait: Wait) -> None:
        deadline = time.monotonic() + self.seconds
        told = False
        while not self._changes.wait_for(lambda: pending.done or self.broken, self._nap(deadline)):
            if not told:
                self._post(json.dumps([wait.group, wait.number, wait.what, str(creation_site())]))
                told = True
            self.hear()
            if time.monotonic() >= deadline and not pending.done and not self.broken:
                self.breaks(RpcTimeoutError(self._late(wait)))
        if told and not self.broken:
            with contextlib.suppress(RuntimeError):  # who keeps the store may have done its work, and be gone
                self.store.set(f"waits/{self.rank}", "")

    @staticmethod
    def _nap(deadline: float) -> float:
        return max(0.0, min(_GLANCE, deadline - time.monotonic()))

    # -- what ranks tell each other through the store
    def _post(self, words: str) -> None:
        with self._kept("tell where it waits"):
            self.store.set(f"waits/{self.rank}", words)

    def hear(self) -> None:
        """Take over what has broken the world elsewhere."""
        with self._kept("hear of the others"):
            if self._broken is None and self.store.check(["broken"]):
                self._take(self.store.get("broken"))

    def _take(self, told: bytes) -> None:
        kind, text = json.loads(told)
        self.ends(_KINDS[kind](text))

    @contextlib.contextmanager
    def _kept(self, deed: str) -> Iterator[None]:
        """Around words with the store, which end with the rank that keeps it. Word of its end may come later."""
        try:
            yield
        except (c10d.DistError, RuntimeError) as error:
            polled(lambda: self.broken or bool(self.gone()), _NEWS_SECONDS)
            gone, cannot = self.gone(), f"no rank can {deed}, as the process group's store is out of reach"
            words = str(error).splitlines()[0]
            self.ends(self.lost(gone, cannot) if gone else WorkerLostError(f"{cannot}: {words}. {AGAIN}"))

    def breaks(self, error: RpcError) -> None:
        """Nobody goes on in this world, for this reason or an earlier one."""
        if self._broken is None:
            with self._kept("tell the others"):
                kind = type(error).__name__
                self._take(self.store.compare_set("broken", "", json.dumps([kind, error.args[0]])))

    def ends(self, error: RpcError) -> None:
        """As `breaks`, where the other ranks hear of it in another way, or need not."""
        if self._broken is None:
            self.close(error)
            _abort()

    # -- who is at fault
    def reached(self, store: Store, keys: list[str], ranks: Sequence[int]) -> bool:
        """Whether all of these are in a store, where these ranks are to put them; raises what has broken the world.

        A rank that is gone and has not put its own there breaks it.
        """
        self.check()
        gone = [rank for rank in self.gone() if rank in ranks]  # first: it may have put it there, and ended then
        if store.check(keys):
            return True
        if gone:
            self.breaks(self.lost(gone, f"while {self.named(self.rank)} waited for it to join a group"))
            self.check()
        return False

    def _late(self, wait: Wait) -> str:
        """Who has not come, and where the others wait."""
        lines = [f"{self.seconds:g} s have passed in {wait.what}:"]
        for rank in sorted({*wait.members, self.rank}):
            said = ""
            with self._kept("tell who waits"):
                said = self.store.get(f"waits/{rank}").decode() if self.store.check([f"waits/{rank}"]) else ""
            lines.append(f"  {self.named(rank)} {_whereabouts(said, wait)}")
        return "\n".join([*lines, AGAIN])

    def _blame(self, words: str, wait: Wait) -> None:
        """A connection has ended, or torch has failed: break the world, with the name of who is gone, if one is."""
        gone: list[int] = []

        def known() -> bool:
            self.hear()
            gone[:] = self.gone()
            return self.broken or bool(gone)

        polled(known, _NEWS_SECONDS)
        if gone:
            self.breaks(self.lost(gone, f"while {self.named(self.rank)} was in {wait.what}"))
        else:
            self.breaks(CollectiveError(f"{wait.what} failed on {self.named(self.rank)}: {words} {AGAIN}"))

    def gone(self) -> list[int]:
        """Ranks that have ended for certain."""
        return [rank for rank, who in enumerate(self.ranks) if who.is_gone()]

    def lost(self, ranks: Sequence[int], how: str) -> WorkerLostError:
        """That these ranks are gone."""
        names = ", ".join(self.named(rank) for rank in ranks)
        return WorkerLostError(f"{names} of the process group {'are' if len(ranks) > 1 else 'is'} gone, {how}. {AGAIN}")

    def close(self, error: RpcError) -> None:
        """Free the threads, and whoever waits. What torch has finished here still reaches the others."""
        self._broken = self._broken or error
        self._changes.tell()
        for lane in list(self._lanes.values()):
            lane.close()
        self.told.abandon(self.token)

    def ended(self, seconds: float) -> None:
        """Wait for the threads of a world that is closed, so many seconds for each at most."""
        for lane in list(self._lanes.values()):
            lane.ended(seconds)


def _is_of_torch(error: BaseException | None) -> bool:
    """Whether a job has failed half-way, and not by what all ranks agreed to raise."""
    return error is not None and not isinstance(error, CollectiveError)


def _whereabouts(said: str, wait: Wait) -> str:
    if not said:
        return "has not come"
    group, number, what, where = json.loads(said)
    same = group == wait.group and number == wait.number
    return f"{'waits there' if same else f'has not come; it waits in {what}'}, at {where}"


def _abort() -> None:
    """End what torch has under way. gloo has no word for that; but a wait that is late ends all others of its group."""
    for group in list(c10d.distributed_c10d._world.pg_map):
        if isinstance(group, c10d.ProcessGroup) and group.size() > 1:
            peer = 1 if group.rank() == 0 else 0
            with contextlib.suppress(RuntimeError):  # that it is late, or that the connection has ended before
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            group.abort()  # NCCL has one

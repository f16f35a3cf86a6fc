"""The world of a process group: rendezvous of its ranks at a store, waits of its ranks, and its failure and end.

Guarantees
- A wait for a collective ends with a deadline, Ctrl-C on any rank, the end of a rank, or a change of the cluster.
- Each of these breaks the world, because no rank can know how far the others have come in the collective. A broken
  world refuses all further collectives; `init_process_group` creates the next world.
- The first reason reaches all ranks through the store, and every rank raises it.
- A worker of a cluster that is lost before it has come to a rendezvous ends that, as the cluster's next change does.
- The end of a rank is never guessed: it is known from membership, or from the operating system on one host.
- Ranks without a number get one in the order of arrival. Groups of different names at one store never interact.
"""
# The rendezvous takes place in numbered rounds, each with a prefix of its own in the store:
#
#     here/RANK   the process of each rank, as JSON          verdict    written once, by compare_set:
#     came        counts them; the last one decides             complete   all have come, and all continue
#                                                               stale      one of them has died: begin the next round
#                                                               an error   one gave up, and all raise its reason
#
# As there is one verdict, either all ranks of a round continue or none does. A process that is late for a failed round
# enters the next one, together with the ranks that try again; so does one that finds only entries of a killed process.
# Later the ranks exchange two things through the store of their round:
#
#     waits/RANK  the collective in which this rank waits, for the error of a rank whose deadline passes
#     broken      the first reason, written once, by compare_set

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import (
    CollectiveError,
    RankFailedError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
    count_noun,
)
from rpcbench.distributed import stores
from rpcbench.distributed.events import OWN_CALLS, CollectiveEvents
from rpcbench.distributed.executor import BlockingExecutor, Pending
from rpcbench.distributed.stores import InitMethod, store_at, wait_until
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import creation_site
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.hosts import host_id
from rpcbench.transport.listeners import is_loopback


class RankWatch:
    """The part of an agent that ends the latest world when a worker of the cluster with a rank in it is lost."""

    def __init__(self, agent: Agent) -> None:
        self._world: weakref.ref[World] | None = None
        agent.on_member(self._member_changed)

    @staticmethod
    def watch_world(world: World) -> None:
        """Watch a world, where this process has an agent."""
        if (agent := current.find_current()) is not None:
            agent.part(RankWatch)._world = weakref.ref(world)

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        world = self._world() if self._world is not None else None
        rank = world.rank_of(who.name) if world is not None and kind == "lost" else None
        if world is not None and rank is not None:
            world.break_on_this_rank(world.lost_ranks_error([rank], reason))


_COMPLETE, _STALE = b"complete", b"stale"
_NOT_FOUNDED = "the process group was not founded"


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank."""

    name: str  # of the worker, or HOST:PID
    host: str  # id of the host
    pid: int
    offer: str = ""  # its backend or its GPU, see `backends`

    @staticmethod
    def of_this_process(offer: str = "") -> RankProcess:
        agent = current.find_current()
        name = agent.name if agent else f"{socket.gethostname()}:{os.getpid()}"
        return RankProcess(name, host_id(), os.getpid(), offer)

    def has_ended(self) -> bool:
        """Return whether it has certainly ended; False for a process on another host."""
        if self.host != host_id():
            return False
        try:  # a zombie has ended too: its parent has not collected it yet
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, slots=True)
class RendezvousResult:
    """The result of a successful rendezvous."""

    store: Store  # of this round
    rank: int  # of this process
    ranks: tuple[RankProcess, ...]  # all processes, by rank


@contextlib.contextmanager
def convert_store_errors(place: InitMethod) -> Iterator[None]:
    """Turn failures of the store meanwhile into the end of its host. Raises WorkerLostError."""
    try:
        yield
    except c10d.DistError as error:  # the report that the host is lost may arrive a little later
        wait_until(lambda: not place.names or _find_obstacle(place) is not None, DETECTION_SECONDS)
        _raise_obstacle(place)
        raise WorkerLostError(
            f"{_NOT_FOUNDED}: the rank that hosts its store has ended or cannot be reached "
            f"({str(error).splitlines()[0]}). {RETRY_HINT}"
        ) from error


def meet_all_ranks(place: InitMethod, group_name: str, seconds: float, offer: str = "") -> RendezvousResult:
    """Wait until all ranks have come, while `convert_store_errors`; this one makes an offer (see `backends`).

    Raises RpcTimeoutError after `seconds`, with the ranks that have not; WorkerLostError where a worker is lost.
    """
    shared = PrefixStore(f"rpcbench/{group_name}", store_at(place, seconds, lambda: _raise_obstacle(place)))
    while True:
        number, rank = _join_round(shared, place)
        store = PrefixStore(f"{number}", shared)
        if not store.check(["verdict"]) and (met := _wait_for_verdict(store, rank, place, seconds, offer)):
            return met


def _raise_obstacle(place: InitMethod) -> None:
    if (error := _find_obstacle(place)) is not None:
        raise error


def _find_obstacle(place: InitMethod) -> RpcError | None:
    """Return the reason why the ranks at this place can no longer all come; None where none is known."""
    agent = current.find_current()
    if place.generation and stores.cluster_generation() != place.generation:
        return CollectiveError(f"{_NOT_FOUNDED}: the cluster has changed meanwhile. {RETRY_HINT}")
    if agent is None or place.names[place.rank : place.rank + 1] != (agent.name,):
        return None  # the program has given other ranks than those of the cluster
    for rank, name in enumerate(place.names):
        try:
            agent.member(name)
        except UnknownWorkerError:  # it never was in this world
            continue
        except WorkerLostError as error:
            return WorkerLostError(f"{_NOT_FOUNDED}: rank {rank} ({name}) has not come. {error}")
    return None


def _join_round(shared: Store, place: InitMethod) -> tuple[int, int]:
    if place.rank >= 0:  # the n-th try of each rank belongs to round n
        return shared.add(f"{place.world_size}/tries/{place.rank}", 1), place.rank
    number, rank = divmod(shared.add(f"{place.world_size}/tries", 1) - 1, place.world_size)
    return number + 1, rank


def _wait_for_verdict(
    store: Store, rank: int, place: InitMethod, seconds: float, offer: str
) -> RendezvousResult | None:
    """Return the world once all ranks have come; None if one of them has died meanwhile."""
    size = place.world_size
    store.set(f"here/{rank}", json.dumps(asdict(RankProcess.of_this_process(offer))))
    if store.add("came", 1) == size:
        dead = any(who.has_ended() for who in read_ranks(store, size))
        store.compare_set("verdict", "", (_STALE if dead else _COMPLETE).decode())
    try:
        wait_until(lambda: store.check(["verdict"]) or _find_obstacle(place) is not None, seconds)
    finally:  # Ctrl-C too gives up for all ranks; a verdict that exists already stays
        reason = _find_obstacle(place) or RpcTimeoutError(_timeout_text(store, rank, place, seconds))
        verdict = store.compare_set("verdict", "", _as_json(reason))
    if verdict == _STALE:
        return None
    if verdict != _COMPLETE:
        raise _from_json(verdict)
    return RendezvousResult(store, rank, read_ranks(store, size))


def has_met(store: Store, size: int) -> bool:
    """Return whether this many ranks have met at the store of a round."""
    keys = ["verdict", *(f"here/{each}" for each in range(size))]
    return store.check(keys) and store.get("verdict") == _COMPLETE


def read_ranks(store: Store, size: int) -> tuple[RankProcess, ...]:
    """Return the processes that have come to the store of a round, by rank."""
    return tuple(RankProcess(**json.loads(store.get(f"here/{each}"))) for each in range(size))


def _timeout_text(store: Store, rank: int, place: InitMethod, seconds: float) -> str:
    size = place.world_size
    far = f", and reach the store at {place.address}:{place.port}" if not is_loopback(place.address) else ""
    missing = [str(each) for each in range(size) if not store.check([f"here/{each}"])]
    return (
        f"{_NOT_FOUNDED}: rank {rank} gave up after at most {seconds:g} s. Of "
        f"{count_noun(size, 'rank')} {size - len(missing)} had come; missing: {', '.join(missing) or 'none'}. "
        f"Each rank must call init_process_group, with the same world_size and group_name{far}"
    )


def _as_json(error: RpcError) -> str:
    return json.dumps([type(error).__name__, error.args[0]])


def _from_json(error_json: bytes) -> RpcError:
    kind, text = json.loads(error_json)
    return _KINDS[kind](text)


T = TypeVar("T")

_POLL_SECONDS = 0.5
"""Seconds between two polls of the store by a wait, and until it first writes where it waits."""
DETECTION_SECONDS = 2.0
"""Seconds that the report of a lost rank may take after its connection has broken."""
_UNUSED_TAG = 0x7E57  # of a message that no rank sends; see `_abort_group`
_KINDS = {  # sent by name
    kind.__name__: kind for kind in (CollectiveError, RankFailedError, RpcTimeoutError, WorkerLostError)
}
RETRY_HINT = "Call init_process_group again, on all ranks"
_NETWORK_HINT = (
    "Set GLOO_SOCKET_IFNAME, on each host, to the network interface by which the others reach it, then call "
    "init_process_group again, on all ranks"
)


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective or transfer for which a rank waits."""

    what: str  # for errors
    group: str  # key of the group
    number: int  # counts the collectives of the group, alike on all ranks
    members: tuple[int, ...]  # the other ranks that take part
    seconds: float | None = None  # for it; None: those of the world


class World:
    """One instance of the default group, on this rank."""

    keeps_groups = True  # torch's groups of it are kept alive until it ends

    def __init__(self, met: RendezvousResult, backend: str, seconds: float) -> None:
        self.store, self.rank, self.ranks = met.store, met.rank, met.ranks
        self.backend, self.seconds = backend, seconds  # seconds: for each wait
        self._changes = Condition()  # notified when a job ends and when the world breaks
        self._broken: RpcError | None = None  # the reason; set once
        self.outdated = False  # whether the cluster has changed, so that ranks belong to other workers now
        self._executors: dict[object, BlockingExecutor] = {}  # by group, and by peer for transfers
        self.made = 0  # groups, counted alike on all ranks
        self.made_locally = Counter[tuple[int, ...]]()  # groups whose ranks alone have called, by these ranks
        self._closing: dict[int, Callable[[], None]] = {}  # to be called at the end of this world
        self.kept: Store | None = None  # keeps a reference: torch holds none to a store written in Python
        # Unique to this world and the same on all ranks, as the first one that is written wins.
        self.token = met.store.compare_set("token", "", secrets.token_hex(8)).decode()
        agent = current.find_current()
        self.collective_events = CollectiveEvents() if agent is None else agent.part(CollectiveEvents)

    # -- naming
    def rank_label(self, rank: int) -> str:
        """Return the name of a rank, as `rank 1 (worker2)`."""
        return f"rank {rank} ({self.ranks[rank].name})"

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a worker of our cluster."""
        return next((rank for rank, who in enumerate(self.ranks) if who.name == name), None)

    # -- work
    def executor_for(self, key: object) -> BlockingExecutor:
        """Return the executor of this key, the same for all threads; its first job starts its thread."""
        return self._executors.setdefault(key, BlockingExecutor(f"rpcbench-group-{key}", self._changes.notify_all))

    @property
    def is_busy(self) -> bool:
        return any(executor.is_busy for executor in list(self._executors.values()))

    def is_group_busy(self, group: str) -> bool:
        """Return whether a collective or transfer of the group with this key runs or is queued."""
        executors = list(self._executors.items())
        return any(
            executor.is_busy
            for key, executor in executors
            if key == group or (isinstance(key, tuple) and key[0] == group)
        )

    def raise_if_broken(self) -> None:
        if (reason := self.failure_reason()) is not None:
            raise reason

    def failure_reason(self) -> RpcError | None:
        """Return the reason why this world is broken; None if it is not."""
        # A new error each time, since several threads may raise it.
        return None if self._broken is None else type(self._broken)(*self._broken.args)

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def call_when_closed(self, deed: Callable[[], None]) -> Callable[[], object]:
        """Call a function at the end of this world, or now if it is over; the function returned revokes that."""
        self._closing[id(deed)] = deed
        if self.is_broken:
            deed()
        return lambda: self._closing.pop(id(deed), None)

    def wait_for_result(self, pending: Pending[T], wait: Wait) -> T:
        """Wait for a job and return its result, or raise the error that breaks the world meanwhile."""
        try:
            self._wait_for_job(pending, wait)
        except KeyboardInterrupt:
            self.break_on_all_ranks(
                CollectiveError(f"{self.rank_label(self.rank)} was interrupted in {wait.what}. {RETRY_HINT}")
            )
            raise
        if not self.is_broken and _is_torch_error(pending.error):  # a connection may have ended with the rank behind it
            self._fail_with_cause(str(pending.error), wait)
        if not pending.done or _is_torch_error(pending.error):
            self.raise_if_broken()
        return pending.result()

    def _wait_for_job(self, pending: Pending[T], wait: Wait) -> None:
        deadline = time.monotonic() + self._wait_seconds(wait)
        is_reported = False

        def over() -> bool:
            return pending.done or self.is_broken

        while not self._changes.wait_for(over, max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
            if not is_reported:
                with self._handle_store_errors("report where it waits"):
                    words = json.dumps([wait.group, wait.number, wait.what, str(creation_site())])
                    self.store.set(f"waits/{self.rank}", words)
                is_reported = True
            self.poll_failure()
            if time.monotonic() >= deadline and not over():
                self.break_on_all_ranks(RpcTimeoutError(self._timeout_text(wait)))
        if is_reported and not self.is_broken:
            with contextlib.suppress(RuntimeError):  # the store's host may have finished its work and ended
                self.store.set(f"waits/{self.rank}", "")

    def _wait_seconds(self, wait: Wait) -> float:
        return self.seconds if wait.seconds is None else wait.seconds

    # -- exchange of reports through the store
    def poll_failure(self) -> bool:
        """Break this world too if another rank has broken it; return whether it is broken."""
        with self._handle_store_errors("read the reports of the others"):
            if self._broken is None and self.store.check(["broken"]):
                self.break_on_this_rank(_from_json(self.store.get("broken")))
        return self.is_broken

    @contextlib.contextmanager
    def _handle_store_errors(self, deed: str) -> Iterator[None]:
        """Turn failures of the store into the end of its host, where that is known."""
        try:
            yield
        # The store ends with the rank that hosts it; the report that this rank is lost may arrive a little later.
        except (c10d.DistError, RuntimeError) as error:
            wait_until(lambda: self.is_broken or bool(self.ended_ranks()), DETECTION_SECONDS)
            gone, cannot = self.ended_ranks(), f"no rank can {deed}, as the process group's store cannot be reached"
            words = str(error).splitlines()[0]
            self.break_on_this_rank(
                self.lost_ranks_error(gone, cannot) if gone else WorkerLostError(f"{cannot}: {words}. {RETRY_HINT}")
            )

    def break_on_all_ranks(self, error: RpcError) -> None:
        """Break the world on all ranks, for this reason or for an earlier one."""
        if self._broken is None:
            with self._handle_store_errors("report the failure to the others"):
                self.break_on_this_rank(_from_json(self.store.compare_set("broken", "", _as_json(error))))

    def break_on_this_rank(self, error: RpcError) -> None:
        """Break the world on this rank, where the others learn the reason in another way or need not."""
        if self._broken is None:
            self.close(error)
            for group in self.torch_groups():
                _abort_group(group)

    def torch_groups(self) -> list[Any]:
        return [each for each in list(c10d.distributed_c10d._world.pg_map) if isinstance(each, c10d.ProcessGroup)]

    # -- the rank at fault
    def has_all_keys(self, store: Store, keys: list[str], ranks: Sequence[int]) -> bool:
        """Return whether these keys, which these ranks write, are all in a store. Raises if the world is broken.

        A rank that has ended without writing its key breaks the world.
        """
        self.raise_if_broken()
        # before `raise_if_broken`: a rank may write its key, then end
        gone = [rank for rank in self.ended_ranks() if rank in ranks]
        if store.check(keys):
            return True
        if gone:
            self.break_on_all_ranks(
                self.lost_ranks_error(gone, f"while {self.rank_label(self.rank)} waited for it to join a group")
            )
            self.raise_if_broken()
        return False

    def _timeout_text(self, wait: Wait) -> str:
        """Return the text of a timeout: the ranks that have not come, and where the others wait."""
        lines = [f"{self._wait_seconds(wait):g} s have passed in {wait.what}:"]
        for rank in sorted({*wait.members, self.rank}):
            said = ""
            with self._handle_store_errors("read where the others wait"):
                said = self.store.get(f"waits/{rank}").decode() if self.store.check([f"waits/{rank}"]) else ""
            lines.append(f"  {self.rank_label(rank)} {_wait_text(said, wait)}")
        return "\n".join([*lines, RETRY_HINT])

    def _fail_with_cause(self, words: str, wait: Wait) -> None:
        """Break the world after an error of torch; name the rank that has ended, if one has."""
        wait_until(lambda: self.poll_failure() or bool(self.ended_ranks()), DETECTION_SECONDS)
        if gone := self.ended_ranks():
            self.break_on_all_ranks(
                self.lost_ranks_error(gone, f"while {self.rank_label(self.rank)} was in {wait.what}")
            )
        else:
            hint = _NETWORK_HINT if "connectFullMesh" in words else RETRY_HINT
            self.break_on_all_ranks(
                CollectiveError(f"{wait.what} failed on {self.rank_label(self.rank)}: {words} {hint}")
            )

    def ended_ranks(self) -> list[int]:
        """Return the ranks that have certainly ended."""
        return [rank for rank, who in enumerate(self.ranks) if who.has_ended()]

    def lost_ranks_error(self, ranks: Sequence[int], how: str) -> WorkerLostError:
        names = ", ".join(self.rank_label(rank) for rank in ranks)
        return WorkerLostError(
            f"{names} of the process group {'are' if len(ranks) > 1 else 'is'} gone, {how}. {RETRY_HINT}"
        )

    def close(self, error: RpcError) -> None:
        """End the executors, and free all threads that wait. Data that torch has sent already still arrives."""
        self._broken = self._broken or error
        self._changes.notify_all()
        for executor in list(self._executors.values()):
            executor.close()
        self.collective_events.fail_running_parts(self.token)
        for deed in list(self._closing.values()):
            deed()

    def join_threads(self, seconds: float) -> None:
        """Wait for the threads of a closed world, at most this long for each."""
        for executor in list(self._executors.values()):
            executor.join_thread(seconds)


def _is_torch_error(error: BaseException | None) -> bool:
    """Return whether a job has failed half-way, not with a CollectiveError that all ranks raise alike."""
    return error is not None and not isinstance(error, CollectiveError)


def _wait_text(said: str, wait: Wait) -> str:
    if not said:
        return "has not come"
    group, number, what, where = json.loads(said)
    same = group == wait.group and number == wait.number
    return f"{'waits there' if same else f'has not come; it waits in {what}'}, at {where}"


def _abort_group(group: Any) -> None:
    """End the running operations of one of torch's groups."""
    # gloo cannot abort; but a wait that times out ends all others of its group, so this starts one with 1 ms. It tries
    # each peer: where the connection has ended before, nothing is waited for, and no other wait ends.
    for peer in set(range(group.size())) - {group.rank()}:
        with OWN_CALLS, contextlib.suppress(RuntimeError):  # the timeout, or the connection that has ended
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    if group.size() > 1:
        group.abort()  # for NCCL; gloo ignores it

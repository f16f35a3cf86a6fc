"""How processes become the ranks of one world at a store, as often as they like.

Each founding is a round with a number. A round gets one verdict, by one atomic step of the store: all have come, or
somebody gave up; so either all its ranks go on, or none does.

Guarantees
- Ranks that nobody names are handed out in the order of arrival.
- Who was late for a round that failed comes into the next one, as the others do that try again; so does who meets only
  what a killed process of this host has left there.
- Groups of different names at one store never see each other.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

import psutil
from torch._C._distributed_c10d import PrefixStore, Store

from rpcbench.base.errors import RpcTimeoutError, counted
from rpcbench.distributed.stores import Place, polled, store_at
from rpcbench.runtime import current
from rpcbench.transport.addresses import host_id

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

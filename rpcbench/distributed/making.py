"""torch's own groups, made on the world's lane: by all ranks alike, or by none.

torch waits in C++ for what other ranks put into the store, deaf to Ctrl-C and to whoever is gone, and holds the store's
connection meanwhile. gloo gets the store from here, which waits in Python. Guarantees
- What ends the world ends torch's own wait, too: no thread stays behind that would change torch's groups later.
- A rank of this host that has ended before it has joined is named at once, with an agent or without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from rpcbench.base.errors import CollectiveError
from rpcbench.distributed.stores import polled
from rpcbench.distributed.world import World


class WatchedStore(Store):
    """A store for torch, whose waits end with the world. Whatever is not said here, torch's groups do not ask for."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__()
        self._store, self._world = store, world
        self.ranks: Sequence[int] = range(len(world.ranks))  # those that torch waits for now

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        polled(lambda: self._world.reached(self._store, keys, self.ranks), math.inf)


def default_group(world: World, behind: str) -> c10d.ProcessGroup:
    """torch's default group, of all ranks."""
    c10d.distributed_c10d._world.group_count = 0  # a founding that failed has counted, and ranks must count alike
    store: Store = PrefixStore("torch", world.store)
    if behind == "gloo":  # NCCL asks the store from threads of its own, also while Python ends
        store = world.kept = WatchedStore(store, world)
    c10d.init_process_group(
        behind, store=store, rank=world.rank, world_size=len(world.ranks), timeout=_patience(world)
    )  # fmt: skip
    return _in_time(world, c10d.distributed_c10d._get_default_group())


def new_group(world: World, ranks: tuple[int, ...]) -> tuple[str, c10d.ProcessGroup]:
    """The key and torch's group of these ranks; of a rank that is not in it, torch's word for that."""
    _agree(world, ranks)
    if isinstance(world.kept, WatchedStore):
        world.kept.ranks = ranks
    return str(world.made), _in_time(world, c10d.new_group(list(ranks), timeout=_patience(world)))


def _in_time(world: World, made: c10d.ProcessGroup) -> c10d.ProcessGroup:
    """What torch has made, unless the world has ended meanwhile: torch's groups may be those of the next one then."""
    if world.broken:
        c10d.destroy_process_group(made)
        world.check()
    return made


def _patience(world: World) -> timedelta:
    """What torch gets: our own deadline comes first, as it tells who has not come."""
    return timedelta(seconds=2 * world.seconds + 10)


def _agree(world: World, ranks: tuple[int, ...]) -> None:
    """All ranks ask for the same group, or all raise."""
    world.made += 1
    everyone = range(len(world.ranks))
    keys = [f"new/{world.made}/{rank}" for rank in everyone]
    world.store.set(keys[world.rank], json.dumps(ranks))
    polled(lambda: world.reached(world.store, keys, everyone), math.inf)
    asked = [tuple(json.loads(world.store.get(key))) for key in keys]
    if len(set(asked)) > 1:
        lines = [f"  {world.named(rank)}: {listed(each)}" for rank, each in enumerate(asked)]
        raise CollectiveError("\n".join(["ranks make different groups; all must call new_group alike:", *lines]))
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(everyone):
        raise CollectiveError(f"new_group({listed(ranks)}): name different ranks, from 0 to {len(keys) - 1}")


def listed(ranks: Sequence[int]) -> str:
    """As `[0, 1]`."""
    return f"[{', '.join(map(str, ranks))}]"

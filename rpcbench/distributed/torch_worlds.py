"""Worlds that this package has not founded: torch's default group, and process groups that a program makes by hand.

Guarantees
- Nothing is agreed with other ranks when a world is taken over, so each rank may do it whenever it first needs it.
- All ranks that take over one world of torch have one token for it, the same as the watcher of torch's own collectives.
- Ranks have the names of their workers: those that they gave when they met, or that each gives when it takes over.
- Worlds that follow one another at one store share nothing, where gloo is among their backends.
- No group of torch is kept alive, and no store: torch reuses the port of a store once that has been freed.
- A deadline of ours passes before torch's own, so that the error names the ranks that have not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import weakref
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from rpcbench.distributed import stores
from rpcbench.distributed.events import CollectiveEvents
from rpcbench.distributed.world import RankProcess, RendezvousResult, World, has_met, read_ranks
from rpcbench.runtime import current

_log = logging.getLogger(__name__)
_SHARE = 0.9  # of torch's own timeout, after which an error of ours comes


class TorchWorld(World):
    """The world of torch's default group, which torch's own functions have founded."""

    keeps_groups = False

    def __init__(self, group: c10d.ProcessGroup) -> None:
        super().__init__(rendezvous_of_group(group), backend_of(group), _SHARE * _torch_seconds(group))
        self.store.set(f"here/{self.rank}", json.dumps(asdict(RankProcess.of_this_process())))

    def rank_label(self, rank: int) -> str:
        return _rank_name(rank) if self.ranks[rank].name == _rank_name(rank) else super().rank_label(rank)

    def ended_ranks(self) -> list[int]:
        self._find_processes()
        return super().ended_ranks()

    def _find_processes(self) -> None:
        """Read which processes the ranks are, of those that have taken over this world, too."""
        with contextlib.suppress(c10d.DistError, RuntimeError):  # those who need the store report that it has ended
            for rank, who in enumerate(self.ranks):
                if not who.pid and self.store.check([f"here/{rank}"]):
                    found = RankProcess(**json.loads(self.store.get(f"here/{rank}")))
                    self.ranks = (*self.ranks[:rank], found, *self.ranks[rank + 1 :])


class HandMadeWorld(World):
    """The world of one process group that the program has made by hand: its ranks have no other way to each other."""

    keeps_groups = False

    def __init__(self, group: c10d.ProcessGroup | Backend) -> None:
        me = group.rank()
        ranks = tuple(RankProcess("", "", 0) for _ in range(group.size()))
        seconds = _SHARE * _torch_seconds(group)
        super().__init__(RendezvousResult(HashStore(), me, ranks), group.name(), seconds)
        self._group = weakref.ref(group)
        self.collective_events = CollectiveEvents()  # seen by nobody, as no two ranks have one token

    def rank_label(self, rank: int) -> str:
        return f"rank {rank}"

    def torch_groups(self) -> list[Any]:
        return [] if (group := self._group()) is None else [group]


def rendezvous_of_group(group: c10d.ProcessGroup, timeout: timedelta | None = None) -> RendezvousResult:
    """Return what is known of the meeting of the ranks of torch's default group.

    Its store is of this world alone. A rank that nothing is known of is called `rank 1`.

    Args:
        group: The default group.
        timeout: For each request to the store; None: that of torch's own store.
    """
    me, size = group.rank(), group.size()
    ranks = _cluster_ranks(me, size)
    try:
        store: Any = distributed_c10d._get_default_store()
        stores.check_host(store)
        theirs = store.clone()  # a connection of its own: torch may wait in the other
        if timeout is not None:
            theirs.set_timeout(timeout)
        own = PrefixStore(f"rpcbench/{_nonce_of_world(theirs, group)}", theirs)
        own.compare_set("founder", "", "torch")
        return RendezvousResult(own, me, _met_ranks(theirs, size) or ranks)
    except (c10d.DistError, RuntimeError, NotImplementedError, OSError) as error:
        why = str(error).splitlines()[0]
        _log.warning("the ranks of torch's process group cannot tell each other of failures and collectives: %s", why)
        return RendezvousResult(HashStore(), me, ranks)


def _nonce_of_world(store: Store, group: c10d.ProcessGroup) -> str:
    """Return a text of this world alone, alike on its ranks; "" where torch has written none.

    A program may found one world after the other at one store, and torch uses the same keys for all of them.
    """
    # The address at which gloo's rank 0 listens, which torch writes for each world, before any rank can have joined it.
    keys = sorted(f"{device.type}//0/0" for device in group._device_types)
    found = next((store.get(key) for key in keys if store.check([key])), b"")
    return hashlib.blake2b(found, digest_size=8).hexdigest() if found else ""


def _met_ranks(store: Any, size: int) -> tuple[RankProcess, ...]:
    """Return the processes of the ranks that have met at a store of torch's as `world.meet_all_ranks` lets them; else
    none."""
    while isinstance(store, PrefixStore):  # torch has put the store of their round under prefixes of its own
        store = store.underlying_store
        if has_met(store, size):
            return read_ranks(store, size)
    return ()


def _cluster_ranks(me: int, size: int) -> tuple[RankProcess, ...]:
    """Return the workers of the cluster, where this world may be that of all of them; else ranks without names."""
    agent, names = current.find_current(), stores.rank_names()
    if agent is None or len(names) != size or names[me] != agent.name:
        names = tuple(map(_rank_name, range(size)))
    return tuple(RankProcess(name, "", 0) for name in names)


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


def backend_of(group: c10d.ProcessGroup) -> str:
    """Return the backend of a group; where torch has chosen several, the one that includes them."""
    name = str(c10d.get_backend(group))
    if name != "undefined":
        return name
    return "nccl" if any(device.type == "cuda" for device in group._device_types) else "gloo"


def _torch_seconds(group: c10d.ProcessGroup | Backend) -> float:
    """Return torch's own timeout of a group."""
    backend = group._get_backend(group._device_types[0]) if isinstance(group, c10d.ProcessGroup) else group
    options = getattr(backend, "options", None)  # not all backends have them
    timeout = distributed_c10d.default_pg_timeout if options is None else options._timeout
    return float(timeout.total_seconds())

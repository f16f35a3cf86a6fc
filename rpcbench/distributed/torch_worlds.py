"""Worlds that this package has not founded: torch's default group, and process groups that a program makes by hand.

Guarantees
- Nothing is agreed with other ranks when a world is taken over, so each rank may do it whenever it first needs it.
- All ranks that take over one world of torch have one token for it, the same as the watcher of torch's own collectives.
- Ranks have the names of their workers. Of a process outside a cluster the name is known once it has taken over, too.
- No group of torch is kept alive, and no store: torch reuses the port of a store once that has been freed.
- A deadline of ours passes before torch's own, so that the error names the ranks that have not come.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as c10d
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from rpcbench.base.errors import RpcError
from rpcbench.distributed.events import CollectiveEvents
from rpcbench.distributed.world import RankProcess, RendezvousResult, World
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

_log = logging.getLogger(__name__)
_SHARE = 0.9  # of torch's own timeout, after which an error of ours comes


def name_of(rank: int, me: int, agent: Agent | None) -> str:
    """Return the name of the worker with a rank of torch's world, in which the agent's is `me`; "" without an agent."""
    # The ids of members are in the order of their ranks, in a cluster from 1 on, as the notebook has none.
    return "" if agent is None else agent.member_table.name(agent.id + rank - me)


class TorchWorld(World):
    """The world of torch's default group, which torch's own functions have founded."""

    keeps_groups = False

    def __init__(self, group: c10d.ProcessGroup) -> None:
        me = group.rank()
        ranks = tuple(RankProcess(name_of(rank, me, current.find()), "", 0) for rank in range(group.size()))
        super().__init__(RendezvousResult(_store(), me, ranks), _backend(group), _SHARE * _torch_seconds(group))
        self.store.set(f"here/{me}", json.dumps(asdict(RankProcess.here())))

    def named(self, rank: int) -> str:
        return super().named(rank) if self.ranks[rank].name else f"rank {rank}"

    def gone(self) -> list[int]:
        self._find_processes()
        return super().gone()

    def _find_processes(self) -> None:
        """Read which processes the ranks are, of those that have taken over this world, too."""
        with contextlib.suppress(c10d.DistError, RuntimeError):  # those who need the store report that it has ended
            for rank, who in enumerate(self.ranks):
                if not who.pid and self.store.check([f"here/{rank}"]):
                    found = RankProcess(**json.loads(self.store.get(f"here/{rank}")))
                    named = replace(found, name=who.name or found.name)
                    self.ranks = (*self.ranks[:rank], named, *self.ranks[rank + 1 :])


class HandMadeWorld(World):
    """The world of one process group that the program has made by hand: its ranks have no other way to each other."""

    keeps_groups = False

    def __init__(self, group: c10d.ProcessGroup | Backend) -> None:
        me = group.rank()
        ranks = tuple(RankProcess("", "", 0) for _ in range(group.size()))
        seconds = _SHARE * _torch_seconds(group)
        super().__init__(RendezvousResult(HashStore(), me, ranks), group.name(), seconds)
        self.told = CollectiveEvents()  # seen by nobody, as no two ranks have one token

    def named(self, rank: int) -> str:
        return f"rank {rank}"

    def ends(self, error: RpcError) -> None:
        if not self.broken:
            self.close(error)  # and leaves torch's groups alone


def _store() -> Store:
    """Return the store of torch's default group, under a prefix of ours."""
    store: Any = distributed_c10d._get_default_store()
    try:
        own = PrefixStore("rpcbench", store.clone())  # a connection of its own: torch may wait in the other
        own.compare_set("founder", "", "torch")
    except (c10d.DistError, RuntimeError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        _log.warning("the ranks of torch's process group cannot report failures to each other: %s", why)
        return HashStore()
    return own


def _backend(group: c10d.ProcessGroup) -> str:
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

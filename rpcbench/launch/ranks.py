"""The workers of a cluster as ranks of a process group, worker1 as rank 0: they have the variables that torchrun sets.

These are set anew whenever the cluster changes: a generation. Guarantees
- All workers know their places before `Cluster`, `scale` and `restart` return; they meet on this host only.
- A process group of the generation before is over and says why; who waited in it is freed.
- `Cluster.group` makes a group on all workers or on none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import psutil

from rpcbench.agent.core import Agent
from rpcbench.words.errors import CollectiveError, UnknownWorkerError, WorkerLostError
from rpcbench.words.futures import Future, wait_all

if TYPE_CHECKING:
    from rpcbench.distributed.groups import NamedGroup

_LOOPBACK = "127.0.0.1"


def settle(agent: Agent, ranks: Mapping[str, int], size: int, why: str) -> list[Future[None]]:
    """Tell each of these workers its place among `size`; `why` says what has changed."""
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        port = free.getsockname()[1]
    return [agent.call(name, take_place, (rank, size, port, why), own=True) for name, rank in ranks.items()]


def settled(told: Sequence[Future[None]]) -> None:
    """Wait until they know. Who is lost meanwhile need not."""
    for each in told:
        with contextlib.suppress(WorkerLostError):
            each.wait()


def take_place(rank: int, world_size: int, port: int, why: str) -> None:
    """Called on a worker: where it stands now, and what has changed in the cluster."""
    before = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the notebook's, if torchrun has started that
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=_LOOPBACK, MASTER_PORT=str(port),
    )  # fmt: skip
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface())
    if groups := sys.modules.get("rpcbench.distributed.groups"):
        groups.retire(why, before)


def _interface() -> str:
    """The name of the loopback interface: workers of one host need not be heard from outside."""
    found = psutil.net_if_addrs().items()
    return next(str(name) for name, addresses in found if any(each.address == _LOOPBACK for each in addresses))


def group(agent: Agent, workers: Sequence[str], chosen: Sequence[str]) -> NamedGroup:
    """See `Cluster.group`."""
    from rpcbench.distributed import groups  # torch.distributed, for who asks for it

    if unknown := [name for name in chosen if name not in workers]:
        raise UnknownWorkerError(f"there is no {', '.join(unknown)}; the cluster has {', '.join(workers)}")
    ready = wait_all([agent.call(name, groups.has_world, own=True) for name in workers])
    if missing := [name for name, has in zip(workers, ready, strict=True) if not has]:
        raise CollectiveError(
            f"{', '.join(missing)} is in no process group: run rpcbench.distributed.init_process_group() on all workers"
        )
    ranks = tuple(int(name.removeprefix("worker")) - 1 for name in chosen)
    made: list[NamedGroup] = wait_all([agent.call(name, groups.new, (ranks,), own=True) for name in workers])
    return made[0]

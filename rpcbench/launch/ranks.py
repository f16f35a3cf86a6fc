"""The workers of a cluster as ranks of a process group, worker1 as rank 0: they have the variables that torchrun sets.

These are set anew whenever the cluster changes: a generation. Guarantees
- All workers know their places before `Cluster`, `scale` and `restart` return. They meet on this host only; those that
  may be on several meet at rank 0's, where torch itself neither encrypts nor asks who comes.
- A process group of the generation before is over and says why; who waited in it is freed.
- `Cluster.group` makes a group on all workers or on none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import psutil

from rpcbench.base.errors import CollectiveError, UnknownWorkerError, WorkerLostError
from rpcbench.base.futures import Future, wait_all
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.transport import listeners
from rpcbench.wire.messages import Member

if TYPE_CHECKING:
    from rpcbench.distributed.groups import NamedGroup

_LOOPBACK = "127.0.0.1"


def settle(agent: Agent, ranks: Mapping[str, int], size: int, why: str) -> list[Future[None]]:
    """Tell each of these workers its place among `size`; `why` says what has changed.

    RpcError where rank 0 is on another host, and cannot say where the others are to meet there.
    """
    there = agent.machine.ask(lambda node: {one.name: one for one in node.members.members.values()})
    ranks = {name: rank for name, rank in ranks.items() if name in there}
    first = next((name for name, rank in ranks.items() if rank == 0 and there[name].remote), None)
    address, port = agent.call(first, reserve, own=True).wait() if first else agent.part(ReservedPort).at(_LOOPBACK)
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [
        agent.call(name, take_place, ({**common, "RANK": str(rank), **_local(name, size, ranks, there)}, why), own=True)
        for name, rank in ranks.items()
    ]


def _local(name: str, size: int, ranks: Mapping[str, int], there: Mapping[str, Member]) -> dict[str, str]:
    """Its place among those on its host: where the cluster is on one host, among all."""
    rank = ranks[name]
    if there[name].remote:
        near = sorted(other for each, other in ranks.items() if there[each].host == there[name].host)
        rank, size = near.index(rank), len(near)
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}


class ReservedPort:
    """The port at which the ranks of a generation meet. One for each agent: `agent.part(ReservedPort)`.

    It stays bound here, so no connection of this host takes it meanwhile, while rank 0 may listen there at any time:
    Linux allows this where both sockets have SO_REUSEADDR and this one does not listen. torch's stores have it.
    """

    def __init__(self, agent: Agent) -> None:
        self._release: Callable[[], object] = lambda: None
        agent.on_end.append(lambda: self._release())

    def at(self, address: str) -> tuple[str, int]:
        """`address`, and a port that is free there until the next one is reserved, or the agent ends."""
        self._release()
        holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._release = weakref.finalize(self, holder.close)  # at the latest: the agent may have ended meanwhile
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        return address, holder.getsockname()[1]


def reserve() -> tuple[str, int]:
    """On the worker that is rank 0: the address where others find it, and a port there."""
    return current.current().part(ReservedPort).at(_address())


def settled(told: Sequence[Future[None]]) -> None:
    """Wait until they know. Who is lost meanwhile need not."""
    for each in told:
        with contextlib.suppress(WorkerLostError):
            each.wait()


def take_place(place: Mapping[str, str], why: str) -> None:
    """Called on a worker: torchrun's variables as they are now, and what has changed in the cluster."""
    before = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the notebook's, if torchrun has started that
    os.environ.update(place)
    if interface := _interface(_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if groups := sys.modules.get("rpcbench.distributed.groups"):
        groups.retire(why, before)


def _address() -> str:
    """Where other workers find this one: on loopback, where all are on one host."""
    remote = current.current().config.remote
    return listeners.split_address(remote.removeprefix("tls://"))[0] if remote else _LOOPBACK


def _interface(address: str) -> str:
    """The name of the interface that has it, or "". Workers of one host need not be heard from outside."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return ""


def group(agent: Agent, workers: Sequence[str], chosen: Sequence[str]) -> NamedGroup:
    """See `Cluster.group`."""
    from rpcbench.distributed import groups  # torch.distributed, for who asks for it

    if unknown := [name for name in chosen if name not in workers]:
        raise UnknownWorkerError.of(unknown[0], workers)
    ready = wait_all([agent.call(name, groups.has_world, own=True) for name in workers])
    if missing := [name for name, has in zip(workers, ready, strict=True) if not has]:
        raise CollectiveError(
            f"{', '.join(missing)} is in no process group: run rpcbench.distributed.init_process_group() on all workers"
        )
    ranks = tuple(int(name.removeprefix("worker")) - 1 for name in chosen)
    made: list[NamedGroup] = wait_all([agent.call(name, groups.new, (ranks,), own=True) for name in workers])
    return made[0]

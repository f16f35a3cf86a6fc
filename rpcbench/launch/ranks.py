"""The workers of a cluster as ranks of a process group, worker1 as rank 0, with torchrun's environment variables.

A generation is one assignment of ranks; each change of the cluster begins a new one.

Guarantees
- All workers have their ranks before `Cluster`, `scale` and `restart` return. Their rendezvous is on this host only;
  if workers may be on several hosts it is on rank 0's, and there torch neither encrypts nor authenticates.
- A process group of an earlier generation has ended: it raises an error with the reason, also for waits in it.
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

from rpcbench.base.config import STORE_PORT
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
    """Begin a generation of `size` ranks: send each worker its rank, with the reason `why`, and return the futures.
    RpcError if rank 0 is on another host, and provides no address to meet at."""
    there = agent.machine.ask(lambda node: {one.name: one for one in node.members.members.values()})
    ranks = {name: rank for name, rank in ranks.items() if name in there}  # others were lost just now
    first = next((name for name, rank in ranks.items() if rank == 0 and there[name].remote), None)
    ports = agent.part(ReservedPorts)
    address, port, own = agent.call(first, reserve, own=True).wait() if first else ports.at(_LOOPBACK)
    common = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port), STORE_PORT: f"{port}:{own}",
    }  # fmt: skip
    places = {name: {**common, "RANK": f"{ranks[name]}", **local_place(name, size, ranks, there)} for name in ranks}
    return [agent.call(name, set_rank, (place, why), own=True) for name, place in places.items()]


def local_place(name: str, size: int, ranks: Mapping[str, int], there: Mapping[str, Member]) -> dict[str, str]:
    """Return a worker's rank among those on its host."""
    rank = ranks[name]
    if there[name].remote:  # else the cluster is on one host
        near = sorted(other for each, other in ranks.items() if there[each].host == there[name].host)
        rank, size = near.index(rank), len(near)
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}


class ReservedPorts:
    """The ports of the rendezvous of a generation: torch's and ours. One object for each agent:
    `agent.part(ReservedPorts)`."""

    # Two, as our store listens as long as its process, and torch's own init_process_group must find its port free.
    def __init__(self, agent: Agent) -> None:
        self._release: list[Callable[[], object]] = []
        agent.on_end.append(self._end)

    def _end(self) -> None:
        while self._release:
            self._release.pop()()

    def at(self, address: str) -> tuple[str, int, int]:
        """Return `address`, and two ports that are reserved there until the next call, or until the agent ends."""
        self._end()
        return address, self._port(address), self._port(address)

    def _port(self, address: str) -> int:
        holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._release.append(weakref.finalize(self, holder.close))  # also called if the agent has ended meanwhile
        # The port stays bound, so no connection of this host takes it, and rank 0 may listen there at any time: Linux
        # allows that if both sockets have SO_REUSEADDR, as torch's stores do, and this one does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port: int = holder.getsockname()[1]
        return port


def reserve() -> tuple[str, int, int]:
    """Return the address at which other workers reach this one, and two ports there. Called on rank 0."""
    return current.current().part(ReservedPorts).at(address_here())


def settled(told: Sequence[Future[None]]) -> None:
    """Wait until all workers have their ranks."""
    for each in told:
        with contextlib.suppress(WorkerLostError):  # a lost worker needs none
            each.wait()


def set_rank(place: Mapping[str, str], why: str) -> None:
    """Set torchrun's variables, and end the process groups of the generation before. Called on each worker."""
    before = os.environ.get("MASTER_ADDR", ""), int(os.environ.get(STORE_PORT, "0").rpartition(":")[2])
    used = "rpcbench.distributed.groups" in sys.modules
    if used:
        from rpcbench.distributed import groups  # another thread may be loading it just now: this waits for that

        groups.outdate()  # first: a function of `spmd` that ends meanwhile restores no variable
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # inherited if torchrun started the notebook
    os.environ.update(place)
    if current.current().config.gpu:  # CUDA shows this worker one GPU, and programs select number LOCAL_RANK
        os.environ["LOCAL_RANK"] = "0"
    if interface := _interface(address_here()):  # loopback, if all are on one host: gloo then listens on no other
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if used:
        groups.end_generation(why, before)


def address_here() -> str:
    """Return the address at which other workers reach this one: loopback if all are on one host."""
    remote = current.current().config.remote
    return listeners.split_address(remote.removeprefix("tls://"))[0] if remote else _LOOPBACK


def _interface(address: str) -> str:
    """Return the name of the network interface with this address, or ""."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return ""


def group(agent: Agent, workers: Sequence[str], chosen: Sequence[str]) -> NamedGroup:
    """Make a process group of the workers `chosen`. See `BaseCluster.group`."""
    from rpcbench.distributed import groups  # here: it loads torch.distributed

    if unknown := [name for name in chosen if name not in workers]:
        raise UnknownWorkerError.of(unknown[0], workers)
    ready = wait_all([agent.call(name, groups.has_world, own=True) for name in workers])  # first: on all or on none
    if missing := [name for name, has in zip(workers, ready, strict=True) if not has]:
        raise CollectiveError(
            f"{', '.join(missing)} is in no process group: run rpcbench.distributed.init_process_group() on all workers"
        )
    ranks = tuple(int(name.removeprefix("worker")) - 1 for name in chosen)
    made: list[NamedGroup] = wait_all([agent.call(name, groups.new, (ranks,), own=True) for name in workers])
    return made[0]

"""The workers of a cluster as ranks of a process group, worker1 as rank 0, with torchrun's environment variables.

A generation is one assignment of ranks; each change of the cluster begins a new one.

Guarantees
- All workers that respond have their ranks before `Cluster`, `scale` and `restart` return. One that does not, as its
  code keeps Python's lock, holds up no other for long: it gets its rank when it responds.
- Their rendezvous is on this host only; if workers may be on several hosts it is on rank 0's, and there torch neither
  encrypts nor authenticates.
- A process group of an earlier generation has ended: it raises an error with the reason, also for waits in it.
- `Cluster.group` makes a group on all workers or on none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import psutil

from rpcbench.base.conditions import Condition
from rpcbench.base.config import RANK_NAMES, STORE_PORT, UNSET_TIMEOUT
from rpcbench.base.errors import CollectiveError, RpcTimeoutError, UnknownWorkerError, WorkerLostError
from rpcbench.base.futures import Future, wait_all
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.transport import listeners
from rpcbench.wire.messages import Member

if TYPE_CHECKING:
    from rpcbench.distributed.groups import NamedGroup

_LOOPBACK = "127.0.0.1"
GROUP = "the setup of the process group"
"""The label of calls, in errors."""
_RANKS = "the setup of the ranks"
_RESPONSE_SECONDS = 10.0  # to wait for workers that were there before: one that is busy in C may respond much later


def begin_generation(
    agent: Agent, ranks: Mapping[str, int], size: int, why: str, new: Collection[str] = ()
) -> dict[str, Future[None]]:
    """Begin a generation of `size` ranks: send each worker its rank, with the reason `why`, and return the futures by
    name. The workers `new` have just joined. None begins, with a RuntimeWarning, if rank 0 is on another host and does
    not say where to meet. RpcError if it has no such address."""
    there = agent.machine.read_node(lambda node: {one.name: one for one in node.members.members.values()})
    ranks = {name: rank for name, rank in ranks.items() if name in there}  # others were lost just now
    first = next((name for name, rank in ranks.items() if rank == 0 and there[name].remote), None)
    ports = agent.part(ReservedPorts)
    try:
        address, port, own = _reserved_at(agent, first, first in new) if first else ports.reserve_at(_LOOPBACK)
    except RpcTimeoutError:
        _warn_of([str(first)])
        return {}
    ports.generation += 1
    common = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port), STORE_PORT: f"{port}:{own}",
        RANK_NAMES: names_of(size),
    }  # fmt: skip
    places = {
        name: {**common, "RANK": f"{ranks[name]}", **local_rank_variables(name, size, ranks, there)} for name in ranks
    }
    # No limit for those that were there before: they get their ranks when they respond.
    limits = {name: UNSET_TIMEOUT if name in new else 0.0 for name in places}
    return {
        name: agent.call(name, set_rank, (place, why, ports.generation), timeout=limits[name], label=_RANKS, own=True)
        for name, place in places.items()
    }


def _reserved_at(agent: Agent, first: str, is_new: bool) -> tuple[str, int, int]:
    seconds = UNSET_TIMEOUT if is_new else _RESPONSE_SECONDS
    address, port, own = agent.call(first, reserve_ports, timeout=seconds, label=_RANKS, own=True).wait()
    return address, port, own


def names_of(size: int) -> str:
    """Return the names of a cluster's workers by rank, as RANK_NAMES has them."""
    return ",".join(f"worker{rank + 1}" for rank in range(size))


def local_rank_variables(name: str, size: int, ranks: Mapping[str, int], there: Mapping[str, Member]) -> dict[str, str]:
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
        self.generation = 0  # the number of the latest one that this member has begun
        self._release: list[Callable[[], object]] = []
        agent.hooks.on_end.append(self._release_ports)

    def _release_ports(self) -> None:
        while self._release:
            self._release.pop()()

    def reserve_at(self, address: str) -> tuple[str, int, int]:
        """Return `address`, and two ports that are reserved there until the next call, or until the agent ends."""
        self._release_ports()
        return address, self._reserve_port(address), self._reserve_port(address)

    def _reserve_port(self, address: str) -> int:
        holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._release.append(weakref.finalize(self, holder.close))  # also called if the agent has ended meanwhile
        # The port stays bound, so no connection of this host takes it, and rank 0 may listen there at any time: Linux
        # allows that if both sockets have SO_REUSEADDR, as torch's stores do, and this one does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port: int = holder.getsockname()[1]
        return port


def reserve_ports() -> tuple[str, int, int]:
    """Return the address at which other workers reach this one, and two ports there. Called on rank 0."""
    return current.current_agent().part(ReservedPorts).reserve_at(address_here())


def await_ranks(rank_futures: Mapping[str, Future[None]], new: Collection[str] = ()) -> None:
    """Wait until the workers `new` have their ranks, and some seconds for the others. A RuntimeWarning names those that
    do not respond."""
    for name in new:
        if name in rank_futures:
            _wait_for_rank(rank_futures[name])
    changes = Condition()
    for each in rank_futures.values():
        each.add_done_callback(lambda _: changes.notify_all())
    changes.wait_for(lambda: all(each.done() for each in rank_futures.values()), _RESPONSE_SECONDS)
    for each in rank_futures.values():
        if each.done():
            _wait_for_rank(each)
    if late := [name for name, each in rank_futures.items() if not each.done()]:
        _warn_of(late)


def _wait_for_rank(future: Future[None]) -> None:
    with contextlib.suppress(WorkerLostError):  # a lost worker needs no rank
        future.wait()


def _warn_of(late: Sequence[str]) -> None:
    warnings.warn(
        f"{', '.join(late)} did not respond in {_RESPONSE_SECONDS:g} s: until it does, no process group of all workers "
        f"can be made. cluster.stack({late[0]!r}) shows where it is; cluster.restart({late[0]!r}) starts it again",
        RuntimeWarning,
        stacklevel=5,
    )


class _Latest:
    """The generation whose ranks are set in this process."""

    lock = threading.Lock()
    generation = 0


def set_rank(place: Mapping[str, str], why: str, generation: int) -> None:
    """Set torchrun's variables, and end the process groups of the generation before. Called on each worker. Nothing
    happens if a later generation came first."""
    choose_interface()
    used = "rpcbench.distributed.groups" in sys.modules
    if used:
        from rpcbench.distributed import groups  # another thread may be loading it just now: this waits for that
    with _Latest.lock:  # a worker that has not responded for a while gets several ranks at once, in any order
        if generation < _Latest.generation:
            return
        _Latest.generation = generation
        before = os.environ.get("MASTER_ADDR", ""), int(os.environ.get(STORE_PORT, "0").rpartition(":")[2])
        if used:
            groups.mark_world_outdated()  # first: a function of `spmd` that ends meanwhile restores no variable
        _set_variables(place)
    if used:
        groups.end_generation(why, before)


def _set_variables(place: Mapping[str, str]) -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # inherited if torchrun started the notebook
    os.environ.update(place)
    if current.current_agent().config.gpu:  # CUDA shows this worker one GPU, and programs select number LOCAL_RANK
        os.environ["LOCAL_RANK"] = "0"


def address_here() -> str:
    """Return the address at which other workers reach this one: loopback if all are on one host."""
    remote = current.current_agent().config.remote
    return listeners.split_address(remote.removeprefix("tls://"))[0] if remote else _LOOPBACK


def choose_interface() -> None:
    """Have gloo listen on the interface by which other workers reach this one, unless the environment names another."""
    # Loopback, if all are on one host. By itself gloo takes the address of the host's name, which is often 127.0.1.1.
    if interface := _find_interface(address_here()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _find_interface(address: str) -> str:
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
    # First: on all or on none.
    ready = wait_all([agent.call(name, groups.has_world, label=GROUP, own=True) for name in workers])
    if missing := [name for name, has in zip(workers, ready, strict=True) if not has]:
        raise CollectiveError(
            f"{', '.join(missing)} is in no process group: run rpcbench.distributed.init_process_group() on all workers"
        )
    ranks = tuple(int(name.removeprefix("worker")) - 1 for name in chosen)
    made: list[NamedGroup] = wait_all(
        [agent.call(name, groups.create_group, (ranks,), label=GROUP, own=True) for name in workers]
    )
    return made[0]

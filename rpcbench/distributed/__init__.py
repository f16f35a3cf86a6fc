"""The process groups of torch.distributed 0.4, built on those of today's torch: for cells, calls and scripts.

`import rpcbench.distributed as dist`, and call its functions on every rank. A rank is always a number in the world, for
subgroups too. Errors name the rank at fault, and no wait exceeds its timeout. The errors CollectiveError,
RpcTimeoutError and WorkerLostError are RuntimeErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.distributed import groups
from rpcbench.distributed.collectives import (
    Request,
    all_gather,
    all_gather_multigpu,
    all_reduce,
    all_reduce_multigpu,
    barrier,
    broadcast,
    broadcast_multigpu,
    gather,
    irecv,
    isend,
    recv,
    reduce,
    reduce_multigpu,
    scatter,
    send,
)
from rpcbench.distributed.groups import AnyGroup, NamedGroup, Outsider, ddp_all_reduce, group

__all__ = [
    "NamedGroup", "Outsider", "ReduceOp", "Request", "all_gather", "all_gather_multigpu", "all_reduce",
    "all_reduce_multigpu", "barrier", "broadcast", "broadcast_multigpu", "ddp_all_reduce", "destroy_process_group",
    "gather", "get_rank", "get_world_size", "group", "init_process_group", "irecv", "is_available", "is_initialized",
    "isend", "new_group", "recv", "reduce", "reduce_multigpu", "reduce_op", "scatter", "send",
]  # fmt: skip

reduce_op = ReduceOp  # its name in torch 0.4


def init_process_group(
    backend: str = "gloo", init_method: str = "env://", world_size: int = -1, rank: int = -1, group_name: str = "",
    timeout: float | timedelta | None = None,
) -> None:  # fmt: skip
    """Create the default process group; returns once all ranks have joined.

    Args:
        backend: "gloo", "nccl" or "mpi".
        init_method: "env://" (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which each worker of a cluster has),
            "tcp://HOST:PORT" of rank 0, or "file:///PATH".
        world_size: Number of ranks; -1: from the environment or the URL.
        rank: Rank of this process; -1: from the environment or the URL, or else, with "tcp" and "file", assigned in
            the order of arrival.
        group_name: Groups of different names at one place stay apart.
        timeout: Seconds that a rank waits for others, here (60 by default) and in each collective (300 by default).

    Raises:
        CollectiveError: The arguments are wrong, or there is a group already.
        RpcTimeoutError: Ranks have not come in time.
        WorkerLostError: A rank has ended.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    groups.init(backend, init_method, world_size, rank, group_name, seconds)


def destroy_process_group() -> None:
    """End the default group and all others, and free all threads that wait in one. Without a group it does nothing."""
    groups.destroy()


def is_available() -> bool:
    """Return whether this torch has process groups."""
    return c10d.is_available()


def is_initialized() -> bool:
    """Return whether there is a default group that is not broken."""
    return groups.has_world()


def get_rank(group: AnyGroup = None) -> int:
    """Return the rank of this process in the world, or its position in a group."""
    end = groups.member(group, at_work=False)
    return end.ranks.index(end.world.rank)


def get_world_size(group: AnyGroup = None) -> int:
    """Return the number of ranks of the world or of a group."""
    return len(groups.member(group, at_work=False).ranks)


def new_group(ranks: Sequence[int] | None = None) -> c10d.ProcessGroup | Outsider:
    """Return torch's group of these ranks of the world (None: all), or an `Outsider` on a rank that is not in it.

    All ranks must call it with the same ranks. Raises CollectiveError on all of them where they differ.
    """
    return groups.opened(groups.new(ranks))

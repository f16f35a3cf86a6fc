"""The process groups of torch.distributed 0.4 on those of today's torch: for cells, calls and scripts.

`import rpcbench.distributed as dist`, and call on every rank. Ranks are numbers in the world; in a group as well.
Errors name the rank at fault, and no wait lasts longer than its timeout: CollectiveError, RpcTimeoutError and
WorkerLostError are all RuntimeErrors.
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

reduce_op = ReduceOp


def init_process_group(
    backend: str = "gloo", init_method: str = "env://", world_size: int = -1, rank: int = -1, group_name: str = "",
    timeout: float | timedelta | None = None,
) -> None:  # fmt: skip
    """Found the default process group; returns once all ranks are in.

    backend: "gloo", "nccl" or "mpi". init_method: "env://" (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which each
    worker of a cluster has), "tcp://HOST:PORT" of rank 0, or "file:///PATH"; of the latter two a rank that names none
    (-1) gets one in the order of arrival. group_name: groups of different names at one place stay apart. timeout:
    seconds that a rank waits for others, here (60 if none is given) and in each collective (300).

    CollectiveError where it is told wrong things or there is a group already, RpcTimeoutError where ranks do not come.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    groups.init(backend, init_method, world_size, rank, group_name, seconds)


def destroy_process_group() -> None:
    """End the default group and all others; who waits in one is freed. Without one nothing happens."""
    groups.destroy()


def is_available() -> bool:
    """Whether torch has process groups here."""
    return c10d.is_available()


def is_initialized() -> bool:
    """Whether there is a default group, and nothing has broken it."""
    return groups.has_world()


def get_rank(group: AnyGroup = None) -> int:
    """The rank of this process in the world, or its place in a group."""
    end = groups.member(group, at_work=False)
    return end.ranks.index(end.world.rank)


def get_world_size(group: AnyGroup = None) -> int:
    """How many ranks the world, or a group, has."""
    return len(groups.member(group, at_work=False).ranks)


def new_group(ranks: Sequence[int] | None = None) -> c10d.ProcessGroup | Outsider:
    """A group of these ranks of the world, None: of all. All ranks call it, also those that are not in it, and alike.

    Returns torch's group, and an `Outsider` on a rank that is not in it. CollectiveError, on all, where they differ.
    """
    return groups.opened(groups.new(ranks))

"""Process groups: how they begin and end, their ranks and backends, and subgroups, with the names of torch.distributed.

Guarantees
- `new_group` and its relatives return torch's own groups, which torch's functions accept as well, also those of torch
  that this package passes on. A group or a world that torch has made, as for a device mesh, is accepted, too.
- All ranks request the same group, or all raise an error with the requests.
- Ranks and sizes may also be read in a broken world, unless a change of the cluster has made them wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import Store

from rpcbench.base.errors import CollectiveError, count_noun
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import accept_older_order, rank_fault, timeout_seconds
from rpcbench.distributed.groups import AnyGroup, GroupOptions, Outsider

OpenedGroup = c10d.ProcessGroup | Outsider


@accept_older_order(2, "world_size", "rank", "group_name", "timeout")
def init_process_group(
    backend: str | None = None, init_method: str | None = None, timeout: float | timedelta | None = None,
    world_size: int = -1, rank: int = -1, store: Store | None = None, group_name: str = "", pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:  # fmt: skip
    """Create the default process group; returns once all ranks have joined.

    The order (backend, init_method, world_size, rank, group_name, timeout) works, too.

    Args:
        backend: "gloo", "nccl" or "mpi". By default "nccl" where CUDA shows each rank one GPU, another one than to the
            other ranks; otherwise "gloo".
        init_method: "env://" (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which each worker of a cluster has; the
            default), "tcp://HOST:PORT" of rank 0, or "file:///PATH".
        timeout: Seconds that a rank waits for others, here (60 by default) and in each collective (300 by default).
        world_size: Number of ranks; -1: from the environment or the URL.
        rank: Rank of this process; -1: from the environment or the URL, or else, with "tcp" and "file", assigned in
            the order of arrival.
        store: The store where the ranks meet, in place of `init_method`; with `world_size`.
        group_name: Groups of different names at one place stay apart.
        pg_options, device_id: Passed on to torch.

    Raises:
        CollectiveError: The arguments are wrong, or there is a group already.
        RpcTimeoutError: Ranks have not come in time.
        WorkerLostError: A rank has ended.
    """
    if store is not None and init_method is not None:
        raise CollectiveError("pass store or init_method, not both")
    passed = _drop_none(pg_options=pg_options, device_id=device_id)
    if isinstance(device_id, int):
        passed["device_id"] = torch.device("cuda", device_id)
    method = "env://" if init_method is None else init_method
    groups.init_default_group(backend, method, world_size, rank, group_name, timeout_seconds(timeout), store, passed)


def destroy_process_group(group: AnyGroup = None) -> None:
    """End the default group and all others, and free all threads that wait in one; or end one group of this rank.

    Without a group in this process it does nothing. Raises CollectiveError if a collective of `group` runs, or if this
    rank is not in it.
    """
    if group is None:
        groups.destroy_all_groups()
    else:
        groups.end_group(group)


def is_available() -> bool:
    """Return whether this torch has process groups."""
    return c10d.is_available()


def is_initialized() -> bool:
    """Return whether there is a default group that is not broken; it may be torch's own."""
    return groups.has_world()


def get_rank(group: AnyGroup = None) -> int:
    """Return the rank of this process in the world, or its position in a group."""
    member = groups.member_of(group, at_work=False)
    return member.ranks.index(member.world.rank)


def get_world_size(group: AnyGroup = None) -> int:
    """Return the number of ranks of the world or of a group."""
    return len(groups.member_of(group, at_work=False).ranks)


def get_backend(group: AnyGroup = None) -> str:
    """Return the backend of the world or of a group: "gloo", "nccl" or "mpi"."""
    return groups.member_of(group, at_work=False).backend


def get_process_group_ranks(group: AnyGroup = None) -> list[int]:
    """Return the ranks of a group as ranks of the world, in the order of the group."""
    return list(groups.member_of(group, at_work=False).ranks)


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Return the position in a group of `global_rank`. Raises CollectiveError if that is not in the group."""
    ranks = get_process_group_ranks(group)
    if wrong := rank_fault(ranks, global_rank):
        raise CollectiveError(wrong)
    return ranks.index(global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Return the rank of the world at position `group_rank` of a group. Raises CollectiveError if it has none there."""
    ranks = get_process_group_ranks(group)
    if group_rank not in range(len(ranks)):
        raise CollectiveError(f"position {group_rank} is not in the group, which has ranks 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def new_group(
    ranks: Sequence[int] | None = None, timeout: float | timedelta | None = None, backend: str | None = None,
    pg_options: Any = None, use_local_synchronization: bool = False, group_desc: str | None = None,
    device_id: torch.device | None = None, sort_ranks: bool = True,
) -> OpenedGroup:  # fmt: skip
    """Return torch's group of these ranks of the world, or an `Outsider` on a rank that is not in it.

    All ranks must call it with the same arguments.

    Args:
        ranks: Ranks of the world; None: all.
        timeout: Seconds that a rank waits for others in each collective of the group; None: as in the world.
        backend: As of `init_process_group`; None: that of the world.
        pg_options, group_desc, device_id: Passed on to torch.
        use_local_synchronization: Only the ranks of the group call it.
        sort_ranks: The group has the order of the world; False: that of `ranks`.

    Raises:
        CollectiveError: On all ranks that call: they differ, or the request is invalid.
        RpcTimeoutError: A rank has not come in time.
        WorkerLostError: A rank has ended.
    """
    passed = _drop_none(pg_options=pg_options, group_desc=group_desc, device_id=device_id)
    how = GroupOptions(backend or "", timeout_seconds(timeout), not sort_ranks, use_local_synchronization, passed)
    return groups.group_of_handle(groups.create_group(ranks, how))


def new_subgroups(
    group_size: int | None = None, group: AnyGroup = None, timeout: float | timedelta | None = None,
    backend: str | None = None, pg_options: Any = None, group_desc: str | None = None,
) -> tuple[OpenedGroup, list[OpenedGroup]]:  # fmt: skip
    """Split a group into subgroups of equal size, of ranks that follow one another; return this rank's, and all.

    All ranks of the world must call it. `group_size` is by default the number of ranks of a host, LOCAL_WORLD_SIZE of
    the environment; `group` is by default the world. `timeout`, `backend`, `pg_options`, `group_desc` and the errors
    are as of `new_group`; one more CollectiveError is for a group that does not split evenly.
    """
    ranks = get_process_group_ranks(group)
    size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks))) if group_size is None else group_size
    if size < 1 or len(ranks) % size:
        raise CollectiveError(f"a group of {count_noun(len(ranks), 'rank')} does not split into subgroups of {size}")
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]], timeout: float | timedelta | None = None,
    backend: str | None = None, pg_options: Any = None, group_desc: str | None = None,
) -> tuple[OpenedGroup, list[OpenedGroup]]:  # fmt: skip
    """Make several groups that have no rank in common; return that of this rank, or an `Outsider`, and all of them.

    All ranks of the world must call it with the same arguments. `ranks_per_subgroup_list` has the ranks of each, as
    ranks of the world. `timeout`, `backend`, `pg_options`, `group_desc` and the errors are as of `new_group`; one more
    CollectiveError is for a rank in two groups.
    """
    everyone = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    if twice := sorted({rank for rank in everyone if everyone.count(rank) > 1}):
        raise CollectiveError(f"ranks {groups.format_ranks(twice)} are in more than one of the subgroups")
    made = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in ranks_per_subgroup_list
    ]  # fmt: skip
    own = (each for each in made if not isinstance(each, Outsider))
    return next(own, Outsider(tuple(everyone))), made


def _drop_none(**passed: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in passed.items() if value is not None}

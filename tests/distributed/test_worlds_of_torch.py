"""Worlds of torch that not all workers are in, that follow one another at one store, or that end with a receive."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from distributed_outcome import outcome
from worlds import cluster_fixture, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups
from rpcbench.runtime import current

pytestmark = pytest.mark.process
cluster = cluster_fixture(3)


def begin(rank: int, path: str) -> list[str]:
    """Found a world of torch of two ranks, at a file or where the cluster's ranks meet; return the names of its ranks
    at once."""
    if path:
        c10d.init_process_group("gloo", store=c10d.FileStore(path, 2), rank=rank, world_size=2)
    else:
        c10d.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    groups.member_of(None).world.ended_ranks()  # reads the names that the ranks have given since
    return [groups.member_of(None).world.rank_label(each) for each in range(2)]


def see_lost(name: str) -> None:
    """Wait until this worker knows that another is lost."""
    until(lambda: "WorkerLostError" in outcome(current.current_agent().member, name))


def go_on() -> float:
    dist.all_reduce(x := torch.ones(1))
    return x.item()


@pytest.mark.parametrize("at", ["", "store"])
def test_the_loss_of_a_worker_that_has_no_rank_in_a_world_of_torch_leaves_it_alone(
    cluster: rpcbench.Cluster, tmp_path: Path, at: str
) -> None:
    path, ranks = f"{tmp_path}/{at}" if at else "", {"worker1": 0, "worker3": 1}
    named = wait_all([cluster.rpc_async(name, begin, (rank, path)) for name, rank in ranks.items()])
    assert named == [["rank 0 (worker1)", "rank 1 (worker3)"]] * 2
    cluster.kill("worker2")
    wait_all([cluster.rpc_async(name, see_lost, ("worker2",)) for name in ranks])
    assert wait_all([cluster.rpc_async(name, go_on) for name in ranks]) == [2.0, 2.0]
    wait_all([cluster.rpc_async(name, dist.destroy_process_group) for name in ranks])
    cluster.restart("worker2")


def again(rank: int, path: str) -> list[Any]:
    """Let a world of torch break, and found the next one at the same store, with a group that torch makes there."""
    store, told = c10d.FileStore(path, 2), list[Any]()
    for number, seconds in enumerate((2, 60)):
        c10d.init_process_group(store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
        dist.all_reduce(x := torch.ones(1))
        told.append(x.item())
        world = groups.member_of(None).world
        if seconds == 2:
            said = outcome(dist.barrier) if rank == 0 else ""
            until(world.poll_failure)
            told.append("RpcTimeoutError" in said)
        else:
            told += [world.poll_failure(), *in_own_group(rank)]
            dist.barrier()
        c10d.destroy_process_group()
        store.delete_key(f"0//cpu//0/{rank}")  # where gloo listened: the other rank would take it for the next address
        store.add("ended", 1)
        until(lambda both=2 * number + 2: store.add("ended", 0) >= both)
    return told


def in_own_group(rank: int) -> list[Any]:
    """Return the backend of a group that torch has made of one rank, and the sum of sparse tensors in it."""
    own = [c10d.new_group([each]) for each in range(2)][rank]
    dist.all_reduce(x := torch.sparse_coo_tensor([[1]], [3.0], (2,)), group=own)
    return [dist.get_backend(own), x.to_dense().tolist()]


def test_the_next_world_of_torch_at_one_store_begins_without_the_failure_of_the_last(
    cluster: rpcbench.Cluster, tmp_path: Path
) -> None:
    each = [cluster.rpc_async(f"worker{rank + 1}", again, (rank, f"{tmp_path}/store")) for rank in range(2)]
    first, second = wait_all(each)
    assert first == [2.0, True, 2.0, False, "gloo", [0.0, 3.0]]
    assert second == [2.0, False, 2.0, False, "gloo", [0.0, 3.0]]


PENDING = """
import sys, torch, torch.distributed as c10d, rpcbench.distributed as dist
from datetime import timedelta
kind, path, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store, group = c10d.FileStore(path, 2), None
if kind == "by hand":
    group = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, 2, timedelta(seconds=60))
else:
    library = dist if kind == "ours" else c10d
    library.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 0:
    dist.irecv(torch.zeros(1), 1, group=group)
    dist.recv(torch.zeros(1), 1, group=group, tag=1)
else:
    dist.send(torch.zeros(1), 0, group=group, tag=1)
"""


@pytest.mark.parametrize("kind", ["by hand", "ours", "torch"])
def test_a_script_ends_well_while_a_receive_is_pending(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", PENDING, kind, f"{tmp_path}/store"]
    running = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        said = [each.communicate(timeout=100)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], said

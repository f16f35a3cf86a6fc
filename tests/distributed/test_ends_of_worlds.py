"""The ends of a process group: a missing rank, a killed rank, an interrupt, and a change of the cluster."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed_outcome import outcome, survivors_name_the_dead
from torch_world import all_wait
from worlds import cluster_fixture, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError, RpcError, RpcTimeoutError, UnknownWorkerError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups, world
from rpcbench.distributed.groups import NamedGroup

pytestmark = pytest.mark.process

INIT = "import torch, rpcbench.distributed as dist\ndist.init_process_group('gloo', timeout=100)"
SUM = "dist.all_reduce(x := torch.ones(1)); x.item()"
HANG_SECONDS = 25.0  # five times the limit; without a notice of the end it would be the group's timeout
Deed = Callable[[], Any]
cluster = cluster_fixture(3, scope="function")


def begin(cluster: rpcbench.Cluster) -> None:
    cluster.run("all", INIT)
    assert cluster.run("all", SUM) == {name: float(len(cluster.workers)) for name in cluster.workers}


def ends(deed: Deed) -> tuple[str, float]:
    """On a worker: the outcome of a deed, and its time."""
    return outcome(deed), time.monotonic()


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hurry(seconds: float) -> None:
    """On a worker: let its next waits end after so long."""
    groups.member_of(None).world.seconds = seconds


def reduced() -> float:
    dist.all_reduce(x := torch.ones(1))
    return x.item()


def test_a_timeout_names_the_missing_rank_and_where_the_others_wait(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cluster.run, "worker3", "pass\ndist.all_reduce(torch.ones(2))")
        until(lambda: cluster.rpc_sync("worker1", all_wait, (2,)))
        cluster.rpc_sync("worker1", hurry, (1.0,))
        with pytest.raises(RpcTimeoutError) as caught:
            cluster.run("worker1", "pass\ndist.all_reduce(torch.ones(2))")
        assert isinstance(other.exception(), RpcTimeoutError)
    story = str(caught.value)
    assert "1 s have passed in all_reduce(SUM) of float32[2]:\n" in story
    assert "rank 1 (worker2) has not come\n" in story
    assert all(f"rank {rank} (worker{rank + 1}) waits there, at " in story for rank in (0, 2)), story
    assert "line 2: dist.all_reduce(torch.ones(2))" in story
    assert cluster.run("all", "dist.get_rank()") == {f"worker{rank + 1}": rank for rank in range(3)}
    begin(cluster)  # the next world does not need the old one to be destroyed


def test_a_timeout_names_the_collective_that_the_missing_rank_waits_in(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    other = cluster.rpc_async("worker2", outcome, (lambda: dist.recv(torch.ones(1), 2),), timeout=2 * HANG_SECONDS)
    until(lambda: cluster.rpc_sync("worker1", all_wait, (1,)))
    cluster.rpc_sync("worker1", hurry, (1.0,))
    with pytest.raises(RpcTimeoutError) as caught:
        cluster.run("worker1", "dist.barrier()")
    assert "has not come; it waits in" in str(caught.value)
    assert other.wait().startswith("RpcTimeoutError")


@pytest.mark.parametrize("rank", [0, 2])  # rank 0 keeps the store
@pytest.mark.parametrize("deed", [dist.barrier, lambda: dist.recv(torch.ones(1))])
def test_a_killed_rank_is_named_to_the_waiting_ranks_at_once(cluster: rpcbench.Cluster, rank: int, deed: Deed) -> None:
    begin(cluster)
    dead = f"worker{rank + 1}"
    waiting = [cluster.rpc_async(name, ends, (deed,), timeout=HANG_SECONDS) for name in cluster.workers if name != dead]
    cluster.rpc_async(dead, kill_oneself)
    since = time.monotonic()
    for said, until_then in wait_all(waiting):
        assert said.startswith(f"WorkerLostError: rank {rank} ({dead}) of the process group is gone, "), said
        assert until_then - since < HANG_SECONDS
    cluster.restart(dead)
    begin(cluster)


def interrupted(cluster: rpcbench.Cluster, worker: str, code: str) -> None:
    with pytest.raises((KeyboardInterrupt, RpcError)):
        cluster.run(worker, code)


def test_an_interrupt_of_one_rank_ends_the_waits_of_the_others(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    waiting = cluster.rpc_async("worker3", outcome, (dist.barrier,), timeout=2 * HANG_SECONDS)
    cell = threading.Thread(target=interrupted, args=(cluster, "worker2", "dist.barrier()"))
    cell.start()
    until(lambda: cluster.rpc_sync("worker1", all_wait, (1, 2)))
    since = time.monotonic()
    cluster.interrupt("worker2")
    assert "CollectiveError: rank 1 (worker2) was interrupted in barrier. Call init_process_group" in waiting.wait()
    assert time.monotonic() - since < HANG_SECONDS
    cell.join()
    begin(cluster)


def connections() -> int:
    """On a worker: how many TCP connections it has; only those of its process groups, as the cluster uses none."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp"))


def abort_here() -> None:
    for group in groups.member_of(None).world.torch_groups():
        world._abort_group(group)


def end_here() -> None:
    groups.member_of(None, at_work=False).world.break_on_this_rank(CollectiveError("over"))


def test_an_end_reaches_a_wait_in_torch_after_the_connection_to_another_rank_has_broken(
    cluster: rpcbench.Cluster,
) -> None:
    begin(cluster)
    before = cluster.rpc_sync("worker3", connections)
    waits = cluster.rpc_async("worker3", torch.distributed.recv, (torch.ones(2), 1), timeout=HANG_SECONDS)
    until(lambda: "work.wait()" in str(cluster.stack("worker3")))  # for worker2, which sends nothing
    cluster.rpc_sync("worker1", abort_here)
    until(lambda: cluster.rpc_sync("worker3", connections) == before - 1)
    assert not waits.done()
    cluster.rpc_sync("worker3", end_here)
    with pytest.raises(RuntimeError, match="pair closure"):
        waits.wait()


def test_destroy_process_group_ends_the_waits_of_all_ranks(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    waiting = [cluster.rpc_async(name, ends, (dist.barrier,), timeout=HANG_SECONDS) for name in ("worker1", "worker3")]
    until(lambda: cluster.rpc_sync("worker2", all_wait, (0, 2)))
    cluster.rpc_sync("worker1", dist.destroy_process_group)
    words = "CollectiveError: rank 0 (worker1) has destroyed the process group while it was in use"
    assert all(said.startswith(words) for said, _ in wait_all(waiting))
    begin(cluster)


def test_the_timeout_of_a_cell_ends_the_waits_of_all_ranks(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    since = time.monotonic()
    with pytest.raises(RpcTimeoutError, match="the cell ran for more than 1 s and was interrupted"):
        cluster.run("all", "dist.get_rank() == 1 or dist.barrier()", timeout=1)
    assert time.monotonic() - since < HANG_SECONDS
    begin(cluster)


def test_a_process_group_ends_when_workers_join_leave_or_restart(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    group = cluster.group("worker1", "worker2")
    waiting = cluster.rpc_async("worker1", outcome, (dist.barrier,))
    cluster.scale(4)
    old = "CollectiveError: this process group is of an earlier generation of the cluster: worker4 joined. Call init_"
    assert waiting.wait().startswith(old)
    assert cluster.rpc_sync("worker2", outcome, (dist.get_rank,)).startswith(old)
    begin(cluster)
    cluster.group("worker3", "worker4")  # it has the same number in its world as the old one
    assert "has ended, not to the current one" in cluster.rpc_sync("worker1", outcome, (dist.get_rank, group))
    cluster.scale(2)
    assert "worker3, worker4 left" in cluster.rpc_sync("worker1", outcome, (dist.barrier,))
    begin(cluster)
    waiting = cluster.rpc_async("worker1", outcome, (dist.barrier,))
    cluster.restart("worker2")
    parted = r"WorkerLostError: rank 1 \(worker2\) .* is gone|CollectiveError: .* generation of the cluster: worker2 "
    for said in waiting.wait(), cluster.rpc_sync("worker1", outcome, (dist.barrier,)):
        assert re.match(parted, said)  # either message may arrive first
    begin(cluster)


def in_group(group: NamedGroup) -> tuple[int, float, int]:
    dist.all_reduce(x := torch.tensor([10.0 ** dist.get_rank()]), group=group)
    return dist.get_rank(group), x.item(), torch.distributed.get_world_size(group.here())


def test_a_group_of_some_workers_has_its_own_ranks_and_refuses_other_workers(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(CollectiveError, match=r"worker1, worker2, worker3 is in no process group: run rpcbench.distr"):
        cluster.group("worker1")
    begin(cluster)
    group = cluster.group("worker3", "worker1")
    assert group.workers == ("worker3", "worker1")
    assert [f.wait() for f in [cluster.rpc_async(name, in_group, (group,)) for name in ("worker1", "worker3")]] == [
        (0, 101.0, 2), (1, 101.0, 2)
    ]  # fmt: skip
    assert cluster.run("worker1,worker3", "dist.get_world_size(pair)", push={"pair": group}) == dict.fromkeys(
        ("worker1", "worker3"), 2
    )
    said = cluster.rpc_sync("worker2", outcome, (in_group, group))
    assert said == "CollectiveError: rank 1 (worker2) is not in the group of ranks [2, 0]"
    with pytest.raises(UnknownWorkerError, match="could not find destination name worker9: did you mean worker"):
        cluster.group("worker9")


def test_workers_have_the_environment_that_torch_distributed_needs(cluster: rpcbench.Cluster) -> None:
    cluster.run("all", "import torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    cluster.run("all", "dist.all_reduce(x := torch.ones(1))")
    assert cluster.run("all", "x.item()") == dict.fromkeys(cluster.workers, 3.0)


SCRIPT = """
import os, sys, torch, rpcbench.distributed as dist
dist.init_process_group("gloo", "file://" + sys.argv[1], world_size=3, timeout=60)
if dist.get_rank() == int(sys.argv[2]):
    os.kill(os.getpid(), 9)
dist.barrier()
"""


@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_ranks_of_a_script_without_a_cluster_name_a_killed_rank(tmp_path: Path, rank: str) -> None:
    survivors_name_the_dead(int(rank), SCRIPT, f"{tmp_path}/meeting", rank)

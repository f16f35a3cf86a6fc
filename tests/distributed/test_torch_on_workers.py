"""Torch's own process groups on workers: where their store listens, every end of the wait for ranks, and models of
DistributedDataParallel that end after their group."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

import psutil
import pytest
import torch
from distributed_outcome import outcome
from torch_world import sum_by_ours, sum_by_torch
from worlds import cluster_fixture, until

import rpcbench
from rpcbench.base.futures import wait_all

pytestmark = pytest.mark.process

HANG_SECONDS = 25.0  # torch itself would wait for half an hour, and we for a minute
cluster = cluster_fixture(3)


def found(cluster: rpcbench.Cluster, deed: Callable[[], float]) -> None:
    """All ranks found a group, and end it."""
    assert wait_all([cluster.rpc_async(name, deed) for name in cluster.workers]) == [3.0] * 3


@pytest.mark.parametrize("deed", [sum_by_torch, sum_by_ours])
@pytest.mark.parametrize("dead", ["worker2", "worker1"])  # worker1 hosts the store
def test_a_rank_that_dies_before_it_has_come_is_named_at_once(
    cluster: rpcbench.Cluster, deed: Callable[[], float], dead: str
) -> None:
    rest = [name for name in cluster.workers if name != dead]
    waiting = [cluster.rpc_async(name, outcome, (deed,), timeout=HANG_SECONDS) for name in rest]
    cluster.kill(dead)
    words = f"WorkerLostError: the process group was not founded: rank {int(dead[-1]) - 1} ({dead}) has not come."
    for said in wait_all(waiting):
        assert said.startswith(words) and "killed by SIGKILL" in said
    cluster.restart(dead)
    found(cluster, deed)


def wait_begun(cluster: rpcbench.Cluster, name: str) -> None:
    until(lambda: "init_process_group(" in str(cluster.stack(name)))


def test_the_stop_button_ends_the_wait_and_the_next_group_is_founded(cluster: rpcbench.Cluster) -> None:
    def stop() -> None:
        wait_begun(cluster, "worker1")
        cluster.interrupt("worker1")

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("worker1", "import torch\ntorch.distributed.init_process_group('gloo')")
    stopper.join()
    found(cluster, sum_by_torch)


STOPPED_EARLY = """
import torch.distributed.distributed_c10d as c10d
from rpcbench.distributed import stores

parse = stores.parse_init_method

def press_stop(*args):
    stores.parse_init_method = parse
    raise KeyboardInterrupt

stores.parse_init_method = press_stop
try:
    c10d.init_process_group("gloo")
except KeyboardInterrupt:
    stopped = True
"""


def test_a_stop_before_the_wait_has_begun_leaves_the_next_group_its_name(cluster: rpcbench.Cluster) -> None:
    assert cluster.run("worker1", STOPPED_EARLY, want="stopped") == {"stopped": True}
    found(cluster, sum_by_torch)


@pytest.mark.parametrize("deed", [sum_by_torch, sum_by_ours])
def test_a_change_of_the_cluster_ends_the_wait(cluster: rpcbench.Cluster, deed: Callable[[], float]) -> None:
    waiting = cluster.rpc_async("worker1", outcome, (deed,), timeout=HANG_SECONDS)
    wait_begun(cluster, "worker1")
    cluster.scale(4)
    changed = "CollectiveError: the process group was not founded: the cluster has changed meanwhile."
    assert waiting.wait().startswith(changed)
    cluster.scale(3)
    found(cluster, deed)


def test_torch_opens_no_port_beyond_loopback(cluster: rpcbench.Cluster) -> None:
    begin = "import torch\ntorch.distributed.init_process_group('gloo')"
    cluster.run("all", begin)
    for name in cluster.workers:
        sockets = psutil.Process(cluster.pid(name)).net_connections("tcp")
        assert {each.laddr.ip for each in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    cluster.run("all", "torch.distributed.destroy_process_group()")


def alone(method: str) -> float:
    torch.distributed.init_process_group("gloo", method, rank=0, world_size=1)
    torch.distributed.all_reduce(x := torch.ones(1))
    return x.item()


def in_a_fork(method: str) -> int | None:
    """On a worker: the exit code of a forked process that founds a group by itself."""
    child = multiprocessing.get_context("fork").Process(target=alone, args=(method,))
    child.start()
    child.join(HANG_SECONDS)
    return child.exitcode


def test_a_process_that_a_worker_forks_has_the_rendezvous_of_torch(cluster: rpcbench.Cluster) -> None:
    assert cluster.rpc_sync("worker1", in_a_fork, ("tcp://127.0.0.1:0",)) == 0


MODELS = """
import gc, weakref, torch, {library} as dist
def train():
    dist.init_process_group("gloo")
    made.append(weakref.ref(torch.distributed.group.WORLD))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(4, 8)).sum().backward()
    dist.destroy_process_group()

made = []
for _ in range(10):  # where a group ends with its model, a rank hangs in the eighth at the latest
    train()
gc.collect()
[each() is None for each in made[1:]]  # torch itself keeps the first one of a process
"""


@pytest.mark.parametrize("library", ["torch.distributed", "rpcbench.distributed"])
def test_models_of_ddp_may_end_after_their_group_and_keep_none(cluster: rpcbench.Cluster, library: str) -> None:
    left = cluster.run("all", MODELS.format(library=library), timeout=2 * HANG_SECONDS)
    assert left == dict.fromkeys(cluster.workers, [True] * 9)

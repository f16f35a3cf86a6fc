"""Clusters of real processes: what survives what, and that nothing is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from worlds import until

import rpcbench
from rpcbench.launch.process import ProcessLauncher
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.words.errors import RpcError, SerializationError, UnknownWorkerError, WorkerLostError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cluster() -> Iterator[rpcbench.Cluster]:
    """For tests that leave it as it was: two workers."""
    with rpcbench.Cluster(2) as made:
        yield made


def test_calls_reach_the_workers_and_names_their_processes(cluster: rpcbench.Cluster) -> None:
    assert cluster.workers == ["worker1", "worker2"]
    assert {cluster.rpc_sync(name, os.getpid) for name in cluster.workers} == {cluster.pid(n) for n in cluster.workers}
    assert torch.equal(cluster.rpc_sync("worker2", torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert rpcbench.cluster() is cluster and "worker1, worker2" in repr(cluster)


def test_bad_input_leaves_it_usable(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.rpc_sync("worker9", os.getpid)
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.pid("worker9")
    with pytest.raises(SerializationError, match=r"args\[0\]"):
        cluster.rpc_sync("worker1", print, (threading.Lock(),))
    assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


def test_two_clusters_side_by_side(cluster: rpcbench.Cluster) -> None:
    with rpcbench.Cluster(1) as other:
        assert rpc_sync("worker1", os.getpid) == other.pid("worker1") != cluster.pid("worker1")
        foreign = remote("worker1", max, (1, 2))
        with pytest.raises(RpcError, match="another world"):
            cluster.rpc_sync("worker1", print, (foreign,))
    assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


def test_scale_up_and_down(cluster: rpcbench.Cluster) -> None:
    cluster.scale(3)
    assert cluster.workers == ["worker1", "worker2", "worker3"] and cluster.rpc_sync("worker3", max, (1, 2)) == 2
    cluster.scale(2)
    assert cluster.workers == ["worker1", "worker2"]
    with pytest.raises(WorkerLostError, match="worker3 is gone"):
        cluster.rpc_sync("worker3", max, (1, 2))


def test_a_killed_worker_is_named_with_its_signal_and_can_be_started_again(cluster: rpcbench.Cluster) -> None:
    rref: RRef[int] = cluster.remote("worker1", max, (1, 2))
    assert rref.to_here() == 2
    waiting = cluster.rpc_async("worker1", _forever)
    os.kill(cluster.pid("worker1"), signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"worker1 was lost.*SIGKILL"):
        waiting.wait()
    assert cluster.rpc_sync("worker2", max, (1, 2)) == 2
    cluster.restart("worker1")
    assert cluster.rpc_sync("worker1", max, (3, 4)) == 4
    until(lambda: cluster.workers == ["worker1", "worker2"])


def _forever() -> None:
    threading.Event().wait()


def test_shutdown_leaves_nothing(no_leaks: None) -> None:
    made = rpcbench.Cluster(1)
    made.shutdown()
    made.shutdown()
    assert repr(made) == "<Cluster: shut down>"
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        made.rpc_sync("worker1", max, (1, 2))


SCRIPT = """
import rpcbench, sys, time
cluster = rpcbench.Cluster(1)
kept = cluster.remote("worker1", bytes, (1000,))
kept.to_here()
busy = cluster.rpc_async("worker1", time.sleep, (600,))
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["sys.stdin.read()", "pass", "raise SystemExit(3)", "import os; os._exit(1)"])
def test_however_the_driver_ends_nothing_is_left(no_leaks: None, end: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(end=end)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
        if "stdin" in end:
            driver.kill()
        driver.wait(30)


def test_a_worker_that_cannot_start_shows_its_last_words(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = functools.partial(ProcessLauncher, entry="no_such_module:main")
    monkeypatch.setattr("rpcbench.launch.cluster.ProcessLauncher", broken)
    with pytest.raises(RpcError, match="no_such_module"):
        rpcbench.Cluster(1, start="spawn")


def test_spawned_workers_work_as_forked_ones(no_leaks: None) -> None:
    with rpcbench.Cluster(1, start="spawn") as cluster:
        assert cluster.rpc_sync("worker1", os.getpid) == cluster.pid("worker1")
